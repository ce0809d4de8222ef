// The public API without the client library: stubs and tensors, for requests that the library would
// not send.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "emberd/v1/admin_service.grpc.pb.h"
#include "emberd/v1/checkpoint_service.grpc.pb.h"
#include "emberd/v1/embedding_service.grpc.pb.h"

namespace emberd::testing {

struct Api {
  explicit Api(const std::string& address);

  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::EmbeddingService::Stub> embedding;
  std::unique_ptr<v1::AdminService::Stub> admin;
  std::unique_ptr<v1::CheckpointService::Stub> checkpoints;
};

// What every call gets: a deadline that is long enough to be none, and the patience to wait for a
// connection, for gRPC 1.51 may take one that is on its way for one that has failed.
inline void Prepare(grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + absl::Minutes(2)));
  context->set_wait_for_ready(true);
}

// Makes one unary call:
//   grpc::Status status = Call(&v1::EmbeddingService::Stub::Lookup, api, request, &response);
template <typename Request, typename Response>
grpc::Status Call(grpc::Status (v1::EmbeddingService::Stub::*method)(grpc::ClientContext*,
                                                                     const Request&, Response*),
                  const Api& api, const Request& request, Response* response) {
  grpc::ClientContext context;
  Prepare(&context);
  return (api.embedding.get()->*method)(&context, request, response);
}

template <typename Request, typename Response>
grpc::Status Call(grpc::Status (v1::AdminService::Stub::*method)(grpc::ClientContext*,
                                                                 const Request&, Response*),
                  const Api& api, const Request& request, Response* response) {
  grpc::ClientContext context;
  Prepare(&context);
  return (api.admin.get()->*method)(&context, request, response);
}

// The same of checkpoints. Where the answer is a stream, `response` is its last message.
template <typename Request, typename Response>
grpc::Status Call(grpc::Status (v1::CheckpointService::Stub::*method)(grpc::ClientContext*,
                                                                      const Request&, Response*),
                  const Api& api, const Request& request, Response* response) {
  grpc::ClientContext context;
  Prepare(&context);
  return (api.checkpoints.get()->*method)(&context, request, response);
}
template <typename Request>
grpc::Status Call(std::unique_ptr<grpc::ClientReader<v1::CheckpointProgress>> (
                      v1::CheckpointService::Stub::*method)(grpc::ClientContext*, const Request&),
                  const Api& api, const Request& request, v1::CheckpointProgress* response) {
  grpc::ClientContext context;
  Prepare(&context);
  const auto reader = (api.checkpoints.get()->*method)(&context, request);
  while (reader->Read(response)) {
  }
  return reader->Finish();
}

template <typename T>
v1::DataType DataTypeOf();
template <>
inline v1::DataType DataTypeOf<float>() {
  return v1::FLOAT32;
}
template <>
inline v1::DataType DataTypeOf<int32_t>() {
  return v1::INT32;
}
template <>
inline v1::DataType DataTypeOf<int64_t>() {
  return v1::INT64;
}

// The shape need not fit the values.
template <typename T>
v1::Tensor MakeTensor(const std::vector<int64_t>& shape, const std::vector<T>& values) {
  v1::Tensor tensor;
  tensor.set_dtype(DataTypeOf<T>());
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(values.data(), values.size() * sizeof(T));
  return tensor;
}
template <typename T>
v1::Tensor MakeVector(const std::vector<T>& values) {
  return MakeTensor<T>({static_cast<int64_t>(values.size())}, values);
}

// float32 data of a tensor.
std::vector<float> Floats(const v1::Tensor& tensor);

}  // namespace emberd::testing
