// A program that runs as a child of this process and never outlives it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>
#include <unistd.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace emberd {

// Not thread-safe. Start it from a thread that lives as long as the process (the main thread): when
// that thread ends, however it does, the kernel kills the child.
class ChildProcess {
 public:
  static constexpr int kExtraDescriptor = 3;
  // Descriptors of this process that the child gets. It gets no other; its standard input is empty.
  struct Streams {
    int output = STDERR_FILENO;  // becomes its standard output
    int error = STDERR_FILENO;   // becomes its standard error
    int extra = -1;              // becomes its kExtraDescriptor; -1: none
  };
  // Runs argv[0] (a path) in a process group of its own, so that Ctrl-C in a terminal reaches only
  // the parent, which then stops its children in order. No signal is blocked in the child. Status
  // 127: argv[0] cannot be run.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const std::vector<std::string>& argv,
                                                             const Streams& streams);
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const std::vector<std::string>& argv) {
    return Start(argv, Streams());
  }
  // Kills it if it still runs.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  // False once it has ended.
  bool Running();
  // False if it still runs after `timeout`.
  bool WaitFor(absl::Duration timeout);
  // Nothing if it has ended.
  void Signal(int signal);
  // SIGSTOP; returns when every thread of it stands still. Signal(SIGCONT) lets it go on.
  void Suspend();
  // SIGTERM, and SIGKILL if it still runs after `patience`; without patience SIGKILL alone. Returns
  // when it has ended.
  void Stop(absl::Duration patience);

  // After its end: its exit status, or minus the number of the signal that killed it.
  int exit_status() const { return exit_status_; }
  // After its end: "exited with status 2" or "was killed by signal 9 (Killed)".
  std::string End() const;

 private:
  explicit ChildProcess(pid_t pid) : pid_(pid) {}
  // Asks the kernel, with waitpid's options, whether it has ended.
  void Wait(int options);

  const pid_t pid_;
  bool ended_ = false;
  int exit_status_ = 0;
};

}  // namespace emberd
