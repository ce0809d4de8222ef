// A service of gRPC with unary methods: what each of them needs beside its work stands here, once.
// Every method takes and gives bytes: requests are decoded on a worker, where what is no message
// gets a clear status (gRPC's own decoding would say UNIMPLEMENTED).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <google/protobuf/message.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/coordinator/pooled_call.h"
#include "server/ops/metrics.h"
#include "server/ops/rpc_names.h"
#include "server/ops/samples.h"
#include "server/rpc/call_context.h"
#include "server/rpc/wire.h"

namespace emberd::server {

// What the methods of a service have in common.
struct UnaryOptions {
  CallEnvironment environment;
  ops::Metrics* metrics = nullptr;  // hears how long encoding takes; null: nobody does
  ops::Samples* samples = nullptr;  // hears how long each call takes that succeeds; the same
};

// Where a method of a public service stands in its service.
int MethodIndex(ops::Rpc rpc);
// Its name among the samples: "execute_chained".
std::string SampleName(ops::Rpc rpc);

// `Service` is made by gRPC's compiler: X::Service, with those of its streams that are served
// otherwise. What a subclass serves must outlive it.
template <typename Service>
class UnaryService : public Service {
 protected:
  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;

  explicit UnaryService(const UnaryOptions& options) : options_(options) {}

  // The method answers with encode(work(context, request, call)), which runs on a worker; what
  // `work` returns is a StatusOr.
  template <typename Request, typename Work,
            typename Encode = Bytes (*)(const google::protobuf::Message&)>
  void Serve(ops::Rpc rpc, const Work& work, Encode encode = &rpc::EncodeMessage) {
    const auto start = [this, rpc, work, encode](const Context* context, const Bytes* request,
                                                 Bytes* response) {
      auto run = [=, this](rpc::CallContext* call, int64_t* response_bytes) -> absl::Status {
        const absl::Time began = SteadyNow();
        Request message;
        RETURN_IF_ERROR(rpc::DecodeMessage(*request, &message));
        ASSIGN_OR_RETURN(const auto result, work(*context, std::move(message), call));
        std::optional<ops::StageTimer> timer;
        if (options_.metrics != nullptr) timer.emplace(options_.metrics, ops::Stage::kEncode);
        *response = encode(result);
        timer.reset();
        *response_bytes = static_cast<int64_t>(response->Length());
        if (options_.samples == nullptr) return absl::OkStatus();
        options_.samples->Add(SampleName(rpc), absl::ToDoubleSeconds(SteadyNow() - began));
        return absl::OkStatus();
      };
      return PooledCall::Start(options_.environment, *context, rpc,
                               static_cast<int64_t>(request->Length()), std::move(run));
    };
    this->MarkMethodRawCallback(MethodIndex(rpc),
                                new grpc::internal::CallbackUnaryHandler<Bytes, Bytes>(start));
  }

  // The method is one of `target`.
  template <typename Target, typename Request, typename Result>
  void Serve(ops::Rpc rpc, Target* target,
             absl::StatusOr<Result> (Target::*method)(Request, rpc::CallContext*)) {
    using Message = std::decay_t<Request>;
    Serve<Message>(rpc,
                   [target, method](const Context&, Message&& request, rpc::CallContext* call) {
                     return (target->*method)(std::move(request), call);
                   });
  }

  const CallEnvironment& environment() const { return options_.environment; }

 private:
  const UnaryOptions options_;
};

}  // namespace emberd::server
