#include "shard/batch/distinct_rows.h"

#include <algorithm>
#include <utility>

namespace emberd::shard {
namespace {

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
      for (int64_t i = 0; i < run.size; ++i) {
        if (i > 0 && run.rows[i] == run.rows[i - 1]) continue;
        keys[n] = Key(static_cast<uint32_t>(run.rows[i]), first_group + n);
        if (n > 0 && keys[n] < keys[n - 1]) result.stretch_ends.push_back(n);
        ++n;
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

int64_t CountGroups(const Run& run) {
  int64_t groups = run.size > 0;
  for (int64_t i = 1; i < run.size; ++i) groups += run.rows[i] != run.rows[i - 1];
  return groups;
}

DistinctRows FindDistinctRows(const RunTable& runs, absl::Span<const int64_t> groups,
                              int64_t rows_per_partition, BufferPool& pool, Executor& executor) {
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
  executor.ParallelFor(runs.partitions(), [&](int k) {
    ordered[k] = OrderGroups(runs, groups, k, partition_first[k], pool);
  });
  uint64_t distinct = 0;
  for (const PartitionGroups& partition : ordered) {
    distinct += partition.distinct;
    result.partition_ends.push_back(distinct);
  }
  result.rows = PooledArray<uint32_t>(pool, distinct);
  result.ranks = PooledArray<uint32_t>(pool, total);
  executor.ParallelFor(runs.partitions(), [&](int k) {
    const PooledArray<uint64_t>& keys = ordered[k].keys;
    const uint32_t base = static_cast<uint32_t>(k * rows_per_partition);
    int64_t next = static_cast<int64_t>(result.partition_ends[k]) - ordered[k].distinct;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (i == 0 || RowOf(keys[i]) != RowOf(keys[i - 1]))
        result.rows[next++] = base + RowOf(keys[i]);
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
