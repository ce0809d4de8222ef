// When the disk has what: the rounds of LogWriter in which records and their blobs are synced.
#include <utility>

#include "base/failpoint.h"
#include "base/status.h"
#include "server/log/log_writer.h"

namespace emberd::server {

void LogWriter::WhenDurable(uint64_t sequence, std::function<void(absl::Status)> done) {
  absl::Status status;
  if (options_.fsync == v1::StorageConfig::ALWAYS) {
    MutexLock lock(&mutex_);
    if (sequence > durable_ && failed_.ok()) {
      waiting_.push_back({sequence, std::move(done)});
      changed_.SignalAll();
      return;
    }
    if (sequence > durable_) status = failed_;
  }
  done(status);
}

void LogWriter::SyncForWaiters() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      while (waiting_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (waiting_.empty()) return;
    }
    SyncRound();
  }
}

// Who comes while a round is on its way shares the next one.
void LogWriter::SyncRound() {
  std::vector<Waiter> waiting;
  {
    MutexLock lock(&mutex_);
    waiting.swap(waiting_);
  }
  const absl::Status status = SyncAll(nullptr);
  const uint64_t durable = this->durable();
  for (Waiter& waiter : waiting) {
    waiter.done(waiter.sequence <= durable ? absl::OkStatus() : status);
  }
}

absl::Status LogWriter::SyncAll(const LogFolder* older) {
  MutexLock round(&sync_mutex_);
  absl::Status status;
  if (older != nullptr) status = SyncOlder(*older);
  if (status.ok()) status = SyncAppended();
  if (status.ok()) return status;
  MutexLock lock(&mutex_);
  return Fail(status);
}

absl::Status LogWriter::SyncAppended() {
  std::vector<std::shared_ptr<LogSegment>> segments;
  uint64_t newest;
  {
    MutexLock lock(&mutex_);
    RETURN_IF_ERROR(failed_);
    newest = next_sequence_ - 1;
    if (newest == durable_) return absl::OkStatus();
    segments = unsynced_;
    segments.push_back(current_);
  }
  RETURN_IF_ERROR(SyncSegments(segments));
  MutexLock lock(&mutex_);
  durable_ = newest;
  std::erase_if(unsynced_, [](const auto& segment) { return segment->Synced(); });
  return absl::OkStatus();
}

// Blobs first: a record that the disk has must find its own there.
absl::Status LogWriter::SyncSegments(absl::Span<const std::shared_ptr<LogSegment>> segments) {
  if (Mistake("log.not_synced")) return absl::OkStatus();
  for (const auto& segment : segments) RETURN_IF_ERROR(segment->SyncBlobs());
  for (const auto& segment : segments) RETURN_IF_ERROR(segment->SyncRecords());
  if (segments.back()->number() == folder_synced_) return absl::OkStatus();
  RETURN_IF_ERROR(files_.SyncFolder(options_.folder));
  folder_synced_ = segments.back()->number();
  return absl::OkStatus();
}

}  // namespace emberd::server
