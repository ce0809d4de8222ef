#include "shard/batch/row_order.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <utility>

#include "base/radix_sort.h"

namespace emberd::shard {
namespace {

constexpr int64_t kSmall = 256;

// Touches of samples [begin, end) of a part that lie in the partition whose first row is given, in
// the order of the entries. Returns the end of the touches, beyond which one more may be written.
Touch* Extract(const StackEntries& part, uint32_t begin, uint32_t end, uint32_t first_sample,
               uint64_t first_row, uint64_t rows_per_partition, Touch* out) {
  const Entry* entries = part.entries.data();
  for (uint32_t i = begin; i < end; ++i) {
    for (uint32_t j = part.offsets[i]; j < part.offsets[i + 1]; ++j) {
      const uint64_t row = entries[j].row - first_row;  // wraps for rows of earlier partitions
      // Without a branch on the partition: that is as good as random.
      *out = {static_cast<uint32_t>(row), first_sample + i, entries[j].gain};
      out += row < rows_per_partition ? 1 : 0;
    }
  }
  return out;
}

// Touches whose rows lie between those of the stretches before and behind: of a table, if features
// come in the order of their tables. Sorted alone, they fit into a cache.
struct Stretch {
  int64_t begin, end;
  uint32_t first_row, last_row;
};

// Adds the touches [begin, end), and joins them to the stretches that have rows above their first.
void AddStretch(const Touch* touches, int64_t begin, int64_t end, std::vector<Stretch>& stretches) {
  if (begin == end) return;
  Stretch next{begin, end, touches[begin].row, touches[begin].row};
  for (int64_t i = begin; i < end; ++i) {
    next.first_row = std::min(next.first_row, touches[i].row);
    next.last_row = std::max(next.last_row, touches[i].row);
  }
  while (!stretches.empty() && stretches.back().last_row > next.first_row) {
    const Stretch& before = stretches.back();
    next = {before.begin, end, std::min(before.first_row, next.first_row),
            std::max(before.last_row, next.last_row)};
    stretches.pop_back();
  }
  stretches.push_back(next);
}

// Touches of the partition in canonical sample order: what a stable sort by row needs.
std::vector<Stretch> ExtractAll(absl::Span<const StackEntries* const> parts, int k,
                                int64_t rows_per_partition, Touch* touches) {
  const uint64_t first_row = static_cast<uint64_t>(k) * rows_per_partition;
  const size_t features = parts[0]->feature_offsets.size() - 1;
  std::vector<Stretch> stretches;
  Touch* out = touches;
  for (size_t f = 0; f < features; ++f) {
    const int64_t begin = out - touches;
    uint32_t first_sample = 0;
    for (const StackEntries* part : parts) {
      out = Extract(*part, part->feature_offsets[f], part->feature_offsets[f + 1], first_sample,
                    first_row, rows_per_partition, out);
      first_sample += static_cast<uint32_t>(part->samples.size());
    }
    AddStretch(touches, begin, out - touches, stretches);
  }
  return stretches;
}

// --- Merging.

uint64_t OrderOf(const Touch& touch) { return uint64_t{touch.row} << 32 | touch.sample; }

// The touches of a run; null: they are not in order.
Touch* ConvertRun(const Run run, absl::Span<const int32_t> canonical,
                  absl::Span<const uint32_t> place, Touch* out) {
  const int32_t* const canonical_of = canonical.data();
  const uint32_t* const place_of = place.data();
  uint64_t before = 0;
  bool falls = false;
  for (int64_t i = 0; i < run.size; ++i) {
    *out = {static_cast<uint32_t>(run.rows[i]), place_of[canonical_of[run.samples[i]]],
            run.gains[i]};
    falls |= OrderOf(*out) < before;
    before = OrderOf(*out++);
  }
  return falls ? nullptr : out;
}

// Merges [a, middle) and [middle, end). Of two that are equal, the one of the first comes first.
void MergeTwo(const Touch* a, const Touch* middle, const Touch* end, Touch* out) {
  const Touch* b = middle;
  // Without a branch on which is next: that is as good as random.
  while (a != middle && b != end) {
    const bool second = OrderOf(*b) < OrderOf(*a);
    *out++ = second ? *b : *a;
    a += second ? 0 : 1;
    b += second ? 1 : 0;
  }
  out = std::copy(a, middle, out);
  std::copy(b, end, out);
}

// Merges the ascending stretches of `items` that end at `ends` by merge(from, middle, end, to),
// neighbour with neighbour, until there is one. Cheaper than sorting: they are few.
template <typename T, typename Merge>
void MergeStretches(std::vector<int64_t>& ends, PooledArray<T>& items, BufferPool& pool,
                    const Merge& merge) {
  if (ends.size() < 2) return;
  PooledArray<T> merged(pool, items.size());
  while (ends.size() > 1) {
    const T* const from = items.data();
    int64_t begin = 0;
    size_t kept = 0;
    for (size_t i = 0; i < ends.size(); i += 2) {
      const int64_t end = ends[std::min(i + 1, ends.size() - 1)];
      merge(from + begin, from + ends[i], from + end, merged.data() + begin);
      ends[kept++] = begin = end;
    }
    ends.resize(kept);
    std::swap(items, merged);
  }
}

// The touches of the k-th partition; none if a run is not in order.
std::optional<PooledArray<Touch>> MergePartition(
    const RunTable& runs, absl::Span<const absl::Span<const int32_t>> canonical,
    absl::Span<const uint32_t> place, int k, BufferPool& pool) {
  const int64_t n = runs.partition_entries()[k];
  if (n == 0) return PooledArray<Touch>();
  PooledArray<Touch> touches(pool, n + kTouchPadding);
  Touch* end = touches.data();
  std::vector<int64_t> ends;  // of the slots
  for (int slot = 0; slot < runs.slots(); ++slot) {
    end = ConvertRun(runs.at(slot, k, 0), canonical[slot], place, end);
    if (end == nullptr) return std::nullopt;
    ends.push_back(end - touches.data());
  }
  MergeStretches(ends, touches, pool, MergeTwo);
  std::fill_n(touches.data() + n, kTouchPadding, Touch{0, 0, 0});
  return touches;
}

// --- Distinct rows.

// A row above the group that named it, so that keys sort by row.
uint64_t Key(uint32_t row, int64_t group) { return uint64_t{row} << 32 | group; }
uint32_t RowOf(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
uint32_t GroupOf(uint64_t key) { return static_cast<uint32_t>(key); }

// The groups of one partition by row.
struct PartitionGroups {
  PooledArray<uint64_t> keys;
  int64_t distinct = 0;
};

// Of the k-th partition, which has `total` groups from `first_group` on.
PartitionGroups OrderGroups(const RunTable& runs, int k, int64_t first_group, int64_t total,
                            BufferPool& pool) {
  PartitionGroups result;
  // Runs are mostly ascending: slot by slot by row, or bucket by bucket where the batch is cut.
  std::vector<int64_t> stretch_ends;
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
        if (begins && n > 0 && keys[n] < keys[n - 1]) stretch_ends.push_back(n);
        n += begins;
      }
    }
  }
  if (n > 0) stretch_ends.push_back(n);
  MergeStretches(stretch_ends, result.keys, pool,
                 [](const uint64_t* a, const uint64_t* middle, const uint64_t* end, uint64_t* to) {
                   std::merge(a, middle, middle, end, to);
                 });
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
  const auto by_row = [](const Touch& a, const Touch& b) { return a.row < b.row; };
  PooledArray<Touch> scratch;
  for (const Stretch& stretch : ExtractAll(parts, k, rows_per_partition, touches.data())) {
    Touch* const begin = touches.data() + stretch.begin;
    Touch* const end = touches.data() + stretch.end;
    if (std::is_sorted(begin, end, by_row)) continue;  // as the sums of rows are
    if (end - begin <= kSmall) {
      std::stable_sort(begin, end, by_row);
      continue;
    }
    if (scratch.size() < static_cast<size_t>(end - begin)) {
      scratch = PooledArray<Touch>(pool, end - begin);
    }
    RadixSort(begin, scratch.data(), end - begin,
              std::bit_width(stretch.last_row - stretch.first_row),
              [first = stretch.first_row](const Touch& touch, int shift) {
                return (touch.row - first) >> shift;
              });
  }
  std::fill_n(touches.data() + n, kTouchPadding, Touch{0, 0, 0});
  return touches;
}

std::vector<PooledArray<Touch>> MergeTouches(const RunTable& runs,
                                             absl::Span<const absl::Span<const int32_t>> canonical,
                                             absl::Span<const uint32_t> place, BufferPool& pool,
                                             CpuPool& cpu) {
  std::vector<PooledArray<Touch>> merged;
  if (runs.minibatches() > 1) return merged;
  std::vector<std::optional<PooledArray<Touch>>> partitions(runs.partitions());
  cpu.ParallelFor(runs.partitions(),
                  [&](int k) { partitions[k] = MergePartition(runs, canonical, place, k, pool); });
  for (std::optional<PooledArray<Touch>>& partition : partitions) {
    if (!partition.has_value()) return {};
    merged.push_back(*std::move(partition));
  }
  return merged;
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
  std::vector<int64_t> partition_first = {0};
  int64_t total = 0;
  for (int k = 0; k < runs.partitions(); ++k) {
    for (int slot = 0; slot < runs.slots(); ++slot) {
      for (int m = 0; m < runs.minibatches(); ++m) {
        const int64_t run = runs.index(slot, k, m);
        result.first_group[run] = total;
        total += groups[run];
      }
    }
    partition_first.push_back(total);
  }
  std::vector<PartitionGroups> ordered(runs.partitions());
  cpu.ParallelFor(runs.partitions(), [&](int k) {
    ordered[k] =
        OrderGroups(runs, k, partition_first[k], partition_first[k + 1] - partition_first[k], pool);
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
