#include "server/host/log/part_codec.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "emberd/internal/v1/log.pb.h"

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

}  // namespace emberd::host
