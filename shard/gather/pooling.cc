#include "shard/gather/pooling.h"

#include <algorithm>

namespace emberd::shard {
namespace {

// A chunk reads about this many floats.
constexpr int64_t kChunkFloats = int64_t{1} << 20;

}  // namespace

ForwardArgs MakeForwardArgs(const StackSpec& spec, const char* weights, const StackEntries& entries,
                            float* sums) {
  ForwardArgs args;
  args.weights = weights;
  args.dtype = spec.storage_dtype;
  args.width = spec.embedding_dim;
  args.partitions = static_cast<int>(entries.partition_ends.size());
  args.partition_ends = entries.partition_ends.data();
  args.entries = entries.entries.data();
  args.offsets = entries.offsets.data();
  args.end = static_cast<int64_t>(entries.samples.size());
  args.sums = sums;
  args.quantized = spec.quantized;
  args.lower = spec.quantization.lower();
  args.upper = spec.quantization.upper();
  args.num_buckets = spec.quantization.num_buckets();
  return args;
}

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

}  // namespace emberd::shard
