#include "server/log/log_writer.h"

#include <algorithm>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/files/files.h"

namespace emberd::log {
namespace {

using internal::v1::LogBlob;
using internal::v1::LogRecord;

// Asking a full disk again and again for room that is not needed yet would slow records down.
constexpr absl::Duration kTryAgain = absl::Milliseconds(100);

absl::Status WriteBytes(LogFile& file, int64_t offset, absl::string_view bytes) {
  const absl::Span<const char> piece(bytes.data(), bytes.size());
  return file.Write(offset, {&piece, 1});
}

absl::Status CheckRecord(const LogRecord& record) {
  const size_t bytes = record.ByteSizeLong();
  if (static_cast<int64_t>(bytes) <= kMostRecordBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "a record of the log has ", bytes, " bytes; at most ", kMostRecordBytes, " are allowed"));
}

absl::Status CheckIsState(const LogRecord& record) {
  if (record.kind_case() == LogRecord::kState) return CheckRecord(record);
  return absl::InternalError("a segment of the log does not begin with the state");
}

}  // namespace

bool SpareBlobs::HasRoom(int64_t bytes) const {
  for (const Spare& spare : spares_) bytes += spare.bytes;
  std::error_code error;
  const std::filesystem::space_info disk = std::filesystem::space(folder_, error);
  return bytes <= most_bytes_ && !error && static_cast<uint64_t>(bytes) <= disk.available;
}

void SpareBlobs::Find() {
  const absl::StatusOr<LogFolder> found = ListLog(folder_);
  if (!found.ok()) return;
  absl::MutexLock lock(&mutex_);
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
  absl::MutexLock lock(&mutex_);
  const int64_t bytes = LogFileBytes(path);  // 0 if another call has kept it
  if (bytes == 0 || !HasRoom(bytes)) return files_.Remove(path);
  RETURN_IF_ERROR(files_.Rename(path, files::PathIn(folder_, SpareName(segment))));
  spares_.push_back({segment, bytes});
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LogFile>> SpareBlobs::Take(uint64_t segment) {
  const std::string path = files::PathIn(folder_, BlobsName(segment));
  absl::MutexLock lock(&mutex_);
  while (!spares_.empty()) {
    const std::string spare = files::PathIn(folder_, SpareName(spares_.back().segment));
    spares_.pop_back();
    if (files_.Rename(spare, path).ok()) return files_.Open(path);
  }
  return files_.Create(path);
}

bool SpareBlobs::Clear() {
  absl::MutexLock lock(&mutex_);
  const bool any = !spares_.empty();
  for (const Spare& spare : spares_) {
    files_.Remove(files::PathIn(folder_, SpareName(spare.segment))).IgnoreError();
  }
  spares_.clear();
  return any;
}

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

LogWriter::LogWriter(LogOptions options, uint64_t next_sequence)
    : options_(std::move(options)),
      files_(options_.files != nullptr ? *options_.files : SystemLogFiles()),
      spares_(files_, options_.folder, options_.spare_bytes),
      next_sequence_(next_sequence),
      older_blobs_(options_.older_blobs) {}

absl::StatusOr<std::unique_ptr<LogWriter>> LogWriter::Open(LogOptions options,
                                                           uint64_t next_segment,
                                                           uint64_t next_sequence,
                                                           const LogRecord& state) {
  if (next_sequence == 0) {
    return absl::InternalError(
        absl::StrCat(options.folder, ": the records of a log are numbered from 1, not from 0"));
  }
  std::unique_ptr<LogWriter> writer(new LogWriter(std::move(options), next_sequence));
  if (absl::Status status = writer->Begin(next_segment, state); !status.ok()) {
    // Nobody waits for anything else to pass.
    return absl::IsResourceExhausted(status) ? writer->Refusal(status) : status;
  }
  LogWriter* const self = writer.get();
  self->open_ = true;
  switch (self->options_.fsync) {
    case v1::StorageConfig::ALWAYS:
      self->thread_ = std::thread([self] { self->SyncForWaiters(); });
      break;
    case v1::StorageConfig::INTERVAL:
      self->each_interval_ =
          std::make_unique<PeriodicTask>(self->options_.interval, [self] { self->SyncRound(); });
      break;
    default:
      break;
  }
  return writer;
}

absl::Status LogWriter::Begin(uint64_t next_segment, const LogRecord& state) {
  const std::string& folder = options_.folder;
  RETURN_IF_ERROR(files::MakeFolders(folder));
  ASSIGN_OR_RETURN(const LogFolder found, ListLog(folder));
  if (next_segment <= found.newest()) {
    return absl::InternalError(absl::StrCat(folder, ": segment ", next_segment,
                                            " cannot be begun: there is already segment ",
                                            found.newest()));
  }
  for (const auto& [segment, name] : found.files()) {
    absl::MutexLock lock(&mutex_);
    older_bytes_[name] = LogFileBytes(files::PathIn(folder, name));
  }
  spares_.Find();
  absl::MutexLock round(&sync_mutex_);
  older_ = found;
  const bool sync = options_.fsync != v1::StorageConfig::NEVER;
  // After a sync that failed, the next one may say that the disk has what it has not. So, other
  // than on a full disk, there is no second try.
  absl::Status synced = sync ? SyncOlder() : absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  if (!synced.ok()) return Fail(synced);
  durable_ = sync ? next_sequence_ - 1 : 0;
  ASSIGN_OR_RETURN(current_, NewSegment(next_segment, state));
  synced = current_->SyncBlobs();
  if (synced.ok()) synced = current_->SyncRecords();
  if (synced.ok()) synced = files_.SyncFolder(folder);
  if (!synced.ok()) return Fail(synced);
  folder_synced_ = next_segment;
  if (sync) durable_ = next_sequence_ - 1;
  return absl::OkStatus();
}

// What a killed process has left with the system alone is built upon from here on.
absl::Status LogWriter::SyncOlder() {
  if (older_.newest() == 0) return absl::OkStatus();
  for (const auto& [segment, name] : older_.files()) {
    RETURN_IF_ERROR(files_.Sync(files::PathIn(options_.folder, name)));
  }
  RETURN_IF_ERROR(files_.SyncFolder(options_.folder));
  older_ = LogFolder();
  return absl::OkStatus();
}

LogWriter::~LogWriter() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
  each_interval_.reset();
  if (open_ && options_.fsync != v1::StorageConfig::NEVER) SyncRound();
}

absl::StatusOr<std::shared_ptr<LogSegment>> LogWriter::NewSegment(uint64_t number,
                                                                  const LogRecord& state) {
  RETURN_IF_ERROR(CheckIsState(state));
  LogHead head;
  head.shard = static_cast<uint32_t>(options_.shard);
  head.shards = static_cast<uint32_t>(options_.shards);
  head.segment = number;
  head.first_sequence = next_sequence_;
  head.durable = durable_;
  head.fsync = options_.fsync;
  head.salt = std::random_device{}();
  files_.BootId().copy(head.boot_id.data(), kBootIdBytes);
  const auto create = [&] {
    return LogSegment::Create(files_, options_.folder, head, FrameFor(state),
                              options_.reserve_bytes, spares_);
  };
  auto segment = create();
  if (MadeSpace(segment.status())) segment = create();
  if (!segment.ok()) return segment;
  NoteOlderBlob(number, OldestBlobSegment(state), &older_blobs_);
  ++next_sequence_;
  return segment;
}

absl::Status LogWriter::Refusal(const absl::Status& error) const {
  switch (error.code()) {
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kInvalidArgument:
      return error;
    case absl::StatusCode::kResourceExhausted:
      return absl::ResourceExhaustedError(
          absl::StrCat("the disk of ", options_.folder,
                       " is full, or a limit of the process is reached (", error.message(),
                       "): nothing was changed; lookups go on, and updates are accepted again when "
                       "there is space"));
    default:
      return absl::UnavailableError(
          absl::StrCat("the log in ", options_.folder, " cannot be written (", error.message(),
                       "): nothing was changed; lookups go on, and updates are accepted again when "
                       "it can be written"));
  }
}

bool LogWriter::MadeSpace(const absl::Status& error) {
  return absl::IsResourceExhausted(error) && spares_.Clear();
}

absl::Status LogWriter::Fail(const absl::Status& error) {
  if (!failed_.ok()) return failed_;
  failed_ = absl::UnavailableError(absl::StrCat(
      "the log in ", options_.folder, " failed (", error.message(),
      "): what the disk holds is unknown, so updates are refused until this process is restarted; "
      "check the disk first"));
  return failed_;
}

absl::StatusOr<LogBlob> LogWriter::AppendBlob(absl::Span<const absl::Span<const char>> pieces) {
  LogBlob blob;
  uint32_t crc = 0;
  int64_t bytes = 0;
  for (const absl::Span<const char> piece : pieces) {
    crc = ExtendCrc32c(crc, piece);
    bytes += static_cast<int64_t>(piece.size());
  }
  std::shared_ptr<LogSegment> segment;
  int64_t offset;
  {
    absl::MutexLock lock(&mutex_);
    if (!failed_.ok()) return failed_;
    segment = current_;
    offset = segment->BeginBlob(bytes);
  }
  absl::Status status = segment->WriteBlob(offset, pieces);
  if (MadeSpace(status)) status = segment->WriteBlob(offset, pieces);
  absl::MutexLock lock(&mutex_);
  segment->EndBlob(offset, bytes, status.ok());
  blob_failure_ = status.ok() ? status : Refusal(status);
  RETURN_IF_ERROR(blob_failure_);
  blob.set_segment(segment->number());
  blob.set_offset(offset);
  blob.set_bytes(bytes);
  blob.set_crc32c(crc);
  return blob;
}

absl::StatusOr<uint64_t> LogWriter::Append(const LogRecord& record) {
  RETURN_IF_ERROR(CheckRecord(record));
  const std::string frame = FrameFor(record);
  absl::MutexLock lock(&mutex_);
  if (!failed_.ok()) return failed_;
  absl::Status status = current_->Append(next_sequence_, durable_, frame);
  if (MadeSpace(status)) status = current_->Append(next_sequence_, durable_, frame);
  record_failure_ = status.ok() ? status : Refusal(status);
  RETURN_IF_ERROR(record_failure_);
  NoteOlderBlob(current_->number(), OldestBlobSegment(record), &older_blobs_);
  return next_sequence_++;
}

absl::StatusOr<uint64_t> LogWriter::StartSegment(const LogRecord& state) {
  absl::MutexLock lock(&mutex_);
  if (!failed_.ok()) return failed_;
  const uint64_t number = current_->number() + 1;
  // Of an attempt that failed.
  for (const std::string& name : {BlobsName(number), RecordsName(number)}) {
    if (absl::Status status = files_.Remove(files::PathIn(options_.folder, name)); !status.ok()) {
      return record_failure_ = Refusal(status);
    }
  }
  absl::StatusOr<std::shared_ptr<LogSegment>> segment = NewSegment(number, state);
  if (absl::IsAborted(segment.status())) return Fail(segment.status());
  record_failure_ = segment.ok() ? absl::OkStatus() : Refusal(segment.status());
  RETURN_IF_ERROR(record_failure_);
  current_->Close();
  older_bytes_[RecordsName(current_->number())] = current_->bytes() - current_->blob_bytes();
  older_bytes_[BlobsName(current_->number())] = current_->blob_bytes();
  unsynced_.push_back(std::exchange(current_, *std::move(segment)));
  return number;
}

bool LogWriter::SegmentFull() const {
  absl::MutexLock lock(&mutex_);
  return current_->blob_bytes() > options_.segment_bytes ||
         current_->record_bytes() > options_.record_bytes;
}

uint64_t LogWriter::BlobsNeededFrom(uint64_t segment) const {
  absl::MutexLock lock(&mutex_);
  for (auto it = older_blobs_.lower_bound(segment); it != older_blobs_.end(); ++it) {
    segment = std::min(segment, it->second);
  }
  return segment;
}

absl::Status LogWriter::Dropped(const std::string& name, const absl::Status& status) {
  if (!status.ok()) return Refusal(status);
  // One after another, for a loss of power must leave no gap.
  if (absl::Status synced = files_.SyncFolder(options_.folder); !synced.ok()) {
    return Refusal(synced);
  }
  absl::MutexLock lock(&mutex_);
  older_bytes_.erase(name);
  return absl::OkStatus();
}

absl::Status LogWriter::DropBefore(uint64_t segment) {
  segment = std::min(segment, this->segment());
  const uint64_t blobs = BlobsNeededFrom(segment);
  ASSIGN_OR_RETURN(const LogFolder found, ListLog(options_.folder));
  // All records first: one that was left behind for a while must find its blobs.
  if ((found.records.empty() || found.records.front() >= segment) &&
      (found.blobs.empty() || found.blobs.front() >= blobs)) {
    return absl::OkStatus();
  }
  // What the log will begin with must survive a loss of power, and its blobs with it.
  RETURN_IF_ERROR(Sync());
  for (const uint64_t old : found.records) {
    if (old >= segment) break;
    RETURN_IF_ERROR(
        Dropped(RecordsName(old), files_.Remove(files::PathIn(options_.folder, RecordsName(old)))));
  }
  for (const uint64_t old : found.blobs) {
    if (old >= blobs) break;
    RETURN_IF_ERROR(Dropped(BlobsName(old), spares_.Keep(old)));
  }
  absl::MutexLock lock(&mutex_);
  older_blobs_.erase(older_blobs_.begin(), older_blobs_.lower_bound(segment));
  return absl::OkStatus();
}

uint64_t LogWriter::segment() const {
  absl::MutexLock lock(&mutex_);
  return current_->number();
}

int64_t LogWriter::bytes() const {
  absl::MutexLock lock(&mutex_);
  int64_t bytes = current_->bytes();
  for (const auto& [name, older] : older_bytes_) bytes += older;
  return bytes;
}

uint64_t LogWriter::records() const {
  absl::MutexLock lock(&mutex_);
  return next_sequence_ - 1;
}

uint64_t LogWriter::durable() const {
  absl::MutexLock lock(&mutex_);
  return durable_;
}

absl::Status LogWriter::failure() const {
  absl::MutexLock lock(&mutex_);
  if (!failed_.ok()) return failed_;
  return record_failure_.ok() ? blob_failure_ : record_failure_;
}

// When the disk has what: the rounds of LogWriter in which records and their blobs are synced.

void LogWriter::WhenDurable(uint64_t sequence, std::function<void(absl::Status)> done) {
  absl::Status status;
  if (options_.fsync == v1::StorageConfig::ALWAYS) {
    absl::MutexLock lock(&mutex_);
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
      absl::MutexLock lock(&mutex_);
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
    absl::MutexLock lock(&mutex_);
    waiting.swap(waiting_);
  }
  const absl::Status status = Sync();
  const uint64_t durable = this->durable();
  for (Waiter& waiter : waiting) {
    waiter.done(waiter.sequence <= durable ? absl::OkStatus() : status);
  }
}

absl::Status LogWriter::Sync() {
  absl::MutexLock round(&sync_mutex_);
  absl::Status status = SyncOlder();
  if (status.ok()) status = SyncAppended();
  if (status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  return Fail(status);
}

absl::Status LogWriter::SyncAppended() {
  std::vector<std::shared_ptr<LogSegment>> segments;
  uint64_t newest;
  {
    absl::MutexLock lock(&mutex_);
    RETURN_IF_ERROR(failed_);
    newest = next_sequence_ - 1;
    if (newest == durable_) return absl::OkStatus();
    segments = unsynced_;
    segments.push_back(current_);
  }
  RETURN_IF_ERROR(SyncSegments(segments));
  absl::MutexLock lock(&mutex_);
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

}  // namespace emberd::log
