// A machine that loses power: what nobody had synced may be gone afterwards, in any part.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "base/file_descriptor.h"
#include "server/log/log_files.h"

namespace emberd::log {

// The disks of one machine, as one of its processes sees them. Writes to the real ones, syncs
// nothing there, and keeps a journal of what was written and what was asked to be synced in a
// folder of the machine's own: so that after `kill -9` of all its processes LosePower can take
// away what a real machine might. Thread-safe.
class ForgetfulFiles : public LogFiles {
 public:
  // Made if it is not there. Ends the process if it cannot be written.
  explicit ForgetfulFiles(const std::string& machine);

  // As if the process was killed now: from now on nothing happens, and everything is an error.
  void Die();
  // The same before the n-th thing from now on that would change something.
  void DieAfter(int64_t n);
  bool dead();

  absl::StatusOr<std::unique_ptr<LogFile>> Create(const std::string& path) override;
  absl::Status Sync(const std::string& path) override;
  absl::Status SyncFolder(const std::string& folder) override;
  absl::Status Remove(const std::string& path) override;
  // To the journal, the other name is that of another file.
  absl::Status Rename(const std::string& from, const std::string& to) override;
  // Only what this process has made or renamed.
  absl::StatusOr<std::unique_ptr<LogFile>> Open(const std::string& path) override;
  std::string BootId() override { return boot_id_; }

 private:
  friend class ForgetfulFile;
  // A line of the journal. False: the process is dead.
  bool Note(absl::string_view line);
  bool NoteLocked(absl::string_view line) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t NextId();

  const std::string machine_;
  std::string boot_id_;
  absl::Mutex mutex_;
  FileDescriptor journal_ ABSL_GUARDED_BY(mutex_);
  std::string journal_name_;
  std::map<std::string, std::string> made_ ABSL_GUARDED_BY(mutex_);  // ids by path
  int64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  bool dead_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t left_ ABSL_GUARDED_BY(mutex_) = -1;  // until it dies; -1: it does not
};

struct PowerLoss {
  int64_t lost_bytes = 0;
  int64_t lost_names = 0;  // files that were made, or were removed, but are not now
};

// Takes from a machine without living processes what nobody had synced: by the seed nothing of it,
// all of it, or some of its sectors; and gives it another boot id.
absl::StatusOr<PowerLoss> LosePower(const std::string& machine, uint64_t seed);

}  // namespace emberd::log
