// A program that a test runs, and that never outlives it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace emberd::testing {

// Not thread-safe. Start it from the main thread: the kernel kills the program when the thread that
// started it ends, be it by a crash of the test.
class Process {
 public:
  // Runs argv[0] (a path); standard output and error are appended to the file `log_path`.
  static absl::StatusOr<std::unique_ptr<Process>> Start(const std::vector<std::string>& argv,
                                                        const std::string& log_path);
  // SIGKILL if it still runs.
  ~Process();

  pid_t pid() const { return pid_; }
  bool Running();
  // Nothing if it has ended.
  void Signal(int signal);
  // SIGSTOP; returns when every thread of it stands still. Signal(SIGCONT) lets it go on.
  void Suspend();
  // False if it still runs after `timeout`.
  bool WaitFor(absl::Duration timeout);
  // After its end: the exit status, or minus the signal that killed it.
  int exit_status() const { return exit_status_; }
  const std::string& log_path() const { return log_path_; }

 private:
  void SetEnd(int wait_status);

  Process(pid_t pid, std::string log_path) : pid_(pid), log_path_(std::move(log_path)) {}

  const pid_t pid_;
  const std::string log_path_;
  bool ended_ = false;
  int exit_status_ = 0;
};

// The whole file, empty if it is not there.
std::string ReadFile(const std::string& path);
void WriteFile(const std::string& path, const std::string& text);

}  // namespace emberd::testing
