// The memory of a shard's SparseCores, where models may be evicted: what it holds, and what
// operators do with it.

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/ops/logging.h"
#include "server/shard/shard_host.h"

namespace emberd::server {
namespace {

using v1::ChangeMemoryRequest;

v1::MemoryTable::Place PlaceOf(shard::RowsPlace place) {
  switch (place) {
    case shard::RowsPlace::kSparseCore:
      return v1::MemoryTable::SPARSECORE;
    case shard::RowsPlace::kHost:
      return v1::MemoryTable::HOST;
    case shard::RowsPlace::kSpilled:
      return v1::MemoryTable::SPILLED;
  }
  return v1::MemoryTable::PLACE_UNSPECIFIED;
}

}  // namespace

absl::Status CheckMemoryChange(const ChangeMemoryRequest& request) {
  const bool pins = request.operation() == ChangeMemoryRequest::PIN ||
                    request.operation() == ChangeMemoryRequest::UNPIN;
  const std::string name = ChangeMemoryRequest::Operation_Name(request.operation());
  if (request.operation() == ChangeMemoryRequest::OPERATION_UNSPECIFIED || name.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("operation is ",
                                                   static_cast<int>(request.operation()),
                                                   "; it must be PIN, UNPIN, COMPACT or RELEASE"));
  }
  if (pins && request.model().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("model is empty; ", name, " needs a name"));
  }
  if (!pins && !request.model().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("model is '", request.model(), "'; ", name,
                                                   " is about all models: leave it empty"));
  }
  return absl::OkStatus();
}

v1::MemoryStatus ShardHost::DescribeMemory() const {
  const shard::MemoryFigures figures = engine_->memory()->Figures();
  v1::MemoryStatus memory;
  memory.set_bytes(figures.bytes);
  memory.set_free_bytes(figures.free_bytes);
  memory.set_largest_gap_bytes(figures.largest_gap);
  memory.set_host_bytes(figures.host_bytes);
  memory.set_host_budget_bytes(host_budget_bytes_);
  memory.set_spilled_bytes(figures.spilled_bytes);
  memory.set_pinned_bytes(figures.pinned_bytes);
  memory.set_evictions(figures.evictions);
  memory.set_returns(figures.returns);
  memory.set_compactions(figures.compactions);
  memory.set_failures(figures.failures);
  for (const shard::MemoryFigures::Table& table : figures.tables) {
    v1::MemoryTable* to = memory.add_tables();
    to->set_model(table.model);
    to->set_stack(table.name);
    to->set_bytes(table.bytes);
    to->set_place(PlaceOf(table.place));
    to->set_address(table.address);
    to->set_uses(table.uses);
    to->set_pinned(table.pinned);
  }
  return memory;
}

absl::StatusOr<shard::MemoryChange> ShardHost::MakeMemoryChange(
    const ChangeMemoryRequest& request) {
  switch (request.operation()) {
    case ChangeMemoryRequest::COMPACT:
      return engine_->memory()->Compact();
    case ChangeMemoryRequest::RELEASE:
      return engine_->memory()->ReleaseAll();
    default:
      break;
  }
  const bool pinned = request.operation() == ChangeMemoryRequest::PIN;
  auto change = models_.SetPinned(request.model(), pinned);
  if (change.ok()) RETURN_IF_ERROR(log_.WaitDurable());
  return change;
}

absl::StatusOr<v1::ShardMemoryChange> ShardHost::ChangeMemory(const ChangeMemoryRequest& request) {
  RETURN_IF_ERROR(CheckMemoryChange(request));
  if (engine_->memory() == nullptr) {
    return absl::FailedPreconditionError(
        "models are not evicted in this cluster: its description has no `eviction`; write "
        "`eviction { spill_folder: \"/var/tmp/emberd\" }` into it and start it again");
  }
  ASSIGN_OR_RETURN(const shard::MemoryChange change, MakeMemoryChange(request));
  v1::ShardMemoryChange response;
  response.set_shard(place_.index);
  response.set_changed(change.changed);
  response.set_returned(change.returned);
  response.mutable_evicted()->Add(change.evicted.begin(), change.evicted.end());
  response.set_evicted_bytes(change.evicted_bytes);
  response.set_moved_tables(change.moved);
  *response.mutable_memory() = DescribeMemory();
  ops::Log(ops::LogLevel::kInfo, "memory changed by an operator",
           {{"operation", ChangeMemoryRequest::Operation_Name(request.operation())},
            {"model", request.model()},
            {"shard", place_.index},
            {"evicted", change.evicted.size()},
            {"moved_tables", change.moved}});
  return response;
}

}  // namespace emberd::server
