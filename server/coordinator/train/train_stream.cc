#include "server/coordinator/train/train_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/rpc/wire.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/security/security.h"
#include "server/step/activations.h"

namespace emberd::coordinator {
namespace {

absl::StatusOr<std::deque<grpc::ByteBuffer>> OneMessage(const v1::TrainResponse& response) {
  std::deque<grpc::ByteBuffer> messages;
  ASSIGN_OR_RETURN(messages.emplace_back(), rpc::EncodeMessage(response));
  return messages;
}

// A trainer that follows the order of steps takes each lookup before it sends what the lookup after
// the next waits for. So this slows nobody down who reads.
constexpr size_t kMaxUntakenLookups = 2;
// Requests that were read and whose answers have not been taken. More than any order of steps
// needs.
constexpr int64_t kMaxUnanswered = 4 * TrainSession::kMaxLookupsAhead;
// A stream without its start message is no training yet.
constexpr absl::Duration kMaxSilenceBeforeStart = absl::Seconds(30);

absl::Status Silent(absl::Duration silence, bool has_start) {
  return absl::DeadlineExceededError(absl::StrCat(
      "the trainer has sent nothing for ", absl::FormatDuration(silence),
      has_start ? " (timeouts.silent_stream_ms); its stream is ended, and it may start a new one"
                : ", not even the start of its stream"));
}

absl::Status Stopping() {
  return absl::UnavailableError(
      "the coordinator is stopping; start the stream again at another one");
}

}  // namespace

TrainStream::TrainStream(TrainStreams* streams, const CoordinatorResources* resources,
                         const CallEnvironment& environment,
                         const grpc::CallbackServerContext& server_context,
                         rpc::Admission::Grant grant)
    : streams_(streams),
      resources_(resources),
      environment_(environment),
      server_context_(&server_context),
      timer_(environment.metrics, ops::Rpc::kTrain),
      context_(absl::InfiniteFuture(), rpc::TraceOf(server_context)),
      grant_(std::move(grant)),
      last_sign_(SteadyNow()) {
  context_.SetRoomMaker(
      [this](int64_t bytes, absl::string_view what, bool) { return MakeRoom(bytes, what); });
}

void TrainStream::OnReadDone(bool ok) {
  absl::Status status;
  const bool is_start = !begun_;
  if (ok) {
    // Once the start is taken, another thread may begin the next read.
    grpc::ByteBuffer bytes;
    bytes.Swap(&incoming_);
    status = Take(bytes);
  } else if (!begun_) {
    status = absl::InvalidArgumentError("the stream ended before its start");
  } else if (assembler_.in_request()) {
    status = absl::InvalidArgumentError("the stream ended in the middle of a request");
  }
  if (!status.ok()) {
    Stop(status);
    return;
  }
  std::optional<absl::Status> end;
  {
    absl::MutexLock lock(&mutex_);
    last_sign_ = SteadyNow();
    if (no_more_) return;
    if (ok) {
      // After the start, RunLookups goes on reading when it knows the step.
      if (!is_start) ReadOn();
      return;
    }
    no_more_ = true;
    end_place_ = next_place_;
    if (session_ != nullptr) session_->EndRequests();
    end = WriteDue();
    if (!end.has_value()) end = EndIfDrained();
  }
  if (end.has_value()) End(*end);
}

void TrainStream::Stop(const absl::Status& status) {
  std::optional<absl::Status> end;
  bool starting = false;
  {
    absl::MutexLock lock(&mutex_);
    if (no_more_) return;
    no_more_ = stopped_ = true;
    starting = session_ == nullptr;
    if (!starting) session_->Fail(status);
    const bool started = write_place_ > 0 || answers_.count(0) > 0;
    EndAt(started ? next_place_ : 0, status);
    end = WriteDue();
  }
  if (starting) context_.Cancel();
  if (end.has_value()) End(*end);
}

void TrainStream::SetDraining(bool draining) {
  std::optional<absl::Status> end;
  bool starting = false;
  {
    absl::MutexLock lock(&mutex_);
    draining_ = draining;
    starting = draining && session_ == nullptr;
    if (!starting) end = EndIfDrained();
  }
  if (starting) Stop(DrainingError());
  if (end.has_value()) End(*end);
}

void TrainStream::EndIfSilent(absl::Duration silence, absl::Duration standstill) {
  bool has_start = false;
  {
    absl::MutexLock lock(&mutex_);
    last_sign_ = std::min(last_sign_ + standstill, SteadyNow());  // some came after it
    has_start = has_start_;
    if (!has_start) silence = std::min(silence, kMaxSilenceBeforeStart);
    if (done_ || working_ > 0 || SteadyNow() - last_sign_ < silence) return;
    // The trainer would not take what must be written before the status, either.
    if (writing_ || no_more_) {
      server_context_->TryCancel();
      return;
    }
  }
  Stop(Silent(silence, has_start));
}

std::optional<absl::Status> TrainStream::EndIfDrained() {
  if (!refused_place_.has_value() && (!draining_ || no_more_)) return std::nullopt;
  // After the last request, a step without an update will not get one.
  const int64_t under_way = end_place_.has_value() ? pending_updates_ : open_steps_;
  if (under_way > 0 || session_ == nullptr) return std::nullopt;
  no_more_ = true;
  session_->Fail(DrainingError());
  EndAt(next_place_, DrainingError());
  return WriteDue();
}

absl::Status TrainStream::Take(const grpc::ByteBuffer& bytes) {
  v1::TrainRequest message;
  RETURN_IF_ERROR(rpc::DecodeMessage(bytes, &message));
  const auto length = static_cast<int64_t>(bytes.Length());
  timer_.AddRequestBytes(length);
  if (!std::exchange(begun_, true)) {
    if (!message.has_start()) {
      return absl::InvalidArgumentError("start: it is not set in the first message");
    }
    return TakeStart(std::move(*message.mutable_start()));
  }
  {
    absl::MutexLock lock(&mutex_);
    RETURN_IF_ERROR(grant_.AddBytes(length));
  }
  ASSIGN_OR_RETURN(auto request, assembler_.Add(&message, length));
  return request.has_value() ? TakeRequest(*std::move(request)) : absl::OkStatus();
}

absl::Status TrainStream::TakeStart(v1::TrainStart start) {
  absl::MutexLock lock(&mutex_);
  if (no_more_) return absl::OkStatus();
  RETURN_IF_ERROR(streams_->workers_.SubmitPair(
      [this, start = std::move(start)] { RunLookups(start); }, [this] { RunUpdates(); },
      [this] {
        return absl::StrCat(
            streams_->limits_.max_streams,
            " training streams are open already; budgets.max_train_streams allows no more");
      }));
  workers_ = 2;
  references_ += 2;
  has_start_ = true;
  ++working_;
  return absl::OkStatus();
}

absl::Status TrainStream::TakeRequest(step::TrainStepRequest request) {
  absl::MutexLock lock(&mutex_);
  if (no_more_) return absl::OkStatus();
  const bool is_lookup = request.lookup.has_value();
  if (is_lookup && (draining_ || refused_place_.has_value())) {
    grant_.ReleaseBytes(request.bytes);
    return RefuseLookup();
  }
  RETURN_IF_ERROR(is_lookup ? session_->AdmitLookup(request.step)
                            : session_->AdmitUpdate(request.step));
  ++(is_lookup ? open_steps_ : pending_updates_);
  (is_lookup ? lookups_ : updates_).push_back({next_place_++, std::move(request)});
  return absl::OkStatus();
}

absl::Status TrainStream::RefuseLookup() {
  // A pipelined group's updates wait for the next lookups of all ranks, so no step can be finished
  // without beginning another.
  if (open_steps_ == 0 || session_->pipelined()) return DrainingError();
  if (!refused_place_.has_value()) refused_place_ = next_place_;
  ++next_place_;
  return absl::OkStatus();
}

std::optional<TrainStream::Work> TrainStream::Next(std::deque<Work>* queue) {
  const auto ready = [&]()
                         ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !queue->empty() || no_more_; };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&ready));
  if (queue->empty()) return std::nullopt;
  Work work = std::move(queue->front());
  queue->pop_front();
  ++working_;
  return work;
}

absl::StatusOr<rpc::CallContext::Room> TrainStream::MakeRoom(int64_t bytes,
                                                             absl::string_view what) {
  const auto may_go_on = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return untaken_lookups_.size() < kMaxUntakenLookups || stopped_ || finished_;
  };
  absl::MutexLock lock(&mutex_);
  if (!may_go_on()) {
    --working_;  // now the trainer is waited for
    mutex_.Await(absl::Condition(&may_go_on));
    ++working_;
  }
  if (stopped_ || finished_) return absl::CancelledError("the stream has ended");
  return grant_.Reserve(bytes, what);
}

void TrainStream::RunLookups(const v1::TrainStart& start) {
  auto started = TrainSession::Start(*resources_, start, &context_);
  if (!started.ok()) {
    Deliver(0, started.status());
    WorkerDone();
    return;
  }
  TrainSession* const session = started->get();
  v1::TrainResponse response;
  *response.mutable_started() = session->started();
  Deliver(0, OneMessage(response));
  {
    absl::MutexLock lock(&mutex_);
    session_ = *std::move(started);
    if (!no_more_) ReadOn();
  }
  while (std::optional<Work> work = Next(&lookups_)) {
    const step::TrainStepRequest& request = work->request;
    auto output = session->Lookup(request);
    if (output.ok()) {
      ops::StageTimer timer(resources_->metrics, ops::Stage::kEncode);
      Deliver(work->place, step::EncodeTrainLookup(request.step, output->lookup, output->times),
              /*of_lookup=*/true);
    } else {
      Deliver(work->place, output.status());
    }
    absl::MutexLock lock(&mutex_);
    grant_.ReleaseBytes(request.bytes);
  }
  WorkerDone();
}

void TrainStream::RunUpdates() {
  while (std::optional<Work> work = Next(&updates_)) {
    TrainSession* session = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      session = session_.get();
    }
    auto result = session->Update(work->request);
    {
      // Before the answer goes: with it, the trainer may send as much again at once.
      absl::MutexLock lock(&mutex_);
      grant_.ReleaseBytes(work->request.bytes);
    }
    if (result.ok()) {
      v1::TrainResponse response;
      *response.mutable_update() = *std::move(result);
      Deliver(work->place, OneMessage(response));
    } else {
      Deliver(work->place, result.status());
    }
    std::optional<absl::Status> end;
    {
      absl::MutexLock lock(&mutex_);
      --open_steps_;
      --pending_updates_;
      end = EndIfDrained();
    }
    if (end.has_value()) End(*end);
  }
  WorkerDone();
}

void TrainStream::WorkerDone() {
  std::unique_ptr<TrainSession> session;
  bool at_end = false;
  {
    absl::MutexLock lock(&mutex_);
    if (workers_ == 1 && session_ != nullptr) {
      const auto over = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return AtEnd() || done_ || session_->failed();
      };
      mutex_.Await(absl::Condition(&over));
      session = std::move(session_);
      at_end = AtEnd();
      if (at_end) finished_ = true;
    }
    --workers_;
  }
  if (at_end) {
    session->Leave();
    End(absl::OkStatus());
    // The end of the requests looks the same whether the trainer has closed its stream or is gone;
    // only the end of the call tells.
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&done_));
  }
  if (session != nullptr) session->Finish();
  session.reset();
  Unref();
}

void TrainStream::Deliver(int64_t place, absl::StatusOr<Messages> answer, bool of_lookup) {
  std::optional<absl::Status> end;
  {
    absl::MutexLock lock(&mutex_);
    --working_;
    last_sign_ = SteadyNow();
    if (answer.ok()) {
      if (of_lookup) untaken_lookups_.insert(place);
      const auto [known, is_new] = answers_.try_emplace(place, *std::move(answer));
      if (is_new) {  // else the stream ends there
        for (const grpc::ByteBuffer& message : *known->second) {
          timer_.AddResponseBytes(static_cast<int64_t>(message.Length()));
        }
      }
    } else {
      no_more_ = true;
      EndAt(place, answer.status());
    }
    end = WriteDue();
  }
  if (end.has_value()) End(*end);
}

void TrainStream::EndAt(int64_t place, const absl::Status& status) {
  answers_.try_emplace(std::min(place, refused_place_.value_or(place)), status);
}

std::optional<absl::Status> TrainStream::WriteDue() {
  while (!writing_ && !finished_) {
    if (AtEnd()) {
      if (workers_ > 0) return std::nullopt;  // WorkerDone ends it
      finished_ = true;
      return absl::OkStatus();
    }
    const auto found = answers_.find(write_place_);
    if (found == answers_.end()) return std::nullopt;
    absl::StatusOr<Messages>& due = found->second;
    if (!due.ok()) {
      finished_ = true;
      return due.status();
    }
    if (due->empty()) {
      answers_.erase(found);
      AnswerTaken();
      continue;
    }
    outgoing_ = std::move(due->front());
    due->pop_front();
    writing_ = true;
    StartWrite(&outgoing_);
  }
  return std::nullopt;
}

void TrainStream::AnswerTaken() {
  untaken_lookups_.erase(write_place_++);
  if (std::exchange(read_waits_, false) && !no_more_) ReadOn();
}

void TrainStream::ReadOn() {
  read_waits_ = next_place_ - write_place_ >= kMaxUnanswered;
  if (!read_waits_) StartRead(&incoming_);
}

void TrainStream::OnWriteDone(bool ok) {
  std::optional<absl::Status> end;
  {
    absl::MutexLock lock(&mutex_);
    last_sign_ = SteadyNow();
    outgoing_.Clear();  // its memory counts until then
    writing_ = false;
    if (ok) {
      end = WriteDue();
    } else if (!std::exchange(finished_, true)) {
      end = absl::CancelledError("the trainer is gone");
    }
  }
  if (end.has_value()) End(*end);
}

void TrainStream::OnCancel() {
  context_.Cancel();
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(finished_, true)) return;
  }
  End(absl::CancelledError("the trainer is gone"));
}

void TrainStream::End(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    no_more_ = true;
  }
  if (!status.ok()) context_.Cancel();
  timer_.Finish(status.code());
  Finish(rpc::ToGrpcStatus(status));
}

void TrainStream::OnDone() {
  {
    absl::MutexLock lock(&mutex_);
    done_ = true;
  }
  Unref();
}

void TrainStream::Unref() {
  {
    absl::MutexLock lock(&mutex_);
    if (--references_ > 0) return;
  }
  streams_->Remove(this);
  delete this;
}

TrainStreams::TrainStreams(const CoordinatorResources* resources,
                           const CallEnvironment& environment, BlockingPool* threads,
                           const Limits& limits)
    : resources_(resources),
      environment_(environment),
      limits_(limits),
      workers_(threads, 2 * limits.max_streams, /*max_queued=*/0) {}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* TrainStreams::Start(
    const grpc::CallbackServerContext& server_context) {
  auto grant = environment_.admission->Admit(security::ClientName(server_context), 0);
  const absl::Status refusal = grant.status();
  auto* stream = new TrainStream(this, resources_, environment_, server_context,
                                 grant.ok() ? *std::move(grant) : rpc::Admission::Grant());
  absl::MutexLock lock(&mutex_);
  streams_.insert(stream);
  environment_.metrics->Set(ops::MetricId::kTrainStreams, static_cast<double>(streams_.size()));
  if (stopping_) {
    stream->Stop(Stopping());
  } else if (draining_) {
    stream->Stop(DrainingError());
  } else if (!refusal.ok()) {
    stream->Stop(refusal);
  } else {
    stream->Begin();
  }
  return stream;
}

void TrainStreams::Stop() {
  absl::MutexLock lock(&mutex_);
  stopping_ = true;
  for (TrainStream* stream : streams_) stream->Stop(Stopping());
}

void TrainStreams::SetDraining(bool draining) {
  absl::MutexLock lock(&mutex_);
  draining_ = draining;
  for (TrainStream* stream : streams_) stream->SetDraining(draining);
}

void TrainStreams::EndSilent(absl::Duration standstill) {
  absl::MutexLock lock(&mutex_);
  for (TrainStream* stream : streams_) stream->EndIfSilent(limits_.silence, standstill);
}

int TrainStreams::count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(streams_.size());
}

void TrainStreams::AwaitNone(absl::Duration limit) const {
  const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return streams_.empty(); };
  absl::MutexLock lock(&mutex_);
  AwaitSteadily(&mutex_, absl::Condition(&none), limit);
}

void TrainStreams::Remove(TrainStream* stream) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(stream);
  environment_.metrics->Set(ops::MetricId::kTrainStreams, static_cast<double>(streams_.size()));
}

}  // namespace emberd::coordinator
