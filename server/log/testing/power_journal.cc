#include "server/log/testing/power_journal.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>

#include <fcntl.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "server/files/files.h"
#include "server/log/log_files.h"

namespace emberd::log {
namespace {

constexpr char kBoot[] = "boot";
constexpr char kJournal[] = "journal-";

std::vector<std::string> NamesIn(const std::string& machine) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(machine)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

absl::StatusOr<std::string> BootOf(const std::string& machine) {
  // Processes that start at once must agree.
  ASSIGN_OR_RETURN(const files::FolderLock lock, files::FolderLock::Take(machine));
  const absl::StatusOr<std::string> boot = files::ReadFileWhole(files::PathIn(machine, kBoot));
  if (boot.ok()) return boot;
  std::string made(kBootIdBytes, '\0');
  std::random_device random;
  for (char& c : made) c = static_cast<char>(random());
  RETURN_IF_ERROR(files::WriteFileWhole(machine, kBoot, made));
  return made;
}

absl::StatusOr<FileDescriptor> NewJournal(const std::string& machine) {
  for (int number = 1;; ++number) {
    const std::string path =
        files::PathIn(machine, absl::StrCat(kJournal, absl::Dec(number, absl::kZeroPad6)));
    FileDescriptor file(
        open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (file.get() >= 0) return file;
    if (errno != EEXIST) return files::FileError(errno, path, "cannot be created");
  }
}

absl::StatusOr<std::vector<std::vector<std::string>>> ReadJournals(const std::string& machine) {
  std::vector<std::vector<std::string>> journals;
  for (const std::string& name : NamesIn(machine)) {
    if (!absl::StartsWith(name, kJournal)) continue;
    ASSIGN_OR_RETURN(const std::string text, files::ReadFileWhole(files::PathIn(machine, name)));
    journals.push_back(absl::StrSplit(text, '\n'));
    journals.back().pop_back();  // empty, or cut off by the death of the process
  }
  return journals;
}

absl::Status BootAgain(const std::string& machine) {
  for (const std::string& name : NamesIn(machine)) {
    std::error_code error;
    std::filesystem::remove(files::PathIn(machine, name), error);
    if (error)
      return files::FileError(error.value(), files::PathIn(machine, name), "cannot be removed");
  }
  return BootOf(machine).status();
}

}  // namespace emberd::log
