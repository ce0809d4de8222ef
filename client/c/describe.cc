#include "client/c/describe.h"

#include <nlohmann/json.hpp>

#include "absl/time/time.h"

namespace emberd::c {
namespace {

using Json = nlohmann::json;

// Names come from a server, which need not be right about UTF-8.
std::string Print(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json JsonOf(const client::CheckpointInfo& checkpoint) {
  Json json = {{"model", checkpoint.model},
               {"name", checkpoint.name},
               {"saved_at_ms", absl::ToUnixMillis(checkpoint.saved_at)},
               {"bytes", checkpoint.bytes},
               {"rows", checkpoint.rows},
               {"parent", checkpoint.parent},
               {"chain", checkpoint.chain},
               {"groups", Json::object()},
               {"automatic", checkpoint.automatic},
               {"changes", checkpoint.changes}};
  for (const client::GroupStep& group : checkpoint.groups) {
    json["groups"][group.group] = group.next_step;
  }
  return json;
}

}  // namespace

std::string Describe(const client::SavedCheckpoint& saved) {
  Json json = JsonOf(saved.checkpoint);
  json["pause_us"] = absl::ToInt64Microseconds(saved.pause);
  return Print(json);
}

std::string Describe(const client::CheckpointInfo& checkpoint) { return Print(JsonOf(checkpoint)); }

std::string Describe(const client::CheckpointList& list) {
  Json json = {{"checkpoints", Json::array()}, {"damaged", list.damaged}};
  for (const client::CheckpointInfo& checkpoint : list.checkpoints) {
    json["checkpoints"].push_back(JsonOf(checkpoint));
  }
  return Print(json);
}

std::string Describe(const client::CheckpointProgress& progress) {
  return Print({{"phase", progress.phase},
                {"bytes", progress.bytes},
                {"total_bytes", progress.total_bytes},
                {"elapsed_ms", absl::ToInt64Milliseconds(progress.elapsed)}});
}

std::string DescribeEnd(const std::string& checkpoint, const std::string& error) {
  return Print({{"checkpoint", checkpoint}, {"error", error}});
}

std::string Describe(const client::Model& model) {
  Json json = {{"id", std::to_string(model.id)},  // JSON's numbers have 53 bits in many languages
               {"name", model.name},
               {"created", model.created},
               {"tables", Json::array()},
               {"features", Json::array()},
               {"stacks", Json::array()},
               {"shards", model.shards},
               {"sparsecores_per_shard", model.sparsecores_per_shard},
               {"table_bytes", model.table_bytes}};
  for (const client::TableInfo& table : model.tables) {
    json["tables"].push_back({{"name", table.name},
                              {"vocabulary_size", table.vocabulary_size},
                              {"embedding_dim", table.embedding_dim},
                              {"stack", table.stack},
                              {"optimizer", table.optimizer},
                              {"slots", table.slots}});
  }
  for (const client::FeatureInfo& feature : model.features) {
    json["features"].push_back({{"name", feature.name},
                                {"table", feature.table},
                                {"embedding_dim", feature.embedding_dim},
                                {"output_shape", feature.output_shape}});
  }
  for (const client::StackInfo& stack : model.stacks) {
    json["stacks"].push_back({{"name", stack.name},
                              {"embedding_dim", stack.embedding_dim},
                              {"rows_per_partition", stack.rows_per_partition},
                              {"bytes_per_partition", stack.bytes_per_partition},
                              {"tables", stack.tables}});
  }
  return Print(json);
}

std::string Describe(const client::ClusterStatus& status) {
  Json json = {{"version", status.version}, {"uptime_ms", status.uptime_ms},
               {"models", Json::array()},   {"shards", Json::array()},
               {"batches", status.batches}, {"batch_bytes", status.batch_bytes}};
  for (const client::ModelStatus& model : status.models) {
    json["models"].push_back({{"id", std::to_string(model.id)},
                              {"name", model.name},
                              {"tables", model.tables},
                              {"stacks", model.stacks},
                              {"table_bytes", model.table_bytes}});
  }
  for (const client::ShardStatus& shard : status.shards) {
    json["shards"].push_back({{"index", shard.index},
                              {"address", shard.address},
                              {"reachable", shard.reachable},
                              {"error", shard.error},
                              {"incarnation", std::to_string(shard.incarnation)},
                              {"uptime_ms", shard.uptime_ms},
                              {"models", shard.models},
                              {"table_bytes", shard.table_bytes},
                              {"batches", shard.batches},
                              {"batch_bytes", shard.batch_bytes},
                              {"rows_gathered", shard.rows_gathered},
                              {"rows_updated", shard.rows_updated}});
  }
  return Print(json);
}

std::string Describe(const client::BatchStatistics& statistics, const client::StepTimes* times) {
  Json json = {{"num_minibatches", statistics.num_minibatches}, {"stacks", Json::array()}};
  for (const client::StackStatistics& stack : statistics.stacks) {
    json["stacks"].push_back(
        {{"stack", stack.stack},
         {"ids", stack.ids},
         {"unique_ids", stack.unique_ids},
         {"duplicate_ids", stack.duplicate_ids},
         {"max_ids_per_partition", stack.max_ids_per_partition},
         {"max_unique_ids_per_partition", stack.max_unique_ids_per_partition},
         {"required_buffer_size", stack.required_buffer_size},
         {"dropped_ids", stack.dropped_ids},
         {"pad_cells", stack.pad_cells},
         {"bytes_gathered", stack.bytes_gathered},
         {"activation_bytes_per_sparsecore", stack.activation_bytes_per_sparsecore},
         {"imbalance", stack.imbalance},
         {"limit_ids_per_partition", stack.limit_ids_per_partition},
         {"limit_unique_ids_per_partition", stack.limit_unique_ids_per_partition}});
  }
  if (times != nullptr) {
    json["times_us"] = {{"preprocess", absl::ToInt64Microseconds(times->preprocess)},
                        {"wait_for_ranks", absl::ToInt64Microseconds(times->wait_for_ranks)},
                        {"wait_for_update", absl::ToInt64Microseconds(times->wait_for_update)},
                        {"shards", absl::ToInt64Microseconds(times->shards)},
                        {"combine", absl::ToInt64Microseconds(times->combine)}};
    json["slowest_rank"] = times->slowest_rank;
  }
  return Print(json);
}

}  // namespace emberd::c
