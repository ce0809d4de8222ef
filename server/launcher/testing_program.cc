#include "server/launcher/testing_program.h"

#include <cstdlib>
#include <fstream>
#include <sstream>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/time/clock.h"

namespace emberd::launcher {
namespace {

std::string ReadAll(const std::string& path) {
  std::stringstream content;
  content << std::ifstream(path).rdbuf();
  return content.str();
}

void SendTo(const std::string& path, int fd) {
  const int file = open(path.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0 || dup2(file, fd) < 0) _exit(126);
}

}  // namespace

TestingProgram::TestingProgram(const std::vector<std::string>& argv) {
  const std::string temporary = directory_.path() + "/tmp";
  mkdir(temporary.c_str(), 0700);
  std::vector<char*> pointers;
  for (const std::string& argument : argv) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  pid_ = fork();
  if (pid_ < 0) abort();
  if (pid_ == 0) {  // this process has one thread, so anything may be called
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setenv("TMPDIR", temporary.c_str(), 1);
    SendTo(directory_.path() + "/out", STDOUT_FILENO);
    SendTo(directory_.path() + "/err", STDERR_FILENO);
    execv(pointers[0], pointers.data());
    _exit(127);
  }
}

TestingProgram::~TestingProgram() {
  if (Ended()) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::string TestingProgram::Out() const { return ReadAll(directory_.path() + "/out"); }
std::string TestingProgram::Err() const { return ReadAll(directory_.path() + "/err"); }

std::string TestingProgram::WaitForLine(const std::string& prefix, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    const bool last = Ended() || absl::Now() > deadline;
    std::stringstream lines(Out());
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(prefix) && !lines.eof()) return line;
    }
    if (last) return "";
    absl::SleepFor(absl::Milliseconds(10));
  }
}

void TestingProgram::Signal(int signal) const {
  if (!ended_) kill(pid_, signal);
}

int TestingProgram::Wait(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!Ended()) {
    if (absl::Now() > deadline) return -1;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return WIFSIGNALED(wait_status_) ? 128 + WTERMSIG(wait_status_) : WEXITSTATUS(wait_status_);
}

bool TestingProgram::Ended() {
  if (!ended_) ended_ = waitpid(pid_, &wait_status_, WNOHANG) == pid_;
  return ended_;
}

}  // namespace emberd::launcher
