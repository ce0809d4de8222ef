#include "server/launcher/files.h"

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace emberd::launcher {

absl::Status WriteFileAtomically(const std::string& path, const std::string& content) {
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  {
    std::ofstream file(temporary, std::ios::binary);
    file << content;
    if (!file.flush())
      return absl::ErrnoToStatus(errno, absl::StrCat(temporary, ": cannot be written"));
  }
  if (std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const absl::Status status = absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be written"));
  unlink(temporary.c_str());
  return status;
}

absl::Status WriteReadyFile(const std::string& path, const ReadyInfo& info) {
  return WriteFileAtomically(
      path, absl::StrCat("grpc=", info.grpc, "\nhttp=", info.http, "\npid=", info.pid, "\n"));
}

absl::StatusOr<ReadyInfo> ReadReadyFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": does not exist"));
  std::stringstream content;
  content << file.rdbuf();
  ReadyInfo info;
  for (absl::string_view line : absl::StrSplit(content.str(), '\n', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> entry =
        absl::StrSplit(line, absl::MaxSplits('=', 1));
    if (entry.first == "grpc") info.grpc = std::string(entry.second);
    if (entry.first == "http") info.http = std::string(entry.second);
    if (entry.first == "pid" && !absl::SimpleAtoi(entry.second, &info.pid)) info.pid = 0;
  }
  if (!info.grpc.empty() && info.pid > 0) return info;
  return absl::InvalidArgumentError(absl::StrCat(path, ": is not a ready file"));
}

}  // namespace emberd::launcher
