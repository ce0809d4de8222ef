// Programs that a test runs, and the files around them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/child_process.h"

namespace emberd::testing {

// Runs argv[0] (a path) from the main thread; standard output and error are appended to the file
// `log_path`.
absl::StatusOr<std::unique_ptr<ChildProcess>> StartProcess(const std::vector<std::string>& argv,
                                                           const std::string& log_path);

// The whole file, empty if it is not there.
std::string ReadFile(const std::string& path);
void WriteFile(const std::string& path, const std::string& text);

}  // namespace emberd::testing
