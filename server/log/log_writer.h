// Writes the log of a shard. See docs/log.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/periodic_task.h"
#include "emberd/internal/v1/log.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "server/log/log_files.h"

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
  absl::Mutex mutex_;
  std::vector<Spare> spares_ ABSL_GUARDED_BY(mutex_);
};

// One segment of a log, while it is written. One thread at a time, unless said otherwise.
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

  // Syncs what was written before, if anything was since the last sync. Beside threads that write,
  // but by one thread at a time.
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

struct LogOptions {
  std::string folder;  // made if it is not there
  int shard = 0;
  int shards = 1;
  v1::StorageConfig::Fsync fsync = v1::StorageConfig::INTERVAL;
  absl::Duration interval = absl::Seconds(1);  // INTERVAL

  // A segment that is longer than either is full. Small segments can be dropped sooner, but each
  // begins with the whole state of the shard.
  int64_t segment_bytes = int64_t{256} << 20;  // of blobs
  int64_t record_bytes = int64_t{64} << 20;    // of records behind the state
  // Room for records is set aside in steps of so much, and half of it at least ahead of need: small
  // records go on for a while when blobs find the disk full.
  int64_t reserve_bytes = int64_t{8} << 20;

  // Files of blobs that are dropped are kept for later segments, up to so much.
  int64_t spare_bytes = int64_t{256} << 20;

  std::map<uint64_t, uint64_t> older_blobs = {};  // as LogEnd says

  LogFiles* files = nullptr;  // null: SystemLogFiles(); else outlives the writer
};

// Thread-safe. Two kinds of errors: RESOURCE_EXHAUSTED or UNAVAILABLE for what could not be
// written; nothing was changed, and the next call tries again. After the disk failed to sync,
// nobody knows what it holds: from then on everything is UNAVAILABLE, until the process is
// restarted.
class LogWriter {
 public:
  // Starts segment `next_segment` with the record `next_sequence`, the state; both as ReadLog says
  // (1 and 1 for a new log). Waits for the disk. Nobody else may write to the folder.
  static absl::StatusOr<std::unique_ptr<LogWriter>> Open(LogOptions options, uint64_t next_segment,
                                                         uint64_t next_sequence,
                                                         const internal::v1::LogRecord& state);
  // Waits for the disk, except with NEVER, and for those who wait in WhenDurable.
  ~LogWriter();

  // Bulk bytes for a record to name: all pieces, one behind another, beginning at a multiple of 64
  // bytes. They count for nothing until such a record is appended. Several may write at once.
  absl::StatusOr<internal::v1::LogBlob> AppendBlob(absl::Span<const absl::Span<const char>> pieces);

  // The order of calls is that of records. Returns the record's sequence. After an error the record
  // may still be found by who reads the log, unless another one was appended since.
  absl::StatusOr<uint64_t> Append(const internal::v1::LogRecord& record);

  // ALWAYS: calls `done` on a thread of the writer when the disk has this record, all before it,
  // and their blobs; it may use the writer, but not wait for others. Else: calls it at once.
  void WhenDurable(uint64_t sequence, std::function<void(absl::Status)> done);

  // Returns when the disk has all records that were appended before, and their blobs, and what
  // earlier processes have left. After an error the writer has failed.
  absl::Status Sync();

  // Starts a new segment, whose number it returns, with the state after all records before. After
  // an error the log goes on in the old one.
  absl::StatusOr<uint64_t> StartSegment(const internal::v1::LogRecord& state);
  bool SegmentFull() const;

  // Removes segments before this one, oldest first, but no blobs that a record which stays may
  // name; never the newest. Waits for the disk first.
  absl::Status DropBefore(uint64_t segment);

  const std::string& folder() const { return options_.folder; }
  uint64_t segment() const;  // the newest
  int64_t bytes() const;     // of all segments
  uint64_t records() const;  // since the first one ever
  uint64_t durable() const;  // the newest record that the disk is known to have
  // Why something was refused last; OK if the latest attempts went well.
  absl::Status failure() const;

 private:
  struct Waiter {
    uint64_t sequence;
    std::function<void(absl::Status)> done;
  };

  LogWriter(LogOptions options, uint64_t next_sequence);
  absl::Status Begin(uint64_t next_segment, const internal::v1::LogRecord& state);
  absl::StatusOr<std::shared_ptr<LogSegment>> NewSegment(uint64_t number,
                                                         const internal::v1::LogRecord& state)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The oldest segment whose blobs are needed by records of this segment and later ones.
  uint64_t BlobsNeededFrom(uint64_t segment) const;
  // What the caller is told about an error of the disk.
  absl::Status Refusal(const absl::Status& error) const;
  // A file was taken out of the log, or could not be.
  absl::Status Dropped(const std::string& name, const absl::Status& status);
  // Whether something that failed for want of space may do better now.
  bool MadeSpace(const absl::Status& error);
  absl::Status Fail(const absl::Status& error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SyncForWaiters();
  // Sync, and then tells those who wait.
  void SyncRound();
  absl::Status SyncAppended() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sync_mutex_);
  absl::Status SyncSegments(absl::Span<const std::shared_ptr<LogSegment>> segments)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(sync_mutex_);
  absl::Status SyncOlder() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sync_mutex_);

  const LogOptions options_;
  LogFiles& files_;
  SpareBlobs spares_;
  bool open_ = false;
  absl::Mutex sync_mutex_;                        // one round at a time; taken before mutex_
  LogFolder older_ ABSL_GUARDED_BY(sync_mutex_);  // of earlier processes, until they are synced
  // The segment whose files' names survive a loss of power.
  uint64_t folder_synced_ ABSL_GUARDED_BY(sync_mutex_) = 0;
  mutable absl::Mutex mutex_;
  absl::CondVar changed_;
  uint64_t next_sequence_ ABSL_GUARDED_BY(mutex_);
  uint64_t durable_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<LogSegment> current_ ABSL_GUARDED_BY(mutex_);
  // Older ones that a round must still look at.
  std::vector<std::shared_ptr<LogSegment>> unsynced_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, uint64_t> older_blobs_ ABSL_GUARDED_BY(mutex_);    // see LogEnd
  std::map<std::string, int64_t> older_bytes_ ABSL_GUARDED_BY(mutex_);  // by the name of the file
  std::vector<Waiter> waiting_ ABSL_GUARDED_BY(mutex_);
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);  // for good
  absl::Status record_failure_ ABSL_GUARDED_BY(mutex_);
  absl::Status blob_failure_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;                           // ALWAYS
  std::unique_ptr<PeriodicTask> each_interval_;  // INTERVAL
};

}  // namespace emberd::log
