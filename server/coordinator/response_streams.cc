#include "server/coordinator/response_streams.h"

#include <utility>

#include "base/steady_time.h"
#include "server/security/callers.h"

namespace emberd::coordinator {

StreamWatch::Place::Place(StreamWatch* watch, const grpc::ServerContextBase* context)
    : watch_(watch), context_(context) {
  if (watch_ == nullptr) return;
  absl::MutexLock lock(&watch_->mutex_);
  watch_->places_.insert(this);
}

StreamWatch::Place::~Place() {
  if (watch_ == nullptr) return;
  absl::MutexLock lock(&watch_->mutex_);
  watch_->places_.erase(this);
}

void StreamWatch::Place::BeginSending() { Set(SteadyNow()); }
void StreamWatch::Place::EndSending() { Set(absl::InfiniteFuture()); }

void StreamWatch::Place::Set(absl::Time since) {
  if (watch_ == nullptr) return;
  absl::MutexLock lock(&watch_->mutex_);
  since_ = since;
}

void StreamWatch::EndStuck() {
  absl::MutexLock lock(&mutex_);
  const absl::Time latest = SteadyNow() - patience_;
  for (Place* place : places_) {
    if (place->since_ > latest) continue;
    place->since_ = absl::InfiniteFuture();
    place->context_->TryCancel();
  }
}

StreamCall::StreamCall(const CallEnvironment& environment,
                       const grpc::CallbackServerContext& server_context, ops::Rpc rpc,
                       absl::Duration limit)
    : environment(environment),
      client(security::ClientName(server_context)),
      context(DeadlineOf(server_context, limit), rpc::TraceOf(server_context)),
      timer(environment.metrics, rpc),
      watched(environment.streams, &server_context) {}

absl::Status StreamCall::Admit() {
  ASSIGN_OR_RETURN(grant, environment.admission->Admit(client, 0));
  const bool draining = environment.drain != nullptr && environment.drain->draining();
  return draining ? DrainingError() : absl::OkStatus();
}

absl::Status StreamCall::Submit(std::function<void()> work) {
  if (environment.queue->Submit(std::move(work))) return absl::OkStatus();
  return QueueFullError(environment);
}

}  // namespace emberd::coordinator
