// Coordinator::ReadRows, AssignRows and ExportTable: logical rows by table and id.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "config/optimizers.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/for_each_shard.h"
#include "server/coordinator/tensor_view.h"

namespace emberd::server {

// Which values of which table.
struct RowTarget {
  int stack = 0;
  const preprocess::TablePlan* table = nullptr;
  std::string slot;  // empty: weights
  int columns = 0;
};

namespace {

constexpr int64_t kExportPartBytes = int64_t{1} << 20;

absl::StatusOr<RowTarget> FindTarget(const ServedModel& model, const std::string& table,
                                     const std::string& slot) {
  const auto found = model.tables.find(table);
  if (found == model.tables.end()) {
    return absl::NotFoundError(absl::StrCat("table is '", table, "', which model '",
                                            model.config.name(), "' does not have"));
  }
  const auto location = model.plan.table_at[found->second];
  const v1::TableConfig& config = model.config.tables(found->second);
  RowTarget target;
  target.stack = location.stack;
  target.table = &model.plan.stacks[location.stack].tables[location.position];
  target.slot = slot;
  target.columns = config.embedding_dim();
  if (slot.empty()) return target;
  std::string names;
  for (const config::SlotInfo& info : config::OptimizerSlots(config.optimizer())) {
    if (info.name == slot) {
      if (info.one_per_row) target.columns = 1;
      return target;
    }
    absl::StrAppend(&names, " '", info.name, "'");
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "slot is '", slot, "'; the optimizer ", config::OptimizerName(config.optimizer()),
      " of table '", table, "' has", names.empty() ? " none" : names));
}

absl::StatusOr<std::vector<int64_t>> DecodeIds(const v1::Tensor& tensor, const RowTarget& target) {
  auto span = IntsOf(tensor, "ids");
  if (!span.ok()) return span.status();
  if (absl::Status status = CheckRank(tensor, 1, "ids"); !status.ok()) return status;
  std::vector<int64_t> ids(IntCount(*span));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = IntAt(*span, static_cast<int64_t>(i));
    if (ids[i] < 0 || ids[i] >= target.table->vocabulary_size) {
      return absl::OutOfRangeError(absl::StrCat("ids[", i, "] is ", ids[i], "; table '",
                                                target.table->name, "' has ids 0 .. ",
                                                target.table->vocabulary_size - 1));
    }
  }
  return ids;
}

// The rows of one shard: where they lie, and where they stand in the request.
struct ShardRows {
  std::vector<int32_t> partitions;
  std::vector<int64_t> local_rows;
  std::vector<size_t> positions;

  shard::RowSelection Selection(uint64_t model_id, const RowTarget& target) const {
    return {model_id, target.stack, target.slot, partitions, local_rows, target.columns};
  }
};

std::vector<ShardRows> PlaceRows(const preprocess::Topology& topology, const RowTarget& target,
                                 absl::Span<const int64_t> ids) {
  std::vector<ShardRows> shards(topology.shards);
  const int64_t partitions = topology.partitions();
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto partition =
        static_cast<int32_t>((ids[i] + target.table->shard_rotation) % partitions);
    ShardRows& rows = shards[partition / topology.sparsecores_per_shard];
    rows.partitions.push_back(partition);
    rows.local_rows.push_back(ids[i] / partitions + target.table->row_offset);
    rows.positions.push_back(i);
  }
  return shards;
}

std::vector<int> NonEmpty(const std::vector<ShardRows>& shards) {
  std::vector<int> indices;
  for (size_t i = 0; i < shards.size(); ++i) {
    if (!shards[i].positions.empty()) indices.push_back(static_cast<int>(i));
  }
  return indices;
}

absl::Status CheckNoRepeats(std::vector<int64_t> ids) {
  std::sort(ids.begin(), ids.end());
  const auto repeat = std::adjacent_find(ids.begin(), ids.end());
  if (repeat == ids.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("ids: ", *repeat, " is repeated; each row may be assigned once"));
}

// The mutation's tag: equal on every coordinator, since shards keep it.
uint64_t AssignTag(const v1::AssignRowsRequest& request) {
  const auto digest = Sha256(absl::StrCat(request.table().size(), ":", request.table(), "/",
                                          request.slot(), "/", request.ids().data()));
  uint64_t tag;
  std::memcpy(&tag, digest.data(), sizeof(tag));
  return tag;
}

absl::StatusOr<absl::Span<const float>> DecodeValues(const v1::Tensor& tensor, int64_t rows,
                                                     int columns) {
  if (absl::Status status = CheckShape(tensor, {rows, columns}, "values"); !status.ok())
    return status;
  auto values = FloatsOf(tensor, "values");
  if (!values.ok()) return values.status();
  for (size_t i = 0; i < values->size(); ++i) {
    if (!std::isfinite((*values)[i])) {
      return absl::InvalidArgumentError(absl::StrCat("values[", i / columns, ", ", i % columns,
                                                     "] is ", (*values)[i],
                                                     "; values must be finite"));
    }
  }
  return values;
}

}  // namespace

absl::StatusOr<v1::Tensor> Coordinator::ReadTableRows(const ServedModel& model,
                                                      const RowTarget& target,
                                                      absl::Span<const int64_t> ids,
                                                      rpc::CallContext* context) {
  const size_t row_bytes = target.columns * sizeof(float);
  if (static_cast<int64_t>(ids.size()) > max_message_bytes_ / static_cast<int64_t>(row_bytes)) {
    return absl::ResourceExhaustedError(
        absl::StrCat(ids.size(), " rows of ", row_bytes,
                     " bytes are over budgets.max_message_bytes = ", max_message_bytes_));
  }
  v1::Tensor tensor;
  tensor.set_dtype(v1::FLOAT32);
  tensor.add_shape(static_cast<int64_t>(ids.size()));
  tensor.add_shape(target.columns);
  tensor.mutable_data()->resize(ids.size() * row_bytes);
  char* data = tensor.mutable_data()->data();

  const std::vector<ShardRows> shards = PlaceRows(model.plan.topology, target, ids);
  const auto read = [&](int shard) {
    const ShardRows& rows = shards[shard];
    std::vector<float> values(rows.positions.size() * target.columns);
    absl::Status status = fanout_.WithModel(model, shard, context, [&] {
      return shards_[shard]->ReadRows(rows.Selection(model.id, target), absl::MakeSpan(values),
                                      context);
    });
    for (size_t i = 0; status.ok() && i < rows.positions.size(); ++i) {
      std::memcpy(data + rows.positions[i] * row_bytes, values.data() + i * target.columns,
                  row_bytes);
    }
    return status;
  };
  if (absl::Status status = FirstError(ForEachShard(NonEmpty(shards), read)); !status.ok())
    return status;
  return tensor;
}

absl::StatusOr<v1::ReadRowsResponse> Coordinator::ReadRows(const v1::ReadRowsRequest& request,
                                                           rpc::CallContext* context) {
  auto model = registry_.Find(request.model_id(), context);
  if (!model.ok()) return model.status();
  auto target = FindTarget(**model, request.table(), request.slot());
  if (!target.ok()) return target.status();
  auto ids = DecodeIds(request.ids(), *target);
  if (!ids.ok()) return ids.status();
  auto values = ReadTableRows(**model, *target, *ids, context);
  if (!values.ok()) return values.status();
  v1::ReadRowsResponse response;
  *response.mutable_values() = *std::move(values);
  return response;
}

absl::StatusOr<v1::AssignRowsResponse> Coordinator::AssignRows(const v1::AssignRowsRequest& request,
                                                               rpc::CallContext* context) {
  const Mutation mutation{request.mutation().client_id(), request.mutation().sequence(),
                          AssignTag(request)};
  if (absl::Status status = CheckMutation(mutation); !status.ok()) return status;
  auto model = registry_.Find(request.model_id(), context);
  if (!model.ok()) return model.status();
  auto target = FindTarget(**model, request.table(), request.slot());
  if (!target.ok()) return target.status();
  auto ids = DecodeIds(request.ids(), *target);
  if (!ids.ok()) return ids.status();
  if (absl::Status status = CheckNoRepeats(*ids); !status.ok()) return status;
  auto values = DecodeValues(request.values(), static_cast<int64_t>(ids->size()), target->columns);
  if (!values.ok()) return values.status();

  auto before = record_.Begin(mutation);
  if (!before.ok()) return before.status();
  v1::AssignRowsResponse response;
  response.set_replayed(before->has_value());
  if (before->has_value()) {
    server_metrics_->AddReplay();
    return response;
  }
  const std::vector<ShardRows> shards = PlaceRows((*model)->plan.topology, *target, *ids);
  // Another coordinator may have carried it out: then every shard says so.
  std::atomic<bool> all_replayed = !ids->empty();
  const auto assign = [&](int shard) {
    const ShardRows& rows = shards[shard];
    std::vector<float> part(rows.positions.size() * target->columns);
    for (size_t i = 0; i < rows.positions.size(); ++i) {
      std::copy_n(values->data() + rows.positions[i] * target->columns, target->columns,
                  part.data() + i * target->columns);
    }
    return fanout_.WithModel(**model, shard, context, [&] {
      auto replayed = shards_[shard]->AssignRows(rows.Selection((*model)->id, *target), part,
                                                 mutation, context);
      if (replayed.ok() && !*replayed) all_replayed = false;
      return replayed.status();
    });
  };
  if (absl::Status status = FirstError(ForEachShard(NonEmpty(shards), assign)); !status.ok()) {
    // A retry finishes what is missing: shards that were done answer from their record.
    record_.Abort(mutation);
    return status;
  }
  record_.Finish(mutation, {});
  response.set_replayed(all_replayed);
  return response;
}

absl::StatusOr<std::unique_ptr<Coordinator::Export>> Coordinator::StartExport(
    const v1::ExportTableRequest& request, rpc::CallContext* context) {
  class TableExport final : public Export {
   public:
    TableExport(Coordinator* coordinator, std::shared_ptr<const ServedModel> model,
                RowTarget target, int64_t first, int64_t end, rpc::CallContext* context)
        : coordinator_(coordinator),
          model_(std::move(model)),
          target_(std::move(target)),
          next_(first),
          end_(end),
          context_(context) {}

    absl::StatusOr<v1::ExportTableResponse> Next() override {
      const int64_t part =
          std::max<int64_t>(1, kExportPartBytes / (target_.columns * sizeof(float)));
      std::vector<int64_t> ids(std::min(part, end_ - next_));
      std::iota(ids.begin(), ids.end(), next_);
      v1::ExportTableResponse response;
      response.set_first_row(next_);
      if (ids.empty()) return response;
      auto values = coordinator_->ReadTableRows(*model_, target_, ids, context_);
      if (!values.ok()) return values.status();
      next_ += static_cast<int64_t>(ids.size());
      *response.mutable_values() = *std::move(values);
      return response;
    }

   private:
    Coordinator* const coordinator_;
    const std::shared_ptr<const ServedModel> model_;
    const RowTarget target_;
    int64_t next_;
    const int64_t end_;
    rpc::CallContext* const context_;
  };

  auto model = registry_.Find(request.model_id(), context);
  if (!model.ok()) return model.status();
  auto target = FindTarget(**model, request.table(), request.slot());
  if (!target.ok()) return target.status();
  const int64_t rows = target->table->vocabulary_size;
  if (request.first_row() < 0 || request.first_row() > rows) {
    return absl::OutOfRangeError(
        absl::StrCat("first_row is ", request.first_row(), "; it must be in 0 .. ", rows));
  }
  const int64_t left = rows - request.first_row();
  if (request.row_count() < 0 || request.row_count() > left) {
    return absl::OutOfRangeError(
        absl::StrCat("row_count is ", request.row_count(), "; it must be in 0 .. ", left));
  }
  const int64_t end = request.row_count() == 0 ? rows : request.first_row() + request.row_count();
  return std::make_unique<TableExport>(this, *std::move(model), *std::move(target),
                                       request.first_row(), end, context);
}

}  // namespace emberd::server
