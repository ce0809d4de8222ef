#include "server/coordinator/train/train_streams.h"

#include <utility>

#include "absl/status/status.h"
#include "base/steady_wait.h"
#include "server/coordinator/train/train_stream.h"
#include "server/security/callers.h"

namespace emberd::server {
namespace {

absl::Status Stopping() {
  return absl::UnavailableError(
      "the coordinator is stopping; start the stream again at another one");
}

}  // namespace

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
                                 grant.ok() ? *std::move(grant) : Admission::Grant());
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

void TrainStreams::EndSilent() {
  absl::MutexLock lock(&mutex_);
  for (TrainStream* stream : streams_) stream->EndIfSilent(limits_.silence);
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

}  // namespace emberd::server
