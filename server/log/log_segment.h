// One segment of a log, while it is written, and files that are ready for the next one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "server/log/log_files.h"
#include "server/log/log_format.h"

namespace emberd::log {

// Files of blobs that a log no longer needs, kept for its later segments: the system has their
// pages and the disk their places already, which would otherwise be looked for again with every
// page that is written. Their old bytes do no harm, for records name blobs with a checksum.
//
// Thread-safe.
class SpareBlobs {
 public:
  // At most so many bytes are kept, and no more than what is left of the disk. `files` outlives it.
  SpareBlobs(LogFiles& files, std::string folder, int64_t most_bytes)
      : files_(files), folder_(std::move(folder)), most_bytes_(most_bytes) {}

  // What an earlier process kept.
  void Find();
  // Takes the file of blobs of this segment out of the log. What is gone already is no error.
  absl::Status Keep(uint64_t segment);
  // A file for the blobs of a new segment: the one that was kept last, or a new one.
  absl::StatusOr<std::unique_ptr<LogFile>> Take(uint64_t segment);
  // Gives the disk its space back. False: there was nothing to give.
  bool Clear();

 private:
  struct Spare {
    uint64_t segment;
    int64_t bytes;
  };
  // Whether there is room for one more.
  bool HasRoom(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  LogFiles& files_;
  const std::string folder_;
  const int64_t most_bytes_;
  Mutex mutex_;
  std::vector<Spare> spares_ ABSL_GUARDED_BY(mutex_);
};

// One thread at a time, unless said otherwise.
class LogSegment {
 public:
  // Makes its files, that of blobs from what `spares` has, and writes the state, a frame that
  // nobody has sealed, and then the head, which makes it count. After an error it does not count,
  // except for ABORTED: then nobody knows.
  static absl::StatusOr<std::shared_ptr<LogSegment>> Create(LogFiles& files,
                                                            const std::string& folder,
                                                            const LogHead& head, std::string state,
                                                            int64_t reserve_bytes,
                                                            SpareBlobs& spares);

  uint64_t number() const { return head_.segment; }
  // Behind the last record, and behind the state.
  absl::Status Append(uint64_t sequence, uint64_t durable, std::string frame);
  int64_t record_bytes() const { return end_ - begin_; }

  // A place for a blob; each must be given back.
  int64_t BeginBlob(int64_t bytes);
  void EndBlob(int64_t offset, int64_t bytes, bool written);
  int64_t blob_bytes() const { return blob_end_; }
  // Several threads at once.
  absl::Status WriteBlob(int64_t offset, absl::Span<const absl::Span<const char>> pieces) {
    return blobs_->Write(offset, pieces);
  }

  int64_t bytes() const { return end_ + blob_end_; }
  // Gives room back that was set aside for records.
  void Close() { records_->Truncate(end_).IgnoreError(); }

  // What was written before, if anything was since the last time. Beside other threads, but only
  // one at a time.
  absl::Status SyncBlobs() { return SyncIf(&blobs_written_, *blobs_); }
  absl::Status SyncRecords() { return SyncIf(&records_written_, *records_); }
  bool Synced() const { return blobs_writing_ == 0 && !blobs_written_ && !records_written_; }

 private:
  LogSegment(const LogHead& head, int64_t reserve_bytes)
      : head_(head), reserve_bytes_(reserve_bytes) {}
  absl::Status Begin(LogFiles& files, const std::string& folder, std::string state,
                     SpareBlobs& spares);
  absl::Status MakeRoom(int64_t bytes);
  static absl::Status SyncIf(std::atomic<bool>* written, LogFile& file);

  const LogHead head_;
  const int64_t reserve_bytes_;
  std::unique_ptr<LogFile> records_;
  std::unique_ptr<LogFile> blobs_;
  bool head_written_ = false;      // or tried to be
  int64_t begin_ = kLogHeadBytes;  // behind the state
  int64_t end_ = kLogHeadBytes;    // of records
  int64_t reserved_ = 0;
  absl::Time next_try_ = absl::InfinitePast();  // to set more room aside
  int64_t blob_end_ = 0;
  int blobs_writing_ = 0;
  std::atomic<bool> blobs_written_{false};
  std::atomic<bool> records_written_{false};
};

}  // namespace emberd::log
