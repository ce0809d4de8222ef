#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "server/files/files.h"
#include "server/log/testing/forgetful_files.h"
#include "server/log/testing/power_journal.h"

namespace emberd::log {
namespace {

constexpr int64_t kSector = 512;

struct PendingWrite {
  int64_t offset = 0;
  int64_t bytes = 0;
  bool synced = false;
};
struct MadeFile {
  std::vector<size_t> writes;  // of all
};
// What a name stood for: a file, by its place among all, or none.
using Meaning = std::optional<size_t>;
struct Name {
  std::vector<Meaning> meanings = {std::nullopt};  // since its folder was synced; the first: then
};

// All that the journals tell.
class Machine {
 public:
  Machine(std::string folder, uint64_t seed) : folder_(std::move(folder)), random_(seed) {}

  absl::Status Replay();
  absl::StatusOr<PowerLoss> Lose();

 private:
  absl::Status Replay(int journal, const std::string& line);
  size_t FileAt(const std::string& path);
  void Removed(const std::string& path, const std::string& name);
  absl::Status LoseNames();
  absl::Status LoseBytes(const std::string& path, const MadeFile& file);
  int Below(int count) { return std::uniform_int_distribution<int>(0, count - 1)(random_); }

  const std::string folder_;
  std::mt19937_64 random_;
  std::vector<PendingWrite> writes_;
  std::vector<MadeFile> files_;
  std::map<std::string, size_t> write_ids_, file_ids_;  // "JOURNAL.ID"
  std::map<std::string, Name> names_;                   // by path
  std::map<size_t, std::string> kept_;                  // removed files: where they are
  std::map<std::string, std::string> removing_;         // by path: as what it is kept
  PowerLoss loss_;
};

absl::Status Machine::Replay() {
  ASSIGN_OR_RETURN(const auto journals, ReadJournals(folder_));
  for (size_t i = 0; i < journals.size(); ++i) {
    for (const std::string& line : journals[i]) {
      RETURN_IF_ERROR(Replay(static_cast<int>(i), line));
    }
    // The process may have been killed after it had moved a file, and before it told.
    for (const auto& [path, name] : std::exchange(removing_, {})) {
      if (std::filesystem::exists(files::PathIn(folder_, name))) Removed(path, name);
    }
  }
  return absl::OkStatus();
}

// One that was there before the journals began has nothing pending.
size_t Machine::FileAt(const std::string& path) {
  const auto [name, is_new] = names_.try_emplace(path);
  Meaning& now = name->second.meanings.back();
  if (is_new || !now.has_value()) {
    now = files_.size();
    files_.emplace_back();
  }
  return *now;
}

absl::Status Machine::Replay(int journal, const std::string& line) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(line, absl::MaxSplits(' ', 1));
  const auto& [event, rest] = parts;
  const std::pair<std::string, std::string> words = absl::StrSplit(rest, absl::MaxSplits(' ', 1));
  const auto id = [&](absl::string_view number) { return absl::StrCat(journal, ".", number); };
  if (event == "made") {
    file_ids_[id(words.first)] = files_.size();
    names_[words.second].meanings.emplace_back(files_.size());
    files_.emplace_back();
  } else if (event == "write") {
    const std::vector<std::string> numbers = absl::StrSplit(rest, ' ');
    const auto file = numbers.size() == 4 ? file_ids_.find(id(numbers[1])) : file_ids_.end();
    PendingWrite write;
    if (file == file_ids_.end() || !absl::SimpleAtoi(numbers[2], &write.offset) ||
        !absl::SimpleAtoi(numbers[3], &write.bytes)) {
      return absl::InternalError(absl::StrCat("a journal has the line ", line));
    }
    write_ids_[id(numbers[0])] = writes_.size();
    files_[file->second].writes.push_back(writes_.size());
    writes_.push_back(write);
  } else if (event == "synced") {
    for (const auto number : absl::StrSplit(rest, ' ', absl::SkipEmpty())) {
      writes_[write_ids_.at(id(number))].synced = true;
    }
  } else if (event == "synced-path") {
    for (const size_t write : files_[FileAt(rest)].writes) writes_[write].synced = true;
  } else if (event == "folder") {
    for (auto& [path, name] : names_) {
      if (std::filesystem::path(path).parent_path() != rest) continue;
      name.meanings.erase(name.meanings.begin(), name.meanings.end() - 1);
    }
  } else if (event == "removing") {
    removing_[words.second] = words.first;
  } else if (event == "removed") {
    removing_.erase(words.second);
    Removed(words.second, words.first);
  } else {
    return absl::InternalError(absl::StrCat("a journal has the line ", line));
  }
  return absl::OkStatus();
}

void Machine::Removed(const std::string& path, const std::string& name) {
  kept_[FileAt(path)] = files::PathIn(folder_, name);
  names_[path].meanings.push_back(std::nullopt);
}

// A folder's changes reach the disk in their order, for each name on its own.
absl::Status Machine::LoseNames() {
  for (auto& [path, name] : names_) {
    const size_t chosen = Below(static_cast<int>(name.meanings.size()));
    const Meaning now = name.meanings.back();
    const Meaning then = name.meanings[chosen];
    name.meanings = {then};
    if (then == now) continue;
    ++loss_.lost_names;
    if (now.has_value() && unlink(path.c_str()) != 0) {
      return files::FileError(errno, path, "cannot be removed");
    }
    if (then.has_value() && rename(kept_.at(*then).c_str(), path.c_str()) != 0) {
      return files::FileError(errno, path, "cannot be put back");
    }
  }
  return absl::OkStatus();
}

absl::Status Machine::LoseBytes(const std::string& path, const MadeFile& file) {
  absl::StatusOr<std::string> bytes = files::ReadFileWhole(path);
  RETURN_IF_ERROR(bytes.status());
  std::vector<bool> lost(bytes->size(), false);
  const int mode = Below(3);  // what happens to sectors: all go, all stay, each decides
  int64_t end = 0;            // of what stays
  for (const size_t i : file.writes) {
    const PendingWrite& write = writes_[i];
    const int64_t last =
        std::min<int64_t>(write.offset + write.bytes, static_cast<int64_t>(lost.size()));
    for (int64_t at = write.offset; at < last;) {
      const int64_t next = std::min(last, (at / kSector + 1) * kSector);
      const bool goes = !write.synced && (mode == 0 || (mode == 2 && Below(2) == 0));
      std::fill(lost.begin() + at, lost.begin() + next, goes);
      if (!goes) end = std::max(end, next);
      at = next;
    }
  }
  int64_t count = 0;
  for (size_t i = 0; i < lost.size(); ++i) {
    if (!lost[i]) continue;
    ++count;
    (*bytes)[i] = '\0';
  }
  loss_.lost_bytes += count;
  // The file may have become longer for what is gone now; and it may not.
  if (count > 0 && Below(2) == 0) bytes->resize(end);
  const FileDescriptor out(open(path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC));
  if (out.get() < 0) return files::FileError(errno, path, "cannot be opened");
  return files::WriteAt(out, path, 0, *bytes);
}

absl::StatusOr<PowerLoss> Machine::Lose() {
  RETURN_IF_ERROR(LoseNames());
  for (const auto& [path, name] : names_) {
    const Meaning& file = name.meanings.back();
    if (!file.has_value()) continue;
    const std::vector<size_t>& writes = files_[*file].writes;
    const bool pending = std::any_of(writes.begin(), writes.end(),
                                     [&](size_t write) { return !writes_[write].synced; });
    if (pending) RETURN_IF_ERROR(LoseBytes(path, files_[*file]));
  }
  RETURN_IF_ERROR(BootAgain(folder_));
  return loss_;
}

}  // namespace

absl::StatusOr<PowerLoss> LosePower(const std::string& machine, uint64_t seed) {
  Machine lost(machine, seed);
  RETURN_IF_ERROR(lost.Replay());
  return lost.Lose();
}

}  // namespace emberd::log
