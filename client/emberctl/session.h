// What every command needs: the cluster, the common options, and where to write.
#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/transport.h"

namespace emberd::emberctl {

// Not thread-safe.
class Session {
 public:
  explicit Session(std::ostream& out) : out(out) {}

  // Connects if need be, then calls as client::Transport::Call does.
  absl::Status Call(client::Transport::Attempt attempt);

  // Set by the command line.
  std::vector<std::string> addresses;
  bool json = false;
  double timeout_seconds = 10;

  std::ostream& out;

 private:
  std::unique_ptr<client::Transport> transport_;
};

}  // namespace emberd::emberctl
