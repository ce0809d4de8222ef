#include "server/shard/log/shard_log.h"

#include <algorithm>
#include <utility>

#include "absl/synchronization/notification.h"
#include "base/status.h"
#include "server/ops/logging.h"
#include "server/shard/log/part_codec.h"

namespace emberd::server {

void KeepOldestBlob(const internal::v1::LogBlob& blob, internal::v1::LogState* state) {
  if (blob.segment() == 0) return;
  const uint64_t oldest = state->oldest_blob_segment();
  state->set_oldest_blob_segment(oldest == 0 ? blob.segment() : std::min(oldest, blob.segment()));
}

void ShardLog::Start(std::unique_ptr<LogWriter> writer, int64_t log_bytes) {
  log_bytes_ = log_bytes;
  writer_ = std::move(writer);
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
  return writer_->AppendBlob(encoded.pieces());
}

absl::StatusOr<internal::v1::LogBlob> ShardLog::AppendBytes(absl::Span<const char> bytes) {
  if (!on()) return internal::v1::LogBlob();
  return writer_->AppendBlob({bytes});
}

absl::Status ShardLog::Append(const internal::v1::LogRecord& record) {
  return on() ? writer_->Append(record).status() : absl::OkStatus();
}

absl::Status ShardLog::AppendChange(uint64_t model_id, const internal::v1::LogRecord& record) {
  if (!on()) return absl::OkStatus();
  RETURN_IF_ERROR(Append(record));
  NoteChange(model_id, writer_->segment());
  return absl::OkStatus();
}

void ShardLog::NoteChange(uint64_t model_id, uint64_t segment) {
  MutexLock lock(&mutex_);
  last_change_[model_id] = segment;
}

std::optional<uint64_t> ShardLog::LastChange(uint64_t model_id) const {
  MutexLock lock(&mutex_);
  const auto found = last_change_.find(model_id);
  return found == last_change_.end() ? std::nullopt : std::optional(found->second);
}

void ShardLog::WhenDurable(std::function<void(absl::Status)> done) {
  if (!on()) return done(absl::OkStatus());
  writer_->WhenDurable(writer_->records(), std::move(done));
}

absl::Status ShardLog::WaitDurable() {
  absl::Status result;
  absl::Notification over;
  WhenDurable([&](const absl::Status& status) {
    result = status;
    over.Notify();
  });
  over.WaitForNotification();
  return result;
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
    compose(writer_->segment() + 1, record.mutable_state());
    segment = writer_->StartSegment(record);
  }
  MutexLock lock(&mutex_);
  beginning_ = false;
  moved_.SignalAll();
  return segment;
}

void ShardLog::DropBefore(uint64_t segment) {
  if (!on()) return;
  const absl::Status status = writer_->DropBefore(segment);
  if (status.ok()) return;
  ops::Log(ops::LogLevel::kWarning, "old segments of the log could not be removed",
           {{"before", segment}, {"reason", std::string(status.message())}});
}

}  // namespace emberd::server
