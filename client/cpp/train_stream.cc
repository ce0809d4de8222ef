#include "client/cpp/train_stream.h"

#include <deque>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/rpc/wire.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "client/cpp/batch_codec.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/transport.h"

namespace emberd::client {
namespace {

// A call with a stream of encoded messages in each direction. Thread-safe.
class RawStream final : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // On gRPC's threads, one call at a time.
  struct Listener {
    // A message has come. An error cancels the call and becomes its status.
    std::function<absl::Status(grpc::ByteBuffer* message)> on_message;
    // The call is over: the last that is told.
    std::function<void(const absl::Status& status)> on_end;
  };

  // Opens a call of `method` ("/package.Service/Method"), which Transport::CancelCalls ends too,
  // also if it was called since Transport::begun gave `begun`. `transport` must outlive the stream.
  RawStream(Transport* transport, int coordinator, uint64_t begun, const std::string& method,
            Listener listener)
      : transport_(transport),
        listener_(std::move(listener)),
        stub_(transport->channel(coordinator)) {
    transport_->Authorize(&context_);
    stub_.PrepareBidiStreamingCall(&context_, method, grpc::StubOptions(), this);
    // Messages are written outside of reactions: the hold keeps OnDone away while that may happen.
    AddHold();
    StartRead(&incoming_);
    StartCall();
    transport_->AddCall(&context_, begun);
  }

  // Cancels the call if it is not over, and waits for its end.
  ~RawStream() override {
    transport_->RemoveCall(&context_);
    absl::MutexLock lock(&mutex_);
    if (!done_) context_.TryCancel();
    StopWriting();
    mutex_.Await(absl::Condition(&done_));
  }

  // Queues messages. Does not wait.
  void Send(std::deque<grpc::ByteBuffer> messages) {
    absl::MutexLock lock(&mutex_);
    if (!held_) return;
    outgoing_.insert(outgoing_.end(), std::make_move_iterator(messages.begin()),
                     std::make_move_iterator(messages.end()));
    if (!writing_) WriteNext();
  }
  void Send(grpc::ByteBuffer message) {
    std::deque<grpc::ByteBuffer> messages;
    messages.push_back(std::move(message));
    Send(std::move(messages));
  }
  void Cancel() { context_.TryCancel(); }
  // No message follows those sent.
  void HalfClose() {
    absl::MutexLock lock(&mutex_);
    half_closed_ = true;
    if (held_ && !writing_) WriteNext();
  }

 private:
  void StopWriting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!held_) return;
    held_ = false;
    RemoveHold();
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    writing_ = !outgoing_.empty();
    if (writing_) {
      StartWrite(&outgoing_.front());
    } else if (half_closed_) {
      StartWritesDone();
      StopWriting();
    }
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    outgoing_.pop_front();
    if (ok && held_) {
      WriteNext();
    } else {
      writing_ = false;
      outgoing_.clear();
      StopWriting();
    }
  }

  void OnReadDone(bool ok) override {
    if (ok) {
      local_error_ = listener_.on_message(&incoming_);
      incoming_.Clear();
      if (local_error_.ok()) {
        StartRead(&incoming_);
        return;
      }
      context_.TryCancel();
    }
    absl::MutexLock lock(&mutex_);
    StopWriting();
  }

  void OnDone(const grpc::Status& status) override {
    listener_.on_end(local_error_.ok() ? rpc::FromGrpcStatus(status) : local_error_);
    absl::MutexLock lock(&mutex_);
    done_ = true;
  }

  Transport* const transport_;
  const Listener listener_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer incoming_;
  absl::Status local_error_;  // what the listener found; touched by reactions alone

  absl::Mutex mutex_;
  std::deque<grpc::ByteBuffer> outgoing_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool held_ ABSL_GUARDED_BY(mutex_) = true;  // false: nothing can be written any more
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

// Kept between steps. Those of a run are alike: a few blocks serve all of them.
constexpr size_t kIdleBytes = size_t{256} << 20;

class GrpcTrainStream final : public TrainStream {
 public:
  GrpcTrainStream(const ClientOptions& options, const Model& model, const TrainOptions& train)
      : options_(options), model_(model), most_ahead_(train.pipelined ? 2 : 1) {}

  // Opens the stream and waits for TrainStarted.
  absl::Status Start(Transport* transport, int coordinator, const TrainOptions& options) {
    const uint64_t begun = transport->begun();
    memory_ = transport->memory(coordinator);
    if (memory_ != nullptr) memory_->Arena();  // now, not while a step is sent
    stream_ = std::make_unique<RawStream>(
        transport, coordinator, begun, "/emberd.v1.EmbeddingService/Train",
        RawStream::Listener{[this](grpc::ByteBuffer* message) { return OnMessage(message); },
                            [this](const absl::Status& status) { OnEnd(status); }});
    stream_->Send(EncodeTrainStart(model_, options));
    // The server waits for the other ranks; beyond that it has as long as for any call.
    const absl::Duration patience = options.step_timeout + options_.deadline;
    const auto answered = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return has_started_ || end_.has_value();
    };
    absl::MutexLock lock(&mutex_);
    if (!AwaitSteadily(&mutex_, absl::Condition(&answered), patience)) {
      return absl::DeadlineExceededError(absl::StrCat(
          "coordinator ", options_.addresses[coordinator], " did not start the stream within ",
          absl::FormatDuration(patience), " (step_timeout and the client's deadline)"));
    }
    return has_started_ ? absl::OkStatus() : MissingAnswer();
  }

  int64_t next_step() const override { return started_.next_step(); }
  uint64_t generation() const override { return started_.generation(); }
  uint64_t made_generation() const override { return started_.made_generation(); }

  absl::Status SendLookup(int64_t step, absl::Span<const FeatureIds> features,
                          const TrainLookupOptions& options) override {
    ExpectedLookup expected;
    ASSIGN_OR_RETURN(auto messages,
                     EncodeTrainLookup(model_, step, features, options_.activation_type,
                                       options.concat, &expected, memory_));
    absl::MutexLock sending(&send_mutex_);
    absl::MutexLock lock(&mutex_);
    RETURN_IF_ERROR(CheckOpen());
    expected.Lend();
    lookups_.emplace_back(std::move(expected), &pool_);
    held_.push_back({step, std::move(messages)});
    SendHeld(/*all=*/step != next_lookup_);  // out of its turn: the server says so
    next_lookup_ = step + 1;
    return absl::OkStatus();
  }

  absl::Status SendUpdate(int64_t step, absl::Span<const FeatureGradient> gradients,
                          const UpdateOptions& options) override {
    // Without `memory` all of them are copied, for the caller may change them at once.
    SharedGradients shared(memory_, options.memory != nullptr
                                        ? OwnBlocks()
                                        : std::vector<std::shared_ptr<SharedBlock>>());
    ASSIGN_OR_RETURN(auto encoder, UpdateEncoder::Make(model_, step, gradients, options,
                                                       options_.gradient_type, &pool_, &shared));
    absl::MutexLock sending(&send_mutex_);
    {
      absl::MutexLock lock(&mutex_);
      RETURN_IF_ERROR(CheckOpen());
      shared.Lend();
      updates_.push_back({step, std::move(shared), options.memory});
    }
    // What throws here, for want of memory, leaves half a request, which cannot be taken back.
    absl::Cleanup half_sent = [this] { stream_->Cancel(); };
    while (std::optional<grpc::ByteBuffer> part = encoder.Next()) stream_->Send(*std::move(part));
    std::move(half_sent).Cancel();
    absl::MutexLock lock(&mutex_);
    next_update_ = step + 1;
    SendHeld(/*all=*/false);
    return absl::OkStatus();
  }

  std::shared_ptr<float> AllocateGradients(size_t floats) override {
    const size_t shareable = std::min<size_t>(floats, PTRDIFF_MAX / sizeof(float));
    std::shared_ptr<SharedBlock> block;
    if (memory_ != nullptr) {
      block = memory_->Take(shareable * sizeof(float), absl::InfiniteFuture());
    }
    if (block == nullptr) return TakeFloats(&pool_, floats);
    absl::MutexLock lock(&mutex_);
    own_blocks_.push_back(block);
    auto* const data = reinterpret_cast<float*>(block->data());
    return {std::move(block), data};
  }

  absl::StatusOr<TrainLookupResult> ReceiveLookup() override {
    absl::MutexLock lock(&mutex_);
    return Receive("lookup", &lookup_results_, lookups_);
  }

  absl::StatusOr<TrainUpdateResult> ReceiveUpdate() override {
    absl::MutexLock lock(&mutex_);
    return Receive("update", &update_results_, updates_);
  }

  bool WaitForLookup(absl::Duration timeout) override {
    absl::MutexLock lock(&mutex_);
    return Await(timeout, lookup_results_, lookups_);
  }

  bool WaitForUpdate(absl::Duration timeout) override {
    absl::MutexLock lock(&mutex_);
    return Await(timeout, update_results_, updates_);
  }

  absl::Status Finish() override {
    {
      absl::MutexLock sending(&send_mutex_);
      absl::MutexLock lock(&mutex_);
      half_closed_ = true;
      SendHeld(/*all=*/true);
    }
    stream_->HalfClose();
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](std::optional<absl::Status>* end) { return end->has_value(); }, &end_));
    const bool answered = lookups_.empty() && updates_.empty();
    return end_->ok() && !answered ? MissingAnswer() : *end_;
  }

  void Cancel() override { stream_->Cancel(); }

 private:
  // OK if another request can be sent.
  absl::Status CheckOpen() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (half_closed_) return absl::FailedPreconditionError("nothing can be sent after Finish");
    return end_.has_value() ? MissingAnswer() : absl::OkStatus();
  }

  // The status of a stream that has ended, where an answer is missing.
  absl::Status MissingAnswer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return end_->ok() ? absl::InternalError("the server ended the stream without an answer")
                      : *end_;
  }

  // Sends the lookups whose turn has come, or all.
  void SendHeld(bool all) ABSL_EXCLUSIVE_LOCKS_REQUIRED(send_mutex_, mutex_) {
    while (!held_.empty() && (all || held_.front().step <= next_update_ + most_ahead_)) {
      stream_->Send(std::move(held_.front().messages));
      held_.pop_front();
    }
  }

  std::vector<std::shared_ptr<SharedBlock>> OwnBlocks() {
    absl::MutexLock lock(&mutex_);
    std::vector<std::shared_ptr<SharedBlock>> blocks;
    std::vector<std::weak_ptr<SharedBlock>> living;
    for (const std::weak_ptr<SharedBlock>& held : own_blocks_) {
      std::shared_ptr<SharedBlock> block = held.lock();
      if (block == nullptr) continue;
      blocks.push_back(std::move(block));
      living.push_back(held);
    }
    own_blocks_.swap(living);
    return blocks;
  }

  // Waits until there is one of `results`, or none to wait for; false after `timeout`.
  template <typename Result, typename Expected>
  bool Await(absl::Duration timeout, const std::deque<Result>& results,
             const std::deque<Expected>& expected) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto settled = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return !results.empty() || expected.empty() || end_.has_value();
    };
    return AwaitSteadily(&mutex_, absl::Condition(&settled), timeout);
  }

  // Waits for the next of `results`, while any is `expected`.
  template <typename Result, typename Expected>
  absl::StatusOr<Result> Receive(const char* what, std::deque<Result>* results,
                                 const std::deque<Expected>& expected)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Await(absl::InfiniteDuration(), *results, expected);
    if (!results->empty()) {
      Result result = std::move(results->front());
      results->pop_front();
      return result;
    }
    if (end_.has_value() && (!end_->ok() || !expected.empty())) return MissingAnswer();
    return absl::FailedPreconditionError(absl::StrCat("no ", what, " awaits its answer"));
  }

  absl::Status OnMessage(grpc::ByteBuffer* message) {
    v1::TrainResponse response;
    if (rpc::DecodeMessage(*message, &response).ok()) {
      switch (response.response_case()) {
        case v1::TrainResponse::kStarted:
          return OnStarted(response.started());
        case v1::TrainResponse::kLookup:
          return OnLookup(response.lookup());
        case v1::TrainResponse::kUpdate:
          return OnUpdate(response.update());
        case v1::TrainResponse::RESPONSE_NOT_SET:
          break;
      }
    }
    return absl::InternalError("the server sent an invalid TrainResponse");
  }

  absl::Status OnStarted(const v1::TrainStarted& started) {
    absl::MutexLock lock(&mutex_);
    if (has_started_) return absl::InternalError("the server sent a second TrainStarted");
    started_ = started;
    next_lookup_ = next_update_ = started_.next_step();
    has_started_ = true;
    return absl::OkStatus();
  }

  absl::Status OnLookup(const v1::TrainLookupResult& part) {
    LookupAssembler* assembler = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      if (lookups_.empty())
        return absl::InternalError("the server answered a lookup that was not sent");
      assembler = &lookups_.front();
    }
    ASSIGN_OR_RETURN(const bool complete, assembler->Add(part));
    if (!complete) return absl::OkStatus();
    absl::MutexLock lock(&mutex_);
    lookup_results_.push_back(assembler->Take());
    lookups_.pop_front();
    return absl::OkStatus();
  }

  absl::Status OnUpdate(const v1::TrainUpdateResult& message) {
    std::shared_ptr<const void> memory;
    {
      absl::MutexLock lock(&mutex_);
      if (updates_.empty() || message.step() != updates_.front().step) {
        return absl::InternalError(absl::StrCat("the server answered an update of step ",
                                                message.step(), ", but another step is next"));
      }
      updates_.front().shared.Settle();
      memory = std::move(updates_.front().memory);
    }
    memory = nullptr;  // before anybody sees the answer, and, as a caller's code may run, unlocked
    absl::MutexLock lock(&mutex_);
    updates_.pop_front();
    update_results_.push_back({message.step(), message.rows_updated(), DecodeTimes(message.times()),
                               message.rows_skipped(), message.checkpoint(),
                               message.checkpoint_error(),
                               message.has_checkpoint_step() ? message.checkpoint_step() : -1});
    return absl::OkStatus();
  }

  void OnEnd(const absl::Status& status) {
    std::vector<std::shared_ptr<const void>> memory;
    absl::MutexLock lock(&mutex_);
    for (SentUpdate& update : updates_) {
      update.shared.Part();
      memory.push_back(std::move(update.memory));
    }
    end_ = status;
  }

  const ClientOptions options_;
  const Model model_;
  // Steps between the next update and the last lookup that leaves before it. Answers come in the
  // order of the requests: the answer to a later lookup, which needs an update that has not been
  // sent, would keep those of earlier updates back.
  const int64_t most_ahead_;
  BufferPool pool_{kIdleBytes};
  SharedMemory* memory_ = nullptr;  // with the coordinator, if there is any; set by Start

  // Held from a request's first part to its last.
  absl::Mutex send_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  absl::Mutex mutex_;
  bool has_started_ ABSL_GUARDED_BY(mutex_) = false;
  v1::TrainStarted started_;  // constant from then on
  // Of requests that are not answered yet, in their order. Only OnMessage removes any.
  std::deque<LookupAssembler> lookups_ ABSL_GUARDED_BY(mutex_);
  struct SentUpdate {
    int64_t step;
    SharedGradients shared;
    std::shared_ptr<const void> memory;  // UpdateOptions::memory: `shared` may name places in it
  };
  std::deque<SentUpdate> updates_ ABSL_GUARDED_BY(mutex_);
  // What AllocateGradients gave.
  std::vector<std::weak_ptr<SharedBlock>> own_blocks_ ABSL_GUARDED_BY(mutex_);
  // That are to be sent.
  int64_t next_lookup_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t next_update_ ABSL_GUARDED_BY(mutex_) = 0;
  struct HeldLookup {
    int64_t step;
    std::deque<grpc::ByteBuffer> messages;
  };
  std::deque<HeldLookup> held_ ABSL_GUARDED_BY(mutex_);
  std::deque<TrainLookupResult> lookup_results_ ABSL_GUARDED_BY(mutex_);
  std::deque<TrainUpdateResult> update_results_ ABSL_GUARDED_BY(mutex_);
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);

  std::unique_ptr<RawStream> stream_;  // goes first: its end is awaited
};

}  // namespace

absl::StatusOr<std::unique_ptr<TrainStream>> TrainStream::Open(Transport* transport,
                                                               const ClientOptions& client_options,
                                                               const Model& model,
                                                               const TrainOptions& options) {
  const int coordinators = static_cast<int>(client_options.addresses.size());
  if (options.coordinator < -1 || options.coordinator >= coordinators) {
    return absl::InvalidArgumentError(absl::StrCat("coordinator: ", options.coordinator,
                                                   " is not allowed; it must be -1 or in [0, ",
                                                   coordinators, ")"));
  }
  // Here, for on the wire less than a millisecond is 0, which stands for the server's default.
  if (options.step_timeout < absl::Milliseconds(1) ||
      options.step_timeout > absl::Milliseconds(2147483647)) {
    return absl::InvalidArgumentError(
        absl::StrCat("step_timeout: ", absl::FormatDuration(options.step_timeout),
                     " is not allowed; it must be in [1ms, 2147483647ms]"));
  }
  const bool any = options.coordinator < 0;
  const int coordinator = any ? transport->current() : options.coordinator;
  auto stream = std::make_unique<GrpcTrainStream>(client_options, model, options);
  const absl::Status status = stream->Start(transport, coordinator, options);
  if (any && absl::IsUnavailable(status)) transport->MoveOn(coordinator);
  if (!status.ok()) return status;
  return stream;
}

}  // namespace emberd::client
