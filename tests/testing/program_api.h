// ProgramService without the client library, and short ways to write programs and plans.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "emberd/v1/program_service.grpc.pb.h"
#include "tests/testing/api.h"
#include "tests/testing/training.h"

namespace emberd::testing {

class ProgramApi {
 public:
  // `client`: whose the handles are.
  explicit ProgramApi(const std::string& address, std::string client = "programs of a test")
      : api_(address),
        stub_(v1::ProgramService::NewStub(api_.channel)),
        client_(std::move(client)) {}

  const Api& api() const { return api_; }
  const std::string& client() const { return client_; }

  // `client`: who gets a handle of its own; empty: nobody.
  absl::StatusOr<v1::CompileResponse> Compile(const v1::ProgramSpec& spec,
                                              const std::string& client = "") {
    v1::CompileRequest request;
    request.set_client_id(client);
    *request.mutable_spec() = spec;
    return Make<v1::CompileResponse>(&v1::ProgramService::Stub::Compile, request);
  }
  absl::Status Release(const std::vector<uint64_t>& programs,
                       const std::vector<uint64_t>& handles = {}) {
    v1::ReleaseRequest request;
    request.mutable_program_handles()->Assign(programs.begin(), programs.end());
    request.mutable_handles()->Assign(handles.begin(), handles.end());
    return Make<v1::ReleaseResponse>(&v1::ProgramService::Stub::Release, request).status();
  }
  // Those that are unknown are left out.
  absl::Status ReleaseAgain(const std::vector<uint64_t>& handles) {
    v1::ReleaseRequest request;
    request.mutable_handles()->Assign(handles.begin(), handles.end());
    request.set_client_id(client_);
    return Make<v1::ReleaseResponse>(&v1::ProgramService::Stub::Release, request).status();
  }
  absl::Status ReleaseAll() {
    v1::ReleaseRequest request;
    request.set_all_of_client(client_);
    return Make<v1::ReleaseResponse>(&v1::ProgramService::Stub::Release, request).status();
  }
  absl::StatusOr<v1::PrepareBatchResponse> Prepare(uint64_t program, const v1::Literal& batch) {
    v1::PrepareBatchRequest request;
    request.set_program_handle(program);
    *request.mutable_batch() = batch;
    request.set_client_id(client_);
    return Make<v1::PrepareBatchResponse>(&v1::ProgramService::Stub::PrepareBatch, request);
  }
  absl::StatusOr<v1::ExecuteResponse> Execute(v1::ExecuteRequest request) {
    if (request.config().client_id().empty()) request.mutable_config()->set_client_id(client_);
    return Make<v1::ExecuteResponse>(&v1::ProgramService::Stub::Execute, request);
  }
  // Of whole handles.
  absl::StatusOr<v1::ExecuteResponse> Execute(uint64_t program,
                                              const std::vector<uint64_t>& arguments,
                                              const v1::ExecutionConfig& config = {}) {
    v1::ExecuteRequest request;
    request.set_program_handle(program);
    for (const uint64_t handle : arguments) request.add_arguments()->set_handle(handle);
    *request.mutable_config() = config;
    return Execute(std::move(request));
  }
  absl::StatusOr<v1::ExecuteChainedResponse> Chain(v1::ExecuteChainedRequest request,
                                                   absl::Duration limit = absl::Seconds(60)) {
    if (request.config().client_id().empty()) request.mutable_config()->set_client_id(client_);
    return Make<v1::ExecuteChainedResponse>(&v1::ProgramService::Stub::ExecuteChained, request,
                                            limit);
  }
  absl::StatusOr<v1::ReadHandleResponse> Read(uint64_t handle, int output_index = 0,
                                              bool csr = false,
                                              const std::vector<int>& inner = {}) {
    v1::ReadHandleRequest request;
    request.set_csr(csr);
    request.mutable_inner()->Assign(inner.begin(), inner.end());
    request.set_handle(handle);
    request.set_output_index(output_index);
    return Make<v1::ReadHandleResponse>(&v1::ProgramService::Stub::ReadHandle, request);
  }

 private:
  template <typename Response, typename Request>
  absl::StatusOr<Response> Make(grpc::Status (v1::ProgramService::Stub::*method)(
                                    grpc::ClientContext*, const Request&, Response*),
                                const Request& request, absl::Duration limit = absl::Seconds(60)) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + limit));
    Response response;
    const grpc::Status status = (stub_.get()->*method)(&context, request, &response);
    if (status.ok()) return response;
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  }

  const Api api_;
  const std::unique_ptr<v1::ProgramService::Stub> stub_;
  const std::string client_;
};

// A program of `kind` with all features of the model, of any number of samples up to `samples`.
inline v1::ProgramSpec ModelProgram(v1::ProgramSpec::Kind kind, const std::string& model,
                                    const std::vector<OwnedIds>& batch, int64_t samples) {
  v1::ProgramSpec spec;
  spec.set_kind(kind);
  spec.set_model(model);
  for (const OwnedIds& ids : batch) {
    v1::ProgramInput* input = spec.add_inputs();
    input->set_feature(ids.feature);
    input->set_max_samples(samples);
    input->set_dynamic(true);
  }
  return spec;
}

// A tuple (scale * (a + b)), or with a minus, of two arguments.
inline v1::ProgramSpec SumProgram(v1::ElementwiseOutput::Operation operation, float scale) {
  v1::ProgramSpec spec;
  spec.set_kind(v1::ProgramSpec::ELEMENTWISE);
  spec.add_inputs()->set_feature("a");
  spec.add_inputs()->set_feature("b");
  v1::ElementwiseOutput* output = spec.add_outputs();
  output->set_operation(operation);
  output->set_scale(scale);
  output->mutable_b()->set_argument(1);
  return spec;
}

inline void AddTensor(const std::string& name, const v1::Tensor& tensor, v1::Literal* to) {
  v1::NamedTensor* added = to->add_tensors();
  added->set_name(name);
  *added->mutable_tensor() = tensor;
}

// The features of a batch as messages.
inline v1::Literal BatchLiteral(const std::vector<OwnedIds>& batch) {
  v1::Literal literal;
  for (const OwnedIds& ids : batch) {
    v1::FeatureIds* feature = literal.add_features();
    feature->set_feature(ids.feature);
    const bool narrow = !ids.narrow.empty();
    const auto count = static_cast<int64_t>(narrow ? ids.narrow.size() : ids.wide.size());
    const auto values = [&](const std::vector<int64_t>& shape) {
      return narrow ? MakeTensor(shape, ids.narrow) : MakeTensor(shape, ids.wide);
    };
    v1::Tensor* weights = nullptr;
    std::vector<int64_t> weight_shape = {count};
    if (ids.ids_per_sample > 0) {
      const std::vector<int64_t> shape = {count / ids.ids_per_sample, ids.ids_per_sample};
      *feature->mutable_dense()->mutable_ids() = values(shape);
      weight_shape = shape;
      if (!ids.weights.empty()) weights = feature->mutable_dense()->mutable_weights();
    } else if (!ids.splits.empty()) {
      *feature->mutable_ragged()->mutable_row_splits() = MakeVector(ids.splits);
      *feature->mutable_ragged()->mutable_values() = values({count});
      if (!ids.weights.empty()) weights = feature->mutable_ragged()->mutable_weights();
    } else {
      *feature->mutable_sparse()->mutable_indices() = MakeTensor<int64_t>({count, 2}, ids.indices);
      *feature->mutable_sparse()->mutable_values() = values({count});
      feature->mutable_sparse()->set_sample_count(ids.samples);
      if (!ids.weights.empty()) weights = feature->mutable_sparse()->mutable_weights();
    }
    if (weights != nullptr) *weights = MakeTensor(weight_shape, ids.weights);
  }
  return literal;
}

// Gradients of activations: half of each, and a little that depends on its place.
template <typename Activations>
v1::Literal GradientLiteral(const Activations& activations) {
  v1::Literal literal;
  for (const v1::NamedTensor& activation : activations) {
    std::vector<float> values = Floats(activation.tensor());
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = 0.5f * values[i] + static_cast<float>(i % 7) / 64;
    }
    v1::Tensor tensor = activation.tensor();
    tensor.set_data(values.data(), values.size() * sizeof(float));
    AddTensor(activation.name(), tensor, &literal);
  }
  return literal;
}

// Operations of a plan.
inline int AddData(v1::ExecuteChainedRequest* plan, uint64_t handle) {
  plan->add_ops()->set_data_handle(handle);
  return plan->ops_size() - 1;
}
inline int AddLiteral(v1::ExecuteChainedRequest* plan, const v1::Literal& literal) {
  *plan->add_ops()->mutable_literal() = literal;
  return plan->ops_size() - 1;
}
// `result` >= 0: where the result goes.
inline int AddProgram(v1::ExecuteChainedRequest* plan, uint64_t program,
                      const std::vector<int>& inputs, int result = -1) {
  v1::ChainedOp* op = plan->add_ops();
  op->set_program_handle(program);
  for (const int input : inputs) op->add_inputs()->set_op_index(input);
  if (result >= 0) op->add_outputs()->set_result_index(result);
  return plan->ops_size() - 1;
}

}  // namespace emberd::testing
