#include "shard/hot_rows.h"

#include <algorithm>

#include "shard/counter_random.h"

namespace emberd::shard {

int HotRowCounters(int tables) { return std::clamp(65536 / std::max(1, tables), 128, 1024); }

HotRowSketches::HotRowSketches(const StackStore& store, int counters, int64_t sampling)
    : store_(store),
      sampling_(sampling),
      to_next_(NextDistance() - 1),
      sketches_(store.spec().tables.size(), SpaceSaving(counters)) {}

int64_t HotRowSketches::NextDistance() {
  // Uniform in [1, 2 * sampling - 1], so `sampling` on average.
  return 1 + static_cast<int64_t>(Mix(kGamma * ++distances_) % (2 * sampling_ - 1));
}

void HotRowSketches::Sample(const StackEntries& entries) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t at = to_next_;
  for (; at < entries.entry_count; at += NextDistance()) {
    const uint32_t row = entries.entries[at].row;
    const int table = store_.RangeOf(row).table;
    if (table >= 0) sketches_[table].Add(row, sampling_);
  }
  to_next_ = at - entries.entry_count;
}

std::vector<HotTable> HotRowSketches::Top(int count) const {
  std::vector<HotTable> tables;
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t t = 0; t < sketches_.size(); ++t) {
    HotTable& table = tables.emplace_back();
    table.table = store_.spec().tables[t].name;
    table.lookups = sketches_[t].total();
    for (const SpaceSaving::Item& item : sketches_[t].Top(count)) {
      table.rows.push_back({store_.IdOf(item.key), item.count, item.error});
    }
  }
  return tables;
}

}  // namespace emberd::shard
