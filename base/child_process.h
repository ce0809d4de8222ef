// A program that runs as a child of this process and never outlives it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace emberd {

// Not thread-safe. Start it from a thread that lives as long as the process (the main thread): when
// that thread ends, however it does, the kernel kills the child.
class ChildProcess {
 public:
  // Runs argv[0] (a path) in a process group of its own, so that Ctrl-C in a terminal reaches only
  // the parent, which then stops its children in order. Its standard output goes to the parent's
  // standard error. Status 127: argv[0] cannot be run.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const std::vector<std::string>& argv);
  // Kills it if it still runs.
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  // False once it has ended.
  bool Running();
  // False if it still runs after `timeout`.
  bool WaitFor(absl::Duration timeout);
  // After its end: "exited with status 2" or "was killed by signal 9 (Killed)".
  std::string End() const;
  // Nothing if it has ended.
  void Signal(int signal);

 private:
  explicit ChildProcess(pid_t pid) : pid_(pid) {}

  const pid_t pid_;
  bool ended_ = false;
  int wait_status_ = 0;
};

}  // namespace emberd
