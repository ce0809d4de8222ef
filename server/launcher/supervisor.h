// Starts the processes of a cluster on this machine, starts them again when they die, and stops
// them in order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/child_process.h"
#include "base/machine_memory.h"
#include "server/launcher/files.h"

namespace emberd::launcher {

struct SupervisorOptions {
  // Waits up to the given time; true at once when a stop has been asked for.
  std::function<bool(absl::Duration)> stop_requested;
  // True once for each time that the processes are to be sent SIGHUP; null: never.
  std::function<bool()> take_hangup;
  // Start a process again that ended by itself. The trade-off: with it a cluster heals, without it
  // a fault stays visible.
  bool restart = true;
  // Between the end of a process and its next start; doubles with each death in a row, and starts
  // over after `stable_after` without one.
  absl::Duration min_backoff = absl::Milliseconds(200);
  absl::Duration max_backoff = absl::Seconds(5);
  absl::Duration stable_after = absl::Seconds(10);
  // What the log advises when the kernel has killed a process for want of memory.
  std::string memory_advice;
  std::function<MemoryKills()> memory_kills = [] { return ReadMemoryKills(); };
  // Kills before the last look but one are taken for those of other processes.
  absl::Duration look_at_kills_every = absl::Seconds(5);
  // How long a process may take to get ready, and to end after SIGTERM.
  absl::Duration ready_timeout = absl::Seconds(60);
  absl::Duration stop_timeout = absl::Seconds(15);
};

struct ProcessSpec {
  std::string name;               // in the log, e.g. "shard-2"
  std::vector<std::string> argv;  // argv[0] is a path
  std::string ready_file;         // the process writes it when it listens (files.h)
  int stage = 0;                  // higher stages are stopped first
};

// Not thread-safe; belongs to the main thread (see ChildProcess). The destructor kills what
// still runs.
class Supervisor {
 public:
  explicit Supervisor(SupervisorOptions options)
      : options_(std::move(options)), kills_(options_.memory_kills()), newer_kills_(kills_) {}

  // Starts a process and gives its number, 0, 1, ... Does not wait for it.
  absl::StatusOr<int> Start(ProcessSpec spec);
  // CANCELLED: a stop was asked for. UNAVAILABLE: the process ended first; INVALID_ARGUMENT: with
  // status 2, for its flags or configuration are wrong. DEADLINE_EXCEEDED: not ready in time.
  absl::StatusOr<ReadyInfo> WaitReady(int process);

  // Watches over the processes until a stop is asked for (OK), or until all are dead and may not be
  // restarted (UNAVAILABLE).
  absl::Status Run();

  // SIGTERM, stage after stage. UNAVAILABLE names processes that needed SIGKILL, because they still
  // ran after stop_timeout, and those that ended with an error.
  absl::Status Stop();

  pid_t pid(int process) const;   // 0 while it does not run
  bool ready(int process) const;  // it runs, and has said that it listens
  int restarts() const { return restarts_; }

 private:
  struct Process {
    ProcessSpec spec;
    std::unique_ptr<ChildProcess> child;  // null: waits for next_start
    bool ready = false;
    bool hangup = false;  // is to get SIGHUP when it is ready
    absl::Time started;
    absl::Time next_start = absl::InfiniteFuture();
    absl::Duration backoff;
  };

  absl::Status Launch(Process* process);
  void Watch(Process* process);
  // SIGHUP to those that are ready; others, which do not know yet what it means, get it then.
  void PassHangup();
  void OnDeath(Process* process);
  // Whether the kernel has killed a process for want of memory since the last look but one.
  bool KilledForMemory();
  void StopStage(int stage, std::vector<std::string>* ends);  // adds a text for each bad one

  const SupervisorOptions options_;
  std::vector<Process> processes_;
  int restarts_ = 0;
  MemoryKills kills_, newer_kills_;  // of the last two looks
  absl::Time next_look_at_kills_ = absl::InfinitePast();
};

}  // namespace emberd::launcher
