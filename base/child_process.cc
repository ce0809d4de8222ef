#include "base/child_process.h"

#include <cerrno>

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/steady_time.h"

namespace emberd {
namespace {

constexpr int kLast = ChildProcess::kExtraDescriptor;

// What happens in the child before it becomes the program. The parent has threads, so only calls
// that are safe in a signal handler are allowed here.
[[noreturn]] void Become(char* const* argv, const ChildProcess::Streams& streams, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // it died before the line above
  setpgid(0, 0);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  // First out of the way of one another: the new output must not overwrite the new error's source.
  const int output = fcntl(streams.output, F_DUPFD, kLast + 1);
  const int error = fcntl(streams.error, F_DUPFD, kLast + 1);
  const int extra = streams.extra < 0 ? -1 : fcntl(streams.extra, F_DUPFD, kLast + 1);
  const int null = open("/dev/null", O_RDONLY);
  if (null >= 0) dup2(null, STDIN_FILENO);
  if (output >= 0) dup2(output, STDOUT_FILENO);
  if (error >= 0) dup2(error, STDERR_FILENO);
  if (extra >= 0) dup2(extra, kLast);
  close_range(extra >= 0 ? kLast + 1 : kLast, ~0U, 0);
  execv(argv[0], argv);
  _exit(127);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(
    const std::vector<std::string>& argv, const Streams& streams) {
  std::vector<char*> pointers;
  for (const std::string& argument : argv) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  // Where it is ignored, as whoever started this process may have left it, the kernel reaps
  // children itself: nobody hears how they end, and their pids are free for others.
  struct sigaction before = {};
  if (sigaction(SIGCHLD, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) {
    signal(SIGCHLD, SIG_DFL);
  }
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) Become(pointers.data(), streams, parent);
  if (pid < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot start ", argv[0]));
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid));
}

ChildProcess::~ChildProcess() { Stop(absl::ZeroDuration()); }

void ChildProcess::Wait(int options) {
  if (ended_) return;
  int status = 0;
  pid_t waited;
  do {
    waited = waitpid(pid_, &status, options);
  } while (waited < 0 && errno == EINTR);
  if (waited != pid_ || WIFSTOPPED(status)) return;
  ended_ = true;
  exit_status_ = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

bool ChildProcess::Running() {
  Wait(WNOHANG);
  return !ended_;
}

bool ChildProcess::WaitFor(absl::Duration timeout) {
  const absl::Time deadline = SteadyNow() + timeout;
  while (Running()) {
    if (SteadyNow() >= deadline) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

// The pid is safe to use: it stays taken until Running() has reaped the child.
void ChildProcess::Signal(int signal) {
  if (Running()) kill(pid_, signal);
}

// On a busy machine threads go on for a while after the signal has been sent.
void ChildProcess::Suspend() {
  Signal(SIGSTOP);
  Wait(WUNTRACED);
}

void ChildProcess::Stop(absl::Duration patience) {
  if (patience > absl::ZeroDuration()) Signal(SIGTERM);
  if (WaitFor(patience)) return;
  Signal(SIGKILL);
  Wait(0);
}

std::string ChildProcess::End() const {
  if (exit_status_ >= 0) return absl::StrCat("exited with status ", exit_status_);
  return absl::StrCat("was killed by signal ", -exit_status_, " (", strsignal(-exit_status_), ")");
}

}  // namespace emberd
