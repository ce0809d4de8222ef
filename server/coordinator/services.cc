#include "server/coordinator/services.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "base/rpc/wire.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "emberd/v1/admin_service.grpc.pb.h"
#include "emberd/v1/checkpoint_service.grpc.pb.h"
#include "emberd/v1/embedding_service.grpc.pb.h"
#include "emberd/v1/program_service.grpc.pb.h"
#include "emberd/v1/shared_memory.pb.h"
#include "server/coordinator/administration.h"
#include "server/coordinator/checkpoints.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/model_registry.h"
#include "server/coordinator/programs/programs.h"
#include "server/coordinator/train/train_stream.h"
#include "server/coordinator/unary_calls.h"
#include "server/ops/catalogue.h"
#include "server/ops/logging.h"
#include "server/ops/metrics.h"
#include "server/ops/samples.h"
#include "server/rpc/budgets.h"
#include "server/rpc/call_context.h"
#include "server/rpc/local_peers.h"
#include "server/rpc/message.h"
#include "server/security/security.h"
#include "server/step/activations.h"

namespace emberd::coordinator {
namespace {

using grpc::ByteBuffer;

// ---- Calls

// What ends a step that a Lookup began.
bool FinishesABatch(ops::Rpc rpc) {
  return rpc == ops::Rpc::kApplyGradients || rpc == ops::Rpc::kReleaseBatch;
}

// What goes on while the coordinator drains: handles are of no use at another one.
bool FinishesWork(ops::Rpc rpc) {
  switch (rpc) {
    case ops::Rpc::kRelease:
    case ops::Rpc::kReadHandle:
    case ops::Rpc::kExecute:  // unless it looks up: see Programs::Run
    case ops::Rpc::kExecuteChained:
      return true;
    default:
      return FinishesABatch(rpc);
  }
}

// Operators look in when there is too much to do, and what a Lookup has cost is lost if its step
// does not end.
bool MayBeShed(ops::Rpc rpc) {
  switch (rpc) {
    case ops::Rpc::kGetStatus:
    case ops::Rpc::kGetLimits:
    case ops::Rpc::kSetLimits:
    case ops::Rpc::kGetMetrics:
    case ops::Rpc::kGetStats:
    case ops::Rpc::kDrain:
    case ops::Rpc::kDropModel:
    case ops::Rpc::kResetModel:
    case ops::Rpc::kDropGroup:
      return false;
    default:
      return !FinishesABatch(rpc);
  }
}

// What is made of the request is as large as the request. Of others, ids and gradients are small
// beside what is made of them.
bool DecodesMuch(ops::Rpc rpc) {
  return rpc == ops::Rpc::kReadRows || rpc == ops::Rpc::kAssignRows;
}

// So few requests are taken whatever they are expected to need: one slow request must not make all
// quick ones look slow.
constexpr int kAlwaysTaken = 8;

// The deadline of a call: the caller's, or so long from now.
absl::Time DeadlineOf(const grpc::ServerContextBase& context, absl::Duration default_deadline) {
  const absl::Time deadline = FromSystemTime(context.deadline());
  return deadline == absl::InfiniteFuture() ? SteadyNow() + default_deadline : deadline;
}

// To the environment's queue. RESOURCE_EXHAUSTED: it is full, or there is no thread.
absl::Status Submit(const CallEnvironment& environment, std::function<void()> work) {
  return environment.queue->Submit(std::move(work), [&] {
    return absl::StrCat(environment.queue->max_queued(), " requests wait already; ",
                        environment.waiting_limit, " allows no more; retry later");
  });
}

// What each call has, whichever way it came.
struct Call {
  // `trace`: see rpc::TraceOf.
  Call(const CallEnvironment& environment, ops::Rpc method, absl::Time deadline, std::string trace,
       int64_t request_bytes = 0)
      : environment(environment),
        method(method),
        request_bytes(request_bytes),
        context(deadline, std::move(trace)),
        timer(environment.metrics, method, request_bytes) {}

  // Takes a place under the budgets. UNAVAILABLE: the coordinator is draining.
  absl::Status Admit(const std::string& client) {
    ASSIGN_OR_RETURN(grant, environment.admission->Admit(client, request_bytes));
    // After it has been counted: an operator who drains sees either no request or a refused one.
    const bool draining = environment.draining != nullptr && environment.draining->load();
    return draining && !FinishesWork(method) ? DrainingError() : absl::OkStatus();
  }

  const CallEnvironment environment;
  const ops::Rpc method;
  const int64_t request_bytes;
  rpc::CallContext context;
  ops::RpcTimer timer;
  rpc::Admission::Grant grant;
};

// A call that is answered with one message.
struct UnaryCall : Call {
  using Room = rpc::CallContext::Room;

  // `sent_trace`: see rpc::SentTrace.
  UnaryCall(const CallEnvironment& environment, ops::Rpc method, absl::Time deadline,
            absl::string_view sent_trace, int64_t request_bytes)
      : Call(environment, method, deadline, rpc::TraceOf(sent_trace), request_bytes),
        span(&context, ops::RpcName(method), rpc::Span::Kind::kServer, rpc::IsTrace(sent_trace),
             began) {
    context.SetRoomMaker(
        [this](int64_t bytes, absl::string_view what, bool brief) -> absl::StatusOr<Room> {
          ASSIGN_OR_RETURN(Room room, grant.Reserve(bytes, what));
          if (!brief) rooms.push_back(room);
          return room;
        });
  }

  // Tells metrics and spans, and the log if it took longer than the environment's slow_call.
  void End(const absl::Status& status) {
    const absl::Duration took = SteadyNow() - began;
    if (took > environment.slow_call) {
      ops::Log(ops::LogLevel::kWarning, "slow call",
               {{"rpc", ops::RpcName(method)},
                {"code", ops::CodeName(status.code())},
                {"ms", absl::ToInt64Milliseconds(took)},
                {"trace", rpc::TraceId(context.trace())}});
    }
    grant = rpc::Admission::Grant();
    span.End(status);
    timer.Finish(status.code());
  }

  const absl::Time began = SteadyNow();
  rpc::Span span;
  // For what the work produces, which stays until the caller has been sent its answer. Of the
  // thread that works on it.
  std::vector<Room> rooms;
};

// Fills the response and returns the status; `response_bytes` is for the metrics.
using PooledWork = std::function<absl::Status(rpc::CallContext* context, int64_t* response_bytes)>;

// A unary call. Deletes itself when it is over.
class PooledCall final : public grpc::ServerUnaryReactor {
 public:
  PooledCall(const CallEnvironment& environment, const grpc::CallbackServerContext& server_context,
             ops::Rpc method, int64_t request_bytes)
      : call_(environment, method, DeadlineOf(server_context, environment.default_deadline),
              rpc::SentTrace(server_context), request_bytes) {}

  void Begin(const std::string& client, PooledWork work) {
    const absl::Status status = Enqueue(client, std::move(work));
    if (!status.ok()) End(status);
  }

 private:
  // Takes a place in the queue. UNAVAILABLE: the coordinator is draining. RESOURCE_EXHAUSTED: a
  // budget does not allow it, or the queue is so long that the caller would have given up before
  // the answer.
  absl::Status Enqueue(const std::string& client, PooledWork work) {
    RETURN_IF_ERROR(call_.Admit(client));
    TaskQueue& queue = *call_.environment.queue;
    // What could not be answered in time is refused at once: it would only delay what can be.
    const absl::Duration patience = call_.context.deadline() - call_.began;
    const absl::Duration expected = queue.ExpectedTime();
    if (MayBeShed(call_.method) && queue.tasks() >= kAlwaysTaken && expected > patience * 3 / 4) {
      return absl::ResourceExhaustedError(absl::StrCat(
          queue.tasks(), " requests are waiting already; after them this one would take ",
          absl::ToInt64Milliseconds(expected), " ms, but its deadline is in ",
          absl::ToInt64Milliseconds(patience), " ms; retry later"));
    }
    return Submit(call_.environment, [this, work = std::move(work)] { End(Run(work)); });
  }
  void End(const absl::Status& status) {
    call_.End(status);
    Finish(rpc::ToGrpcStatus(status));
  }
  absl::Status Run(const PooledWork& work) {
    if (call_.context.cancelled()) {
      return absl::CancelledError("the caller cancelled the call while it was waiting");
    }
    const absl::Time start = SteadyNow();
    const absl::Duration waited = start - call_.began;
    const absl::Duration left = call_.context.deadline() - start;
    call_.span.Set("emberd.queued_us", absl::ToInt64Microseconds(waited));
    if (left < absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat("the request waited ",
                                                      absl::ToInt64Milliseconds(waited),
                                                      " ms for a thread, until its deadline"));
    }
    // The queue has grown slower than was foreseen.
    TaskQueue& queue = *call_.environment.queue;
    if (MayBeShed(call_.method) && waited > left / 3 && left < queue.ExpectedRunTime()) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "the request waited ", absl::ToInt64Milliseconds(waited), " ms, and the ",
          absl::ToInt64Milliseconds(left), " ms left until its deadline are too few; retry later"));
    }
    int64_t response_bytes = 0;
    absl::Status status;
    if (DecodesMuch(call_.method)) {
      status = call_.context.MakeRoom(call_.request_bytes, "the decoded request").status();
    }
    if (status.ok()) status = work(&call_.context, &response_bytes);
    queue.RecordDuration(SteadyNow() - start);
    call_.timer.AddResponseBytes(response_bytes);
    return status;
  }
  void OnCancel() override { call_.context.Cancel(); }
  void OnDone() override { delete this; }

  UnaryCall call_;
};

// What both kinds of streams have. Deletes itself when the call is over. `limit`: how long it may
// take for callers without a deadline.
class SendingStream : public grpc::ServerWriteReactor<ByteBuffer> {
 public:
  SendingStream(const CallEnvironment& environment,
                const grpc::CallbackServerContext& server_context, ops::Rpc method,
                absl::Duration limit)
      : call_(environment, method, DeadlineOf(server_context, limit), rpc::TraceOf(server_context)),
        watched_(environment.streams, &server_context) {}

 protected:
  void OnCancel() final { call_.context.Cancel(); }
  void OnDone() final { delete this; }

  Call call_;
  StreamWatch::Place watched_;
};

// Each message is made when the caller has taken the one before, on the environment's queue: a slow
// caller costs one message, and no thread. `OpenStream` begins the work, on the queue, too.
using NextMessage = std::function<absl::StatusOr<std::optional<ByteBuffer>>()>;  // none: end
using OpenStream = std::function<absl::StatusOr<NextMessage>(rpc::CallContext* context)>;

class PulledStream final : public SendingStream {
 public:
  using SendingStream::SendingStream;

  void Begin(const std::string& client, OpenStream open) {
    open_ = std::move(open);
    const absl::Status status = call_.Admit(client);
    if (status.ok()) {
      SubmitNext();
    } else {
      End(status);
    }
  }

 private:
  void SubmitNext() {
    const absl::Status status = Submit(call_.environment, [this] { MakeNext(); });
    if (!status.ok()) End(status);
  }

  void MakeNext() {
    const absl::StatusOr<bool> more = Make();
    if (!more.ok() || !*more) {
      End(more.status());
      return;
    }
    watched_.SetSending(true);
    StartWrite(&message_);
  }

  // Whether there is one more message.
  absl::StatusOr<bool> Make() {
    if (call_.context.cancelled()) return absl::CancelledError("the caller is gone");
    if (next_ == nullptr) {
      ASSIGN_OR_RETURN(next_, open_(&call_.context));
    }
    ASSIGN_OR_RETURN(std::optional<ByteBuffer> message, next_());
    if (!message.has_value()) return false;
    const auto bytes = static_cast<int64_t>(message->Length());
    room_ = nullptr;  // of the one before
    ASSIGN_OR_RETURN(room_, call_.grant.Reserve(bytes, "a part of the answer"));
    message_ = *std::move(message);
    call_.timer.AddResponseBytes(bytes);
    return true;
  }

  void OnWriteDone(bool ok) override {
    watched_.SetSending(false);
    if (ok) {
      SubmitNext();
    } else {
      End(absl::CancelledError("the caller is gone"));
    }
  }

  void End(const absl::Status& status) {
    call_.timer.Finish(status.code());
    room_ = nullptr;
    call_.grant = rpc::Admission::Grant();
    Finish(rpc::ToGrpcStatus(status));
  }

  OpenStream open_;
  // These are touched by one thread at a time.
  NextMessage next_;
  std::shared_ptr<const void> room_;  // for the message
  ByteBuffer message_;
};

// The same of work that blocks, on shards and on files, and that tells how far it is. It never
// waits for a caller who is slow to take what it is sent: of too many messages that wait, the last
// is replaced. Writing is CANCELLED if the caller is gone.
using WriteMessage = std::function<absl::Status(ByteBuffer message)>;
using ProgressWork =
    std::function<absl::Status(rpc::CallContext* context, const WriteMessage& write)>;

class ProgressStream final : public SendingStream {
 public:
  using SendingStream::SendingStream;

  void Begin(const std::string& client, ProgressWork work) {
    absl::Status status = call_.Admit(client);
    if (status.ok()) {
      status = Submit(call_.environment, [this, work = std::move(work)] {
        End(work(&call_.context, [this](ByteBuffer message) { return Send(std::move(message)); }));
      });
    }
    if (!status.ok()) End(status);
  }

 private:
  static constexpr size_t kMaxWaiting = 64;

  // When the caller has taken those before.
  absl::Status Send(ByteBuffer message) {
    absl::MutexLock lock(&mutex_);
    if (gone_ || call_.context.cancelled()) return absl::CancelledError("the caller is gone");
    if (waiting_.size() == kMaxWaiting) waiting_.pop_back();
    waiting_.push_back(std::move(message));
    if (!writing_) WriteNext();
    return absl::OkStatus();
  }
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    writing_ = true;
    message_ = std::move(waiting_.front());
    waiting_.pop_front();
    call_.timer.AddResponseBytes(static_cast<int64_t>(message_.Length()));
    watched_.SetSending(true);
    StartWrite(&message_);
  }
  void OnWriteDone(bool ok) override {
    absl::Status end;
    {
      absl::MutexLock lock(&mutex_);
      watched_.SetSending(false);
      writing_ = false;
      gone_ = gone_ || !ok;
      if (!gone_ && !waiting_.empty()) {
        WriteNext();
        return;
      }
      if (!end_.has_value()) return;
      end = *end_;
    }
    Finish(rpc::ToGrpcStatus(end));
  }

  void End(const absl::Status& status) {
    call_.grant = rpc::Admission::Grant();
    call_.timer.Finish(status.code());
    {
      absl::MutexLock lock(&mutex_);
      end_ = status;
      if (writing_) return;  // after what is on its way
    }
    Finish(rpc::ToGrpcStatus(status));
  }

  absl::Mutex mutex_;
  ByteBuffer message_ ABSL_GUARDED_BY(mutex_);
  std::deque<ByteBuffer> waiting_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
};

// ---- Services

// What the methods of a service have in common.
struct ServiceOptions {
  CallEnvironment environment;
  ops::Metrics* metrics = nullptr;  // hears how long encoding takes; null: nobody does
  ops::Samples* samples = nullptr;  // hears how long each call takes that succeeds; the same
};

// `rpc` is declared in a .proto that this program knows.
const google::protobuf::MethodDescriptor& MethodOf(ops::Rpc rpc) {
  return *google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(absl::StrCat(
      "emberd.v1.", absl::StrReplaceAll(std::string(ops::RpcName(rpc)), {{"/", "."}})));
}

// Its name among the samples: "execute_chained".
std::string SampleName(ops::Rpc rpc) {
  std::string name;
  for (const char c : MethodOf(rpc).name()) {
    if (absl::ascii_isupper(c) && !name.empty()) name.push_back('_');
    name.push_back(absl::ascii_tolower(c));
  }
  return name;
}

// What each method needs beside its work stands here, once. Every method takes and gives bytes:
// requests are decoded on a worker, where what is no message gets a clear status (gRPC's own
// decoding would say UNIMPLEMENTED).
//
// `Service` is made by gRPC's compiler: X::Service. What it serves must outlive it.
template <typename Service>
class BytesService final : public Service {
 public:
  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;

  explicit BytesService(const ServiceOptions& options) : options_(options) {}

  // The method answers with encode(work(context, request, call)), which runs on a worker; what
  // `work` returns is a StatusOr.
  template <typename Request, typename Work,
            typename Encode = absl::StatusOr<Bytes> (*)(const google::protobuf::Message&)>
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
        absl::StatusOr<Bytes> encoded = encode(result);
        RETURN_IF_ERROR(encoded.status());
        *response = *std::move(encoded);
        timer.reset();
        *response_bytes = static_cast<int64_t>(response->Length());
        if (options_.samples == nullptr) return absl::OkStatus();
        options_.samples->Add(SampleName(rpc), absl::ToDoubleSeconds(SteadyNow() - began));
        return absl::OkStatus();
      };
      auto* const pooled = new PooledCall(options_.environment, *context, rpc,
                                          static_cast<int64_t>(request->Length()));
      pooled->Begin(security::ClientName(*context), std::move(run));
      return pooled;
    };
    Mark(rpc, new grpc::internal::CallbackUnaryHandler<Bytes, Bytes>(start));
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

  // The method sends what the function gives that a method of `target` returns, until that is
  // nothing. `limit`: how long it may take for callers without a deadline.
  template <typename Target, typename Request, typename Part>
  void ServeParts(ops::Rpc rpc, absl::Duration limit, Target* target,
                  absl::StatusOr<std::function<absl::StatusOr<std::optional<Part>>()>> (
                      Target::*method)(const Request&, rpc::CallContext*)) {
    const auto start = [=, this](const Context* context, const Bytes* request) {
      const auto open = [target, method, request = *request](
                            rpc::CallContext* call) -> absl::StatusOr<NextMessage> {
        Request message;
        RETURN_IF_ERROR(rpc::DecodeMessage(request, &message));
        ASSIGN_OR_RETURN(const auto next, (target->*method)(message, call));
        return [next]() -> absl::StatusOr<std::optional<Bytes>> {
          ASSIGN_OR_RETURN(const std::optional<Part> part, next());
          if (!part.has_value()) return std::nullopt;
          ASSIGN_OR_RETURN(Bytes encoded, rpc::EncodeMessage(*part));
          return encoded;
        };
      };
      auto* const stream = new PulledStream(options_.environment, *context, rpc, limit);
      stream->Begin(security::ClientName(*context), open);
      return stream;
    };
    Mark(rpc, new grpc::internal::CallbackServerStreamingHandler<Bytes, Bytes>(start));
  }

  // The method sends the progress of a method of `target`, and last what that returns.
  template <typename Target, typename Request, typename Progress>
  void ServeProgress(ops::Rpc rpc, absl::Duration limit, Target* target,
                     absl::StatusOr<Progress> (Target::*method)(
                         const Request&, const std::function<absl::Status(const Progress&)>&,
                         rpc::CallContext*)) {
    const auto start = [=, this](const Context* context, const Bytes* request) {
      const auto work = [target, method, request = *request](
                            rpc::CallContext* call, const WriteMessage& write) -> absl::Status {
        const auto report = [&write](const Progress& progress) -> absl::Status {
          ASSIGN_OR_RETURN(Bytes encoded, rpc::EncodeMessage(progress));
          return write(std::move(encoded));
        };
        Request message;
        RETURN_IF_ERROR(rpc::DecodeMessage(request, &message));
        ASSIGN_OR_RETURN(const Progress last, (target->*method)(message, report, call));
        return report(last);
      };
      auto* const stream = new ProgressStream(options_.environment, *context, rpc, limit);
      stream->Begin(security::ClientName(*context), work);
      return stream;
    };
    Mark(rpc, new grpc::internal::CallbackServerStreamingHandler<Bytes, Bytes>(start));
  }

  void Mark(ops::Rpc rpc, grpc::internal::MethodHandler* handler) {
    this->MarkMethodRawCallback(MethodOf(rpc).index(), handler);
  }

 private:
  const ServiceOptions options_;
};

// How long a call of CheckpointService may take where its caller sets no deadline: large tables
// take hours.
constexpr absl::Duration kCheckpointLimit = absl::Hours(24);

}  // namespace

std::unique_ptr<grpc::Service> MakeEmbeddingService(Coordinator* coordinator, TrainStreams* streams,
                                                    LocalServer* local,
                                                    const CallEnvironment& environment) {
  using Context = grpc::CallbackServerContext;
  auto service = std::make_unique<BytesService<v1::EmbeddingService::Service>>(
      ServiceOptions{.environment = environment, .metrics = coordinator->resources().metrics});
  service->Serve(ops::Rpc::kDeclareModel, coordinator, &Coordinator::DeclareModel);
  service->Serve(ops::Rpc::kDescribeModel, coordinator, &Coordinator::DescribeModel);
  UnarySteps* const steps = coordinator->resources().steps;
  service->Serve(ops::Rpc::kApplyGradients, steps, &UnarySteps::ApplyGradients);
  service->Serve(ops::Rpc::kReleaseBatch, steps, &UnarySteps::ReleaseBatch);
  RowAccess* const rows = coordinator->resources().rows;
  service->Serve(ops::Rpc::kReadRows, rows, &RowAccess::ReadRows);
  service->Serve(ops::Rpc::kAssignRows, rows, &RowAccess::AssignRows);
  service->ServeParts(ops::Rpc::kExportTable, environment.default_deadline, rows,
                      &RowAccess::StartExport);
  // The answer is made by hand, so that activations are not copied.
  service->Serve<v1::LookupRequest>(
      ops::Rpc::kLookup,
      [steps](const Context& context, const v1::LookupRequest& request, rpc::CallContext* call) {
        return steps->Lookup(request, security::RoleOf(context), call);
      },
      &step::EncodeLookupResponse);
  service->Serve<v1::ShareMemoryRequest>(ops::Rpc::kShareMemory,
                                         [local](const Context& context, const auto&, auto*) {
                                           return rpc::InvitePeer(local, rpc::LocalPeerOf(context));
                                         });
  const auto train = [streams](const Context* context) { return streams->Start(*context); };
  service->Mark(ops::Rpc::kTrain,
                new grpc::internal::CallbackBidiHandler<ByteBuffer, ByteBuffer>(train));
  return service;
}

std::unique_ptr<grpc::Service> MakeCheckpointService(Checkpoints* checkpoints,
                                                     const CallEnvironment& environment) {
  auto service = std::make_unique<BytesService<v1::CheckpointService::Service>>(
      ServiceOptions{.environment = environment});
  const auto serve = [&](ops::Rpc rpc, auto method) {
    service->ServeProgress(rpc, kCheckpointLimit, checkpoints, method);
  };
  serve(ops::Rpc::kSaveCheckpoint, &Checkpoints::Save);
  serve(ops::Rpc::kRestoreCheckpoint, &Checkpoints::Restore);
  serve(ops::Rpc::kServeCheckpoint, &Checkpoints::Serve);
  serve(ops::Rpc::kVerifyCheckpoint, &Checkpoints::Verify);
  serve(ops::Rpc::kMergeCheckpoint, &Checkpoints::Merge);
  service->ServeParts(ops::Rpc::kExportCheckpoint, kCheckpointLimit, checkpoints,
                      &Checkpoints::StartExport);
  service->Serve(ops::Rpc::kDiffCheckpoints, checkpoints, &Checkpoints::Diff);
  service->Serve(ops::Rpc::kListCheckpoints, checkpoints, &Checkpoints::List);
  service->Serve(ops::Rpc::kGetCheckpoint, checkpoints, &Checkpoints::Get);
  service->Serve(ops::Rpc::kDeleteCheckpoint, checkpoints, &Checkpoints::Delete);
  return service;
}

std::unique_ptr<grpc::Service> MakeProgramService(Programs* programs, ops::Samples* samples,
                                                  const CallEnvironment& environment) {
  auto service = std::make_unique<BytesService<v1::ProgramService::Service>>(ServiceOptions{
      .environment = environment, .metrics = programs->metrics(), .samples = samples});
  service->Serve(ops::Rpc::kCompile, programs, &Programs::Compile);
  service->Serve(ops::Rpc::kRelease, programs, &Programs::Release);
  service->Serve(ops::Rpc::kPrepareBatch, programs, &Programs::PrepareBatch);
  service->Serve(ops::Rpc::kExecute, programs, &Programs::Execute);
  service->Serve(ops::Rpc::kExecuteChained, programs, &Programs::ExecuteChained);
  service->Serve(ops::Rpc::kReadHandle, programs, &Programs::ReadHandle);
  return service;
}

std::unique_ptr<grpc::Service> MakeAdminService(Administration* administration,
                                                Coordinator* coordinator,
                                                const CallEnvironment& environment) {
  auto service = std::make_unique<BytesService<v1::AdminService::Service>>(
      ServiceOptions{.environment = environment});
  service->Serve(ops::Rpc::kGetStatus, administration, &Administration::GetStatus);
  service->Serve(ops::Rpc::kGetLimits, coordinator, &Coordinator::GetLimits);
  service->Serve(ops::Rpc::kSetLimits, coordinator->resources().registry,
                 &ModelRegistry::SetLimits);
  service->Serve(ops::Rpc::kGetMetrics, administration, &Administration::GetMetrics);
  service->Serve(ops::Rpc::kGetStats, administration, &Administration::GetStats);
  service->Serve(ops::Rpc::kDrain, administration, &Administration::Drain);
  service->Serve(ops::Rpc::kDropModel, coordinator, &Coordinator::DropModel);
  service->Serve(ops::Rpc::kResetModel, coordinator, &Coordinator::ResetModel);
  service->Serve(ops::Rpc::kDropGroup, coordinator, &Coordinator::DropGroup);
  service->Serve(ops::Rpc::kChangeMemory, coordinator, &Coordinator::ChangeMemory);
  return service;
}

// ---- Lanes

namespace {

// What fits in a packet beside the few bytes before it.
constexpr size_t kMaxLaneBody = lanes::kMaxPacketBytes - 256;

absl::Status LookUpOnLane(const CoordinatorResources& resources, const LaneCall& lane,
                          UnaryCall* call, LaneAnswer* answer) {
  const lanes::Request& sent = lane.request();
  RETURN_IF_ERROR(call->Admit(security::ClientName(sent.authorization, lane.peer().address)));
  rpc::ArenaMessage<v1::LookupRequest> arena_request;
  v1::LookupRequest& request = *arena_request;
  if (!request.ParseFromArray(sent.body.data(), static_cast<int>(sent.body.size()))) {
    return absl::InvalidArgumentError("the request is not a valid emberd.v1.LookupRequest");
  }
  ASSIGN_OR_RETURN(
      const step::LookupOutput output,
      resources.steps->Lookup(request, security::RoleOf(sent.authorization), &call->context));
  ops::StageTimer timer(resources.metrics, ops::Stage::kEncode);
  answer->body = step::EncodeLookupText(output);
  answer->elsewhere = answer->body.size() > kMaxLaneBody;
  // The trainer asks again over gRPC, and so never learns the handle of this batch.
  if (answer->elsewhere && output.batch_handle != 0) {
    resources.path->Discard(request.model_id(), output.batch_handle);
  }
  return absl::OkStatus();
}

}  // namespace

LaneServer::Handler MakeLookupHandler(const CoordinatorResources* resources,
                                      const CallEnvironment& environment,
                                      const security::Security* security) {
  const auto serve = [resources, environment](LaneCall* lane) {
    UnaryCall call(environment, ops::Rpc::kLookup,
                   rpc::DeadlineOf(*lane, environment.default_deadline), lane->request().trace,
                   static_cast<int64_t>(lane->request().body.size()));
    environment.metrics->Add(ops::MetricId::kLaneCalls);
    lane->OnCancel([&call] { call.context.Cancel(); });
    LaneAnswer answer;
    answer.status = LookUpOnLane(*resources, *lane, &call, &answer);
    lane->OnCancel(nullptr);
    if (answer.status.ok()) call.timer.AddResponseBytes(static_cast<int64_t>(answer.body.size()));
    call.End(answer.status);
    return answer;
  };
  return rpc::ServeOnLanes(v1::LOOKUP, "/emberd.v1.EmbeddingService/Lookup", security, serve);
}

void StreamWatch::EndStuck(absl::Duration standstill) {
  absl::MutexLock lock(&mutex_);
  const absl::Time latest = SteadyNow() - patience_;
  for (Place* place : places_) {
    place->since_ += standstill;
    if (place->since_ > latest) continue;
    place->since_ = absl::InfiniteFuture();
    place->context_->TryCancel();
  }
}

}  // namespace emberd::coordinator
