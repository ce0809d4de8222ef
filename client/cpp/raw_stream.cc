#include "client/cpp/raw_stream.h"

#include <iterator>
#include <utility>

#include <grpcpp/channel.h>

namespace emberd::client {

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

}  // namespace emberd::client
