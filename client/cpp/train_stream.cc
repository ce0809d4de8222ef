#include "client/cpp/train_stream.h"

#include <deque>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/steady_time.h"
#include "client/cpp/batch_codec.h"
#include "client/cpp/lookup_assembler.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/train_request.h"
#include "client/cpp/transport.h"

namespace emberd::client {
namespace {

// What a RawStream tells, on gRPC's threads, one call at a time.
class RawStreamListener {
 public:
  virtual ~RawStreamListener() = default;
  // A message has come. An error cancels the call and becomes its status.
  virtual absl::Status OnMessage(grpc::ByteBuffer* message) = 0;
  // The call is over: the last that is told.
  virtual void OnEnd(const absl::Status& status) = 0;
};

// A call with a stream of encoded messages in each direction. Thread-safe.
class RawStream final : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Opens a call of `method` ("/package.Service/Method"), which Transport::CancelCalls ends too.
  // `transport` and `listener` must outlive the stream.
  RawStream(Transport* transport, int coordinator, const std::string& method,
            RawStreamListener* listener);
  // Cancels the call if it is not over, and waits for its end.
  ~RawStream() override;

  // Queues messages. Does not wait.
  void Send(std::deque<grpc::ByteBuffer> messages);
  // No message follows those sent.
  void HalfClose();

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopWriting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Transport* const transport_;
  RawStreamListener* const listener_;
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

RawStream::RawStream(Transport* transport, int coordinator, const std::string& method,
                     RawStreamListener* listener)
    : transport_(transport), listener_(listener), stub_(transport->channel(coordinator)) {
  transport_->Authorize(&context_);
  stub_.PrepareBidiStreamingCall(&context_, method, grpc::StubOptions(), this);
  // Messages are written outside of reactions: the hold keeps OnDone away while that may happen.
  AddHold();
  StartRead(&incoming_);
  StartCall();
  transport_->AddCall(&context_);
}

RawStream::~RawStream() {
  transport_->RemoveCall(&context_);
  absl::MutexLock lock(&mutex_);
  if (!done_) context_.TryCancel();
  StopWriting();
  mutex_.Await(absl::Condition(&done_));
}

void RawStream::StopWriting() {
  if (!held_) return;
  held_ = false;
  RemoveHold();
}

void RawStream::Send(std::deque<grpc::ByteBuffer> messages) {
  absl::MutexLock lock(&mutex_);
  if (!held_) return;
  outgoing_.insert(outgoing_.end(), std::make_move_iterator(messages.begin()),
                   std::make_move_iterator(messages.end()));
  if (!writing_) WriteNext();
}

void RawStream::HalfClose() {
  absl::MutexLock lock(&mutex_);
  half_closed_ = true;
  if (held_ && !writing_) WriteNext();
}

void RawStream::WriteNext() {
  writing_ = !outgoing_.empty();
  if (writing_) {
    StartWrite(&outgoing_.front());
  } else if (half_closed_) {
    StartWritesDone();
    StopWriting();
  }
}

void RawStream::OnWriteDone(bool ok) {
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

void RawStream::OnReadDone(bool ok) {
  if (ok) {
    local_error_ = listener_->OnMessage(&incoming_);
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

void RawStream::OnDone(const grpc::Status& status) {
  listener_->OnEnd(local_error_.ok() ? ToAbslStatus(status) : local_error_);
  absl::MutexLock lock(&mutex_);
  done_ = true;
}

// Kept between steps. Those of a run are alike: a few blocks serve all of them.
constexpr size_t kIdleBytes = size_t{256} << 20;

}  // namespace

class TrainStream::Impl final : public RawStreamListener {
 public:
  Impl(const ClientOptions& options, const Model& model, const TrainOptions& train)
      : options_(options), model_(model), most_ahead_(train.pipelined ? 2 : 1) {}

  // Opens the stream and waits for TrainStarted.
  absl::Status Start(Transport* transport, int coordinator, const TrainOptions& options);

  absl::Status SendLookup(int64_t step, absl::Span<const FeatureIds> features,
                          const TrainLookupOptions& options);
  absl::Status SendUpdate(int64_t step, absl::Span<const FeatureGradient> gradients,
                          const UpdateOptions& options);
  std::shared_ptr<float> AllocateGradients(size_t floats);
  absl::StatusOr<TrainLookupResult> ReceiveLookup();
  absl::StatusOr<TrainUpdateResult> ReceiveUpdate();
  bool WaitForLookup(absl::Duration timeout);
  bool WaitForUpdate(absl::Duration timeout);
  absl::Status Finish();

  const v1::TrainStarted& started() const { return started_; }

 private:
  absl::Status OnMessage(grpc::ByteBuffer* message) override;
  void OnEnd(const absl::Status& status) override;
  absl::Status OnStarted(google::protobuf::io::CodedInputStream* input);
  absl::Status OnLookup(google::protobuf::io::CodedInputStream* input);
  absl::Status OnUpdate(google::protobuf::io::CodedInputStream* input);

  std::vector<std::shared_ptr<SharedBlock>> OwnBlocks();
  // OK if another request can be sent.
  absl::Status CheckOpen() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The status of a stream that has ended, where an answer is missing.
  absl::Status MissingAnswer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Sends the lookups whose turn has come, or all.
  void SendHeld(bool all) ABSL_EXCLUSIVE_LOCKS_REQUIRED(send_mutex_, mutex_);
  // Waits until there is one of `results`, or none to wait for; false after `timeout`.
  template <typename Result, typename Expected>
  bool Await(absl::Duration timeout, const std::deque<Result>& results,
             const std::deque<Expected>& expected) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits for the next of `results`, while any is `expected`.
  template <typename Result, typename Expected>
  absl::StatusOr<Result> Receive(const char* what, std::deque<Result>* results,
                                 const std::deque<Expected>& expected)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ClientOptions options_;
  const Model model_;
  // Steps between the next update and the last lookup that leaves before it. Answers come in the
  // order of the requests: the answer to a later lookup, which needs an update that has not been
  // sent, would keep those of earlier updates back.
  const int64_t most_ahead_;
  BufferPool pool_{kIdleBytes};
  SharedMemory* memory_ = nullptr;  // with the coordinator; set by Start

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

absl::Status TrainStream::Impl::Start(Transport* transport, int coordinator,
                                      const TrainOptions& options) {
  memory_ = transport->memory(coordinator);
  memory_->Arena();  // now, when there is time, and not while a step is sent
  stream_ = std::make_unique<RawStream>(transport, coordinator, "/emberd.v1.EmbeddingService/Train",
                                        this);
  std::deque<grpc::ByteBuffer> start;
  start.push_back(EncodeTrainStart(model_, options));
  stream_->Send(std::move(start));
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

absl::Status TrainStream::Impl::CheckOpen() {
  if (half_closed_) return absl::FailedPreconditionError("nothing can be sent after Finish");
  return end_.has_value() ? MissingAnswer() : absl::OkStatus();
}

absl::Status TrainStream::Impl::MissingAnswer() {
  return end_->ok() ? absl::InternalError("the server ended the stream without an answer") : *end_;
}

absl::Status TrainStream::Impl::SendLookup(int64_t step, absl::Span<const FeatureIds> features,
                                           const TrainLookupOptions& options) {
  ExpectedLookup expected;
  auto messages = EncodeTrainLookup(model_, step, features, options_.activation_type,
                                    options.concat, &expected, memory_);
  if (!messages.ok()) return messages.status();
  absl::MutexLock sending(&send_mutex_);
  absl::MutexLock lock(&mutex_);
  if (absl::Status status = CheckOpen(); !status.ok()) return status;
  expected.Lend();
  lookups_.emplace_back(std::move(expected), &pool_);
  held_.push_back({step, *std::move(messages)});
  SendHeld(/*all=*/step != next_lookup_);  // out of its turn: the server says so
  next_lookup_ = step + 1;
  return absl::OkStatus();
}

void TrainStream::Impl::SendHeld(bool all) {
  while (!held_.empty() && (all || held_.front().step <= next_update_ + most_ahead_)) {
    stream_->Send(std::move(held_.front().messages));
    held_.pop_front();
  }
}

absl::Status TrainStream::Impl::SendUpdate(int64_t step,
                                           absl::Span<const FeatureGradient> gradients,
                                           const UpdateOptions& options) {
  // Without `memory` all of them are copied, for the caller may change them at once.
  SharedGradients shared(memory_, options.memory != nullptr
                                      ? OwnBlocks()
                                      : std::vector<std::shared_ptr<SharedBlock>>());
  auto encoder = UpdateEncoder::Make(model_, step, gradients, options, options_.gradient_type,
                                     &pool_, &shared);
  if (!encoder.ok()) return encoder.status();
  absl::MutexLock sending(&send_mutex_);
  {
    absl::MutexLock lock(&mutex_);
    if (absl::Status status = CheckOpen(); !status.ok()) return status;
    shared.Lend();
    updates_.push_back({step, std::move(shared)});
  }
  while (std::optional<grpc::ByteBuffer> part = encoder->Next()) {
    std::deque<grpc::ByteBuffer> parts;
    parts.push_back(*std::move(part));
    stream_->Send(std::move(parts));
  }
  absl::MutexLock lock(&mutex_);
  next_update_ = step + 1;
  SendHeld(/*all=*/false);
  return absl::OkStatus();
}

std::shared_ptr<float> TrainStream::Impl::AllocateGradients(size_t floats) {
  std::shared_ptr<SharedBlock> block = memory_->Take(floats * sizeof(float));
  if (block == nullptr) return TakeFloats(&pool_, floats);
  absl::MutexLock lock(&mutex_);
  own_blocks_.push_back(block);
  auto* const data = reinterpret_cast<float*>(block->data());
  return {std::move(block), data};
}

std::vector<std::shared_ptr<SharedBlock>> TrainStream::Impl::OwnBlocks() {
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

template <typename Result, typename Expected>
bool TrainStream::Impl::Await(absl::Duration timeout, const std::deque<Result>& results,
                              const std::deque<Expected>& expected) {
  const auto settled = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !results.empty() || expected.empty() || end_.has_value();
  };
  return AwaitSteadily(&mutex_, absl::Condition(&settled), timeout);
}

template <typename Result, typename Expected>
absl::StatusOr<Result> TrainStream::Impl::Receive(const char* what, std::deque<Result>* results,
                                                  const std::deque<Expected>& expected) {
  Await(absl::InfiniteDuration(), *results, expected);
  if (!results->empty()) {
    Result result = std::move(results->front());
    results->pop_front();
    return result;
  }
  if (end_.has_value() && (!end_->ok() || !expected.empty())) return MissingAnswer();
  return absl::FailedPreconditionError(absl::StrCat("no ", what, " awaits its answer"));
}

absl::StatusOr<TrainLookupResult> TrainStream::Impl::ReceiveLookup() {
  absl::MutexLock lock(&mutex_);
  return Receive("lookup", &lookup_results_, lookups_);
}

absl::StatusOr<TrainUpdateResult> TrainStream::Impl::ReceiveUpdate() {
  absl::MutexLock lock(&mutex_);
  return Receive("update", &update_results_, updates_);
}

bool TrainStream::Impl::WaitForLookup(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  return Await(timeout, lookup_results_, lookups_);
}

bool TrainStream::Impl::WaitForUpdate(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  return Await(timeout, update_results_, updates_);
}

absl::Status TrainStream::Impl::Finish() {
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

absl::Status TrainStream::Impl::OnMessage(grpc::ByteBuffer* message) {
  grpc::ProtoBufferReader reader(message);
  if (!reader.status().ok()) return ToAbslStatus(reader.status());
  google::protobuf::io::CodedInputStream input(&reader);
  constexpr uint32_t kLengthDelimited = 2;
  const uint32_t tag = input.ReadTag();
  const auto limit = input.ReadLengthAndPushLimit();
  absl::Status status = absl::InternalError("the server sent an invalid TrainResponse");
  if ((tag & 7) == kLengthDelimited) {
    switch (tag >> 3) {
      case v1::TrainResponse::kStartedFieldNumber:
        status = OnStarted(&input);
        break;
      case v1::TrainResponse::kLookupFieldNumber:
        status = OnLookup(&input);
        break;
      case v1::TrainResponse::kUpdateFieldNumber:
        status = OnUpdate(&input);
        break;
    }
  }
  input.PopLimit(limit);
  return status;
}

absl::Status TrainStream::Impl::OnStarted(google::protobuf::io::CodedInputStream* input) {
  absl::MutexLock lock(&mutex_);
  if (has_started_ || !started_.MergeFromCodedStream(input)) {
    return absl::InternalError("the server sent an invalid or a second TrainStarted");
  }
  next_lookup_ = next_update_ = started_.next_step();
  has_started_ = true;
  return absl::OkStatus();
}

absl::Status TrainStream::Impl::OnLookup(google::protobuf::io::CodedInputStream* input) {
  LookupAssembler* assembler = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (lookups_.empty())
      return absl::InternalError("the server answered a lookup that was not sent");
    assembler = &lookups_.front();
  }
  const absl::StatusOr<bool> complete = assembler->Add(input);
  if (!complete.ok()) return complete.status();
  if (!*complete) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  lookup_results_.push_back(assembler->Take());
  lookups_.pop_front();
  return absl::OkStatus();
}

absl::Status TrainStream::Impl::OnUpdate(google::protobuf::io::CodedInputStream* input) {
  v1::TrainUpdateResult message;
  const bool good = message.MergeFromCodedStream(input);
  absl::MutexLock lock(&mutex_);
  if (!good || updates_.empty() || message.step() != updates_.front().step) {
    return absl::InternalError(absl::StrCat("the server answered an update of step ",
                                            message.step(), ", but another step is next"));
  }
  updates_.front().shared.Settle();
  updates_.pop_front();
  update_results_.push_back({message.step(), message.rows_updated(), DecodeTimes(message.times()),
                             message.rows_skipped(), message.checkpoint(),
                             message.checkpoint_error()});
  return absl::OkStatus();
}

void TrainStream::Impl::OnEnd(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  for (SentUpdate& update : updates_) update.shared.Part();
  end_ = status;
}

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
  const bool any = options.coordinator < 0;
  const int coordinator = any ? transport->current() : options.coordinator;
  auto impl = std::make_unique<Impl>(client_options, model, options);
  const absl::Status status = impl->Start(transport, coordinator, options);
  if (any && absl::IsUnavailable(status)) transport->MoveOn(coordinator);
  if (!status.ok()) return status;
  return std::unique_ptr<TrainStream>(new TrainStream(std::move(impl)));
}

TrainStream::TrainStream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TrainStream::~TrainStream() = default;

int64_t TrainStream::next_step() const { return impl_->started().next_step(); }
uint64_t TrainStream::generation() const { return impl_->started().generation(); }
uint64_t TrainStream::made_generation() const { return impl_->started().made_generation(); }

absl::Status TrainStream::SendLookup(int64_t step, absl::Span<const FeatureIds> features,
                                     const TrainLookupOptions& options) {
  return impl_->SendLookup(step, features, options);
}
absl::Status TrainStream::SendUpdate(int64_t step, absl::Span<const FeatureGradient> gradients,
                                     const UpdateOptions& options) {
  return impl_->SendUpdate(step, gradients, options);
}
std::shared_ptr<float> TrainStream::AllocateGradients(size_t floats) {
  return impl_->AllocateGradients(floats);
}
absl::StatusOr<TrainLookupResult> TrainStream::ReceiveLookup() { return impl_->ReceiveLookup(); }
absl::StatusOr<TrainUpdateResult> TrainStream::ReceiveUpdate() { return impl_->ReceiveUpdate(); }
bool TrainStream::WaitForLookup(absl::Duration timeout) { return impl_->WaitForLookup(timeout); }
bool TrainStream::WaitForUpdate(absl::Duration timeout) { return impl_->WaitForUpdate(timeout); }
absl::Status TrainStream::Finish() { return impl_->Finish(); }

}  // namespace emberd::client
