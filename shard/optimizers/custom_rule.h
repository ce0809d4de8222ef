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

// Columns that an operation works on at once: few enough that operations overlap in the processor,
// as many as make up for choosing an operation.
inline constexpr size_t kRuleBlock = 128;

// What one thread runs a rule with. Each node has an array of its own, of as many columns as a
// batch of rows.
class CustomRun {
 public:
  struct Operation {
    config::RuleOp op;
    float *to, *a, *b, *c;
  };

  // With arrays of at least `columns`.
  CustomRun(const config::RuleProgram& program, const CommonRule& common, size_t columns);
  // From the inputs, decays weights, runs the rule and clips weights.
  void Run(size_t columns) const;

  // Arrays: gradient, weight, slots; updated weight and slots.
  std::vector<float*> inputs, results;
  std::vector<Operation> operations;

 private:
  hwy::AlignedFreeUniquePtr<float[]> memory_;
};

}  // namespace emberd::shard
