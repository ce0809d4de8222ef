#include "shard/batch/hot_rows.h"

#include <algorithm>
#include <utility>

#include "shard/store/portable_numbers.h"

namespace emberd::shard {
namespace {

constexpr size_t kMaxNoted = 8192;

}  // namespace

void SpaceSaving::Add(uint32_t key, int64_t weight) {
  total_ += weight;
  const auto found = item_of_.find(key);
  if (found == item_of_.end() && static_cast<int>(items_.size()) < counters_) {
    item_of_[key] = items_.insert({.key = key, .count = weight}).first;
    return;
  }
  auto node = items_.extract(found == item_of_.end() ? items_.begin() : found->second);
  Item& item = node.value();
  if (item.key != key) {
    // The new key may have been seen as often as the one that makes room for it.
    item_of_.erase(item.key);
    item = {.key = key, .count = item.count, .error = item.count};
  }
  item.count += weight;
  item_of_[key] = items_.insert(std::move(node)).position;
}

std::vector<SpaceSaving::Item> SpaceSaving::Top(int count) const {
  std::vector<Item> top;
  for (auto item = items_.rbegin(); item != items_.rend(); ++item) {
    if (static_cast<int>(top.size()) >= count) break;
    top.push_back(*item);
  }
  return top;
}

int HotRowCounters(int tables) { return std::clamp(65536 / std::max(1, tables), 128, 1024); }

HotRowSketches::HotRowSketches(const StackStore& store, int counters, int64_t sampling)
    : store_(store), sampling_(sampling), to_next_(NextDistance() - 1) {
  for (size_t t = 0; t < store.spec().tables.size(); ++t) sketches_.emplace_back(counters);
}

int64_t HotRowSketches::NextDistance() {
  // Uniform in [1, 2 * sampling - 1], so `sampling` on average.
  return 1 + static_cast<int64_t>(Mix(kGamma * ++distances_) % (2 * sampling_ - 1));
}

void HotRowSketches::Sample(const StackEntries& entries) {
  std::vector<uint32_t> full;
  {
    MutexLock lock(&mutex_);
    int64_t at = to_next_;
    for (; at < entries.entry_count; at += NextDistance()) {
      noted_.push_back(entries.entries[at].row);
    }
    to_next_ = at - entries.entry_count;
    if (noted_.size() >= kMaxNoted) full.swap(noted_);
  }
  if (full.empty()) return;
  MutexLock lock(&sketches_mutex_);
  Count(full);
}

void HotRowSketches::Count(const std::vector<uint32_t>& rows) {
  std::vector<std::vector<uint32_t>> of_tables(sketches_.size());
  for (const uint32_t row : rows) {
    const int table = store_.RangeOf(row).table;
    if (table >= 0) of_tables[table].push_back(row);
  }
  for (size_t t = 0; t < sketches_.size(); ++t) {
    for (const uint32_t row : of_tables[t]) sketches_[t].Add(row, sampling_);
  }
}

std::vector<HotTable> HotRowSketches::Top(int count) {
  std::vector<uint32_t> noted;
  {
    MutexLock lock(&mutex_);
    noted.swap(noted_);
  }
  std::vector<HotTable> tables;
  MutexLock lock(&sketches_mutex_);
  Count(noted);
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
