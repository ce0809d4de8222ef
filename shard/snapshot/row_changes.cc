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

void ChunkSet::AddAll(const ChunkSet& other) {
  for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
}

void RowChanges::FirstWrite(int64_t chunk) {
  if (copier_ != nullptr && pending_.Has(chunk)) {
    copier_->CopyBeforeWrite(chunk);
    pending_.Remove(chunk);
  }
  changed_.Add(chunk);
}

void RowChanges::Begin(bool changed_only, std::shared_ptr<ChunkCopier> copier) {
  ChunkSet none(first_, count_, false);
  before_ = tracking_ ? std::exchange(changed_, none) : ChunkSet(first_, count_, true);
  pending_ = changed_only ? before_ : ChunkSet(first_, count_, true);
  changed_ = std::move(none);
  tracking_ = true;
  copier_ = std::move(copier);
}

void RowChanges::End(const ChunkCopier* copier, bool kept) {
  if (copier_ == nullptr || copier_.get() != copier) return;
  if (!kept) changed_.AddAll(before_);
  before_ = ChunkSet();
  pending_ = ChunkSet();
  copier_ = nullptr;
}

void RowChanges::Track() {
  tracking_ = true;
  changed_ = ChunkSet(first_, count_, false);
}

int64_t RowChanges::TakePending(const ChunkCopier* copier, int64_t chunk, int64_t end) {
  if (copier_ == nullptr || copier_.get() != copier) return -1;
  const int64_t next = pending_.NextFrom(chunk, end);
  if (next >= end) return -1;
  pending_.Remove(next);
  return next;
}

}  // namespace emberd::shard
