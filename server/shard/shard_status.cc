// What a shard tells of itself: its status, and the metrics that it brings up to date once a
// second.

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/steady_time.h"
#include "server/ops/process_metrics.h"
#include "server/shard/shard_host.h"

namespace emberd::server {
namespace {

// By number of rows, the share of a table's lookups that they have at least: without what the
// sketch may have counted for rows that it forgot.
std::map<int, double> SharesOf(const shard::HotTable& table) {
  std::map<int, double> shares = {{1, 0}, {10, 0}, {100, 0}};
  for (auto& [top, share] : shares) {
    for (size_t i = 0; i < table.rows.size() && i < static_cast<size_t>(top); ++i) {
      const int64_t lookups = table.rows[i].lookups - table.rows[i].error;
      share += static_cast<double>(lookups) / static_cast<double>(table.lookups);
    }
  }
  return shares;
}

}  // namespace

absl::Status CheckHotRows(int hot_rows) {
  if (hot_rows >= 0 && hot_rows <= kMaxHotRows) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("hot_rows is ", hot_rows, "; it must be 0 to ", kMaxHotRows));
}

void ShardHost::Sweep() {
  using enum ops::MetricId;
  ops::ServerMetrics& metrics = *server_metrics_;
  metrics.Add(kBatchesExpired, static_cast<double>(batches_.Sweep(SteadyNow()).size()));
  if (CheckReady().ok()) {
    group_steps_.Sweep(SteadyNow());
    checkpoints_.Sweep(SteadyNow());
    if (log_.SegmentFull()) BeginLogSegment().IgnoreError();  // the next sweep tries again
  }
  const v1::LogStatus log = durable_.Status();
  metrics.Set(kLogBytes, log.bytes());
  metrics.Set(kLogRefuses, log.failure().empty() ? 0 : 1);
  metrics.Set(kRecovering, log.recovering() ? 1 : 0);
  const shard::EngineStatistics statistics = engine_->Statistics();
  metrics.Set(kModels, statistics.models);
  metrics.Set(kTableBytes, statistics.table_bytes);
  metrics.Set(kBatches, batches_.count());
  metrics.Set(kBatchBytes, batches_.bytes());
  metrics.Set(kInFlightBytes, limits_.memory.used());
  if (engine_->memory() != nullptr) {
    const shard::MemoryFigures memory = engine_->memory()->Figures();
    const int cores = place_.sparsecores_per_shard;
    metrics.Set(kTableResidentBytes, (memory.bytes - memory.free_bytes) * cores);
    metrics.Set(kTablePinnedBytes, memory.pinned_bytes * cores);
    metrics.Set(kTableHostBytes, memory.host_bytes * cores);
    metrics.Set(kTableSpilledBytes, memory.spilled_bytes);
    metrics.SetTotal(kEvictions, memory.evictions);
    metrics.SetTotal(kReturns, memory.returns);
    metrics.SetTotal(kMemoryFailures, memory.failures);
  }
  CountPartitions(statistics);
  ShowHotRows();
}

void ShardHost::ShowHotRows() {
  for (const shard::HotTable& table : engine_->HotRows(kMaxHotRows)) {
    metrics_->SetHotRowShares(place_.index, table.model, table.table, SharesOf(table));
  }
}

void ShardHost::CountPartitions(const shard::EngineStatistics& statistics) {
  for (size_t k = 0; k < statistics.partitions.size(); ++k) {
    const shard::PartitionStatistics& now = statistics.partitions[k];
    shard::PartitionStatistics& before = counted_partitions_[k];
    partition_metrics_[k].gathered->Increment(
        static_cast<double>(now.rows_gathered - before.rows_gathered));
    partition_metrics_[k].updated->Increment(
        static_cast<double>(now.rows_updated - before.rows_updated));
    before = now;
  }
}

v1::ShardStatus ShardHost::GetStatus(int hot_rows) const {
  const shard::EngineStatistics statistics = engine_->Statistics();
  v1::ShardStatus status;
  status.set_index(place_.index);
  status.set_reachable(true);
  status.set_incarnation(incarnation_);
  status.set_uptime_ms(absl::ToInt64Milliseconds(SteadyNow() - start_));
  status.set_models(statistics.models);
  status.set_table_bytes(statistics.table_bytes);
  status.set_batches(static_cast<int>(batches_.count()));
  status.set_batch_bytes(batches_.bytes());
  status.set_rows_gathered(statistics.rows_gathered);
  status.set_rows_updated(statistics.rows_updated);
  status.set_table_budget_bytes(table_budget_bytes_);
  status.set_memory_bytes(memory_.share());
  status.set_resident_bytes(ops::ResidentBytes().value_or(0));
  status.set_huge_page_bytes(ops::HugePageBytes().value_or(0));
  status.set_queued(workers_.queued() + statistics.queued);
  if (durable_.on()) *status.mutable_log() = durable_.Status();
  if (engine_->memory() != nullptr) *status.mutable_memory() = DescribeMemory();
  for (int k = 0; k < place_.sparsecores_per_shard; ++k) {
    v1::PartitionStatus* partition = status.add_partitions();
    partition->set_index(place_.index * place_.sparsecores_per_shard + k);
    if (static_cast<size_t>(k) >= statistics.partitions.size()) continue;  // no model yet
    partition->set_table_bytes(statistics.partitions[k].table_bytes);
    partition->set_rows_gathered(statistics.partitions[k].rows_gathered);
    partition->set_rows_updated(statistics.partitions[k].rows_updated);
  }
  if (hot_rows <= 0) return status;
  for (const shard::HotTable& table : engine_->HotRows(std::min(hot_rows, kMaxHotRows))) {
    for (const shard::HotRow& row : table.rows) {
      v1::HotRow* to = status.add_hot_rows();
      to->set_model(table.model);
      to->set_table(table.table);
      to->set_id(row.id);
      to->set_lookups(row.lookups);
      to->set_error(row.error);
      to->set_table_lookups(table.lookups);
    }
  }
  return status;
}

}  // namespace emberd::server
