#include "client/c/describe.h"

#include <nlohmann/json.hpp>

#include "absl/time/time.h"

namespace emberd::client {

using Json = nlohmann::json;

// What is told whole, under the names of its fields.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TableInfo, name, vocabulary_size, embedding_dim, combiner, stack,
                                   optimizer, slots, quantization, row_offset, shard_rotation)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FeatureInfo, name, table, embedding_dim, output_shape)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StackInfo, name, embedding_dim, rows_per_partition,
                                   bytes_per_partition, tables)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModelStatus, name, tables, stacks, table_bytes, lost)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ShardStatus, index, address, reachable, error, incarnation,
                                   uptime_ms, models, table_bytes, batches, batch_bytes,
                                   rows_gathered, rows_updated)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StackStatistics, stack, ids, unique_ids, duplicate_ids,
                                   max_ids_per_partition, max_unique_ids_per_partition,
                                   required_buffer_size, dropped_ids, pad_cells, bytes_gathered,
                                   activation_bytes_per_sparsecore, imbalance,
                                   limit_ids_per_partition, limit_unique_ids_per_partition)

static void to_json(Json& json, const CheckpointInfo& checkpoint) {
  json = {{"model", checkpoint.model},
          {"name", checkpoint.name},
          {"saved_at_ms", absl::ToUnixMillis(checkpoint.saved_at)},
          {"bytes", checkpoint.bytes},
          {"rows", checkpoint.rows},
          {"parent", checkpoint.parent},
          {"chain", checkpoint.chain},
          {"groups", Json::object()},
          {"automatic", checkpoint.automatic},
          {"changes", checkpoint.changes}};
  for (const GroupStep& group : checkpoint.groups) json["groups"][group.group] = group.next_step;
}

}  // namespace emberd::client

namespace emberd::c {
namespace {

using client::Json;

// Names come from a server, which need not be right about UTF-8.
std::string Print(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

std::string Describe(const client::SavedCheckpoint& saved) {
  Json json = saved.checkpoint;
  json["pause_us"] = absl::ToInt64Microseconds(saved.pause);
  return Print(json);
}

std::string Describe(const client::CheckpointInfo& checkpoint) { return Print(checkpoint); }

std::string Describe(const client::CheckpointList& list) {
  return Print({{"checkpoints", list.checkpoints}, {"damaged", list.damaged}});
}

std::string Describe(const client::CheckpointProgress& progress) {
  return Print({{"phase", progress.phase},
                {"bytes", progress.bytes},
                {"total_bytes", progress.total_bytes},
                {"elapsed_ms", absl::ToInt64Milliseconds(progress.elapsed)}});
}

std::string DescribeEnd(const client::TrainUpdateResult& result) {
  return Print({{"checkpoint", result.checkpoint},
                {"error", result.checkpoint_error},
                {"step", result.checkpoint_step}});
}

std::string Describe(const client::Model& model) {
  return Print({{"id", std::to_string(model.id)},  // JSON's numbers have 53 bits in many languages
                {"name", model.name},
                {"created", model.created},
                {"unfilled", std::to_string(model.unfilled)},
                {"tables", model.tables},
                {"features", model.features},
                {"stacks", model.stacks},
                {"shards", model.shards},
                {"sparsecores_per_shard", model.sparsecores_per_shard},
                {"table_bytes", model.table_bytes},
                {"warnings", model.warnings}});
}

std::string Describe(const client::ClusterStatus& status) {
  Json json = {{"version", status.version}, {"uptime_ms", status.uptime_ms},
               {"models", Json::array()},   {"shards", Json::array()},
               {"batches", status.batches}, {"batch_bytes", status.batch_bytes}};
  for (const client::ModelStatus& model : status.models) {
    json["models"].emplace_back(model)["id"] = std::to_string(model.id);
  }
  for (const client::ShardStatus& shard : status.shards) {
    Json& to = json["shards"].emplace_back(shard);
    to["incarnation"] = std::to_string(shard.incarnation);
  }
  return Print(json);
}

std::string Describe(const client::BatchStatistics& statistics, const client::StepTimes* times) {
  Json json = {{"num_minibatches", statistics.num_minibatches}, {"stacks", statistics.stacks}};
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
