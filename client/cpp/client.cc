#include "client/cpp/client.h"

#include <optional>
#include <utility>

#include <google/protobuf/arena.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "client/cpp/batch_codec.h"
#include "client/cpp/coordinator.h"
#include "client/cpp/model_codec.h"
#include "client/cpp/transport.h"
#include "config/config.h"
#include "emberd/v1/types.pb.h"

namespace emberd::client {
namespace {

// Columns of rows that a server sent: the table's, or 1 for a slot with one value per row. INTERNAL
// for others.
absl::StatusOr<int64_t> RowWidth(const Model& model, const std::string& table,
                                 const std::string& slot, const v1::Tensor& rows) {
  const TableInfo* info = model.FindTable(table);
  if (rows.shape_size() == 2) {
    const int64_t width = rows.shape(1);
    if (info != nullptr && width == info->embedding_dim) return width;
    if (!slot.empty() && width == 1) return width;
  }
  return absl::InternalError(absl::StrCat("values: the server sent the shape [",
                                          absl::StrJoin(rows.shape(), ", "),
                                          "], which are not rows of table \"", table, "\""));
}

// One export over all its tries.
struct Export {
  const Model& model;
  const std::string& table;
  const Client::RowSink& sink;
  const ExportOptions& options;
  int64_t next = 0;  // first row not yet delivered
  int64_t end = 0;
  std::optional<uint64_t> history = {};  // of the rows that were delivered
  absl::Status failure = {};             // of the sink, or of what the server sent

  absl::Status Deliver(const v1::ExportTableResponse& part) {
    const v1::Tensor& values = part.values();
    ASSIGN_OR_RETURN(const int64_t dim, RowWidth(model, table, options.slot, values));
    const int64_t rows = values.shape(0);
    if (part.first_row() != next || rows < 0 || rows > end - next) {
      return absl::InternalError(absl::StrCat("the server sent ", rows, " rows from row ",
                                              part.first_row(), "; rows in [", next, ", ", end,
                                              ") were expected"));
    }
    ASSIGN_OR_RETURN(const absl::Span<const float> floats, DecodeFloats(values, rows, dim));
    // A try that follows another one knows nothing of it.
    if (part.history() != history.value_or(part.history())) {
      return absl::AbortedError(
          absl::StrCat("the rows of model \"", model.name, "\" were reset or restored before row ",
                       next, " of table \"", table, "\" was exported; begin again"));
    }
    history = part.history();
    next += rows;
    return sink(part.first_row(), floats, dim);
  }

  grpc::Status Try(const Coordinator& coordinator, grpc::ClientContext* context) {
    if (next == end) return grpc::Status::OK;  // broken after the last row
    v1::ExportTableRequest request;
    request.set_model_id(model.id);
    request.set_table(table);
    request.set_slot(options.slot);
    request.set_first_row(next);
    request.set_row_count(end - next);
    const auto reader = coordinator.Read<v1::ExportTableResponse>(request, context);
    v1::ExportTableResponse part;
    while (failure.ok() && reader->Read(&part)) failure = Deliver(part);
    if (!failure.ok()) context->TryCancel();
    const grpc::Status status = reader->Finish();
    // A failure of our own ends the retries.
    return failure.ok() ? status : grpc::Status::OK;
  }
};

// Room for the activations where this coordinator can write them. Of a unary call bfloat16 travels
// in the answer: it has to be converted anyway.
void ShareActivations(SharedMemory* memory, absl::Time deadline, ExpectedLookup* expected,
                      v1::LookupRequest* request) {
  request->clear_shared();
  expected->activations = nullptr;
  if (memory == nullptr || expected->type != WireType::kFloat32) return;
  expected->activations = memory->Take(SharedBytes(*expected), deadline);
  if (expected->activations == nullptr) return;
  SetPlace(*expected->activations, expected->activations->offset(), SharedBytes(*expected),
           request->mutable_shared()->mutable_activations());
  expected->Lend();
}

constexpr char kLookup[] = "/emberd.v1.EmbeddingService/Lookup";

// Of so few bytes, gRPC costs many times what the lookup does.
constexpr size_t kSmallRequest = size_t{32} << 10;
constexpr size_t kSmallAnswer = size_t{40} << 10;

void SetMutation(const std::string& client_id, uint64_t sequence, v1::MutationId* mutation) {
  mutation->set_client_id(client_id);
  if (Mistake("retry.new_number")) sequence = absl::ToUnixNanos(absl::Now());  // a date
  mutation->set_sequence(sequence);
}

absl::StatusOr<Model> Declare(Transport& transport, const absl::StatusOr<v1::ModelConfig>& config,
                              const DeclareOptions& options) {
  RETURN_IF_ERROR(config.status());
  v1::DeclareModelRequest request;
  request.set_restore_from(options.restore_from);
  request.set_filled(options.filled);
  *request.mutable_config() = *config;
  RETURN_IF_ERROR(config::CompleteModel(request.mutable_config()));
  absl::Duration deadline = options.deadline;
  if (deadline == absl::ZeroDuration() && !options.restore_from.empty()) deadline = absl::Hours(24);
  ASSIGN_OR_RETURN(const auto response,
                   transport.Call<v1::DeclareModelResponse>(request, {deadline}));
  ASSIGN_OR_RETURN(Model model, DecodeModel(response.model_id(), response.created(),
                                            request.config(), response.plan()));
  if (response.unfilled()) model.unfilled = response.history();
  return model;
}

// With the deadline and the sink of the options.
template <typename Options>
absl::StatusOr<v1::CheckpointProgress> RunCheckpointCall(Transport& transport,
                                                         const google::protobuf::Message& request,
                                                         const Options& options) {
  return RunWithProgress(&transport, request, options.deadline,
                         [&](const v1::CheckpointProgress& progress) {
                           if (options.progress) options.progress(DecodeProgress(progress));
                         });
}

}  // namespace

absl::Status Client::CheckBatch(const BatchHandle& batch) const {
  const int count = static_cast<int>(options_.addresses.size());
  if (batch.value != 0 && batch.coordinator >= 0 && batch.coordinator < count) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "batch: handle ", batch.value, " of coordinator ", batch.coordinator,
      " is not allowed; it must come from a Lookup of this client with inference false"));
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(ClientOptions options) {
  RETURN_IF_ERROR(options.Validate());
  if (options.client_id.empty()) options.client_id = RandomUuid();
  ASSIGN_OR_RETURN(std::unique_ptr<Transport> transport, Transport::Connect(options));
  return std::unique_ptr<Client>(new Client(std::move(options), std::move(transport)));
}

Client::Client(ClientOptions options, std::unique_ptr<Transport> transport)
    : options_(std::move(options)),
      transport_(std::move(transport)),
      programs_(std::make_shared<Programs>(transport_.get())) {}
Client::~Client() { programs_->End(); }

absl::StatusOr<Model> Client::DeclareModel(const std::string& config,
                                           const DeclareOptions& options) {
  return Declare(*transport_, config::ParseModel(config), options);
}
absl::StatusOr<Model> Client::DeclareModel(const ModelDescription& description,
                                           const DeclareOptions& options) {
  return Declare(*transport_, EncodeModel(description), options);
}
absl::StatusOr<Model> Client::DeclareModelFile(const std::string& path,
                                               const DeclareOptions& options) {
  return Declare(*transport_, config::LoadModel(path), options);
}

absl::StatusOr<Model> Client::DescribeModel(const std::string& name) {
  v1::DescribeModelRequest request;
  request.set_name(name);
  ASSIGN_OR_RETURN(const auto response, transport_->Call<v1::DescribeModelResponse>(request));
  return DecodeModel(response.model_id(), false, response.config(), response.plan());
}

absl::StatusOr<LookupResult> Client::Lookup(const Model& model,
                                            absl::Span<const FeatureIds> features,
                                            const LookupOptions& options) {
  ASSIGN_OR_RETURN(v1::LookupRequest request,
                   EncodeLookup(model, features, options.inference, options_.activation_type));
  ASSIGN_OR_RETURN(ExpectedLookup expected,
                   ExpectLookup(model, features, options_.activation_type));
  google::protobuf::Arena arena;  // the answer has many small parts
  auto* const response = google::protobuf::Arena::CreateMessage<v1::LookupResponse>(&arena);
  const bool small =
      request.ByteSizeLong() <= kSmallRequest && SharedBytes(expected) <= kSmallAnswer;
  const auto look_up = [&](const Coordinator& coordinator, grpc::ClientContext* context) {
    // A lane that was silent is asked elsewhere again, and may yet write to the same block.
    if (!small || request.shared().has_activations()) {
      return coordinator.Call(kLookup, request, context, response);
    }
    const auto done = transport_->CallOnLane(coordinator, v1::LOOKUP, request, context, response);
    if (done.has_value()) return *done;
    const grpc::Status status = coordinator.Call(kLookup, request, context, response);
    if (status.ok() && coordinator.lanes != nullptr) {
      coordinator.lanes->Grow(FromSystemTime(context->deadline()));
    }
    return status;
  };
  int answered = 0;
  RETURN_IF_ERROR(transport_->Call(
      {options.deadline},
      [&](const Coordinator& coordinator, grpc::ClientContext* context) {
        ShareActivations(coordinator.memory.get(), FromSystemTime(context->deadline()), &expected,
                         &request);
        return look_up(coordinator, context);
      },
      &answered));
  ASSIGN_OR_RETURN(LookupResult result, DecodeLookup(std::move(expected), options.inference,
                                                     *response, transport_->activations()));
  result.batch.coordinator = answered;
  return result;
}

absl::StatusOr<ApplyResult> Client::ApplyGradients(const Model& model, const BatchHandle& batch,
                                                   absl::Span<const FeatureGradient> gradients,
                                                   const ApplyOptions& options) {
  RETURN_IF_ERROR(CheckBatch(batch));
  SharedGradients shared(transport_->memory(batch.coordinator), {});
  ASSIGN_OR_RETURN(v1::ApplyGradientsRequest request,
                   EncodeApply(model, batch, gradients, options, options_.gradient_type, &shared));
  SetMutation(client_id(), options.sequence != 0 ? options.sequence : NextSequence(),
              request.mutable_mutation());
  shared.Lend();
  ASSIGN_OR_RETURN(const auto response, transport_->Call<v1::ApplyGradientsResponse>(
                                            request, {options.deadline, batch.coordinator}));
  shared.Settle();
  return ApplyResult{response.rows_updated(), response.replayed(), response.rows_skipped()};
}

absl::Status Client::ReleaseBatch(const Model& model, const BatchHandle& batch) {
  RETURN_IF_ERROR(CheckBatch(batch));
  v1::ReleaseBatchRequest request;
  request.set_model_id(model.id);
  request.set_batch_handle(batch.value);
  return transport_->Call<v1::ReleaseBatchResponse>(request, {.coordinator = batch.coordinator})
      .status();
}

absl::StatusOr<std::unique_ptr<TrainStream>> Client::Train(const Model& model,
                                                           const TrainOptions& options) {
  return TrainStream::Open(transport_.get(), options_, model, options);
}

absl::StatusOr<RowValues> Client::ReadRows(const Model& model, const std::string& table,
                                           absl::Span<const int64_t> ids, const std::string& slot) {
  v1::ReadRowsRequest request;
  request.set_model_id(model.id);
  request.set_table(table);
  request.set_slot(slot);
  const int64_t rows = static_cast<int64_t>(ids.size());
  EncodeInts(ids, {rows}, request.mutable_ids());
  RETURN_IF_ERROR(CheckSize(request));
  ASSIGN_OR_RETURN(const auto response, transport_->Call<v1::ReadRowsResponse>(request));
  ASSIGN_OR_RETURN(const int64_t dim, RowWidth(model, table, slot, response.values()));
  ASSIGN_OR_RETURN(const absl::Span<const float> values,
                   DecodeFloats(response.values(), rows, dim));
  return RowValues{dim, {values.begin(), values.end()}};
}

absl::StatusOr<bool> Client::AssignRows(const Model& model, const std::string& table,
                                        absl::Span<const int64_t> ids,
                                        absl::Span<const float> values,
                                        const AssignOptions& options) {
  const int64_t rows = static_cast<int64_t>(ids.size());
  const int64_t size = static_cast<int64_t>(values.size());
  if (rows == 0 ? size != 0 : size % rows != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("values: ", size, " floats cannot be divided among ", rows, " ids"));
  }
  v1::AssignRowsRequest request;
  request.set_model_id(model.id);
  request.set_table(table);
  request.set_slot(options.slot);
  request.set_history(model.unfilled);
  EncodeInts(ids, {rows}, request.mutable_ids());
  const TableInfo* info = model.FindTable(table);
  const int64_t dim = rows != 0 ? size / rows : info != nullptr ? info->embedding_dim : 1;
  EncodeFloats(values, {rows, dim}, WireType::kFloat32, request.mutable_values());
  RETURN_IF_ERROR(CheckSize(request));
  SetMutation(client_id(), options.sequence != 0 ? options.sequence : NextSequence(),
              request.mutable_mutation());
  ASSIGN_OR_RETURN(const auto response,
                   transport_->Call<v1::AssignRowsResponse>(request, {options.deadline}));
  return response.replayed();
}

// A stream that breaks with UNAVAILABLE is taken up at the first row that `sink` has not seen.
absl::Status Client::ExportTable(const Model& model, const std::string& table, const RowSink& sink,
                                 const ExportOptions& options) {
  const TableInfo* info = model.FindTable(table);
  if (info == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("table: the model \"", model.name, "\" has no table \"", table, "\""));
  }
  const int64_t left = info->vocabulary_size - (options.first_row < 0 ? 0 : options.first_row);
  if (options.first_row < 0 || left < 0 || options.row_count < 0 || options.row_count > left) {
    return absl::OutOfRangeError(absl::StrCat("rows: ", options.row_count, " rows from row ",
                                              options.first_row, " on do not lie in [0, ",
                                              info->vocabulary_size, ")"));
  }
  const int64_t count = options.row_count != 0 ? options.row_count : left;
  Export state{model, table, sink, options, options.first_row, options.first_row + count};
  absl::Status status =
      transport_->Call({options.deadline}, [&](const Coordinator& coordinator, auto* context) {
        return state.Try(coordinator, context);
      });
  if (!state.failure.ok()) return state.failure;
  if (status.ok() && state.next != state.end) {
    return absl::InternalError(
        absl::StrCat("the server ended the export at row ", state.next, " of ", state.end));
  }
  return status;
}

absl::StatusOr<SavedCheckpoint> Client::SaveCheckpoint(const std::string& model,
                                                       const SaveOptions& options) {
  v1::SaveCheckpointRequest request;
  request.set_model(model);
  request.set_name(options.name);
  request.set_incremental(options.incremental);
  ASSIGN_OR_RETURN(const auto result, RunCheckpointCall(*transport_, request, options));
  return SavedCheckpoint{DecodeCheckpoint(result.checkpoint()),
                         absl::Microseconds(result.pause_us())};
}

absl::StatusOr<CheckpointInfo> Client::RestoreCheckpoint(const std::string& model,
                                                         const RestoreOptions& options) {
  v1::RestoreCheckpointRequest request;
  request.set_model(model);
  request.set_name(options.name);
  if (!options.config.empty()) {
    ASSIGN_OR_RETURN(*request.mutable_config(), config::ParseModel(options.config));
  }
  ASSIGN_OR_RETURN(const auto result, RunCheckpointCall(*transport_, request, options));
  return DecodeCheckpoint(result.checkpoint());
}

absl::StatusOr<CheckpointInfo> Client::ServeCheckpoint(const std::string& model,
                                                       const ServeOptions& options) {
  v1::ServeCheckpointRequest request;
  request.set_model(model);
  request.set_name(options.name);
  request.set_serve_as(options.serve_as);
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  if (!options.storage_dtype.empty() && !v1::DataType_Parse(options.storage_dtype, &dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("storage_dtype: \"", options.storage_dtype,
                     "\" is not allowed; it must be FLOAT32, BFLOAT16 or FLOAT16"));
  }
  request.set_storage_dtype(dtype);
  ASSIGN_OR_RETURN(const auto result, RunCheckpointCall(*transport_, request, options));
  return DecodeCheckpoint(result.checkpoint());
}

absl::StatusOr<CheckpointList> Client::ListCheckpoints(const std::string& model) {
  v1::ListCheckpointsRequest request;
  request.set_model(model);
  ASSIGN_OR_RETURN(const auto response, transport_->Call<v1::ListCheckpointsResponse>(request));
  return DecodeCheckpoints(response);
}

absl::StatusOr<int64_t> Client::DeleteCheckpoint(const std::string& model,
                                                 const std::string& name) {
  v1::DeleteCheckpointRequest request;
  request.set_model(model);
  request.set_name(name);
  ASSIGN_OR_RETURN(const auto response, transport_->Call<v1::DeleteCheckpointResponse>(
                                            request, {.deadline = absl::Hours(1)}));
  return response.bytes();
}

absl::StatusOr<ClusterStatus> Client::GetStatus() {
  ASSIGN_OR_RETURN(const auto response,
                   transport_->Call<v1::GetStatusResponse>(v1::GetStatusRequest()));
  return DecodeStatus(response);
}

absl::StatusOr<bool> Client::DropModel(const std::string& name) {
  v1::DropModelRequest request;
  request.set_name(name);
  ASSIGN_OR_RETURN(const auto response, transport_->Call<v1::DropModelResponse>(request));
  return response.dropped();
}

absl::Status Client::ResetModel(const std::string& name) {
  v1::ResetModelRequest request;
  request.set_name(name);
  return transport_->Call<v1::ResetModelResponse>(request).status();
}

absl::StatusOr<bool> Client::DropGroup(const std::string& model, const std::string& group) {
  v1::DropGroupRequest request;
  request.set_model(model);
  request.set_group(group);
  ASSIGN_OR_RETURN(const auto response, transport_->Call<v1::DropGroupResponse>(request));
  return response.dropped();
}

void Client::CancelCalls() { transport_->CancelCalls(); }
uint64_t Client::cancellations() const { return transport_->cancellations(); }

}  // namespace emberd::client
