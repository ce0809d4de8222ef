#include "client/demo/child.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace emberd::demo {

namespace {

// After dup2 the copy survives exec; a descriptor that is in its place already must be told to.
void Place(int descriptor, int target) {
  if (descriptor == target) {
    fcntl(descriptor, F_SETFD, 0);
  } else if (descriptor >= 0) {
    dup2(descriptor, target);
  }
}

// In the child, between fork and exec: only async-signal-safe calls.
[[noreturn]] void Become(char* const* argv, const Child::Streams& streams, pid_t parent) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);  // it ended before prctl could ask to be told
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  Place(streams.extra, kExtraDescriptor);
  Place(streams.output, STDOUT_FILENO);
  Place(streams.error, STDERR_FILENO);
  execv(argv[0], argv);
  _exit(127);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Child>> Child::Start(const std::vector<std::string>& argv,
                                                    const Streams& streams) {
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) Become(arguments.data(), streams, parent);
  if (pid < 0) return absl::ResourceExhaustedError(absl::StrCat("fork: ", std::strerror(errno)));
  return std::unique_ptr<Child>(new Child(pid));
}

Child::~Child() { Stop(absl::ZeroDuration()); }

bool Child::Running() {
  if (!ended_) ended_ = waitpid(pid_, &wait_status_, WNOHANG) != 0;
  return !ended_;
}

bool Child::WaitFor(absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  while (Running() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
  return !Running();
}

void Child::Stop(absl::Duration patience) {
  if (Running()) kill(pid_, SIGTERM);
  if (WaitFor(patience)) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, &wait_status_, 0);
  ended_ = true;
}

bool Child::Killed() const { return ended_ && WIFSIGNALED(wait_status_); }

std::string Child::End() const {
  if (WIFSIGNALED(wait_status_)) {
    return absl::StrCat("was killed by signal ", WTERMSIG(wait_status_));
  }
  return absl::StrCat("exited with status ", WEXITSTATUS(wait_status_));
}

}  // namespace emberd::demo
