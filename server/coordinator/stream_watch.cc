#include "server/coordinator/stream_watch.h"

#include <grpcpp/server_context.h>

#include "base/steady_time.h"

namespace emberd::server {

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

}  // namespace emberd::server
