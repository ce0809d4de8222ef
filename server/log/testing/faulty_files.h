// A disk that fails when it is told to.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/log/log_files.h"

namespace emberd::log {

// Thread-safe. Works on other files, which outlive it.
class FaultyFiles : public LogFiles {
 public:
  explicit FaultyFiles(LogFiles& files) : files_(files) {}

  // From the n-th call on (0: the next one), whichever it is, every call is this error (an errno).
  // Writes leave a part behind; with ENOSPC, what needs no room goes on: syncing and removing, and
  // writing where there is room already.
  void FailFrom(int64_t n, int error);
  // Only calls of Sync and SyncFolder.
  void FailSyncs(int error);
  void Heal();
  int64_t calls() const;  // so far

  absl::StatusOr<std::unique_ptr<LogFile>> Create(const std::string& path) override;
  absl::Status Sync(const std::string& path) override;
  absl::Status SyncFolder(const std::string& folder) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::StatusOr<std::unique_ptr<LogFile>> Open(const std::string& path) override;
  std::string BootId() override { return files_.BootId(); }

 private:
  friend class FaultyFile;
  enum class Call { kMakes, kSyncs, kRemoves };
  // The error of this call; 0: none.
  int Next(Call call);

  LogFiles& files_;
  mutable absl::Mutex mutex_;
  int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t first_ ABSL_GUARDED_BY(mutex_) = std::numeric_limits<int64_t>::max();
  int error_ ABSL_GUARDED_BY(mutex_) = 0;
  int sync_error_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace emberd::log
