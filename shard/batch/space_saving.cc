#include "shard/batch/space_saving.h"

#include <algorithm>
#include <utility>

namespace emberd::shard {

void SpaceSaving::Add(uint32_t key, int64_t weight) {
  total_ += weight;
  const auto found = item_of_.find(key);
  if (found != item_of_.end()) {
    items_[found->second].count += weight;
    SiftDown(place_[found->second]);
    return;
  }
  if (static_cast<int>(items_.size()) < counters_) {
    const int item = static_cast<int>(items_.size());
    items_.push_back({key, weight, 0});
    heap_.push_back(item);
    place_.push_back(item);
    item_of_[key] = item;
    SiftUp(item);
    return;
  }
  // The new key may have been seen as often as the one that makes room for it.
  const int item = heap_[0];
  item_of_.erase(items_[item].key);
  item_of_[key] = item;
  items_[item] = {key, items_[item].count + weight, items_[item].count};
  SiftDown(0);
}

std::vector<SpaceSaving::Item> SpaceSaving::Top(int count) const {
  std::vector<Item> top = items_;
  const size_t kept = std::min(top.size(), static_cast<size_t>(std::max(0, count)));
  std::partial_sort(top.begin(), top.begin() + kept, top.end(), [](const Item& a, const Item& b) {
    return a.count != b.count ? a.count > b.count : a.key < b.key;
  });
  top.resize(kept);
  return top;
}

void SpaceSaving::SiftDown(int place) {
  const int size = static_cast<int>(heap_.size());
  while (true) {
    int smallest = place;
    for (const int child : {2 * place + 1, 2 * place + 2}) {
      if (child < size && items_[heap_[child]].count < items_[heap_[smallest]].count) {
        smallest = child;
      }
    }
    if (smallest == place) return;
    Swap(place, smallest);
    place = smallest;
  }
}

void SpaceSaving::SiftUp(int place) {
  while (place > 0) {
    const int parent = (place - 1) / 2;
    if (items_[heap_[parent]].count <= items_[heap_[place]].count) return;
    Swap(place, parent);
    place = parent;
  }
}

void SpaceSaving::Swap(int a, int b) {
  std::swap(heap_[a], heap_[b]);
  place_[heap_[a]] = a;
  place_[heap_[b]] = b;
}

}  // namespace emberd::shard
