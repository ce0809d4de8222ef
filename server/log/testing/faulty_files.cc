#include "server/log/testing/faulty_files.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "server/files/files.h"

namespace emberd::log {

// One of a FaultyFiles, which outlives it.
class FaultyFile : public LogFile {
 public:
  FaultyFile(FaultyFiles& faults, std::string path, std::unique_ptr<LogFile> file)
      : faults_(faults), path_(std::move(path)), file_(std::move(file)) {}

  absl::Status Write(int64_t offset, absl::Span<const absl::Span<const char>> pieces) override {
    int64_t bytes = 0;
    for (const absl::Span<const char> piece : pieces) bytes += static_cast<int64_t>(piece.size());
    const int error = faults_.Next(FaultyFiles::Call::kMakes);
    if (error == 0 || (error == ENOSPC && offset + bytes <= room_)) {
      return file_->Write(offset, pieces);
    }
    if (!pieces.empty()) {
      const absl::Span<const char> part = pieces[0].first(pieces[0].size() / 2);
      if (!part.empty()) file_->Write(offset, {&part, 1}).IgnoreError();
    }
    return files::FileError(error, path_, "cannot be written");
  }

  absl::Status Allocate(int64_t offset, int64_t bytes) override {
    if (const int error = faults_.Next(FaultyFiles::Call::kMakes); error != 0) {
      return files::FileError(error, path_, "cannot be enlarged");
    }
    room_ = std::max(room_, offset + bytes);
    return file_->Allocate(offset, bytes);
  }

  absl::Status Truncate(int64_t bytes) override { return file_->Truncate(bytes); }

  absl::Status Sync() override {
    const int error = faults_.Next(FaultyFiles::Call::kSyncs);
    return error == 0 ? file_->Sync() : files::FileError(error, path_, "cannot be written");
  }

 private:
  FaultyFiles& faults_;
  const std::string path_;
  const std::unique_ptr<LogFile> file_;
  int64_t room_ = 0;
};

void FaultyFiles::FailFrom(int64_t n, int error) {
  absl::MutexLock lock(&mutex_);
  first_ = calls_ + n;
  error_ = error;
}

void FaultyFiles::FailSyncs(int error) {
  absl::MutexLock lock(&mutex_);
  sync_error_ = error;
}

void FaultyFiles::Heal() {
  absl::MutexLock lock(&mutex_);
  first_ = std::numeric_limits<int64_t>::max();
  sync_error_ = 0;
}

int64_t FaultyFiles::calls() const {
  absl::MutexLock lock(&mutex_);
  return calls_;
}

int FaultyFiles::Next(Call call) {
  absl::MutexLock lock(&mutex_);
  const bool fails = calls_++ >= first_;
  if (call == Call::kSyncs && sync_error_ != 0) return sync_error_;
  if (!fails || (error_ == ENOSPC && call != Call::kMakes)) return 0;
  return error_;
}

absl::StatusOr<std::unique_ptr<LogFile>> FaultyFiles::Create(const std::string& path) {
  if (const int error = Next(Call::kMakes); error != 0) {
    return files::FileError(error, path, "cannot be created");
  }
  absl::StatusOr<std::unique_ptr<LogFile>> file = files_.Create(path);
  if (!file.ok()) return file.status();
  return std::make_unique<FaultyFile>(*this, path, *std::move(file));
}

absl::Status FaultyFiles::Sync(const std::string& path) {
  const int error = Next(Call::kSyncs);
  return error == 0 ? files_.Sync(path) : files::FileError(error, path, "cannot be written");
}

absl::Status FaultyFiles::SyncFolder(const std::string& folder) {
  const int error = Next(Call::kSyncs);
  return error == 0 ? files_.SyncFolder(folder)
                    : files::FileError(error, folder, "cannot be written");
}

absl::Status FaultyFiles::Remove(const std::string& path) {
  const int error = Next(Call::kRemoves);
  return error == 0 ? files_.Remove(path) : files::FileError(error, path, "cannot be removed");
}

absl::Status FaultyFiles::Rename(const std::string& from, const std::string& to) {
  const int error = Next(Call::kRemoves);
  return error == 0 ? files_.Rename(from, to) : files::FileError(error, from, "cannot be renamed");
}

absl::StatusOr<std::unique_ptr<LogFile>> FaultyFiles::Open(const std::string& path) {
  if (const int error = Next(Call::kRemoves); error != 0) {
    return files::FileError(error, path, "cannot be opened");
  }
  absl::StatusOr<std::unique_ptr<LogFile>> file = files_.Open(path);
  if (!file.ok()) return file.status();
  return std::make_unique<FaultyFile>(*this, path, *std::move(file));
}

}  // namespace emberd::log
