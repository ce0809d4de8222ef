// A gRPC call that never becomes one: its message is announced, and sent as far as the caller
// likes. No gRPC library would do that, so the frames of HTTP/2 (RFC 9113) are written by hand.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/file_descriptor.h"

namespace emberd::testing {

class HalfCall {
 public:
  using Headers = std::vector<std::pair<std::string, std::string>>;
  // Calls `method` ("/package.Service/Method") at "host:port" and announces a message of
  // `message_bytes`, of which nothing is sent yet.
  HalfCall(const std::string& address, const std::string& method, uint32_t message_bytes,
           const Headers& metadata = {});

  // Sends `bytes` of the message, as far as the server takes them within `patience`. False: the
  // server has ended the call or the connection.
  bool Send(int64_t bytes, absl::Duration patience);
  int64_t sent() const { return sent_; }

 private:
  bool Write(const std::string& bytes);
  // Reads what is there, for at most `patience`. False: the call is over.
  bool TakeFrames(absl::Duration patience);
  bool TakeFrame(int type, int flags, uint32_t stream, const std::string& payload);

  FileDescriptor socket_;
  std::string received_;
  int64_t connection_window_ = 65535;
  int64_t stream_window_ = 65535;
  int64_t first_window_ = 65535;  // what the server says that of a new stream is
  int64_t sent_ = 0;
  bool open_ = false;
};

}  // namespace emberd::testing
