#include "tests/testing/process.h"

#include <cerrno>
#include <fstream>
#include <sstream>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace emberd::testing {
namespace {

// In the child. The test has threads, so only what is safe in a signal handler may be called here.
[[noreturn]] void Become(char* const* argv, const char* log_path, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // it ended before the line above
  const int log = open(log_path, O_WRONLY | O_CREAT | O_APPEND, 0644);
  const int null = open("/dev/null", O_RDONLY);
  dup2(null, STDIN_FILENO);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  close_range(STDERR_FILENO + 1, ~0U, 0);
  execv(argv[0], argv);
  _exit(127);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Process>> Process::Start(const std::vector<std::string>& argv,
                                                        const std::string& log_path) {
  std::vector<char*> pointers;
  for (const std::string& argument : argv) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) Become(pointers.data(), log_path.c_str(), parent);
  if (pid < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot start ", argv[0]));
  return std::unique_ptr<Process>(new Process(pid, log_path));
}

Process::~Process() {
  Signal(SIGKILL);
  WaitFor(absl::InfiniteDuration());
}

bool Process::Running() {
  int status = 0;
  if (!ended_ && waitpid(pid_, &status, WNOHANG) == pid_) SetEnd(status);
  return !ended_;
}

void Process::SetEnd(int wait_status) {
  ended_ = true;
  exit_status_ = WIFSIGNALED(wait_status) ? -WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

// The pid is the child's: it stays taken until Running() has seen the end.
void Process::Signal(int signal) {
  if (Running()) kill(pid_, signal);
}

// On a busy machine threads go on for a while after the signal has been sent.
void Process::Suspend() {
  Signal(SIGSTOP);
  int status = 0;
  if (!ended_ && waitpid(pid_, &status, WUNTRACED) == pid_ && !WIFSTOPPED(status)) SetEnd(status);
}

bool Process::WaitFor(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (Running()) {
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void WriteFile(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

}  // namespace emberd::testing
