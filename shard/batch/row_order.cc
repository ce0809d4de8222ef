#include "shard/batch/row_order.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

namespace emberd::shard {
namespace {

constexpr int kMaxDigitBits = 11;
constexpr int kMaxPasses = 3;  // 33 bits
constexpr int64_t kSmall = 256;

using Histogram = std::array<uint32_t, 1 << kMaxDigitBits>;

// Touches of samples [begin, end) of a part that lie in the partition whose first row is given, in
// the order of the entries. Returns the end of the touches.
Touch* Extract(const StackEntries& part, uint32_t begin, uint32_t end, uint32_t first_sample,
               uint64_t first_row, uint64_t rows_per_partition, Touch* out) {
  const Entry* entries = part.entries.data();
  for (uint32_t i = begin; i < end; ++i) {
    for (uint32_t j = part.offsets[i]; j < part.offsets[i + 1]; ++j) {
      const uint64_t row = entries[j].row - first_row;  // wraps for rows of earlier partitions
      if (row < rows_per_partition) {
        *out++ = {static_cast<uint32_t>(row), first_sample + i, entries[j].gain};
      }
    }
  }
  return out;
}

// Touches of the partition in canonical sample order: what a stable sort by row needs.
void ExtractAll(absl::Span<const StackEntries* const> parts, int k, int64_t rows_per_partition,
                Touch* out) {
  const uint64_t first_row = static_cast<uint64_t>(k) * rows_per_partition;
  const size_t features = parts[0]->feature_offsets.size() - 1;
  for (size_t f = 0; f < features; ++f) {
    uint32_t first_sample = 0;
    for (const StackEntries* part : parts) {
      out = Extract(*part, part->feature_offsets[f], part->feature_offsets[f + 1], first_sample,
                    first_row, rows_per_partition, out);
      first_sample += static_cast<uint32_t>(part->samples.size());
    }
  }
}

// One stable pass by the digit at `shift`; `count` becomes the places.
void Scatter(const Touch* from, Touch* to, int64_t n, int shift, uint32_t mask, Histogram& count) {
  uint32_t sum = 0;
  for (uint32_t digit = 0; digit <= mask; ++digit) sum += std::exchange(count[digit], sum);
  for (int64_t i = 0; i < n; ++i) to[count[from[i].row >> shift & mask]++] = from[i];
}

void RadixSort(PooledArray<Touch>& touches, PooledArray<Touch>& scratch, int64_t n,
               uint64_t max_row) {
  const int bits = std::max(1, static_cast<int>(std::bit_width(max_row)));
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (bits + passes - 1) / passes;
  const uint32_t mask = (1u << digit_bits) - 1;
  std::array<Histogram, kMaxPasses> counts{};
  const Touch* all = touches.data();
  for (int64_t i = 0; i < n; ++i) {
    for (int pass = 0; pass < passes; ++pass)
      ++counts[pass][all[i].row >> (pass * digit_bits) & mask];
  }
  for (int pass = 0; pass < passes; ++pass) {
    Scatter(touches.data(), scratch.data(), n, pass * digit_bits, mask, counts[pass]);
    std::swap(touches, scratch);
  }
}

// --- Distinct rows.

// A row above the group that named it, so that keys sort by row.
uint64_t Key(uint32_t row, int64_t group) { return uint64_t{row} << 32 | group; }
uint32_t RowOf(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
uint32_t GroupOf(uint64_t key) { return static_cast<uint32_t>(key); }

// The groups of one partition by row.
struct PartitionGroups {
  PooledArray<uint64_t> keys;
  std::vector<int64_t> stretch_ends;  // ascending stretches of `keys`
  int64_t distinct = 0;
};

// Runs are few and mostly ascending: slot by slot by row, or bucket by bucket where the batch is
// cut. Merging those stretches is cheaper than sorting.
void MergeStretches(PartitionGroups& groups, BufferPool& pool) {
  std::vector<int64_t>& ends = groups.stretch_ends;
  if (ends.size() < 2) return;
  PooledArray<uint64_t> merged(pool, groups.keys.size());
  while (ends.size() > 1) {
    const uint64_t* from = groups.keys.data();
    int64_t begin = 0;
    size_t kept = 0;
    for (size_t i = 0; i < ends.size(); i += 2) {
      const int64_t middle = ends[i];
      const int64_t end = ends[std::min(i + 1, ends.size() - 1)];
      std::merge(from + begin, from + middle, from + middle, from + end, merged.data() + begin);
      ends[kept++] = begin = end;
    }
    ends.resize(kept);
    std::swap(groups.keys, merged);
  }
}

PartitionGroups OrderGroups(const RunTable& runs, absl::Span<const int64_t> groups, int k,
                            int64_t first_group, BufferPool& pool) {
  PartitionGroups result;
  int64_t total = 0;
  for (int slot = 0; slot < runs.slots(); ++slot) {
    for (int m = 0; m < runs.minibatches(); ++m) total += groups[runs.index(slot, k, m)];
  }
  result.keys = PooledArray<uint64_t>(pool, total);
  uint64_t* const keys = result.keys.data();
  int64_t n = 0;
  for (int slot = 0; slot < runs.slots(); ++slot) {
    for (int m = 0; m < runs.minibatches(); ++m) {
      const Run& run = runs.at(slot, k, m);
      // Without a branch on whether a group begins: that is as good as random. What is written for
      // the others is written over, and the last group of all ends the loop.
      for (int64_t i = 0; i < run.size && n < total; ++i) {
        const bool begins = i == 0 || run.rows[i] != run.rows[i - 1];
        keys[n] = Key(static_cast<uint32_t>(run.rows[i]), first_group + n);
        if (begins && n > 0 && keys[n] < keys[n - 1]) result.stretch_ends.push_back(n);
        n += begins;
      }
    }
  }
  if (n > 0) result.stretch_ends.push_back(n);
  MergeStretches(result, pool);
  const uint64_t* const ordered = result.keys.data();
  for (int64_t i = 0; i < n; ++i) {
    result.distinct += i == 0 || RowOf(ordered[i]) != RowOf(ordered[i - 1]);
  }
  return result;
}

}  // namespace

PooledArray<Touch> OrderByRow(absl::Span<const StackEntries* const> parts, int k,
                              int64_t rows_per_partition, BufferPool& pool) {
  int64_t n = 0;
  for (const StackEntries* part : parts) n += part->partition_entries[k];
  PooledArray<Touch> touches(pool, n + kTouchPadding);
  ExtractAll(parts, k, rows_per_partition, touches.data());
  const auto by_row = [](const Touch& a, const Touch& b) { return a.row < b.row; };
  if (std::is_sorted(touches.data(), touches.data() + n, by_row)) {
    // As the sums of rows are.
  } else if (n <= kSmall) {
    std::stable_sort(touches.data(), touches.data() + n, by_row);
  } else {
    PooledArray<Touch> scratch(pool, n + kTouchPadding);
    RadixSort(touches, scratch, n, rows_per_partition - 1);
  }
  std::fill_n(touches.data() + n, kTouchPadding, Touch{0, 0, 0});
  return touches;
}

int64_t CountGroups(const Run& run) {
  int64_t groups = run.size > 0;
  for (int64_t i = 1; i < run.size; ++i) groups += run.rows[i] != run.rows[i - 1];
  return groups;
}

DistinctRows FindDistinctRows(const RunTable& runs, absl::Span<const int64_t> groups,
                              int64_t rows_per_partition, BufferPool& pool, CpuPool& cpu) {
  DistinctRows result;
  result.first_group.resize(runs.size());
  std::vector<int64_t> partition_first;
  int64_t total = 0;
  for (int k = 0; k < runs.partitions(); ++k) {
    partition_first.push_back(total);
    for (int slot = 0; slot < runs.slots(); ++slot) {
      for (int m = 0; m < runs.minibatches(); ++m) {
        const int64_t run = runs.index(slot, k, m);
        result.first_group[run] = total;
        total += groups[run];
      }
    }
  }
  std::vector<PartitionGroups> ordered(runs.partitions());
  cpu.ParallelFor(runs.partitions(), [&](int k) {
    ordered[k] = OrderGroups(runs, groups, k, partition_first[k], pool);
  });
  uint64_t distinct = 0;
  for (const PartitionGroups& partition : ordered) {
    distinct += partition.distinct;
    result.partition_ends.push_back(distinct);
  }
  result.rows = PooledArray<uint32_t>(pool, distinct);
  result.ranks = PooledArray<uint32_t>(pool, total);
  cpu.ParallelFor(runs.partitions(), [&](int k) {
    const PooledArray<uint64_t>& keys = ordered[k].keys;
    const uint32_t base = static_cast<uint32_t>(k * rows_per_partition);
    int64_t next = static_cast<int64_t>(result.partition_ends[k]) - ordered[k].distinct;
    for (size_t i = 0; i < keys.size(); ++i) {
      next += i == 0 || RowOf(keys[i]) != RowOf(keys[i - 1]);
      result.rows[next - 1] = base + RowOf(keys[i]);
      result.ranks[GroupOf(keys[i])] = static_cast<uint32_t>(next - 1);
    }
  });
  return result;
}

int64_t LeastDistinctRows(const RunTable& runs, absl::Span<const int64_t> groups) {
  int64_t sum = 0;
  for (int k = 0; k < runs.partitions(); ++k) {
    int64_t fullest = 0;
    for (int slot = 0; slot < runs.slots(); ++slot) {
      int64_t rows = 0;
      for (int m = 0; m < runs.minibatches(); ++m) rows += groups[runs.index(slot, k, m)];
      fullest = std::max(fullest, rows);
    }
    sum += fullest;
  }
  return sum;
}

}  // namespace emberd::shard
