#include "tests/bench/demo/saved_run.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/file_descriptor.h"
#include "base/sha256.h"
#include "base/status.h"
#include "tests/bench/demo/metrics.h"

namespace emberd::demo {
namespace {

constexpr size_t kDigestSize = 64;  // of SHA-256 in hex digits, which a file begins with

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Waits until a file, or the names in a folder, have reached the disk.
absl::Status Sync(const std::string& path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() >= 0 && fsync(file.get()) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be written"));
}

}  // namespace

std::string CheckpointName(int64_t steps) { return absl::StrCat("step-", steps); }

absl::Status SavedRun::Begin(const std::vector<std::string>& arguments) const {
  std::error_code error;
  const bool used =
      std::filesystem::exists(folder_, error) && !std::filesystem::is_empty(folder_, error);
  if (used && !std::filesystem::exists(OptionsPath(), error)) {
    return absl::FailedPreconditionError(
        absl::StrCat(folder_,
                     ": holds files that no run of the demo has saved; move them away, or "
                     "give another --out"));
  }
  std::filesystem::remove_all(folder_, error);
  if (!error) std::filesystem::create_directories(folder_ + "/dense", error);
  if (error) return absl::FailedPreconditionError(absl::StrCat(folder_, ": ", error.message()));
  return WriteFile(OptionsPath(), absl::StrCat(absl::StrJoin(arguments, "\n"), "\n"));
}

absl::StatusOr<std::vector<std::string>> SavedRun::Arguments() const {
  const absl::StatusOr<std::string> text = ReadFile(OptionsPath());
  if (!text.ok()) {
    return absl::NotFoundError(absl::StrCat(
        folder_,
        ": no run of the demo has saved checkpoints here; give its --out, or begin one "
        "with --checkpoint-every N"));
  }
  return std::vector<std::string>(absl::StrSplit(*text, '\n', absl::SkipEmpty()));
}

absl::Status SavedRun::SaveDense(const std::string& checkpoint, const Position& position) const {
  const std::string path = DensePath(checkpoint), unfinished = path + ".tmp";
  const std::string content = Encode(position);
  RETURN_IF_ERROR(WriteFile(unfinished, Sha256Hex(content) + content));
  RETURN_IF_ERROR(Sync(unfinished));
  if (std::rename(unfinished.c_str(), path.c_str()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be created"));
  }
  return Sync(folder_ + "/dense");
}

absl::StatusOr<Position> SavedRun::LoadDense(const std::string& checkpoint) const {
  const std::string path = DensePath(checkpoint);
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  Position position;
  const std::string content = text.size() < kDigestSize ? "" : text.substr(kDigestSize);
  if (text.substr(0, kDigestSize) != Sha256Hex(content) || !Decode(content, &position)) {
    return absl::DataLossError(absl::StrCat(path, ": is not what was written"));
  }
  return position;
}

}  // namespace emberd::demo
