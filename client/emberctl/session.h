// What every command needs: the cluster, the common options, where to write, and the command
// itself.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <google/protobuf/message.h>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "client/cpp/options.h"
#include "client/cpp/transport.h"
#include "client/emberctl/output.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "emberd/v1/embedding_service.pb.h"

namespace emberd::emberctl {

// Set by the command line.
struct SessionOptions {
  std::vector<std::string> addresses;
  bool json = false;
  double timeout_seconds = 10;
  // PEM files; any of them makes connections TLS (client::TlsOptions). And a file with a token.
  std::string ca_file;
  std::string certificate_file;
  std::string key_file;
  std::string token_file;
};

// Not thread-safe.
class Session : public SessionOptions {
 public:
  explicit Session(std::ostream& out) : out(out) {}

  // The same options, but for this coordinator alone.
  Session At(const std::string& address) const;

  // Connect if need be, then call as client::Transport::Call does. `deadline` zero: --timeout.
  absl::Status Call(client::Transport::Attempt attempt,
                    absl::Duration deadline = absl::ZeroDuration());
  template <typename Response>
  absl::StatusOr<Response> Call(const google::protobuf::Message& request,
                                absl::Duration deadline = absl::ZeroDuration()) {
    if (transport_ == nullptr) RETURN_IF_ERROR(Connect());
    absl::StatusOr<Response> response = transport_->Call<Response>(request, {deadline});
    if (!response.ok()) return Advised(response.status());
    return response;
  }
  // See client::RunWithProgress.
  absl::StatusOr<v1::CheckpointProgress> CallWithProgress(
      const google::protobuf::Message& request, absl::Duration deadline,
      absl::FunctionRef<void(const v1::CheckpointProgress&)> progress);

  // Calls that several verbs need.
  absl::StatusOr<v1::GetStatusResponse> GetStatus();
  absl::StatusOr<v1::DescribeModelResponse> DescribeModel(const std::string& name);

  // Prints an answer: as JSON with --json, and else as this text. OK.
  template <typename Result>
  absl::Status Answer(const Result& answer, const std::string& text) const {
    if (json) return PrintJson(answer, out);
    out << text << "\n";
    return absl::OkStatus();
  }

  // For clients that a command makes itself, once a call has come through: all `addresses`, and how
  // to connect to them. And their errors, with advice, as those of Call.
  client::ClientOptions client_options() const;
  absl::Status Advised(const absl::Status& status) const;

  bool terminal = false;  // `out` is one
  // What was chosen. Prints its result and returns why it could not.
  std::function<absl::Status()> command;

  std::ostream& out;

 private:
  // Errors say what was probably meant.
  absl::Status Connect();

  std::unique_ptr<client::Transport> transport_;
};

// gRPC and protobuf write what they do not like to standard error, several times over; the error of
// the command says it once. GRPC_VERBOSITY gives them their voice back.
void SilenceLibraries();

}  // namespace emberd::emberctl
