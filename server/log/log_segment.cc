#include "server/log/log_segment.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/string_view.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/files/files.h"

namespace emberd::log {

bool SpareBlobs::HasRoom(int64_t bytes) const {
  for (const Spare& spare : spares_) bytes += spare.bytes;
  std::error_code error;
  const std::filesystem::space_info disk = std::filesystem::space(folder_, error);
  return bytes <= most_bytes_ && !error && static_cast<uint64_t>(bytes) <= disk.available;
}

void SpareBlobs::Find() {
  const absl::StatusOr<LogFolder> found = ListLog(folder_);
  if (!found.ok()) return;
  MutexLock lock(&mutex_);
  for (const uint64_t segment : found->spares) {
    const std::string path = files::PathIn(folder_, SpareName(segment));
    const int64_t bytes = LogFileBytes(path);
    if (HasRoom(bytes)) {
      spares_.push_back({segment, bytes});
    } else {
      files_.Remove(path).IgnoreError();
    }
  }
}

absl::Status SpareBlobs::Keep(uint64_t segment) {
  const std::string path = files::PathIn(folder_, BlobsName(segment));
  const int64_t bytes = LogFileBytes(path);
  MutexLock lock(&mutex_);
  if (bytes == 0 || !HasRoom(bytes)) return files_.Remove(path);
  RETURN_IF_ERROR(files_.Rename(path, files::PathIn(folder_, SpareName(segment))));
  spares_.push_back({segment, bytes});
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LogFile>> SpareBlobs::Take(uint64_t segment) {
  const std::string path = files::PathIn(folder_, BlobsName(segment));
  MutexLock lock(&mutex_);
  while (!spares_.empty()) {
    const std::string spare = files::PathIn(folder_, SpareName(spares_.back().segment));
    spares_.pop_back();
    if (files_.Rename(spare, path).ok()) return files_.Open(path);
  }
  return files_.Create(path);
}

bool SpareBlobs::Clear() {
  MutexLock lock(&mutex_);
  const bool any = !spares_.empty();
  for (const Spare& spare : spares_) {
    files_.Remove(files::PathIn(folder_, SpareName(spare.segment))).IgnoreError();
  }
  spares_.clear();
  return any;
}

namespace {

// Asking a full disk again and again for room that is not needed yet would slow records down.
constexpr absl::Duration kTryAgain = absl::Milliseconds(100);

absl::Status WriteBytes(LogFile& file, int64_t offset, absl::string_view bytes) {
  const absl::Span<const char> piece(bytes.data(), bytes.size());
  return file.Write(offset, {&piece, 1});
}

}  // namespace

absl::StatusOr<std::shared_ptr<LogSegment>> LogSegment::Create(
    LogFiles& files, const std::string& folder, const LogHead& head, std::string state,
    int64_t reserve_bytes, SpareBlobs& spares) {
  std::shared_ptr<LogSegment> segment(new LogSegment(head, reserve_bytes));
  const absl::Status status = segment->Begin(files, folder, std::move(state), spares);
  if (status.ok()) return segment;
  if (segment->records_ == nullptr) return status;
  // The records last, also for a loss of power: without them the blobs would look like what is left
  // of a segment.
  absl::Status removed = files.Remove(files::PathIn(folder, BlobsName(head.segment)));
  if (removed.ok()) removed = files.SyncFolder(folder);
  if (removed.ok()) removed = files.Remove(files::PathIn(folder, RecordsName(head.segment)));
  if (!segment->head_written_ || removed.ok()) return status;
  return absl::AbortedError(status.message());
}

absl::Status LogSegment::Begin(LogFiles& files, const std::string& folder, std::string state,
                               SpareBlobs& spares) {
  ASSIGN_OR_RETURN(records_, files.Create(files::PathIn(folder, RecordsName(number()))));
  // No loss of power takes this, so blobs without it are what is left of a segment that somebody
  // has cut or removed (LogScan::FindBehind).
  RETURN_IF_ERROR(WriteBytes(*records_, 0, std::string(kLogHeadBytes, '\0')));
  RETURN_IF_ERROR(records_->Sync());
  RETURN_IF_ERROR(files.SyncFolder(folder));
  ASSIGN_OR_RETURN(blobs_, spares.Take(number()));
  RETURN_IF_ERROR(Append(head_.first_sequence, head_.durable, std::move(state)));
  begin_ = end_;
  head_written_ = true;
  RETURN_IF_ERROR(WriteBytes(*records_, 0, EncodeLogHead(head_)));
  blobs_written_ = true;  // the file itself
  return absl::OkStatus();
}

absl::Status LogSegment::MakeRoom(int64_t bytes) {
  const int64_t needed = end_ + bytes;
  if (needed + reserve_bytes_ / 2 <= reserved_) return absl::OkStatus();
  const absl::Time now = SteadyNow();
  if (needed <= reserved_ && now < next_try_) return absl::OkStatus();
  int64_t more = RoundUp(needed + reserve_bytes_ / 2 - reserved_, reserve_bytes_);
  absl::Status status = records_->Allocate(reserved_, more);
  if (!status.ok()) {
    next_try_ = now + kTryAgain;
    if (needed <= reserved_) return absl::OkStatus();
    // The last that there is.
    more = RoundUp(needed, 4096) - reserved_;
    status = records_->Allocate(reserved_, more);
  }
  if (status.ok()) reserved_ += more;
  return status;
}

absl::Status LogSegment::Append(uint64_t sequence, uint64_t durable, std::string frame) {
  const auto bytes = static_cast<int64_t>(frame.size());
  RETURN_IF_ERROR(MakeRoom(bytes));
  SealFrame(head_.salt, sequence, durable, &frame);
  if (absl::Status status = WriteBytes(*records_, end_, frame); !status.ok()) {
    // It must not be taken for a record if nothing else comes.
    const std::string zeros(kFrameHeadBytes, '\0');
    WriteBytes(*records_, end_, zeros).IgnoreError();
    return status;
  }
  end_ += bytes;
  records_written_ = true;
  return absl::OkStatus();
}

int64_t LogSegment::BeginBlob(int64_t bytes) {
  const int64_t offset = RoundUp(blob_end_, kBlobAlignment);
  blob_end_ = offset + bytes;
  ++blobs_writing_;
  return offset;
}

void LogSegment::EndBlob(int64_t offset, int64_t bytes, bool written) {
  --blobs_writing_;
  if (written) {
    blobs_written_ = true;
  } else if (blob_end_ == offset + bytes) {
    blob_end_ = offset;
  }
}

absl::Status LogSegment::SyncIf(std::atomic<bool>* written, LogFile& file) {
  if (!written->exchange(false)) return absl::OkStatus();
  return file.Sync();
}

}  // namespace emberd::log
