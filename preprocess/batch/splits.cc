#include "preprocess/batch/splits.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace emberd::preprocess {
namespace {

constexpr int kLevels = 6;

// Levels are counted from the leaves here: the node that cuts at bucket b has level ctz(b).
int JaxBit(int cut) {
  const int level = __builtin_ctz(cut);
  const int nodes_below = kBuckets - (kBuckets >> level);
  return nodes_below + (cut >> (level + 1));
}

int TensorFlowBit(int cut) {
  const int level = __builtin_ctz(cut);
  return (1 << (kLevels - 1 - level)) - 1 + (cut >> (level + 1));
}

template <int (*bit_of)(int)>
CutSet FromMask(uint64_t mask) {
  CutSet cuts = 0;
  for (int cut = 1; cut < kBuckets; ++cut) cuts |= (mask >> bit_of(cut) & 1) << cut;
  return cuts;
}

template <int (*bit_of)(int)>
uint64_t ToMask(CutSet cuts) {
  uint64_t mask = 0;
  for (int cut = 1; cut < kBuckets; ++cut) mask |= (cuts >> cut & 1) << bit_of(cut);
  return mask;
}

// Sums of counts over ranges of buckets.
class RangeSums {
 public:
  explicit RangeSums(const int32_t* counts) {
    for (int b = 0; b < kBuckets; ++b) sums_[b + 1] = sums_[b] + counts[b];
  }
  int64_t operator()(int begin, int end) const { return sums_[end] - sums_[begin]; }

 private:
  std::array<int64_t, kBuckets + 1> sums_ = {};
};

}  // namespace

CutSet CutsFromJaxMask(uint64_t mask) { return FromMask<JaxBit>(mask); }
uint64_t JaxMask(CutSet cuts) { return ToMask<JaxBit>(cuts); }
CutSet CutsFromTensorFlowMask(uint64_t mask) { return FromMask<TensorFlowBit>(mask); }
uint64_t TensorFlowMask(CutSet cuts) { return ToMask<TensorFlowBit>(cuts); }

CutSet JaxCuts(const int32_t* counts, int64_t limit) {
  if (limit <= 0 || std::accumulate(counts, counts + kBuckets, int64_t{0}) <= limit) return 0;
  std::array<int64_t, kBuckets> value;
  std::copy(counts, counts + kBuckets, value.begin());
  CutSet cuts = 0;
  for (int half = 1; half < kBuckets; half *= 2) {
    for (int left = 0; left < kBuckets; left += 2 * half) {
      const int64_t a = value[left];
      const int64_t b = value[left + half];
      value[left] = a + b;
      if (a + b > limit) {
        cuts |= CutSet{1} << (left + half);
        value[left] = std::max(a, b);
      }
    }
  }
  return cuts;
}

CutSet TensorFlowCuts(const int32_t* ids, const int32_t* unique, const PartitionLimits& limits,
                      CutSet* tried) {
  const RangeSums ids_in(ids);
  const RangeSums unique_in(unique);
  const auto exceeded = [&](int begin, int end) {
    return limits.Exceeded(ids_in(begin, end), unique_in(begin, end));
  };
  for (int size = kBuckets; size > 1; size /= 2) {
    for (int begin = 0; begin < kBuckets; begin += size) {
      // The parent of a section is cut where the two siblings meet.
      const int parent = begin / (2 * size) * (2 * size) + size;
      const bool reached = size == kBuckets || (*tried >> parent & 1) != 0;
      if (reached && exceeded(begin, begin + size)) *tried |= CutSet{1} << (begin + size / 2);
    }
  }
  CutSet cuts = 0;
  int start = 0;
  int before = 0;
  for (int boundary = 1; boundary <= kBuckets; ++boundary) {
    if (boundary < kBuckets && (*tried >> boundary & 1) == 0) continue;
    if (before != start && exceeded(start, boundary)) {
      cuts |= CutSet{1} << before;
      start = before;
    }
    before = boundary;
  }
  return cuts;
}

}  // namespace emberd::preprocess
