// The spill files that a process has open, for tests that damage them. They have no names in their
// folder any more.
#pragma once

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include <fcntl.h>

#include "base/file_descriptor.h"

namespace emberd::shard::testing {

struct SpilledFile {
  std::string path;  // under which it can be opened while the process has it open
  std::string name;  // that it had
  FileDescriptor Open() const { return FileDescriptor(open(path.c_str(), O_RDWR | O_CLOEXEC)); }
};

// `process`: its id.
inline std::vector<SpilledFile> SpilledFiles(const std::string& process = "self") {
  const std::string gone = " (deleted)";
  std::vector<SpilledFile> files;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + process + "/fd")) {
    std::error_code error;  // it may just have been closed
    std::string name = std::filesystem::read_symlink(entry.path(), error).string();
    if (name.find("/spill-") == std::string::npos) continue;
    if (name.ends_with(gone)) name.resize(name.size() - gone.size());
    files.push_back({entry.path().string(), std::move(name)});
  }
  return files;
}

}  // namespace emberd::shard::testing
