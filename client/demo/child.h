// A process that the demo started and that never outlives it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace emberd::demo {

// Not thread-safe. Start it from the main thread: the kernel sends the child SIGTERM when the
// thread that started it ends, however that happens.
class Child {
 public:
  struct Streams {
    int output = -1;  // becomes its standard output; -1: the parent's
    int error = -1;   // becomes its standard error; -1: the parent's
    int extra = -1;   // becomes file descriptor 3; -1: none
  };
  // Runs argv[0] (a path) in a process group of its own: Ctrl-C in a terminal reaches the parent
  // alone, which stops its children in order. Status 127: argv[0] cannot be run.
  static absl::StatusOr<std::unique_ptr<Child>> Start(const std::vector<std::string>& argv,
                                                      const Streams& streams);
  // Kills it if it still runs.
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  bool Running();
  // False if it still runs after `patience`.
  bool WaitFor(absl::Duration patience);
  // SIGTERM, and SIGKILL if it still runs after `patience`.
  void Stop(absl::Duration patience);
  // After its end: true for status 0.
  bool Succeeded() const { return ended_ && wait_status_ == 0; }
  // After its end: true if a signal was its cause.
  bool Killed() const;
  // After its end: "exited with status 2" or "was killed by signal 9".
  std::string End() const;

 private:
  explicit Child(pid_t pid) : pid_(pid) {}

  const pid_t pid_;
  bool ended_ = false;
  int wait_status_ = 0;
};

inline constexpr int kExtraDescriptor = 3;

}  // namespace emberd::demo
