#include "shard/snapshot/row_changes.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace emberd::shard {

int64_t ChunkSet::NextFrom(int64_t chunk, int64_t end) const {
  int64_t i = chunk - first_;
  const int64_t last = end - first_;
  while (i < last) {
    const uint64_t word = words_[i / 64] >> (i % 64);
    if (word != 0) return std::min(first_ + i + std::countr_zero(word), end);
    i = (i / 64 + 1) * 64;
  }
  return end;
}

int64_t ChunkSet::Count() const {
  int64_t count = 0;
  for (const uint64_t word : words_) count += std::popcount(word);
  return count;
}

void ChunkSet::AddAll(const ChunkSet& other) {
  for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
}

void RowChanges::FirstWrite(int64_t chunk) {
  if (copier_ != nullptr && pending_.Has(chunk)) {
    copier_->CopyBeforeWrite(chunk);
    pending_.Remove(chunk);
  }
  changed_.Add(chunk);
  changed_count_.fetch_add(1, std::memory_order_relaxed);
}

void RowChanges::Begin(bool changed_only, std::shared_ptr<ChunkCopier> copier) {
  ChunkSet none(first_, count_, false);
  before_ = tracking_ ? std::exchange(changed_, none) : ChunkSet(first_, count_, true);
  pending_ = changed_only ? before_ : ChunkSet(first_, count_, true);
  changed_ = std::move(none);
  changed_count_ = 0;
  tracking_ = true;
  copier_ = std::move(copier);
}

void RowChanges::End(const ChunkCopier* copier, bool kept) {
  if (copier_ == nullptr || copier_.get() != copier) return;
  if (!kept) {
    changed_.AddAll(before_);
    changed_count_ = changed_.Count();
  }
  before_ = ChunkSet();
  pending_ = ChunkSet();
  copier_ = nullptr;
}

void RowChanges::Track() {
  tracking_ = true;
  changed_ = ChunkSet(first_, count_, false);
  changed_count_ = 0;
}

int64_t RowChanges::TakePending(const ChunkCopier* copier, int64_t chunk, int64_t end) {
  if (copier_ == nullptr || copier_.get() != copier) return -1;
  const int64_t next = pending_.NextFrom(chunk, end);
  if (next >= end) return -1;
  pending_.Remove(next);
  return next;
}

}  // namespace emberd::shard
