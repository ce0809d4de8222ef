#include "shard/gather/pooling.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::shard {
namespace {

// A chunk reads about this many floats.
constexpr int64_t kChunkFloats = int64_t{1} << 20;
// Of what is taken from a room.
constexpr size_t kRoomAlignment = 64;

std::vector<int64_t> CutSamples(const StackEntries& entries, int width) {
  const int64_t per_chunk = std::max<int64_t>(1, kChunkFloats / width);
  const int64_t samples = entries.samples.size();
  std::vector<int64_t> begins = {0};
  const uint32_t* offsets = entries.offsets.data();
  while (begins.back() < samples) {
    const uint64_t target = uint64_t{offsets[begins.back()]} + per_chunk;
    const uint32_t* next =
        std::lower_bound(offsets + begins.back() + 1, offsets + samples + 1, target);
    begins.push_back(std::min<int64_t>(samples, next - offsets));
  }
  if (samples == 0) begins.push_back(0);
  return begins;
}

// All but which samples, and where their sums go.
ForwardArgs ArgsOf(const StackSpec& spec, const StackEntries& entries, const char* weights,
                   v1::DataType dtype) {
  ForwardArgs args;
  args.weights = weights;
  args.dtype = dtype;
  args.width = spec.embedding_dim;
  args.partitions = static_cast<int>(entries.partition_ends.size());
  args.partition_ends = entries.partition_ends.data();
  args.entries = entries.entries.data();
  args.offsets = entries.offsets.data();
  args.quantized = spec.quantized;
  args.lower = spec.quantization.lower();
  args.upper = spec.quantization.upper();
  args.num_buckets = spec.quantization.num_buckets();
  return args;
}

}  // namespace

absl::Status CheckSumPlaces(const SumPlaces& places, const preprocess::StackBatchView& view,
                            int64_t width) {
  const auto bad = [&](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("places of the sums of stack ", places.stack, ": ", what));
  };
  if (places.features.size() != view.feature_samples.size()) {
    return bad(absl::StrCat("they are of ", places.features.size(), " features; the stack has ",
                            view.feature_samples.size()));
  }
  const size_t words = (int64_t{view.sample_count} + 31) / 32;
  if (!places.passed_over.empty() && places.passed_over.size() != words) {
    return bad(absl::StrCat("passed_over has ", places.passed_over.size(), " words; must be 0 or ",
                            words));
  }
  int64_t first_sample = 0;
  for (size_t f = 0; f < places.features.size(); ++f) {
    const FeatureRows<float>& rows = places.features[f];
    if (rows.first_sample != first_sample || rows.samples != view.feature_samples[f] ||
        rows.width != width || rows.stride < width || (rows.first == nullptr && rows.samples > 0)) {
      return bad(absl::StrCat("feature ", f, " has samples ", rows.first_sample, " + ",
                              rows.samples, " of ", rows.width, " floats, ", rows.stride,
                              " apart; must be ", first_sample, " + ", view.feature_samples[f],
                              " of ", width, ", not less apart"));
    }
    first_sample += rows.samples;
  }
  return absl::OkStatus();
}

Pooling::Pooling(const StackSpec& spec, const char* weights, const StackEntries& entries,
                 BufferPool& pool, const SumPlaces* places, absl::Span<char>* room)
    : args_(ArgsOf(spec, entries, weights, spec.storage_dtype)),
      begins_(CutSamples(entries, spec.embedding_dim)) {
  const size_t samples = entries.samples.size();
  const auto returned = std::make_shared<Returned>();
  returned->samples.assign(entries.samples.data(), entries.samples.data() + samples);
  sums_.stack = entries.stack;
  sums_.samples = returned->samples;
  sums_.rows_gathered = entries.entry_count;
  sums_.owner = returned;
  if (places != nullptr) {
    FindRows(entries, *places, room, pool, returned.get());
    args_.rows = rows_.data();
  } else {
    sums_.rows = static_cast<int64_t>(samples);
    args_.sums = TakeRows(room, pool, returned.get());
  }
  args_.end = static_cast<int64_t>(samples);
}

float* Pooling::TakeRows(absl::Span<char>* room, BufferPool& pool, Returned* returned) {
  const size_t floats = sums_.rows * args_.width, bytes = floats * sizeof(float);
  float* rows = nullptr;
  if (room != nullptr && bytes > 0 && bytes <= room->size()) {
    rows = reinterpret_cast<float*>(room->data());
    room->remove_prefix(
        std::min(room->size(), (bytes + kRoomAlignment - 1) / kRoomAlignment * kRoomAlignment));
  } else {
    returned->sums = PooledArray<float>(pool, floats);
    rows = returned->sums.data();
  }
  sums_.sums = absl::MakeConstSpan(rows, floats);
  return rows;
}

void Pooling::FindRows(const StackEntries& entries, const SumPlaces& places, absl::Span<char>* room,
                       BufferPool& pool, Returned* returned) {
  sums_.placed = true;
  sums_.rows = std::count_if(sums_.samples.begin(), sums_.samples.end(),
                             [&](int32_t sample) { return places.PassesOver(sample); });
  float* next = TakeRows(room, pool, returned);
  rows_ = PooledArray<float*>(pool, sums_.samples.size());
  for (int64_t f = 0; f < entries.features(); ++f) {
    const FeatureRows<float>& feature = places.features[f];
    for (uint32_t i = entries.feature_offsets[f]; i < entries.feature_offsets[f + 1]; ++i) {
      const int32_t sample = sums_.samples[i];
      if (places.PassesOver(sample)) {
        rows_[i] = next;
        next += args_.width;
      } else {
        rows_[i] = feature(sample);
      }
    }
  }
}

absl::Span<const Entry> Pooling::Entries(int chunk) const {
  const uint32_t begin = args_.offsets[begins_[chunk]];
  return absl::MakeConstSpan(args_.entries + begin, args_.offsets[begins_[chunk + 1]] - begin);
}

void Pooling::Run(int chunk) const {
  ForwardArgs args = args_;
  args.begin = begins_[chunk];
  args.end = begins_[chunk + 1];
  SumRows(args);
}

absl::StatusOr<std::shared_ptr<const LaterSums>> LaterSums::Make(
    const preprocess::StackBatchView& view, const StackSpec& spec, int partitions, Rows rows,
    BufferPool& pool, CpuPool& cpu) {
  ASSIGN_OR_RETURN(StackEntries entries,
                   ArrangeForUniqueRows(view, {partitions, spec.rows_per_partition}, pool, cpu));
  if (rows.rounded && (!entries.single_rows || !MayRound(spec))) {
    return absl::InvalidArgumentError(
        absl::StrCat("stack ", spec.name, ": rounded rows, which the batch does not allow"));
  }
  const uint64_t count = entries.partition_ends.back();
  const int64_t row_bytes = rows.rounded ? RoundedRowBytes(spec) : RowBytes(spec);
  if (rows.rows.size() != count * row_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("stack ", spec.name, ": ", rows.rows.size(),
                                                   " bytes of unique rows; the batch has ", count,
                                                   " of ", row_bytes, " bytes"));
  }
  return std::shared_ptr<const LaterSums>(new LaterSums(std::move(entries), spec, rows));
}

LaterSums::LaterSums(StackEntries entries, const StackSpec& spec, Rows rows)
    : entries_(std::move(entries)),
      single_rows_(entries_.single_rows && MayRound(spec)),
      row_bytes_(rows.rounded ? RoundedRowBytes(spec) : RowBytes(spec)),
      args_(ArgsOf(spec, entries_, rows.rows.data(),
                   rows.rounded ? v1::BFLOAT16 : spec.storage_dtype)) {}

void LaterSums::Sum(int64_t begin, int64_t end, float* to) const {
  ForwardArgs args = args_;
  args.offsets = entries_.offsets.data() + begin;
  args.end = end - begin;
  args.sums = to;
  SumRows(args);
}

}  // namespace emberd::shard
