#include "server/host/log/shard_log.h"

#include <algorithm>

#include "base/status.h"
#include "base/steady_time.h"
#include "server/host/log/part_codec.h"
#include "server/host/promise.h"
#include "server/ops/logging.h"

namespace emberd::host {
namespace {

// On a disk that is nearly full some changes fit and others do not: no line for each of them.
constexpr absl::Duration kQuiet = absl::Seconds(1);

}  // namespace

void KeepOldestBlob(const internal::v1::LogBlob& blob, internal::v1::LogState* state) {
  if (blob.segment() == 0) return;
  const uint64_t oldest = state->oldest_blob_segment();
  state->set_oldest_blob_segment(oldest == 0 ? blob.segment() : std::min(oldest, blob.segment()));
}

void ShardLog::Start(std::unique_ptr<log::LogWriter> writer, int64_t log_bytes) {
  log_bytes_ = log_bytes;
  owned_ = std::move(writer);
  writer_ = owned_.get();
  on_ = true;
  NoteDisk(absl::OkStatus());
}

void ShardLog::Refuse(const absl::Status& reason) {
  {
    MutexLock lock(&mutex_);
    reason_ = reason;
  }
  on_ = true;
  NoteDisk(reason);
}

absl::StatusOr<log::LogWriter*> ShardLog::Writer() const {
  if (log::LogWriter* const writer = writer_; writer != nullptr) return writer;
  MutexLock lock(&mutex_);
  return reason_;
}

absl::Status ShardLog::failure() const {
  if (!on()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const log::LogWriter* const writer, Writer());
  return writer->failure();
}

absl::Status ShardLog::Sync() {
  if (!on()) return absl::OkStatus();
  ASSIGN_OR_RETURN(log::LogWriter* const writer, Writer());
  return writer->Sync();
}

absl::StatusOr<internal::v1::LogBlob> ShardLog::AppendPart(const shard::CheckedPart& part) {
  if (!on()) return internal::v1::LogBlob();
  for (const auto& stack : part.stacks()) {
    if (stack.features.empty()) continue;
    return absl::FailedPreconditionError(
        "gradients are named by their places, but this shard keeps a log, which needs their "
        "values; send them, and give the coordinator the shards' `storage`");
  }
  const EncodedPart encoded(part);
  return AppendBlob(encoded.pieces());
}

absl::StatusOr<internal::v1::LogBlob> ShardLog::AppendBlob(
    absl::Span<const absl::Span<const char>> pieces) {
  if (!on()) return internal::v1::LogBlob();
  ASSIGN_OR_RETURN(log::LogWriter* const writer, Writer());
  auto blob = writer->AppendBlob(pieces);
  NoteDisk(blob.status());
  return blob;
}

absl::Status ShardLog::Append(const internal::v1::LogRecord& record) {
  if (!on()) return absl::OkStatus();
  ASSIGN_OR_RETURN(log::LogWriter* const writer, Writer());
  const absl::Status status = writer->Append(record).status();
  NoteDisk(status);
  return status;
}

absl::Status ShardLog::AppendChange(uint64_t model_id, const internal::v1::LogRecord& record) {
  if (!on()) return absl::OkStatus();
  RETURN_IF_ERROR(Append(record));
  NoteChange(model_id, segment());
  return absl::OkStatus();
}

void ShardLog::NoteChange(uint64_t model_id, uint64_t segment) {
  MutexLock lock(&mutex_);
  uint64_t& last = last_change_[model_id];
  last = std::max(last, segment);
}

std::optional<uint64_t> ShardLog::LastChange(uint64_t model_id) const {
  MutexLock lock(&mutex_);
  const auto found = last_change_.find(model_id);
  return found == last_change_.end() ? std::nullopt : std::optional(found->second);
}

void ShardLog::WhenDurable(std::function<void(absl::Status)> done) {
  if (!on()) return done(absl::OkStatus());
  const auto writer = Writer();
  if (!writer.ok()) return done(writer.status());
  (*writer)->WhenDurable((*writer)->records(), std::move(done));
}

absl::Status ShardLog::WaitDurable() {
  return WaitForAnswer<absl::Status>([this](const auto& done) { WhenDurable(done); });
}

void ShardLog::Enter() {
  MutexLock lock(&mutex_);
  while (beginning_) moved_.Wait(&mutex_);
  ++staying_;
}

void ShardLog::Leave() {
  MutexLock lock(&mutex_);
  if (--staying_ == 0) moved_.SignalAll();
}

absl::StatusOr<uint64_t> ShardLog::BeginSegment(Sequencer* order, const Compose& compose) {
  if (!on()) return 0;
  ASSIGN_OR_RETURN(log::LogWriter* const writer, Writer());
  {
    MutexLock lock(&mutex_);
    while (beginning_) moved_.Wait(&mutex_);
    beginning_ = true;
    while (staying_ > 0) moved_.Wait(&mutex_);
  }
  absl::StatusOr<uint64_t> segment;
  internal::v1::LogRecord record;
  {
    MutexLock lock(&order->mutex);
    const absl::Status composed = compose(writer->segment() + 1, record.mutable_state());
    segment = composed.ok() ? writer->StartSegment(record) : composed;
  }
  NoteDisk(segment.status());
  MutexLock lock(&mutex_);
  beginning_ = false;
  moved_.SignalAll();
  return segment;
}

void ShardLog::NoteDisk(const absl::Status& status) {
  if (status.ok() && !refuses_.load(std::memory_order_relaxed)) return;
  const absl::Status failure = this->failure();
  const absl::Time now = SteadyNow();
  MutexLock lock(&mutex_);
  if (failure.ok() == !refuses_ || (!failure.ok() && now < quiet_until_)) return;
  refuses_ = !failure.ok();
  if (refuses_) {
    refuses_since_ = now;
    ops::Log(ops::LogLevel::kWarning, "the shard's log cannot be written: it refuses updates",
             {{"reason", failure.message()}});
  } else {
    quiet_until_ = now + kQuiet;
    ops::Log(
        ops::LogLevel::kWarning, "the shard's log can be written again: it accepts updates",
        {{"folder", owned_->folder()}, {"seconds", absl::ToDoubleSeconds(now - refuses_since_)}});
  }
}

void ShardLog::DropBefore(uint64_t segment) {
  if (!started()) return;
  const absl::Status status = writer_.load()->DropBefore(segment);
  if (status.ok()) return;
  ops::Log(ops::LogLevel::kWarning, "old segments of the log could not be removed",
           {{"before", segment}, {"reason", std::string(status.message())}});
}

}  // namespace emberd::host
