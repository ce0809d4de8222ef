#include "server/host/log/log_records.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::host {
namespace {

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

template <typename Message>
void SetGroup(uint64_t model_id, const std::string& group, Message* message) {
  message->set_model_id(model_id);
  message->set_group(group);
}

template <typename Message>
void SetResult(const absl::StatusOr<RowCounts>& rows, Message* message) {
  message->set_failed(!rows.ok());
  if (rows.ok()) SetRowCounts(*rows, message);
}

}  // namespace

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

internal::v1::LogRecord VoteRecord(const internal::v1::MutationName& mutation, uint64_t attempt,
                                   uint64_t model_id, bool assigns_rows,
                                   const internal::v1::LogBlob& blob) {
  internal::v1::LogRecord record;
  internal::v1::LogVote* vote = record.mutable_vote();
  *vote->mutable_mutation() = mutation;
  vote->set_attempt(attempt);
  vote->set_model_id(model_id);
  vote->set_assigns_rows(assigns_rows);
  *vote->mutable_blob() = blob;
  return record;
}

internal::v1::LogRecord AttemptRecord(const internal::v1::MutationName& mutation,
                                      uint64_t attempt) {
  internal::v1::LogRecord record;
  *record.mutable_attempt()->mutable_mutation() = mutation;
  record.mutable_attempt()->set_attempt(attempt);
  return record;
}

internal::v1::LogRecord DecisionRecord(const internal::v1::MutationName& mutation, uint64_t attempt,
                                       bool commit) {
  internal::v1::LogRecord record;
  *record.mutable_decision()->mutable_mutation() = mutation;
  record.mutable_decision()->set_attempt(attempt);
  record.mutable_decision()->set_commit(commit);
  return record;
}

internal::v1::LogRecord MadeRecord(const internal::v1::MutationName& mutation,
                                   const absl::StatusOr<RowCounts>& rows) {
  internal::v1::LogRecord record;
  *record.mutable_made()->mutable_mutation() = mutation;
  SetResult(rows, record.mutable_made());
  return record;
}

internal::v1::LogRecord PartRecord(uint64_t model_id, const internal::v1::GroupPart& part,
                                   const internal::v1::LogBlob& blob) {
  internal::v1::LogRecord record;
  record.mutable_part()->set_model_id(model_id);
  *record.mutable_part()->mutable_part() = part;
  *record.mutable_part()->mutable_blob() = blob;
  return record;
}

internal::v1::LogRecord DecidedRecord(const internal::v1::DecideStepRequest& request) {
  internal::v1::LogRecord record;
  *record.mutable_step_decided() = request;
  return record;
}

internal::v1::LogRecord StepMadeRecord(uint64_t model_id, const std::string& group, int64_t step,
                                       const absl::StatusOr<RowCounts>& rows) {
  internal::v1::LogRecord record;
  SetGroup(model_id, group, record.mutable_step_made());
  record.mutable_step_made()->set_step(step);
  SetResult(rows, record.mutable_step_made());
  return record;
}

internal::v1::LogRecord EndedRecord(uint64_t model_id, const std::string& group) {
  internal::v1::LogRecord record;
  SetGroup(model_id, group, record.mutable_group_ended());
  return record;
}

internal::v1::LogRecord ForgottenRecord(uint64_t model_id, const std::string& group) {
  internal::v1::LogRecord record;
  SetGroup(model_id, group, record.mutable_group_forgotten());
  return record;
}

internal::v1::LogRecord ModelMadeRecord(const internal::v1::CreateModelRequest& create) {
  internal::v1::LogRecord record;
  *record.mutable_model_made()->mutable_create() = create;
  return record;
}

internal::v1::LogRecord ModelRemovedRecord(uint64_t model_id) {
  internal::v1::LogRecord record;
  record.mutable_model_removed()->set_model_id(model_id);
  return record;
}

internal::v1::LogRecord ModelServedRecord(uint64_t model_id,
                                          const internal::v1::ModelLimits* limits) {
  internal::v1::LogRecord record;
  record.mutable_model_served()->set_model_id(model_id);
  if (limits != nullptr) *record.mutable_model_served()->mutable_limits() = *limits;
  return record;
}

internal::v1::LogRecord ModelPinnedRecord(uint64_t model_id, bool pinned) {
  internal::v1::LogRecord record;
  record.mutable_model_pinned()->set_model_id(model_id);
  record.mutable_model_pinned()->set_pinned(pinned);
  return record;
}

internal::v1::LogRecord ModelRenewedRecord(uint64_t model_id, uint64_t history) {
  internal::v1::LogRecord record;
  record.mutable_model_renewed()->set_model_id(model_id);
  record.mutable_model_renewed()->set_history(history);
  return record;
}

internal::v1::LogRecord HistoryDroppedRecord(uint64_t history) {
  internal::v1::LogRecord record;
  record.mutable_history_dropped()->set_history(history);
  return record;
}

}  // namespace emberd::host
