#include "tests/testing/process.h"

#include <cerrno>
#include <fstream>
#include <sstream>

#include <fcntl.h>

#include "base/file_descriptor.h"

namespace emberd::testing {

absl::StatusOr<std::unique_ptr<ChildProcess>> StartProcess(const std::vector<std::string>& argv,
                                                           const std::string& log_path) {
  const FileDescriptor log(open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (log.get() < 0) return absl::ErrnoToStatus(errno, log_path);
  return ChildProcess::Start(argv, {.output = log.get(), .error = log.get()});
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void WriteFile(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

}  // namespace emberd::testing
