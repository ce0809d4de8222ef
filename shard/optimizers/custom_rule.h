// A user's update rule as it runs, over the columns of some rows at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "config/rule_program.h"
#include "hwy/aligned_allocator.h"
#include "shard/optimizers/rules.h"

namespace emberd::shard {

// The rule of an OptimizerConfig whose kind is custom, for one step: what is the same for all
// elements has become numbers.
std::shared_ptr<const config::RuleProgram> MakeCustomProgram(const v1::OptimizerConfig& optimizer,
                                                             int64_t step);

// Rows whose gradients lie one every `stride` floats.
struct CustomRows {
  size_t count, width, stride;
  const float* gradients;
  char* const* weights;  // float32
  const uint32_t* rows;
  float* const* slots;  // of the partition, [rows, width]
};

// What one thread runs a rule with, block of columns by block: the block of each node lies at a
// place of its own.
class CustomRun {
 public:
  struct Operation {
    config::RuleOp op;
    float *to, *a, *b, *c;
  };

  CustomRun(const config::RuleProgram& program, const CommonRule& common);
  // Decays weights, runs the rule, clips weights, as far as `width`.
  void Update(const CustomRows& rows) const;

  std::vector<float*> inputs, results;  // gradient, weight, slots; weight, slots
  std::vector<Operation> operations;

 private:
  hwy::AlignedFreeUniquePtr<float[]> memory_;
};

}  // namespace emberd::shard
