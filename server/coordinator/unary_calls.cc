#include "server/coordinator/unary_calls.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "base/floats.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/config.h"
#include "config/optimizers.h"
#include "server/coordinator/model_registry.h"
#include "server/host/shard_codec.h"
#include "server/ops/metrics.h"
#include "server/security/security.h"
#include "server/step/request_reader.h"
#include "server/step/shard_set.h"

namespace emberd::coordinator {

// ---- Steps

absl::StatusOr<step::LookupOutput> UnarySteps::Lookup(const v1::LookupRequest& request,
                                                      v1::Token::Role role,
                                                      rpc::CallContext* context) {
  if (!request.inference() && !security::Suffices(role, v1::Token::TRAINER)) {
    return absl::PermissionDeniedError(
        "inference is false, so the batch would be kept, which needs the role TRAINER; it must be "
        "true for a READER");
  }
  return resources_->registry->OnModel(
      request.model_id(), context, [&](const step::ServedModelPtr& model) {
        step::StepHooks no_hooks;
        v1::StepTimes times;
        return resources_->path->Lookup(model, request, context, &no_hooks, &times);
      });
}

absl::StatusOr<v1::ApplyGradientsResponse> UnarySteps::ApplyGradients(
    const v1::ApplyGradientsRequest& request, rpc::CallContext* context) {
  RETURN_IF_ERROR(resources_->registry->CheckNotLost(request.model_id(), context));
  const uint64_t handle = request.batch_handle();
  const host::Mutation mutation{request.mutation().client_id(), request.mutation().sequence(),
                                host::UpdateTag(request.model_id())};
  RETURN_IF_ERROR(host::CheckMutation(mutation));
  const step::UpdateName name{
      .model_id = request.model_id(), .handle = handle, .mutation = mutation};
  step::StepHooks no_hooks;
  v1::StepTimes times;
  const auto made = resources_->path->Update(name, request, context, &no_hooks, &times);
  if (!made.ok()) {
    if (absl::IsNotFound(made.status())) {  // no batch is kept of a model that is only looked up
      const auto model = resources_->registry->Find(request.model_id(), context);
      if (model.ok()) RETURN_IF_ERROR(step::CheckTrainable(**model));
    }
    if (!absl::IsDataLoss(made.status())) return made.status();
    // The rows that the batch was looked up from are gone. Who is told to retry must find the batch
    // again, to hear in the end what became of them.
    const absl::Status why =
        resources_->registry->Explain(request.model_id(), /*history=*/0, made.status());
    if (!absl::IsUnavailable(why) && !absl::IsDeadlineExceeded(why)) {
      resources_->path->Discard(request.model_id(), handle);
    }
    return why;
  }
  if (made->replayed) resources_->server_metrics->Add(ops::MetricId::kReplays);
  v1::ApplyGradientsResponse response;
  host::SetRowCounts(made->rows, &response);
  response.set_replayed(made->replayed);
  return response;
}

absl::StatusOr<v1::ReleaseBatchResponse> UnarySteps::ReleaseBatch(
    const v1::ReleaseBatchRequest& request, rpc::CallContext*) {
  RETURN_IF_ERROR(resources_->path->Release(request.model_id(), request.batch_handle()));
  return v1::ReleaseBatchResponse();
}

// ---- Rows

namespace {

using internal::v1::AssignShardRowsRequest;

constexpr int64_t kExportMessageBytes = int64_t{1} << 20;

// More rows are read one part after another, so that places and messages take no more than a part
// of them does.
constexpr int64_t kRowsAtOnce = 65'536;
constexpr int64_t kBytesAtOnce = int64_t{4} << 20;
// What an id takes besides its row, on the way to the shards and there: its place, in lists that
// grow, and in messages.
constexpr int64_t kPlaceBytes = 128;

absl::StatusOr<RowTarget> FindTarget(const step::ServedModel& model, const std::string& table,
                                     const std::string& slot) {
  const auto found = model.tables.find(table);
  if (found == model.tables.end()) {
    return absl::NotFoundError(absl::StrCat(
        "table is '", table, "', which model '", model.config.name(), "' does not have; ",
        KnownNames("tables", table, config::TableNames(model.config))));
  }
  const auto location = model.plan.table_at[found->second];
  const v1::TableConfig& config = model.config.tables(found->second);
  RowTarget target;
  target.stack = location.stack;
  target.table = &model.plan.stacks[location.stack].tables[location.position];
  target.slot = slot;
  target.columns = config.embedding_dim();
  if (slot.empty()) return target;
  std::vector<std::string> names;
  for (const config::SlotInfo& info : config::OptimizerSlots(config.optimizer())) {
    if (info.name == slot) {
      if (info.one_per_row) target.columns = 1;
      return target;
    }
    names.emplace_back(info.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("slot is '", slot, "'; the optimizer ",
                   config::OptimizerName(config.optimizer()), " of table '", table, "' has ",
                   names.empty() ? "none; only the weights, slot '', can be read and assigned"
                                 : absl::StrCat("others; ", KnownNames("slots", slot, names))));
}

// The ids where they are in the request. `table`: as it has it, for a table may have many names.
absl::StatusOr<preprocess::IntSpan> CheckIds(const v1::Tensor& tensor, const std::string& table,
                                             const RowTarget& target) {
  ASSIGN_OR_RETURN(const auto ids, step::IntsOf(tensor, "ids"));
  RETURN_IF_ERROR(step::CheckRank(tensor, 1, "ids"));
  for (int64_t i = 0; i < step::IntCount(ids); ++i) {
    const int64_t id = step::IntAt(ids, i);
    if (id < 0 || id >= target.table->vocabulary_size) {
      return absl::OutOfRangeError(absl::StrCat("ids[", i, "] is ", id, "; table '", table,
                                                "' has ids 0 .. ",
                                                target.table->vocabulary_size - 1));
    }
  }
  return ids;
}

std::vector<int64_t> SomeOf(const preprocess::IntSpan& ids, int64_t begin, int64_t count) {
  std::vector<int64_t> some(count);
  for (int64_t i = 0; i < count; ++i) some[i] = step::IntAt(ids, begin + i);
  return some;
}

// The rows of one shard: where they lie, and where they stand in the request.
struct ShardRows {
  std::vector<int32_t> partitions;
  std::vector<int64_t> local_rows;
  std::vector<size_t> positions;

  shard::RowSelection Selection(const step::ServedModel& model, const RowTarget& target) const {
    return {model.id,   target.stack,   target.slot,  partitions,
            local_rows, target.columns, model.history};
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

// The rows of one shard with their values, which are those of the request. Without its mutation.
AssignShardRowsRequest AssignTo(const ShardRows& rows, const step::ServedModel& model,
                                const RowTarget& target, absl::Span<const float> values) {
  std::vector<float> here(rows.positions.size() * target.columns);
  for (size_t i = 0; i < rows.positions.size(); ++i) {
    std::copy_n(values.data() + rows.positions[i] * target.columns, target.columns,
                here.data() + i * target.columns);
  }
  host::AssignCommand command;
  command.rows = rows.Selection(model, target);
  command.values = here;
  return host::EncodeAssign(command);
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
  const auto digest =
      Sha256(absl::StrCat(request.table().size(), ":", request.table(), "/", request.slot(), "/",
                          ExtendCrc32c(0, request.values().data()), "/", request.ids().data()));
  uint64_t tag;
  std::memcpy(&tag, digest.data(), sizeof(tag));
  return tag ^ request.model_id();  // see NameModel
}

absl::StatusOr<absl::Span<const float>> DecodeValues(const v1::Tensor& tensor, int64_t rows,
                                                     int columns) {
  RETURN_IF_ERROR(step::CheckShape(tensor, {rows, columns}, "values"));
  ASSIGN_OR_RETURN(auto values, step::FloatsOf(tensor, "values"));
  const int64_t bad = FindNonFinite(values);
  if (bad < 0) return values;
  return absl::InvalidArgumentError(absl::StrCat("values[", bad / columns, ", ", bad % columns,
                                                 "] is ", values[bad], "; values must be finite"));
}

}  // namespace

absl::StatusOr<v1::Tensor> RowAccess::ReadTableRows(const step::ServedModel& model,
                                                    const RowTarget& target,
                                                    const preprocess::IntSpan& ids,
                                                    rpc::CallContext* context) {
  const auto row_bytes = static_cast<int64_t>(target.columns * sizeof(float));
  const int64_t count = step::IntCount(ids);
  if (count > max_message_bytes_ / row_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(count, " rows of ", row_bytes,
                     " bytes are over budgets.max_message_bytes = ", max_message_bytes_));
  }
  const int64_t most = std::max<int64_t>(std::min(kRowsAtOnce, kBytesAtOnce / row_bytes), 1);
  const int64_t part_bytes = std::min(most, count) * (kPlaceBytes + 4 * row_bytes);
  // The rows, the message that is made of them, and what their parts take on the way.
  ASSIGN_OR_RETURN(const auto room,
                   context->MakeRoom(2 * count * row_bytes + part_bytes, "the answer"));
  v1::Tensor tensor;
  tensor.set_dtype(v1::FLOAT32);
  tensor.add_shape(count);
  tensor.add_shape(target.columns);
  tensor.mutable_data()->resize(count * row_bytes);
  for (int64_t begin = 0; begin < count; begin += most) {
    if (context->cancelled()) return absl::CancelledError("the caller is gone");
    const std::vector<int64_t> part = SomeOf(ids, begin, std::min(most, count - begin));
    RETURN_IF_ERROR(ReadRowsTo(model, target, part,
                               tensor.mutable_data()->data() + begin * row_bytes, context));
  }
  return tensor;
}

absl::Status RowAccess::ReadRowsTo(const step::ServedModel& model, const RowTarget& target,
                                   absl::Span<const int64_t> ids, char* data,
                                   rpc::CallContext* context) {
  const size_t row_bytes = target.columns * sizeof(float);
  const std::vector<ShardRows> shards = PlaceRows(model.plan.topology, target, ids);
  const auto read = [&](int index) -> absl::Status {
    const ShardRows& rows = shards[index];
    host::ShardBackend& shard = (*resources_->shards)[index];
    const auto request = host::EncodeRead(rows.Selection(model, target));
    ASSIGN_OR_RETURN(const auto response, shard.ReadRows(request, context));
    const std::string& values = response.values();
    if (values.size() != rows.positions.size() * row_bytes) {
      return absl::InternalError(absl::StrCat(shard.name(), ": ", values.size(),
                                              " bytes of rows instead of ",
                                              rows.positions.size() * row_bytes));
    }
    for (size_t i = 0; i < rows.positions.size(); ++i) {
      std::memcpy(data + rows.positions[i] * row_bytes, values.data() + i * row_bytes, row_bytes);
    }
    return absl::OkStatus();
  };
  return resources_->shards->On(NonEmpty(shards), read);
}

absl::StatusOr<v1::ReadRowsResponse> RowAccess::ReadRows(const v1::ReadRowsRequest& request,
                                                         rpc::CallContext* context) {
  using Response = absl::StatusOr<v1::ReadRowsResponse>;
  return resources_->registry->OnModel(
      request.model_id(), context, [&](const step::ServedModelPtr& model) -> Response {
        ASSIGN_OR_RETURN(const RowTarget target,
                         FindTarget(*model, request.table(), request.slot()));
        ASSIGN_OR_RETURN(const auto ids, CheckIds(request.ids(), request.table(), target));
        v1::ReadRowsResponse response;
        ASSIGN_OR_RETURN(*response.mutable_values(), ReadTableRows(*model, target, ids, context));
        return response;
      });
}

absl::StatusOr<v1::AssignRowsResponse> RowAccess::AssignRows(const v1::AssignRowsRequest& request,
                                                             rpc::CallContext* context) {
  const host::Mutation mutation{request.mutation().client_id(), request.mutation().sequence(),
                                AssignTag(request)};
  RETURN_IF_ERROR(host::CheckMutation(mutation));
  ModelRegistry& models = *resources_->registry;
  const auto assign = [&](const step::ServedModelPtr& model) {
    return Assign(*model, request, mutation, context);
  };
  if (request.history() == 0) return models.OnModel(request.model_id(), context, assign);
  ASSIGN_OR_RETURN(const auto model,
                   models.FindUnfilled(request.model_id(), request.history(), context));
  auto assigned = assign(model);
  if (!assigned.ok()) return models.Explain(model->id, model->history, assigned.status());
  return assigned;
}

absl::StatusOr<v1::AssignRowsResponse> RowAccess::Assign(const step::ServedModel& model,
                                                         const v1::AssignRowsRequest& request,
                                                         const host::Mutation& mutation,
                                                         rpc::CallContext* context) {
  RETURN_IF_ERROR(step::CheckNotReadOnly(model, "its rows cannot be assigned"));
  ASSIGN_OR_RETURN(auto target, FindTarget(model, request.table(), request.slot()));
  ASSIGN_OR_RETURN(const auto given, CheckIds(request.ids(), request.table(), target));
  ASSIGN_OR_RETURN(auto values,
                   DecodeValues(request.values(), step::IntCount(given), target.columns));
  // All shards vote on the whole of it: the ids with their places, the values by shard and in
  // messages.
  ASSIGN_OR_RETURN(const auto room,
                   context->MakeRoom(step::IntCount(given) * kPlaceBytes +
                                         2 * static_cast<int64_t>(request.values().data().size()),
                                     "what is made of the request"));
  const std::vector<int64_t> ids = SomeOf(given, 0, step::IntCount(given));
  RETURN_IF_ERROR(CheckNoRepeats(ids));
  const auto& table = model.config.tables(model.tables.at(request.table()));
  RETURN_IF_ERROR(
      config::CheckSlotValues(table.optimizer(), table.name(), target.slot, ids, values));

  const std::vector<ShardRows> shards = PlaceRows(model.plan.topology, target, ids);
  const auto attempt = [&](uint64_t number) -> absl::StatusOr<step::MadeMutation> {
    // All shards vote, also those without a row of it, as on updates: so any of them can tell
    // whether it may have been decided.
    std::vector<AssignShardRowsRequest> requests;
    for (const ShardRows& rows : shards) {
      auto& part = requests.emplace_back(AssignTo(rows, model, target, values));
      *part.mutable_mutation() = host::NameToProto(mutation);
      part.set_attempt(number);
    }
    return TryAssign(mutation, requests, context);
  };
  ASSIGN_OR_RETURN(const step::MadeMutation made,
                   resources_->mutations->Make(mutation, context, attempt));
  if (made.replayed) resources_->server_metrics->Add(ops::MetricId::kReplays);
  v1::AssignRowsResponse response;
  response.set_replayed(made.replayed);
  return response;
}

absl::StatusOr<step::MadeMutation> RowAccess::TryAssign(
    const host::Mutation& mutation, const std::vector<AssignShardRowsRequest>& requests,
    rpc::CallContext* context) {
  std::vector<char> staged(requests.size());  // not bool: written by several threads
  const auto stage = [&](int shard) {
    const auto answer = (*resources_->shards)[shard].AssignRows(requests[shard], context);
    staged[shard] = answer.ok() && !answer->replayed();
    return answer.status();
  };
  const uint64_t attempt = requests.front().attempt();
  if (absl::Status status = resources_->shards->OnAll(stage); !status.ok()) {
    resources_->mutations->Abandon(mutation, attempt);
    return status;
  }
  std::vector<int> holding;
  for (size_t shard = 0; shard < staged.size(); ++shard) {
    if (staged[shard]) holding.push_back(static_cast<int>(shard));
  }
  ReachFailpoint("assign.votes_are_in");
  RETURN_IF_ERROR(resources_->shards->On(holding, [&](int shard) {
    ReachFailpoint("assign.word_is_next");
    return resources_->mutations
        ->Commit(shard, mutation, attempt, context->deadline(), context->trace())
        .status();
  }));
  ReachFailpoint("assign.is_made");
  return step::MadeMutation{{}, /*replayed=*/holding.empty()};
}

absl::StatusOr<RowAccess::NextRows> RowAccess::StartExport(const v1::ExportTableRequest& request,
                                                           rpc::CallContext* context) {
  ASSIGN_OR_RETURN(auto model, resources_->registry->FindAnew(request.model_id(), context));
  ASSIGN_OR_RETURN(auto target, FindTarget(*model, request.table(), request.slot()));
  const int64_t rows = target.table->vocabulary_size;
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
  const int64_t most = std::max<int64_t>(1, kExportMessageBytes / (target.columns * sizeof(float)));
  return [=, this, next = request.first_row()]() mutable
         -> absl::StatusOr<std::optional<v1::ExportTableResponse>> {
    if (next == end) return std::nullopt;
    const int64_t count = std::min(most, end - next);
    ASSIGN_OR_RETURN(auto response, ExportRows(*model, target, next, count, context));
    next += count;
    return response;
  };
}

absl::StatusOr<v1::ExportTableResponse> RowAccess::ExportRows(const step::ServedModel& model,
                                                              const RowTarget& target,
                                                              int64_t first, int64_t count,
                                                              rpc::CallContext* context) {
  RETURN_IF_ERROR(resources_->registry->CheckNotLost(model.id, context));
  std::vector<int64_t> ids(count);
  std::iota(ids.begin(), ids.end(), first);
  auto values = ReadTableRows(model, target, absl::MakeConstSpan(ids), context);
  if (!values.ok()) {
    return resources_->registry->Explain(model.id, model.history, values.status());
  }
  v1::ExportTableResponse response;
  response.set_first_row(first);
  response.set_history(model.history);
  *response.mutable_values() = *std::move(values);
  return response;
}

}  // namespace emberd::coordinator
