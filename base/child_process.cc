#include "base/child_process.h"

#include <cerrno>

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace emberd {
namespace {

// What happens in the child before it becomes the program. The parent has threads, so only calls
// that are safe in a signal handler are allowed here.
[[noreturn]] void Become(char* const* argv, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // it died before the line above
  setpgid(0, 0);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  const int null = open("/dev/null", O_RDONLY);
  if (null >= 0) dup2(null, STDIN_FILENO);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  close_range(STDERR_FILENO + 1, ~0U, 0);
  execv(argv[0], argv);
  _exit(127);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(
    const std::vector<std::string>& argv) {
  std::vector<char*> pointers;
  for (const std::string& argument : argv) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) Become(pointers.data(), parent);
  if (pid < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot start ", argv[0]));
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid));
}

ChildProcess::~ChildProcess() {
  if (!Running()) return;
  Signal(SIGKILL);
  waitpid(pid_, &wait_status_, 0);
}

bool ChildProcess::Running() {
  if (!ended_) ended_ = waitpid(pid_, &wait_status_, WNOHANG) == pid_;
  return !ended_;
}

bool ChildProcess::WaitFor(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (Running()) {
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return true;
}

std::string ChildProcess::End() const {
  if (!WIFSIGNALED(wait_status_)) {
    return absl::StrCat("exited with status ", WEXITSTATUS(wait_status_));
  }
  const int signal = WTERMSIG(wait_status_);
  return absl::StrCat("was killed by signal ", signal, " (", strsignal(signal), ")");
}

// The pid is safe to use: it stays taken until Running() has reaped the child.
void ChildProcess::Signal(int signal) {
  if (Running()) kill(pid_, signal);
}

}  // namespace emberd
