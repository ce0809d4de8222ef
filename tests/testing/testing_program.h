// Runs a program for a test: its output goes to files, and it is killed when the test is over.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

#include "absl/time/time.h"
#include "base/child_process.h"
#include "base/temp_dir.h"

namespace emberd::testing {

// Not thread-safe. Start it from the main thread (see base/child_process.h).
class TestingProgram {
 public:
  // TMPDIR of the program is directory() + "/tmp". Aborts the test program if it cannot be started.
  explicit TestingProgram(const std::vector<std::string>& argv);

  pid_t pid() const { return process_->pid(); }
  std::string Out() const;  // standard output so far
  std::string Err() const;  // standard error so far
  const std::string& directory() const { return directory_.path(); }

  // The first line of standard output that begins with `prefix`, its end not included; empty if the
  // program ends, or `timeout` passes, without it.
  std::string WaitForLine(const std::string& prefix, absl::Duration timeout = absl::Minutes(2));
  void Signal(int signal) { process_->Signal(signal); }
  // Exit status; 128 + number if a signal ended it; -1 if it still runs after `timeout`.
  int Wait(absl::Duration timeout = absl::Minutes(2));

 private:
  const TempDir directory_ = TempDir::Create().value();
  const std::unique_ptr<ChildProcess> process_;
};

}  // namespace emberd::testing
