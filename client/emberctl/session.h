// What every command needs: the cluster, the common options, and where to write.
#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/options.h"
#include "client/cpp/transport.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/embedding_service.pb.h"

namespace emberd::emberctl {

// Not thread-safe.
class Session {
 public:
  explicit Session(std::ostream& out) : out(out) {}

  // The same options, but for this coordinator alone.
  Session At(const std::string& address) const;

  // Connects if need be, then calls as client::Transport::Call does. `deadline` zero: --timeout.
  absl::Status Call(client::Transport::Attempt attempt,
                    absl::Duration deadline = absl::ZeroDuration());

  // OK if something listens at one of the addresses. For commands that make clients themselves;
  // Call does so first.
  absl::Status CheckReachable() const;

  // Calls that several verbs need.
  absl::StatusOr<v1::GetStatusResponse> GetStatus();
  absl::StatusOr<v1::DescribeModelResponse> DescribeModel(const std::string& name);

  // For clients that a command makes itself: all `addresses`, and how to connect to them.
  client::ClientOptions client_options() const;

  // Set by the command line.
  std::vector<std::string> addresses;
  bool json = false;
  double timeout_seconds = 10;
  // PEM files; any of them makes connections TLS (client::TlsOptions). And a file with a token.
  std::string ca_file;
  std::string certificate_file;
  std::string key_file;
  std::string token_file;
  bool terminal = false;  // `out` is one

  std::ostream& out;

 private:
  // Errors say what was probably meant.
  absl::Status Connect();

  std::unique_ptr<client::Transport> transport_;
};

}  // namespace emberd::emberctl
