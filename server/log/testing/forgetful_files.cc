// The journal has one event a line; a path is the last word, whatever it holds:
//   made FILE PATH                       an empty file
//   write ID FILE OFFSET BYTES           begins
//   synced ID ID ...                     these writes are on the disk
//   synced-path PATH                     and so is all that was written to this file before
//   folder PATH                          its names are on the disk
//   removed NAME PATH                    kept under NAME in the machine's folder
#include "server/log/testing/forgetful_files.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "server/files/files.h"
#include "server/log/testing/power_journal.h"

namespace emberd::log {
namespace {

absl::Status Dead(const std::string& path) {
  return files::FileError(EIO, path, "is of a dead process");
}

}  // namespace

// One of a ForgetfulFiles, which outlives it.
class ForgetfulFile : public LogFile {
 public:
  ForgetfulFile(ForgetfulFiles& machine, std::string path, std::string id,
                std::unique_ptr<LogFile> file)
      : machine_(machine), path_(std::move(path)), id_(std::move(id)), file_(std::move(file)) {}

  absl::Status Write(int64_t offset, absl::Span<const absl::Span<const char>> pieces) override {
    int64_t bytes = 0;
    for (const absl::Span<const char> piece : pieces) bytes += static_cast<int64_t>(piece.size());
    const int64_t write = machine_.NextId();
    if (!machine_.Note(absl::StrCat("write ", write, " ", id_, " ", offset, " ", bytes))) {
      return Dead(path_);
    }
    absl::Status status = file_->Write(offset, pieces);
    absl::MutexLock lock(&mutex_);
    done_.push_back(write);
    return status;
  }

  absl::Status Allocate(int64_t offset, int64_t bytes) override {
    return machine_.Note("") ? file_->Allocate(offset, bytes) : Dead(path_);
  }
  absl::Status Truncate(int64_t bytes) override {
    return machine_.Note("") ? file_->Truncate(bytes) : Dead(path_);
  }

  absl::Status Sync() override {
    std::vector<int64_t> done;
    {
      absl::MutexLock lock(&mutex_);
      done.swap(done_);
    }
    if (machine_.Note(absl::StrCat("synced ", absl::StrJoin(done, " ")))) return absl::OkStatus();
    return Dead(path_);
  }

 private:
  ForgetfulFiles& machine_;
  const std::string path_;
  const std::string id_;
  const std::unique_ptr<LogFile> file_;
  absl::Mutex mutex_;
  std::vector<int64_t> done_ ABSL_GUARDED_BY(mutex_);
};

ForgetfulFiles::ForgetfulFiles(const std::string& machine) : machine_(machine) {
  const auto prepare = [&]() -> absl::Status {
    RETURN_IF_ERROR(files::MakeFolders(machine_));
    ASSIGN_OR_RETURN(boot_id_, BootOf(machine_));
    absl::MutexLock lock(&mutex_);
    ASSIGN_OR_RETURN(journal_, NewJournal(machine_));
    return absl::OkStatus();
  };
  if (absl::Status status = prepare(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::abort();
  }
}

int64_t ForgetfulFiles::NextId() {
  absl::MutexLock lock(&mutex_);
  return next_id_++;
}

bool ForgetfulFiles::Note(absl::string_view line) {
  absl::MutexLock lock(&mutex_);
  return NoteLocked(line);
}

bool ForgetfulFiles::NoteLocked(absl::string_view line) {
  if (left_ >= 0 && left_-- == 0) dead_ = true;
  if (dead_) return false;
  if (line.empty()) return true;
  const std::string text = absl::StrCat(line, "\n");
  // All of it, or the process dies: a line that is missing would spoil the test.
  if (write(journal_.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) {
    return true;
  }
  std::perror("the journal of a machine that loses power");
  std::abort();
}

void ForgetfulFiles::Die() {
  absl::MutexLock lock(&mutex_);
  dead_ = true;
}

void ForgetfulFiles::DieAfter(int64_t n) {
  absl::MutexLock lock(&mutex_);
  left_ = n;
}

bool ForgetfulFiles::dead() {
  absl::MutexLock lock(&mutex_);
  return dead_;
}

absl::StatusOr<std::unique_ptr<LogFile>> ForgetfulFiles::Create(const std::string& path) {
  const std::string id = absl::StrCat(NextId());
  absl::MutexLock lock(&mutex_);
  if (!NoteLocked("")) return Dead(path);
  absl::StatusOr<std::unique_ptr<LogFile>> file = DiskLogFiles().Create(path);
  if (!file.ok()) return file.status();
  left_ += left_ == 0 ? 1 : 0;  // not between a thing and its line
  NoteLocked(absl::StrCat("made ", id, " ", path));
  made_[path] = id;
  return std::make_unique<ForgetfulFile>(*this, path, id, *std::move(file));
}

absl::Status ForgetfulFiles::Sync(const std::string& path) {
  if (!std::filesystem::exists(path)) return files::FileError(ENOENT, path, "cannot be opened");
  return Note(absl::StrCat("synced-path ", path)) ? absl::OkStatus() : Dead(path);
}

absl::Status ForgetfulFiles::SyncFolder(const std::string& folder) {
  return Note(absl::StrCat("folder ", folder)) ? absl::OkStatus() : Dead(folder);
}

absl::Status ForgetfulFiles::Remove(const std::string& path) {
  const std::string name = files::RandomName("", "removed-").substr(1);
  absl::MutexLock lock(&mutex_);
  if (!NoteLocked(absl::StrCat("removing ", name, " ", path))) return Dead(path);
  if (rename(path.c_str(), files::PathIn(machine_, name).c_str()) != 0) {
    return errno == ENOENT ? absl::OkStatus() : files::FileError(errno, path, "cannot be removed");
  }
  left_ += left_ == 0 ? 1 : 0;
  NoteLocked(absl::StrCat("removed ", name, " ", path));
  return absl::OkStatus();
}

absl::Status ForgetfulFiles::Rename(const std::string& from, const std::string& to) {
  RETURN_IF_ERROR(Create(to).status());
  std::error_code error;
  std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing, error);
  if (error) return files::FileError(error.value(), from, "cannot be renamed");
  return Remove(from);
}

absl::StatusOr<std::unique_ptr<LogFile>> ForgetfulFiles::Open(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  if (!NoteLocked("")) return Dead(path);
  const auto id = made_.find(path);
  if (id == made_.end()) return files::FileError(ENOENT, path, "cannot be opened");
  ASSIGN_OR_RETURN(auto file, DiskLogFiles().Open(path));
  return std::make_unique<ForgetfulFile>(*this, path, id->second, std::move(file));
}

}  // namespace emberd::log
