#include "server/rpc/message_stream.h"

#include "base/rpc/wire.h"
#include "base/steady_time.h"

namespace emberd::rpc {

void ServerMessageStream::Close(const absl::Status& status) { Finish(ToGrpcStatus(status)); }

void ServerMessageStream::Write(OutgoingMessage message, bool last) {
  close_after_write_ = last;
  outgoing_ = SplitMessage(std::move(message));
  WriteNextPart();
}

void ServerMessageStream::WriteNextPart() {
  if (close_after_write_ && outgoing_.size() == 1) {
    // Both in one piece to the network. OnDone comes next, whether it got there or not.
    StartWriteAndFinish(&outgoing_.front(), grpc::WriteOptions(), grpc::Status::OK);
  } else {
    StartWrite(&outgoing_.front());
  }
}

void ServerMessageStream::OnReadDone(bool ok) {
  if (!ok) {
    OnPeerGone();
    return;
  }
  absl::StatusOr<std::optional<IncomingMessage>> message = assembler_.Add(incoming_);
  incoming_.Clear();
  if (!message.ok()) {
    Close(message.status());
  } else if (message->has_value()) {
    OnMessage(*std::move(*message));
  } else {
    StartRead(&incoming_);
  }
}

void ServerMessageStream::OnWriteDone(bool ok) {
  if (!ok) {
    // If not close_after_write_, the subclass may still hold something for this call; OnPeerGone
    // gives it back.
    outgoing_.clear();
    if (close_after_write_) {
      Close(absl::CancelledError("the caller is gone"));
    } else {
      OnPeerGone();
    }
    return;
  }
  outgoing_.pop_front();
  if (!outgoing_.empty()) {
    WriteNextPart();
  } else {
    StartRead(&incoming_);
  }
}

MessageChannel::~MessageChannel() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](int64_t* calls) { return *calls == 0; }, &calls_));
}

ClientMessageStream::ClientMessageStream(MessageChannel* channel, const std::string& method,
                                         CallContext* context, const MessageLimits& limits)
    : call_(new ClientMessageCall(channel, limits)) {
  watch_.emplace(context, [call = call_] { call->Cancel(); });
  call_->Start(method, *context);
}

ClientMessageStream::~ClientMessageStream() {
  watch_.reset();
  call_->Release();
}

ClientMessageCall::ClientMessageCall(MessageChannel* channel, const MessageLimits& limits)
    : channel_(channel), assembler_(limits) {
  absl::MutexLock lock(&channel_->mutex_);
  ++channel_->calls_;
}

void ClientMessageCall::Start(const std::string& method, const CallContext& context) {
  client_context_.set_deadline(ToSystemTime(context.deadline()));
  SendTrace(context.trace(), &client_context_);
  // Sent with the first message, in one piece.
  client_context_.set_initial_metadata_corked(true);
  channel_->stub_.PrepareBidiStreamingCall(&client_context_, method, grpc::StubOptions(), this);
  // Send runs outside of reactions: the hold keeps OnDone away until no more of that can happen.
  AddHold();
  StartRead(&incoming_);
  StartCall();
}

void ClientMessageCall::Release() {
  {
    absl::MutexLock lock(&mutex_);
    released_ = true;
    if (!final_status_.has_value()) {
      client_context_.TryCancel();
      ReleaseHold();
      return;  // OnDone deletes it
    }
  }
  Delete();
}

void ClientMessageCall::Delete() {
  MessageChannel* const channel = channel_;
  delete this;  // with its reference to gRPC's channel
  absl::MutexLock lock(&channel->mutex_);
  --channel->calls_;
}

void ClientMessageCall::ReleaseHold() {
  if (!held_) return;
  held_ = false;
  broken_ = true;
  RemoveHold();
}

void ClientMessageCall::Send(OutgoingMessage message) {
  std::deque<grpc::ByteBuffer> parts = SplitMessage(std::move(message));
  absl::MutexLock lock(&mutex_);
  if (broken_) return;
  for (grpc::ByteBuffer& part : parts) outgoing_.push_back(std::move(part));
  if (!writing_) {
    writing_ = true;
    StartWrite(&outgoing_.front());
  }
}

void ClientMessageCall::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  outgoing_.pop_front();
  if (!ok) {
    broken_ = true;
    outgoing_.clear();
  }
  if (outgoing_.empty()) {
    writing_ = false;
  } else {
    StartWrite(&outgoing_.front());
  }
}

void ClientMessageCall::OnReadDone(bool ok) {
  bool more = false;
  if (ok) {
    absl::StatusOr<std::optional<IncomingMessage>> message = assembler_.Add(incoming_);
    incoming_.Clear();
    absl::MutexLock lock(&mutex_);
    if (!message.ok()) {
      local_error_ = message.status();
      client_context_.TryCancel();
    } else {
      if (message->has_value()) inbox_.push_back(*std::move(*message));
      more = true;
    }
  }
  if (more) {
    StartRead(&incoming_);
    return;
  }
  absl::MutexLock lock(&mutex_);
  reads_over_ = true;
}

void ClientMessageCall::OnDone(const grpc::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    final_status_ = local_error_.ok() ? FromGrpcStatus(status) : local_error_;
    if (!released_) return;  // Release deletes it
  }
  Delete();
}

absl::StatusOr<IncomingMessage> ClientMessageCall::Receive() {
  absl::MutexLock lock(&mutex_);
  const auto message_or_end = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !inbox_.empty() || reads_over_;
  };
  mutex_.Await(absl::Condition(&message_or_end));
  if (!inbox_.empty()) {
    IncomingMessage message = std::move(inbox_.front());
    inbox_.pop_front();
    return message;
  }
  ReleaseHold();
  mutex_.Await(absl::Condition(
      +[](std::optional<absl::Status>* status) { return status->has_value(); }, &final_status_));
  if (final_status_->ok())
    return absl::InternalError("the peer ended the stream without an answer");
  return *final_status_;
}

}  // namespace emberd::rpc
