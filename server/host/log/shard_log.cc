#include "server/host/log/shard_log.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/ops/logging.h"
#include "server/rpc/call_context.h"
#include "shard/engine.h"

namespace emberd::host {
namespace {

// On a disk that is nearly full some changes fit and others do not: no line for each of them.
constexpr absl::Duration kQuiet = absl::Seconds(1);

using shard::CheckedPart;
using shard::StackEntries;

constexpr size_t kArrayAlignment = 64;
constexpr int64_t kMaxValues = int64_t{1} << 31;  // of an array

template <typename T>
absl::Span<const char> BytesOf(const T* values, size_t count) {
  return {reinterpret_cast<const char*>(values), count * sizeof(T)};
}

void Describe(const CheckedPart::Stack& stack, internal::v1::LogStack* to) {
  const StackEntries& entries = *stack.entries;
  to->set_stack(entries.stack);
  to->set_samples(static_cast<int64_t>(entries.samples.size()));
  to->set_entries(entries.entry_count);
  to->mutable_partition_entries()->Add(entries.partition_entries.begin(),
                                       entries.partition_entries.end());
  to->mutable_feature_offsets()->Add(entries.feature_offsets.begin(),
                                     entries.feature_offsets.end());
  to->set_floats(stack.gradient_bytes / static_cast<int64_t>(sizeof(float)));
  to->set_has_gradients(stack.has_say);
  to->mutable_hyperparameters()->insert(stack.hyperparameters.begin(), stack.hyperparameters.end());
}

absl::Status BadPart(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("the part of an update in the log ", what));
}

// Takes arrays from the front of the bytes.
class Arrays {
 public:
  explicit Arrays(absl::Span<const char> bytes) : left_(bytes) {}

  absl::StatusOr<absl::Span<const char>> Take(size_t bytes) {
    if (bytes > left_.size()) return BadPart("is shorter than its header says");
    const absl::Span<const char> taken = left_.subspan(0, bytes);
    left_.remove_prefix(bytes);
    return taken;
  }
  // `padding` values behind are zero.
  template <typename T>
  absl::StatusOr<PooledArray<T>> Copy(int64_t count, int64_t padding, BufferPool& pool) {
    if (count < 0 || count > kMaxValues) return BadPart("has an array of an impossible length");
    ASSIGN_OR_RETURN(const absl::Span<const char> bytes, Take(count * sizeof(T)));
    PooledArray<T> values(pool, count + padding);
    if (count > 0) std::memcpy(values.data(), bytes.data(), bytes.size());
    if (padding > 0) std::memset(values.data() + count, 0, padding * sizeof(T));
    return values;
  }
  bool empty() const { return left_.empty(); }

 private:
  absl::Span<const char> left_;
};

absl::StatusOr<StackEntries> DecodeEntries(const internal::v1::LogStack& from, Arrays* arrays,
                                           BufferPool& pool) {
  StackEntries entries;
  entries.stack = from.stack();
  entries.entry_count = from.entries();
  entries.partition_entries.assign(from.partition_entries().begin(),
                                   from.partition_entries().end());
  entries.feature_offsets.assign(from.feature_offsets().begin(), from.feature_offsets().end());
  ASSIGN_OR_RETURN(entries.samples, arrays->Copy<int32_t>(from.samples(), 0, pool));
  ASSIGN_OR_RETURN(entries.offsets, arrays->Copy<uint32_t>(from.samples() + 1, 0, pool));
  ASSIGN_OR_RETURN(entries.entries,
                   arrays->Copy<shard::Entry>(from.entries(), shard::kEntryPadding, pool));
  return entries;
}

absl::StatusOr<internal::v1::LogPartHeader> DecodeHead(Arrays* arrays) {
  ASSIGN_OR_RETURN(const absl::Span<const char> size_bytes, arrays->Take(sizeof(uint32_t)));
  uint32_t size = 0;
  std::memcpy(&size, size_bytes.data(), sizeof(size));
  ASSIGN_OR_RETURN(const absl::Span<const char> head, arrays->Take(size));
  const size_t used = sizeof(size) + size;
  RETURN_IF_ERROR(
      arrays->Take((kArrayAlignment - used % kArrayAlignment) % kArrayAlignment).status());
  internal::v1::LogPartHeader header;
  if (!header.ParseFromArray(head.data(), static_cast<int>(head.size()))) {
    return BadPart("has a header that cannot be read");
  }
  return header;
}

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
    absl::MutexLock lock(&mutex_);
    reason_ = reason;
  }
  on_ = true;
  NoteDisk(reason);
}

absl::StatusOr<log::LogWriter*> ShardLog::Writer() const {
  if (log::LogWriter* const writer = writer_; writer != nullptr) return writer;
  absl::MutexLock lock(&mutex_);
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
  absl::MutexLock lock(&mutex_);
  uint64_t& last = last_change_[model_id];
  last = std::max(last, segment);
}

std::optional<uint64_t> ShardLog::LastChange(uint64_t model_id) const {
  absl::MutexLock lock(&mutex_);
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
  return rpc::WaitForAnswer<absl::Status>([this](const auto& done) { WhenDurable(done); });
}

void ShardLog::Enter() {
  absl::MutexLock lock(&mutex_);
  while (beginning_) moved_.Wait(&mutex_);
  ++staying_;
}

void ShardLog::Leave() {
  absl::MutexLock lock(&mutex_);
  if (--staying_ == 0) moved_.SignalAll();
}

absl::StatusOr<uint64_t> ShardLog::BeginSegment(Sequencer* order, const Compose& compose) {
  if (!on()) return 0;
  ASSIGN_OR_RETURN(log::LogWriter* const writer, Writer());
  {
    absl::MutexLock lock(&mutex_);
    while (beginning_) moved_.Wait(&mutex_);
    beginning_ = true;
    while (staying_ > 0) moved_.Wait(&mutex_);
  }
  absl::StatusOr<uint64_t> segment;
  internal::v1::LogRecord record;
  {
    absl::MutexLock lock(&order->mutex);
    const absl::Status composed = compose(writer->segment() + 1, record.mutable_state());
    segment = composed.ok() ? writer->StartSegment(record) : composed;
  }
  NoteDisk(segment.status());
  absl::MutexLock lock(&mutex_);
  beginning_ = false;
  moved_.SignalAll();
  return segment;
}

void ShardLog::NoteDisk(const absl::Status& status) {
  if (status.ok() && !refuses_.load(std::memory_order_relaxed)) return;
  const absl::Status failure = this->failure();
  const absl::Time now = SteadyNow();
  absl::MutexLock lock(&mutex_);
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
  segment = std::min(segment, this->segment());
  absl::Status status;
  if (segment > begins_) {
    internal::v1::LogRecord record;
    record.mutable_begins()->set_segment(segment);
    status = Append(record);
    if (status.ok()) begins_ = segment;
  }
  if (status.ok()) status = writer_.load()->DropBefore(segment);  // which syncs the record first
  if (status.ok()) return;
  ops::Log(ops::LogLevel::kWarning, "old segments of the log could not be removed",
           {{"before", segment}, {"reason", std::string(status.message())}});
}

EncodedPart::EncodedPart(const CheckedPart& part) {
  internal::v1::LogPartHeader header;
  header.set_step(part.step());
  header.set_rng_seed(part.rng_seed());
  header.set_skip(part.skip());
  for (const CheckedPart::Stack& stack : part.stacks()) Describe(stack, header.add_stacks());
  const auto size = static_cast<uint32_t>(header.ByteSizeLong());
  head_.append(reinterpret_cast<const char*>(&size), sizeof(size));
  header.AppendToString(&head_);
  head_.resize((head_.size() + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment);
  pieces_.emplace_back(head_);
  for (const CheckedPart::Stack& stack : part.stacks()) {
    const StackEntries& entries = *stack.entries;
    const size_t samples = entries.samples.size();
    pieces_.push_back(BytesOf(entries.samples.data(), samples));
    pieces_.push_back(BytesOf(entries.offsets.data(), samples + 1));
    pieces_.push_back(BytesOf(entries.entries.data(), entries.entry_count));
    pieces_.push_back(
        BytesOf(reinterpret_cast<const char*>(stack.gradients), stack.gradient_bytes));
  }
}

absl::StatusOr<std::shared_ptr<const CheckedPart>> DecodePart(uint64_t model_id,
                                                              absl::Span<const char> bytes,
                                                              std::shared_ptr<const void> owner,
                                                              shard::Engine* engine,
                                                              BufferPool& pool) {
  Arrays arrays(bytes);
  ASSIGN_OR_RETURN(const internal::v1::LogPartHeader header, DecodeHead(&arrays));
  std::vector<StackEntries> stacks;
  shard::ApplyInput input;
  input.step = header.step();
  input.rng_seed = header.rng_seed();
  input.skip = header.skip();
  input.checked = true;
  input.owner = std::move(owner);
  for (const internal::v1::LogStack& from : header.stacks()) {
    ASSIGN_OR_RETURN(stacks.emplace_back(), DecodeEntries(from, &arrays, pool));
    if (from.floats() < 0 || from.floats() > kMaxValues) return BadPart("has too many gradients");
    ASSIGN_OR_RETURN(const absl::Span<const char> gradients,
                     arrays.Take(from.floats() * sizeof(float)));
    if (!from.has_gradients()) continue;
    input.stacks.push_back(
        {from.stack(),
         {reinterpret_cast<const float*>(gradients.data()), static_cast<size_t>(from.floats())},
         {from.hyperparameters().begin(), from.hyperparameters().end()}});
  }
  if (!arrays.empty()) return BadPart("is longer than its header says");
  ASSIGN_OR_RETURN(std::shared_ptr<const shard::Batch> batch,
                   engine->RestoreBatch(model_id, std::move(stacks)));
  return CheckedPart::Make(std::move(batch), std::move(input));
}

}  // namespace emberd::host
