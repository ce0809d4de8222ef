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

// Rows whose gradients lie one every `stride` floats, a multiple of 16.
struct CustomRows {
  size_t count, width, stride;
  float* gradients;      // are read
  char* const* weights;  // float32
  const uint32_t* rows;
  float* const* slots;  // of the partition, [rows, width]
};

// What one thread runs a rule with.
class CustomRun {
 public:
  CustomRun(const config::RuleProgram& program, const CommonRule& common);
  // Decays weights, runs the rule, clips weights, as far as `width`.
  void Update(const CustomRows& rows);

 private:
  const config::RuleProgram& program_;
  const CommonRule& common_;
  hwy::AlignedFreeUniquePtr<float[]> memory_;
  std::vector<float*> places_;  // of nodes, and of keep, weight_min and weight_max
};

}  // namespace emberd::shard
