// What verbs show of a plan: where the tables of a model lie and what they cost; and the options of
// the cluster that a plan without a server is made for.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include <CLI/CLI.hpp>

#include "absl/status/statusor.h"
#include "client/emberctl/output.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/plan.pb.h"

namespace emberd::emberctl {

// The cluster that a command without a server works for: a file's, or of so many shards.
struct ClusterShape {
  std::string file;  // a ClusterConfig; empty: the two numbers below
  int shards = 1;
  int sparsecores_per_shard = 2;
};

// Complete, with the default budgets if there is no file. The numbers are checked like a file's.
absl::StatusOr<v1::ClusterConfig> ClusterOf(const ClusterShape& shape);

// Adds --cluster, --shards and --sparsecores, which all need `needed`.
void AddClusterShapeOptions(CLI::App* command, CLI::Option* needed, ClusterShape* shape);

// What the fullest shard could not hold if every row of its tables were touched: a sentence, or
// nothing if all have the memory.
std::string MissingMemory(const v1::GetStatusResponse& cluster);

// "2 shards x 2 SparseCores = 4 partitions"
std::string SizeText(const v1::ModelPlan& plan);
// "none" for 0.
std::string Limit(int32_t limit);
// One line per stack: its size, its limits and its tables with row offset and rotation.
void PrintStacks(const v1::ModelPlan& plan, std::ostream& out);
// One line per feature, in stack order.
void PrintFeatures(const v1::ModelPlan& plan, std::ostream& out);
void PrintWarnings(const v1::ModelPlan& plan, std::ostream& out);

// Limits of partitions from what batches needed.

// Adds what `more` counted.
void MergeSketch(const v1::CountSketch& more, v1::CountSketch* sketch);
int64_t Batches(const v1::CountSketch& sketch);
// The smallest count that at least `fraction` of the batches did not exceed, up to the width of a
// bucket; 0 without batches.
int64_t Quantile(const v1::CountSketch& sketch, double fraction);
// ceil(max * headroom), rounded up to 8; 0 for a max of 0.
int32_t SuggestedLimit(int64_t max, double headroom);
// Of all that a stack may need.
v1::StackLimit SuggestedLimits(const v1::StackLimits& stack, double headroom);
// Gives every table of a stack the suggested limits of the stack, and the plan the capacity that
// its stacks need, if it has one. Stacks without ids stay as they are.
v1::ModelConfig WithSuggestedLimits(const v1::DescribeModelResponse& model,
                                    const v1::GetLimitsResponse& limits, double headroom);

}  // namespace emberd::emberctl
