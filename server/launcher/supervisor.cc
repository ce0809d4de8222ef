#include "server/launcher/supervisor.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <signal.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/ops/logging.h"

namespace emberd::launcher {
namespace {

using ops::Log;
using ops::LogLevel;

constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

// The file that this run of the process wrote, not an earlier one's.
absl::StatusOr<ReadyInfo> ReadyFileOf(const ProcessSpec& spec, pid_t pid) {
  absl::StatusOr<ReadyInfo> info = ReadReadyFile(spec.ready_file);
  if (info.ok() && info->pid != pid) return absl::NotFoundError("of an earlier process");
  return info;
}

}  // namespace

absl::StatusOr<int> Supervisor::Start(ProcessSpec spec) {
  Process process;
  process.spec = std::move(spec);
  process.backoff = options_.min_backoff;
  RETURN_IF_ERROR(Launch(&process));
  processes_.push_back(std::move(process));
  return static_cast<int>(processes_.size()) - 1;
}

absl::Status Supervisor::Launch(Process* process) {
  unlink(process->spec.ready_file.c_str());
  ASSIGN_OR_RETURN(process->child, ChildProcess::Start(process->spec.argv));
  process->ready = false;
  process->started = SteadyNow();
  process->next_start = absl::InfiniteFuture();
  return absl::OkStatus();
}

absl::StatusOr<ReadyInfo> Supervisor::WaitReady(int index) {
  Process& process = processes_[index];
  const absl::Time deadline = SteadyNow() + options_.ready_timeout;
  while (SteadyNow() < deadline) {
    if (!process.child->Running()) {
      const bool misconfigured = process.child->exit_status() == 2;  // as main.cc has it
      return absl::Status(
          misconfigured ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kUnavailable,
          absl::StrCat(process.spec.name, " ", process.child->End(), " before it was ready"));
    }
    absl::StatusOr<ReadyInfo> info = ReadyFileOf(process.spec, process.child->pid());
    if (info.ok()) {
      process.ready = true;
      return info;
    }
    if (options_.stop_requested(absl::Milliseconds(10))) {
      return absl::CancelledError(absl::StrCat("stopped before ", process.spec.name, " was ready"));
    }
  }
  return absl::DeadlineExceededError(absl::StrCat(process.spec.name, " is not ready after ",
                                                  absl::FormatDuration(options_.ready_timeout)));
}

absl::Status Supervisor::Run() {
  while (!options_.stop_requested(kPollInterval)) {
    for (Process& process : processes_) Watch(&process);
    if (SteadyNow() >= next_look_at_kills_) KilledForMemory();
    if (options_.take_hangup != nullptr && options_.take_hangup()) PassHangup();
    const bool any_left = std::any_of(processes_.begin(), processes_.end(), [](const auto& p) {
      return p.child != nullptr || p.next_start != absl::InfiniteFuture();
    });
    if (!any_left) return absl::UnavailableError("every process of the cluster has died");
  }
  return absl::OkStatus();
}

void Supervisor::Watch(Process* process) {
  if (process->child != nullptr && !process->child->Running()) OnDeath(process);
  if (process->child == nullptr) {
    if (SteadyNow() < process->next_start) return;
    const absl::Status status = Launch(process);
    if (!status.ok()) {
      Log(LogLevel::kError, "cannot restart", {{"child", process->spec.name}, {"status", status}});
      process->next_start = SteadyNow() + options_.max_backoff;
      return;
    }
    ++restarts_;
    Log(LogLevel::kInfo, "restarted",
        {{"child", process->spec.name}, {"pid", process->child->pid()}});
  }
  if (process->ready) return;
  const absl::StatusOr<ReadyInfo> info = ReadyFileOf(process->spec, process->child->pid());
  if (!info.ok()) return;
  process->ready = true;
  if (std::exchange(process->hangup, false)) process->child->Signal(SIGHUP);
  Log(LogLevel::kInfo, "listens again", {{"child", process->spec.name}, {"grpc", info->grpc}});
}

void Supervisor::PassHangup() {
  for (Process& process : processes_) {
    process.hangup = process.child == nullptr || !process.ready;
    if (!process.hangup) process.child->Signal(SIGHUP);
  }
}

// The cgroup's count is of this cluster's processes alone; where there is none, the machine's.
bool Supervisor::KilledForMemory() {
  const MemoryKills before = kills_;
  kills_ = std::exchange(newer_kills_, options_.memory_kills());
  next_look_at_kills_ = SteadyNow() + options_.look_at_kills_every;
  return newer_kills_.cgroup > before.cgroup ||
         (newer_kills_.cgroup == 0 && newer_kills_.machine > before.machine);
}

void Supervisor::OnDeath(Process* process) {
  const absl::Time now = SteadyNow();
  if (now - process->started >= options_.stable_after) process->backoff = options_.min_backoff;
  std::vector<ops::LogField> fields = {{"child", process->spec.name},
                                       {"pid", process->child->pid()},
                                       {"end", process->child->End()}};
  if (process->child->exit_status() == -SIGKILL && KilledForMemory()) {
    fields.emplace_back("cause", "the kernel killed it because memory ran out");
    fields.emplace_back("advice", options_.memory_advice);
  }
  process->child.reset();
  if (options_.restart) {
    process->next_start = now + process->backoff;
    fields.emplace_back("restart_in_ms", absl::ToInt64Milliseconds(process->backoff));
    process->backoff = std::min(2 * process->backoff, options_.max_backoff);
  }
  Log(LogLevel::kError, "a process died", fields);
}

absl::Status Supervisor::Stop() {
  std::set<int, std::greater<>> stages;
  for (const Process& process : processes_) stages.insert(process.spec.stage);
  std::vector<std::string> ends;
  for (const int stage : stages) StopStage(stage, &ends);
  if (ends.empty()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(absl::StrJoin(ends, ", "), "; what was not saved may be lost"));
}

void Supervisor::StopStage(int stage, std::vector<std::string>* ends) {
  const absl::Time deadline = SteadyNow() + options_.stop_timeout;
  for (Process& process : processes_) {
    if (process.spec.stage != stage) continue;
    process.next_start = absl::InfiniteFuture();
    if (process.child != nullptr) process.child->Signal(SIGTERM);
  }
  for (Process& process : processes_) {
    if (process.spec.stage != stage || process.child == nullptr) continue;
    ChildProcess& child = *process.child;
    std::string end = "was killed, as it did not end in time";
    if (child.WaitFor(deadline - SteadyNow())) {
      // A signal from outside is the business of whoever sent it.
      const bool as_asked = child.exit_status() == 0 || child.exit_status() == -SIGTERM ||
                            (child.exit_status() == -SIGKILL && !KilledForMemory());
      end = as_asked ? "" : child.End();
    }
    if (!end.empty()) ends->push_back(absl::StrCat(process.spec.name, " ", end));
    process.child.reset();
  }
}

pid_t Supervisor::pid(int process) const {
  const auto& child = processes_[process].child;
  return child == nullptr ? 0 : child->pid();
}

bool Supervisor::ready(int process) const {
  return processes_[process].child != nullptr && processes_[process].ready;
}

}  // namespace emberd::launcher
