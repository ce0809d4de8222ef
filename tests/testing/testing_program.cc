#include "tests/testing/testing_program.h"

#include <cstdlib>
#include <fstream>
#include <sstream>

#include <fcntl.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file_descriptor.h"

namespace emberd::testing {
namespace {

std::string ReadAll(const std::string& path) {
  std::stringstream content;
  content << std::ifstream(path).rdbuf();
  return content.str();
}

// env gives way to the program, which so has its process id.
std::unique_ptr<ChildProcess> Start(std::vector<std::string> argv, const TempDir& directory) {
  const std::string temporary = directory.Path("tmp");
  mkdir(temporary.c_str(), 0700);
  argv.insert(argv.begin(), {"/usr/bin/env", absl::StrCat("TMPDIR=", temporary)});
  constexpr int kAppend = O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC;
  const FileDescriptor out(open(directory.Path("out").c_str(), kAppend, 0600));
  const FileDescriptor err(open(directory.Path("err").c_str(), kAppend, 0600));
  if (out.get() < 0 || err.get() < 0) abort();
  return ChildProcess::Start(argv, {.output = out.get(), .error = err.get()}).value();
}

}  // namespace

TestingProgram::TestingProgram(const std::vector<std::string>& argv)
    : process_(Start(argv, directory_)) {}

std::string TestingProgram::Out() const { return ReadAll(directory_.Path("out")); }
std::string TestingProgram::Err() const { return ReadAll(directory_.Path("err")); }

std::string TestingProgram::WaitForLine(const std::string& prefix, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    const bool last = !process_->Running() || absl::Now() > deadline;
    std::stringstream lines(Out());
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(prefix) && !lines.eof()) return line;
    }
    if (last) return "";
    absl::SleepFor(absl::Milliseconds(10));
  }
}

int TestingProgram::Wait(absl::Duration timeout) {
  if (!process_->WaitFor(timeout)) return -1;
  const int status = process_->exit_status();
  return status < 0 ? 128 - status : status;
}

}  // namespace emberd::testing
