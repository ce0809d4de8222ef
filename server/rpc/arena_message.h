// A protobuf message of many small parts, whose memory is taken and given back in one go.
#pragma once

#include <cstddef>

#include <google/protobuf/arena.h>

namespace emberd::rpc {

template <typename Message>
class ArenaMessage {
 public:
  ArenaMessage() : arena_(block_, sizeof(block_)) {
    message_ = google::protobuf::Arena::CreateMessage<Message>(&arena_);
  }
  ArenaMessage(const ArenaMessage&) = delete;
  ArenaMessage& operator=(const ArenaMessage&) = delete;

  // Lives as long as this does.
  Message& operator*() { return *message_; }
  Message* operator->() { return message_; }

 private:
  static constexpr size_t kBlockBytes = size_t{8} << 10;  // holds a small message

  alignas(std::max_align_t) char block_[kBlockBytes];
  google::protobuf::Arena arena_;
  Message* message_;
};

}  // namespace emberd::rpc
