// Which rows of one partition have changed since a moment, and what they were at that moment.
//
// Rows are grouped in the chunks in which their store initialises them. Nothing is kept until the
// first snapshot is begun; from then on every write is preceded by BeforeWrite, which costs a bit
// test for a chunk that has changed before.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace emberd::shard {

// Numbers of chunks: a bit for each of [first, first + count).
class ChunkSet {
 public:
  ChunkSet() = default;
  ChunkSet(int64_t first, int64_t count, bool full)
      : first_(first), words_((count + 63) / 64, full ? ~uint64_t{0} : 0) {}

  bool Has(int64_t chunk) const {
    const int64_t i = chunk - first_;
    return words_[i / 64] >> (i % 64) & 1;
  }
  void Add(int64_t chunk) {
    const int64_t i = chunk - first_;
    words_[i / 64] |= uint64_t{1} << (i % 64);
  }
  void Remove(int64_t chunk) {
    const int64_t i = chunk - first_;
    words_[i / 64] &= ~(uint64_t{1} << (i % 64));
  }
  // The first one at or after `chunk`; `end` if there is none before it.
  int64_t NextFrom(int64_t chunk, int64_t end) const;
  int64_t Count() const;
  void AddAll(const ChunkSet& other);

 private:
  int64_t first_ = 0;
  std::vector<uint64_t> words_;
};

// Takes the rows of a chunk as they are, before they change.
class ChunkCopier {
 public:
  virtual ~ChunkCopier() = default;
  virtual void CopyBeforeWrite(int64_t chunk) = 0;
};

// Guarded by the strand of the partition: whoever writes rows, begins a snapshot or ends it holds
// it for writing, the one reader of a snapshot for reading.
class RowChanges {
 public:
  // The partition's rows are in chunks [first, first + count).
  RowChanges(int64_t first, int64_t count) : first_(first), count_(count) {}

  // False: BeforeWrite has nothing to do.
  bool tracking() const { return tracking_; }
  // Before a row of the chunk is given its initial value or written.
  void BeforeWrite(int64_t chunk) {
    if (tracking_ && !changed_.Has(chunk)) FirstWrite(chunk);
  }

  // A snapshot begins: of all chunks, or of those that have changed since the last one that was
  // kept. `copier` hears of chunks of it that are about to change, until End.
  void Begin(bool changed_only, std::shared_ptr<ChunkCopier> copier);
  // The snapshot of this copier is over. Unless it was kept, the next one counts changes from where
  // it began itself.
  void End(const ChunkCopier* copier, bool kept);
  // What has changed counts from now on, without a snapshot: the rows have just been restored.
  void Track();

  // Takes out of the snapshot of this copier the first chunk at or after `chunk` that is still to
  // be read; -1: there is none before `end`. A reader may come late, when its snapshot is over and
  // another one is under way: it gets nothing of that.
  int64_t TakePending(const ChunkCopier* copier, int64_t chunk, int64_t end);

  int64_t first() const { return first_; }
  int64_t end() const { return first_ + count_; }
  // Chunks that have changed since the newest snapshot that was kept. Guarded by nothing.
  int64_t changed() const { return changed_count_.load(std::memory_order_relaxed); }

 private:
  void FirstWrite(int64_t chunk);

  const int64_t first_;
  const int64_t count_;
  bool tracking_ = false;
  ChunkSet changed_;  // since the newest snapshot began
  std::atomic<int64_t> changed_count_{0};
  ChunkSet before_;                      // what the snapshot under way has of changes
  ChunkSet pending_;                     // of the snapshot: neither read nor copied yet
  std::shared_ptr<ChunkCopier> copier_;  // null: no snapshot is under way
};

}  // namespace emberd::shard
