// Signals, the end of a process, and the standard gRPC services.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/steady_time.h"

namespace grpc {
class Server;
class ServerBuilder;
}  // namespace grpc

namespace emberd::ops {

// Turns SIGTERM and SIGINT into an orderly end. Create it in main before any other thread exists:
// it blocks the two signals for the calling thread and all that come after it, and takes them on a
// thread of its own. Child processes inherit the block and must undo it.
//
// The first signal asks for shutdown; the second one ends the process at once with status 1.
class ShutdownSignal {
 public:
  // With `stop_on_eof`, the end of standard input asks for shutdown, too: the process at the other
  // end of the pipe has closed it, or has died in whatever way. Input before the end is ignored.
  // With `on_hangup`, SIGHUP is blocked as the others are, and calls that, on a thread of this
  // object; without, it asks for shutdown, unless it was ignored when the process started (nohup).
  static absl::StatusOr<std::unique_ptr<ShutdownSignal>> Create(
      bool stop_on_eof = false, std::function<void()> on_hangup = nullptr);
  ~ShutdownSignal();  // the signals are unblocked again

  void Wait() const { requested_.WaitForNotification(); }
  // False after `timeout` without a request.
  bool WaitFor(absl::Duration timeout) const { return AwaitSteadily(requested_, timeout); }

 private:
  ShutdownSignal(int signal_fd, int stop_fd, bool stop_on_eof, std::function<void()> on_hangup);
  void Run();
  void OnSignal();
  // False: it has ended.
  bool ReadInput();

  const int signal_fd_;
  const int stop_fd_;
  const bool stop_on_eof_;
  const std::function<void()> on_hangup_;
  absl::Notification requested_;
  std::thread thread_;
};

// Ends the process with status 1 and an error in the log unless destroyed within `limit`. Put it
// around an orderly end that must not hang.
class ExitDeadline {
 public:
  explicit ExitDeadline(absl::Duration limit);
  ~ExitDeadline();

 private:
  absl::Notification done_;
  std::thread thread_;
};

// Adds grpc.health.v1 and server reflection to a server that is being built.
void EnableStandardServices(grpc::ServerBuilder* builder);
// What the health service answers for the server as a whole and for `services` (full names).
void SetServing(grpc::Server* server, const std::vector<std::string>& services, bool serving);

}  // namespace emberd::ops
