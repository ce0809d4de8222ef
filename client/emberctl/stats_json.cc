#include <utility>

#include "client/emberctl/stats_view.h"

namespace emberd::emberctl {
namespace {

float PerSecond(const Rates& rates, int64_t count) {
  return static_cast<float>(static_cast<double>(count) / rates.seconds);
}

Json LatencyJson(const Rates& rates, const Latency& latency) {
  return {{"count", latency.count},
          {"per_second", PerSecond(rates, latency.count)},
          {"seconds", static_cast<float>(latency.sum)},
          {"p50_seconds", static_cast<float>(latency.p50)},
          {"p99_seconds", static_cast<float>(latency.p99)}};
}

Json MethodsJson(const Rates& rates) {
  Json methods = Json::array();
  for (const MethodRates& method : rates.methods) {
    Json json = LatencyJson(rates, method.latency);
    json["method"] = method.method;
    json["errors"] = method.errors;
    json["request_bytes"] = method.request_bytes;
    json["response_bytes"] = method.response_bytes;
    methods.push_back(std::move(json));
  }
  return methods;
}

Json StagesJson(const Rates& rates) {
  Json stages = Json::array();
  for (const StageRates& stage : rates.stages) {
    Json json = LatencyJson(rates, stage.latency);
    json["stage"] = stage.stage;
    stages.push_back(std::move(json));
  }
  return stages;
}

Json StacksJson(const Rates& rates) {
  Json stacks = Json::array();
  for (const StackRates& stack : rates.stacks) {
    const v1::StackStats& now = stack.now;
    stacks.push_back(
        {{"model", now.model()},
         {"stack", now.stack()},
         {"batches", stack.batches},
         {"ids", stack.ids},
         {"ids_per_second", PerSecond(rates, stack.ids)},
         {"unique_ids", stack.unique_ids},
         {"dropped_ids", stack.dropped_ids},
         {"max_ids_per_partition", now.max_ids_per_partition()},
         {"largest_ids_per_partition", now.largest_ids_per_partition()},
         {"max_unique_ids_per_partition", now.max_unique_ids_per_partition()},
         {"largest_unique_ids_per_partition", now.largest_unique_ids_per_partition()}});
  }
  return stacks;
}

Json HotRowsJson(const v1::ShardStatus& shard) {
  Json rows = Json::array();
  for (const v1::HotRow& row : shard.hot_rows()) {
    rows.push_back({{"model", row.model()},
                    {"table", row.table()},
                    {"id", row.id()},
                    {"lookups", row.lookups()},
                    {"error", row.error()},
                    {"table_lookups", row.table_lookups()}});
  }
  return rows;
}

Json ShardsJson(const Rates& rates) {
  Json shards = Json::array();
  for (const ShardRates& shard : rates.shards) {
    const v1::ShardStatus& now = shard.now;
    Json json = {
        {"index", now.index()}, {"address", now.address()}, {"reachable", now.reachable()}};
    if (!now.reachable()) {
      json["error"] = now.error();
      shards.push_back(std::move(json));
      continue;
    }
    json.update(Json{{"uptime_ms", now.uptime_ms()},
                     {"rows_gathered", shard.rows_gathered},
                     {"rows_gathered_per_second", PerSecond(rates, shard.rows_gathered)},
                     {"rows_updated", shard.rows_updated},
                     {"rows_updated_per_second", PerSecond(rates, shard.rows_updated)},
                     {"table_bytes", now.table_bytes()},
                     {"table_budget_bytes", now.table_budget_bytes()},
                     {"resident_bytes", now.resident_bytes()},
                     {"huge_page_bytes", now.huge_page_bytes()},
                     {"queued", now.queued()},
                     {"batches", now.batches()},
                     {"hot_rows", HotRowsJson(now)}});
    shards.push_back(std::move(json));
  }
  return shards;
}

Json GroupsJson(const Rates& rates) {
  Json groups = Json::array();
  for (const GroupRates& group : rates.groups) {
    groups.push_back({{"model", group.model},
                      {"group", group.group},
                      {"updates", group.updates},
                      {"updates_per_second", PerSecond(rates, group.updates)},
                      {"failures", group.failures},
                      {"wait_seconds", static_cast<float>(group.wait_seconds)},
                      {"last_rank", group.last_rank},
                      {"last_share", static_cast<float>(group.last_share)}});
  }
  return groups;
}

}  // namespace

Json StatsJson(const Rates& rates) {
  const v1::GetStatsResponse& now = rates.now;
  return {{"time_ms", now.time_ms()},
          {"uptime_ms", now.uptime_ms()},
          {"seconds", static_cast<float>(rates.seconds)},
          {"draining", now.draining()},
          {"in_flight_requests", now.in_flight_requests()},
          {"in_flight_bytes", now.in_flight_bytes()},
          {"queued_requests", now.queued_requests()},
          {"train_streams", now.train_streams()},
          {"batches", now.batches()},
          {"batch_bytes", now.batch_bytes()},
          {"methods", MethodsJson(rates)},
          {"shards", ShardsJson(rates)},
          {"stacks", StacksJson(rates)},
          {"stages", StagesJson(rates)},
          {"groups", GroupsJson(rates)}};
}

}  // namespace emberd::emberctl
