#include "client/emberctl/plan_view.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/command_line.h"
#include "base/status.h"
#include "config/config.h"
#include "config/shared_tables.h"

namespace emberd::emberctl {

absl::StatusOr<v1::ClusterConfig> ClusterOf(const ClusterShape& shape) {
  if (!shape.file.empty()) return config::LoadCluster(shape.file);
  v1::ClusterConfig cluster;
  cluster.set_sparsecores_per_shard(shape.sparsecores_per_shard);
  for (int i = 0; i < shape.shards; ++i) cluster.add_shards()->set_address("localhost:0");
  cluster.add_coordinators()->set_address("localhost:0");
  RETURN_IF_ERROR(config::CompleteCluster(&cluster));
  return cluster;
}

void AddClusterShapeOptions(CLI::App* command, CLI::Option* needed, ClusterShape* shape) {
  constexpr int kMaxPartitions = 1024;  // as in a ClusterConfig
  CLI::Option* const cluster =
      command->add_option("--cluster", shape->file, "ClusterConfig that gives both numbers")
          ->needs(needed);
  command->add_option("--shards", shape->shards, "Shards of the cluster")
      ->needs(needed)
      ->check(Within(1, kMaxPartitions))
      ->excludes(cluster)
      ->capture_default_str();
  command->add_option("--sparsecores", shape->sparsecores_per_shard, "SparseCores of each shard")
      ->needs(needed)
      ->check(Within(1, kMaxPartitions))
      ->excludes(cluster)
      ->capture_default_str();
}

std::string MissingMemory(const v1::GetStatusResponse& cluster) {
  const auto missing = [](const v1::ShardStatus& shard) {
    return shard.memory_bytes() == 0 ? 0 : shard.table_bytes() - shard.memory_bytes();
  };
  const auto& shards = cluster.shards();
  const auto worst =
      std::max_element(shards.begin(), shards.end(),
                       [&](const auto& a, const auto& b) { return missing(a) < missing(b); });
  if (worst == shards.end() || missing(*worst) <= 0) return "";
  return absl::StrCat("if every row is touched, the tables of shard ", worst->index(), " need ",
                      Bytes(worst->table_bytes()), ", and it has ", Bytes(worst->memory_bytes()),
                      " of memory: ", Bytes(missing(*worst)),
                      " do not fit. The shard will refuse lookups of new rows before that. Add "
                      "memory or shards, or store rows in 16 bits");
}

std::string SizeText(const v1::ModelPlan& plan) {
  return absl::StrCat(Counted(plan.shards(), "shard"), " x ",
                      Counted(plan.sparsecores_per_shard(), "SparseCore"), " = ",
                      Counted(plan.partitions(), "partition"));
}

std::string Limit(int32_t limit) { return limit == 0 ? "none" : absl::StrCat(limit); }

void PrintStacks(const v1::ModelPlan& plan, std::ostream& out) {
  Table lines = {{"STACK", "WIDTH", "ROWS/PARTITION", "SIZE/PARTITION", "ACTIVATIONS", "MAX IDS",
                  "MAX UNIQUE IDS", "TABLES (row offset, rotation)"}};
  for (const v1::StackPlan& stack : plan.stacks()) {
    std::vector<std::string> tables;
    for (const v1::TablePlan& table : stack.tables()) {
      tables.push_back(
          absl::StrCat(table.name(), " (", table.row_offset(), ", ", table.shard_rotation(), ")"));
    }
    lines.push_back({stack.name(), stack.embedding_dim(), stack.rows_per_partition(),
                     Bytes(stack.bytes_per_partition()), Bytes(stack.activation_bytes()),
                     Limit(stack.max_ids_per_partition()),
                     Limit(stack.max_unique_ids_per_partition()), absl::StrJoin(tables, ", ")});
  }
  PrintColumns(lines, out);
}

void PrintFeatures(const v1::ModelPlan& plan, std::ostream& out) {
  Table lines = {
      {"FEATURE", "TABLE", "STACK", "BATCH SIZE", "ROW OFFSET", "COL OFFSET", "COL SHIFT"}};
  for (const v1::StackPlan& stack : plan.stacks()) {
    for (const v1::FeaturePlan& feature : stack.features()) {
      lines.push_back({feature.name(), feature.table(), stack.name(), feature.batch_size(),
                       feature.row_offset(), feature.col_offset(), feature.col_shift()});
    }
  }
  PrintColumns(lines, out);
}

void PrintWarnings(const v1::ModelPlan& plan, std::ostream& out) {
  for (const std::string& warning : plan.warnings()) out << "warning: " << warning << "\n";
}

int64_t Batches(const v1::CountSketch& sketch) {
  int64_t batches = 0;
  for (const v1::CountSketch::Bucket& bucket : sketch.buckets()) batches += bucket.count();
  return batches;
}

void MergeSketch(const v1::CountSketch& more, v1::CountSketch* sketch) {
  std::map<int64_t, int64_t> counts;
  for (const v1::CountSketch& part : {more, *sketch}) {
    for (const v1::CountSketch::Bucket& bucket : part.buckets()) {
      counts[bucket.upper()] += bucket.count();
    }
  }
  sketch->clear_buckets();
  for (const auto& [upper, count] : counts) {
    v1::CountSketch::Bucket* bucket = sketch->add_buckets();
    bucket->set_upper(upper);
    bucket->set_count(count);
  }
  sketch->set_max(std::max(sketch->max(), more.max()));
}

int64_t Quantile(const v1::CountSketch& sketch, double fraction) {
  const double wanted = fraction * Batches(sketch);
  int64_t seen = 0;
  for (const v1::CountSketch::Bucket& bucket : sketch.buckets()) {
    seen += bucket.count();
    if (seen >= wanted) return std::min(bucket.upper(), sketch.max());
  }
  return sketch.max();
}

int32_t SuggestedLimit(int64_t max, double headroom) {
  constexpr double kLargest = std::numeric_limits<int32_t>::max() / 8 * 8;
  // 80 * 1.1 is a little more than 88 in binary, and 88 is meant.
  const double wanted = max * headroom * (1 - 1e-12);
  const double limit = std::ceil(wanted / 8) * 8;
  return static_cast<int32_t>(std::min(limit, kLargest));
}

v1::StackLimit SuggestedLimits(const v1::StackLimits& stack, double headroom) {
  const auto suggested = [headroom](const v1::CountSketch& needed, int32_t largest) {
    return std::min(SuggestedLimit(needed.max(), headroom), largest);
  };
  constexpr int32_t kAny = std::numeric_limits<int32_t>::max();
  v1::StackLimit limit;
  limit.set_stack(stack.stack());
  limit.set_max_ids_per_partition(suggested(stack.ids(), kAny));
  limit.set_max_unique_ids_per_partition(suggested(stack.unique_ids(), kAny));
  limit.set_max_ids_per_chip_per_sample(suggested(stack.ids_per_sample(), 65536));
  limit.set_max_minibatches_per_sparsecore(suggested(stack.minibatches(), 64));
  return limit;
}

v1::ModelConfig WithSuggestedLimits(const v1::DescribeModelResponse& model,
                                    const v1::GetLimitsResponse& limits, double headroom) {
  absl::flat_hash_map<std::string, v1::StackLimit> limits_of;  // by table
  int32_t ids_per_sample = 0, minibatches = 0;
  for (const v1::StackPlan& stack : model.plan().stacks()) {
    for (const v1::StackLimits& found : limits.stacks()) {
      if (found.stack() != stack.name()) continue;
      // A stack without ids keeps what it has, which counts, too: a plan has one capacity for all.
      v1::StackLimit limit;
      limit.set_max_ids_per_chip_per_sample(found.max_ids_per_chip_per_sample());
      limit.set_max_minibatches_per_sparsecore(found.max_minibatches_per_sparsecore());
      if (found.ids().max() > 0) {
        limit = SuggestedLimits(found, headroom);
        for (const v1::TablePlan& table : stack.tables()) limits_of[table.name()] = limit;
      }
      if (found.max_ids_per_chip_per_sample() > 0) {
        ids_per_sample = std::max(ids_per_sample, limit.max_ids_per_chip_per_sample());
      }
      if (found.max_minibatches_per_sparsecore() > 0) {
        minibatches = std::max(minibatches, limit.max_minibatches_per_sparsecore());
      }
    }
  }
  v1::ModelConfig config = model.config();
  for (v1::TableConfig& table : *config.mutable_tables()) {
    const auto found = limits_of.find(config::StoredTable(config, table).name());
    if (found == limits_of.end()) continue;
    table.set_max_ids_per_partition(found->second.max_ids_per_partition());
    table.set_max_unique_ids_per_partition(found->second.max_unique_ids_per_partition());
  }
  if (ids_per_sample > 0) config.mutable_plan()->set_max_ids_per_chip_per_sample(ids_per_sample);
  if (minibatches > 0) config.mutable_plan()->set_max_minibatches_per_sparsecore(minibatches);
  return config;
}

}  // namespace emberd::emberctl
