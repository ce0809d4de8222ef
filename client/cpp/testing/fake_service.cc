#include "client/cpp/testing/fake_service.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace emberd::client::testing {
namespace {

constexpr uint64_t kModelId = 42;

int64_t Samples(const v1::FeatureIds& feature) {
  if (feature.has_dense()) return feature.dense().ids().shape(0);
  if (feature.has_sparse()) return feature.sparse().sample_count();
  return feature.ragged().row_splits().shape(0) - 1;
}

// Both types that an activation can have; the numbers used here are exact in either.
void AppendFloat(float value, v1::DataType type, std::string* data) {
  char bytes[4];
  std::memcpy(bytes, &value, 4);
  if (type == v1::BFLOAT16) {
    data->append(bytes + 2, 2);
  } else {
    data->append(bytes, 4);
  }
}

v1::ModelPlan MakePlan(const v1::ModelConfig& config) {
  v1::ModelPlan plan;
  plan.set_shards(1);
  plan.set_sparsecores_per_shard(2);
  plan.set_partitions(2);
  plan.add_warnings("what a plan warns of");
  for (const v1::TableConfig& table : config.tables()) {
    v1::StackPlan* stack = plan.add_stacks();
    stack->set_name(table.name());
    stack->set_optimizer("adagrad");
    stack->add_slots("accumulator");
    stack->set_embedding_dim(table.embedding_dim());
    stack->add_tables()->set_name(table.name());
  }
  return plan;
}

}  // namespace

FakeService::FakeService(std::string address) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  builder.RegisterService(static_cast<v1::EmbeddingService::Service*>(this));
  builder.RegisterService(static_cast<v1::AdminService::Service*>(this));
  builder.RegisterService(&checkpoints);
  server_ = builder.BuildAndStart();
  address_ = absl::StrCat("127.0.0.1:", port);
}

FakeService::~FakeService() {
  // Calls in progress end at once.
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

void FakeService::AddFault(Fault fault) {
  absl::MutexLock lock(&mutex_);
  faults_.push_back(std::move(fault));
}

void FakeService::ClearFaults() {
  absl::MutexLock lock(&mutex_);
  faults_.clear();
}

grpc::Status FakeService::Meet(grpc::ServerContext* context,
                               const std::function<grpc::Status()>& work) {
  Fault fault;
  {
    absl::MutexLock lock(&mutex_);
    if (!faults_.empty()) {
      fault = faults_.front();
      faults_.pop_front();
    }
  }
  const absl::Time until = absl::Now() + fault.delay;
  while (absl::Now() < until && !context->IsCancelled()) absl::SleepFor(absl::Milliseconds(5));
  if (context->IsCancelled()) return grpc::Status::CANCELLED;
  if (!fault.status.ok() && !fault.after_the_work) return fault.status;
  absl::MutexLock lock(&mutex_);
  const grpc::Status status = work();
  return fault.status.ok() ? status : fault.status;
}

bool FakeService::FirstTime(const v1::MutationId& mutation) {
  return mutations_[{mutation.client_id(), mutation.sequence()}]++ == 0;
}

int FakeService::Dim(const std::string& name) const {
  for (const v1::TableConfig& table : config_.tables()) {
    if (table.name() == name) return table.embedding_dim();
  }
  return 0;
}

grpc::Status FakeService::DeclareModel(grpc::ServerContext* context,
                                       const v1::DeclareModelRequest* request,
                                       v1::DeclareModelResponse* response) {
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    declares_.push_back(*request);
    response->set_created(config_.tables().empty());
    config_ = request->config();
    plan_ = MakePlan(config_);
    response->set_model_id(kModelId);
    *response->mutable_plan() = plan_;
    damage_declare(response);
    return grpc::Status::OK;
  });
}

grpc::Status FakeService::DescribeModel(grpc::ServerContext* context,
                                        const v1::DescribeModelRequest* request,
                                        v1::DescribeModelResponse* response) {
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (config_.tables().empty() || config_.name() != request->name()) {
      return grpc::Status(grpc::NOT_FOUND,
                          absl::StrCat("name: there is no model \"", request->name(), "\""));
    }
    response->set_model_id(kModelId);
    *response->mutable_config() = config_;
    *response->mutable_plan() = plan_;
    damage_describe(response);
    return grpc::Status::OK;
  });
}

v1::FeatureActivation FakeService::Activate(const v1::FeatureIds& feature, v1::DataType type,
                                            float base) const {
  std::string table;
  for (const v1::FeatureConfig& known : config_.features()) {
    if (known.name() == feature.feature()) table = known.table();
  }
  v1::FeatureActivation activation;
  activation.set_feature(feature.feature());
  v1::Tensor* tensor = activation.mutable_activation();
  tensor->set_dtype(type);
  tensor->add_shape(Samples(feature));
  tensor->add_shape(Dim(table));
  for (int64_t s = 0; s < Samples(feature); ++s) {
    for (int c = 0; c < Dim(table); ++c) {
      AppendFloat(base + static_cast<float>(s), type, tensor->mutable_data());
    }
  }
  return activation;
}

grpc::Status FakeService::Lookup(grpc::ServerContext* context, const v1::LookupRequest* request,
                                 v1::LookupResponse* response) {
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    lookups_.push_back(*request);
    if (!request->inference()) response->set_batch_handle(lookups_.size());
    for (int i = 0; i < request->features_size(); ++i) {
      *response->add_activations() = Activate(request->features(i), request->activation_dtype(),
                                              100.0f * static_cast<float>(i));
    }
    response->mutable_statistics()->set_num_minibatches(1);
    v1::StackStatistics* stack = response->mutable_statistics()->add_stacks();
    stack->set_ids(17);
    stack->set_pad_cells(7);
    stack->set_bytes_gathered(544);
    stack->set_activation_bytes_per_sparsecore(96);
    stack->set_imbalance(1.5);
    stack->set_limit_ids_per_partition(20);
    stack->set_limit_unique_ids_per_partition(10);
    damage_lookup(response);
    return grpc::Status::OK;
  });
}

grpc::Status FakeService::ApplyGradients(grpc::ServerContext* context,
                                         const v1::ApplyGradientsRequest* request,
                                         v1::ApplyGradientsResponse* response) {
  {
    absl::MutexLock lock(&mutex_);
    applies_.push_back(*request);
  }
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    response->set_replayed(!FirstTime(request->mutation()));
    response->set_rows_updated(request->gradients_size());
    return grpc::Status::OK;
  });
}

grpc::Status FakeService::ReleaseBatch(grpc::ServerContext* context,
                                       const v1::ReleaseBatchRequest* request,
                                       v1::ReleaseBatchResponse* response) {
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    releases_.push_back(*request);
    return grpc::Status::OK;
  });
}

// Nothing until the lookup is complete.
std::vector<v1::TrainResponse> FakeService::Answer(const v1::TrainLookup& part,
                                                   v1::TrainLookup* whole) const {
  std::vector<v1::TrainResponse> parts;
  whole->MergeFrom(part);
  if (part.continues()) return parts;
  for (int i = 0; i < whole->features_size(); ++i) {
    v1::TrainLookupResult* result = parts.emplace_back().mutable_lookup();
    result->set_step(part.step());
    *result->add_activations() =
        Activate(whole->features(i), part.activation_dtype(),
                 100.0f * static_cast<float>(i) + 1000.0f * static_cast<float>(part.step()));
    result->set_continues(i + 1 < whole->features_size());
  }
  parts.back().mutable_lookup()->mutable_statistics()->set_num_minibatches(3);
  parts.back().mutable_lookup()->mutable_times()->set_shards_us(40);
  parts.back().mutable_lookup()->mutable_times()->set_slowest_rank(1);
  whole->Clear();
  return parts;
}

grpc::Status FakeService::Train(
    grpc::ServerContext* context,
    grpc::ServerReaderWriter<v1::TrainResponse, v1::TrainRequest>* stream) {
  v1::TrainRequest request;
  v1::TrainLookup lookup;
  int gradients = 0;
  int sent = 0;
  while (stream->Read(&request)) {
    std::vector<v1::TrainResponse> answers;
    {
      absl::MutexLock lock(&mutex_);
      train_requests_.push_back(request);
      if (request.has_lookup()) answers = Answer(request.lookup(), &lookup);
    }
    if (request.has_start()) {
      answers.emplace_back().mutable_started()->set_next_step(7);
      answers.back().mutable_started()->set_generation(5);
      answers.back().mutable_started()->set_made_generation(4);
    }
    gradients += request.update().gradients_size();
    if (request.has_update() && !request.update().continues()) {
      v1::TrainUpdateResult* result = answers.emplace_back().mutable_update();
      result->set_step(request.update().step());
      result->set_rows_updated(std::exchange(gradients, 0));
    }
    for (v1::TrainResponse& answer : answers) {
      damage_train(&answer);
      if (sent++ == train_responses) return train_status;
      stream->Write(answer);
    }
  }
  return context->IsCancelled() ? grpc::Status::CANCELLED : train_status;
}

void FakeService::FillRow(const std::string& table, int64_t id, v1::Tensor* values) const {
  if (const auto row = assigned_.find({table, id}); row != assigned_.end()) {
    values->mutable_data()->append(row->second);
    return;
  }
  for (int c = 0; c < Dim(table); ++c) {
    AppendFloat(static_cast<float>(id) + static_cast<float>(c) / 100, v1::FLOAT32,
                values->mutable_data());
  }
}

grpc::Status FakeService::ReadRows(grpc::ServerContext* context, const v1::ReadRowsRequest* request,
                                   v1::ReadRowsResponse* response) {
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const int64_t n = request->ids().shape(0);
    v1::Tensor* values = response->mutable_values();
    values->set_dtype(v1::FLOAT32);
    values->add_shape(n);
    values->add_shape(Dim(request->table()));
    for (int64_t i = 0; i < n; ++i) {
      int64_t id;
      std::memcpy(&id, request->ids().data().data() + 8 * i, 8);
      FillRow(request->table(), id, values);
    }
    damage_read(response);
    return grpc::Status::OK;
  });
}

grpc::Status FakeService::AssignRows(grpc::ServerContext* context,
                                     const v1::AssignRowsRequest* request,
                                     v1::AssignRowsResponse* response) {
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    assigns_.push_back(*request);
    response->set_replayed(!FirstTime(request->mutation()));
    const int64_t row_bytes = 4 * request->values().shape(1);
    for (int64_t i = 0; i < request->ids().shape(0) && !response->replayed(); ++i) {
      int64_t id;
      std::memcpy(&id, request->ids().data().data() + 8 * i, 8);
      assigned_[{request->table(), id}] = request->values().data().substr(i * row_bytes, row_bytes);
    }
    return grpc::Status::OK;
  });
}

grpc::Status FakeService::ExportTable(grpc::ServerContext* context,
                                      const v1::ExportTableRequest* request,
                                      grpc::ServerWriter<v1::ExportTableResponse>* writer) {
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    exports_.push_back(*request);
    const int64_t end = request->first_row() + request->row_count();
    for (int64_t row = request->first_row(); row < end; row += export_rows) {
      v1::ExportTableResponse part;
      part.set_first_row(row);
      part.mutable_values()->set_dtype(v1::FLOAT32);
      const int64_t rows = std::min(export_rows, end - row);
      part.mutable_values()->add_shape(rows);
      part.mutable_values()->add_shape(Dim(request->table()));
      for (int64_t i = 0; i < rows; ++i) FillRow(request->table(), row + i, part.mutable_values());
      damage_export(&part);
      if (!writer->Write(part)) return grpc::Status::CANCELLED;
      if (broken_exports > 0) {
        --broken_exports;
        return grpc::Status(grpc::UNAVAILABLE, "broken");
      }
    }
    return grpc::Status::OK;
  });
}

grpc::Status FakeService::DropGroup(grpc::ServerContext* context,
                                    const v1::DropGroupRequest* request,
                                    v1::DropGroupResponse* response) {
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    dropped_group = *request;
    response->set_dropped(true);
    return grpc::Status::OK;
  });
}

grpc::Status FakeService::GetStatus(grpc::ServerContext* context,
                                    const v1::GetStatusRequest* request,
                                    v1::GetStatusResponse* response) {
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    response->set_version("0.0-fake");
    response->set_batches(3);
    response->set_draining(draining);
    v1::ModelStatus* model = response->add_models();
    model->set_model_id(kModelId);
    model->set_name(config_.name());
    v1::ShardStatus* shard = response->add_shards();
    shard->set_index(1);
    shard->set_address("127.0.0.1:1");
    shard->set_error("not there");
    damage_status(response);
    return grpc::Status::OK;
  });
}

namespace {

// Answer number `call`, counted from 1; the last one for all that come later.
template <typename Response>
grpc::Status InTurn(const std::vector<Response>& answers, size_t call, Response* response) {
  if (!answers.empty()) *response = answers[std::min(call, answers.size()) - 1];
  return grpc::Status::OK;
}

}  // namespace

grpc::Status FakeService::GetStats(grpc::ServerContext* context, const v1::GetStatsRequest* request,
                                   v1::GetStatsResponse* response) {
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    stats_requests_.push_back(*request);
    return InTurn(stats, stats_requests_.size(), response);
  });
}

grpc::Status FakeService::Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                                v1::DrainResponse* response) {
  return Meet(context, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    drain_requests_.push_back(*request);
    return InTurn(drains, drain_requests_.size(), response);
  });
}

std::vector<v1::GetStatsRequest> FakeService::stats_requests() const {
  absl::MutexLock lock(&mutex_);
  return stats_requests_;
}
std::vector<v1::DrainRequest> FakeService::drain_requests() const {
  absl::MutexLock lock(&mutex_);
  return drain_requests_;
}
std::vector<v1::DeclareModelRequest> FakeService::declares() const {
  absl::MutexLock lock(&mutex_);
  return declares_;
}
std::vector<v1::LookupRequest> FakeService::lookups() const {
  absl::MutexLock lock(&mutex_);
  return lookups_;
}
std::vector<v1::ApplyGradientsRequest> FakeService::applies() const {
  absl::MutexLock lock(&mutex_);
  return applies_;
}
std::vector<v1::AssignRowsRequest> FakeService::assigns() const {
  absl::MutexLock lock(&mutex_);
  return assigns_;
}
std::vector<v1::ExportTableRequest> FakeService::exports() const {
  absl::MutexLock lock(&mutex_);
  return exports_;
}
std::vector<v1::ReleaseBatchRequest> FakeService::releases() const {
  absl::MutexLock lock(&mutex_);
  return releases_;
}
std::vector<v1::TrainRequest> FakeService::train_requests() const {
  absl::MutexLock lock(&mutex_);
  return train_requests_;
}
int FakeService::applied() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(mutations_.size());
}

}  // namespace emberd::client::testing
