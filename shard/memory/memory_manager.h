// The memory of the emulated SparseCores of one shard, when more models are declared than fit into
// it. Models that were not used for the longest time leave it, first for a budget of this machine's
// memory, then for files, and come back when they are used.
//
// The SparseCores of a shard have the same share of every model, so one map of addresses and one
// budget stand for each of them: bytes here are those of one SparseCore.
//
// Spilled rows are in memory elsewhere, no more: they go with the process, and the next one makes
// its rows from checkpoints and log as ever. Saving a checkpoint is a use like any other.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/file_descriptor.h"
#include "emberd/v1/admin_service.pb.h"

namespace emberd::shard {

// Where tables stand in the memory of an emulated SparseCore. The addresses are those of the chip
// that is emulated; in this machine's memory rows never move.
//
// Not thread-safe.
class AddressMap {
 public:
  explicit AddressMap(int64_t bytes) : bytes_(bytes) {}

  // The lowest address at which `bytes` > 0 fit; nothing: there is none.
  std::optional<int64_t> Place(int64_t bytes);
  void Free(int64_t address);

  int64_t bytes() const { return bytes_; }
  int64_t free_bytes() const { return bytes_ - used_; }
  int64_t largest_gap() const;

 private:
  const int64_t bytes_;
  int64_t used_ = 0;
  std::map<int64_t, int64_t> taken_;  // address -> bytes
};

// Bytes on disk for a while: written once, front to back, and read once or more the same way.
//
// The file has no name in its folder, so nobody can take it away: it goes with this object, and
// with the process, however that ends. Movable, not thread-safe.
class SpillFile {
 public:
  // FAILED_PRECONDITION, with the reason: nothing can be written in `folder`. It must exist.
  static absl::StatusOr<SpillFile> Create(const std::string& folder);

  // RESOURCE_EXHAUSTED: the disk is full, or the file would be longer than `limit`. After an error
  // the file is of no use.
  absl::Status Write(absl::Span<const char> bytes);
  void set_limit(int64_t bytes) { limit_ = bytes; }
  int64_t bytes() const { return bytes_; }

  void Rewind();
  // The next bytes, into all of `bytes`. DATA_LOSS, with the name that the file had, under which
  // the open files of the process still show it: they cannot be read.
  absl::Status Read(absl::Span<char> bytes);
  // After the last byte was read. DATA_LOSS: not what was written.
  absl::Status CheckRead() const;

 private:
  SpillFile(std::string path, FileDescriptor file)
      : path_(std::move(path)), file_(std::move(file)) {}

  std::string path_;  // until it was taken out of its folder
  FileDescriptor file_;
  int64_t limit_ = INT64_MAX;
  int64_t bytes_ = 0;
  uint32_t crc_ = 0;  // of what was written
  int64_t read_ = 0;
  uint32_t read_crc_ = 0;
};

struct MemoryOptions {
  int64_t bytes = 0;        // of each SparseCore
  std::string folder = {};  // of spill files; empty: nothing is evicted
  int64_t host_bytes = 0;   // of evicted rows that stay in memory, for each SparseCore
  int64_t spill_bytes = 0;  // of all spill files; 0: what the disk has
  // How long a model waits for running steps of others, when these hold all the memory.
  std::chrono::milliseconds wait = std::chrono::seconds(10);
  // Told of each step taken for memory: "free", "compact". For tests.
  std::function<void(absl::string_view event)> watch = nullptr;
};

// The rows of a model, as the manager moves them. Nobody uses them meanwhile.
class Evictable {
 public:
  virtual ~Evictable() = default;
  // Writes all rows that have a value; they stay as they are.
  virtual absl::Status Spill(SpillFile& file) = 0;
  // Gives back the memory of the rows.
  virtual void DropRows() = 0;
  // Reads what Spill wrote. After an error, as after DropRows.
  virtual absl::Status Fetch(SpillFile& file) = 0;
};

// Thread-safe. Moving rows takes as long as their bytes; who uses rows that are in place does not
// wait for it.
class MemoryManager : public std::enable_shared_from_this<MemoryManager> {
 public:
  // FAILED_PRECONDITION: the folder cannot be written to.
  static absl::StatusOr<std::shared_ptr<MemoryManager>> Create(MemoryOptions options);
  // False: models take memory when they are made, and nothing else is asked or counted.
  bool evicts() const { return !options_.folder.empty(); }

  struct Table {
    std::string name;
    int64_t bytes = 0;
    int64_t address = -1;  // that it was given; -1: none
  };
  class Room;

  // Keeps rows where they are until the last reference to it goes. Null: of nothing.
  using Use = std::shared_ptr<const void>;

  // Memory for the tables of a new model, which is used until MayEvict. A `model` with a space in
  // its name is no model. RESOURCE_EXHAUSTED names the bytes needed, and why other models do not
  // leave theirs. `owner`: the model of a batch, see Keep.
  absl::StatusOr<std::shared_ptr<Room>> Take(const std::string& model, std::vector<Table> tables,
                                             const Room* owner = nullptr);
  // Memory for a batch of a model, until the last reference to what is returned goes. The model
  // comes back first, as by Hold, and others leave for the batch, as by Take; the batch stays.
  absl::StatusOr<std::shared_ptr<const void>> Keep(const std::shared_ptr<Room>& model,
                                                   int64_t bytes);
  // From now on its rows may leave when nobody uses them.
  void MayEvict(Room& room, std::weak_ptr<Evictable> rows);
  // The model is gone; or, `soon`, goes when nobody works on it: its memory is worth a wait.
  void Return(Room& room, bool soon = false);

  // Brings the rows back if they were evicted, and moves them to the front. RESOURCE_EXHAUSTED, as
  // for Take; DATA_LOSS: they cannot be read any more.
  absl::StatusOr<Use> Hold(const std::shared_ptr<Room>& room);

  // OK, or DATA_LOSS with the name of the file: the rows of a model cannot be read any more.
  absl::Status DamageOf(const Room& room) const;

  // For operators; what was done is told without the shard and the memory. A pinned model is
  // brought in, and not evicted. NOT_FOUND: no such model. RESOURCE_EXHAUSTED: it does not fit
  // beside those that are pinned or in use; errors of Hold. It is as it was then.
  absl::StatusOr<v1::ShardMemoryChange> SetPinned(absl::string_view model, bool pinned);
  // The free bytes lie in one piece afterwards.
  v1::ShardMemoryChange Compact();
  // Evicts all that is neither pinned nor in use. RESOURCE_EXHAUSTED: the disk has no room.
  absl::StatusOr<v1::ShardMemoryChange> ReleaseAll();

  v1::MemoryStatus Figures() const;

 private:
  explicit MemoryManager(MemoryOptions options);

  // Brings it in, and counts a use.
  absl::Status Enter(Room& room) ABSL_EXCLUSIVE_LOCKS_REQUIRED(swapping_);
  // The use that has been counted.
  static Use Counted(const std::shared_ptr<Room>& room);
  absl::Status PlaceOrWait(Room& room) ABSL_EXCLUSIVE_LOCKS_REQUIRED(swapping_);
  // Calls `fn`; while that is RESOURCE_EXHAUSTED, frees `bytes` of what was not used for the
  // longest time and calls it again; when nothing is left to free, compacts and calls it once more.
  // The last error, if all of it did not help: its figures are those of what stays. `disk`: why a
  // model could not leave, if one could not.
  absl::Status MakeRoom(absl::FunctionRef<absl::Status()> fn, int64_t bytes, absl::Status* disk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(swapping_);
  absl::Status Place(Room& room) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `used`: bytes that others do not leave.
  absl::Status TooLarge(int64_t needed, int64_t used) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // In place; together with `other`, if it is not null and is in place.
  int64_t PinnedBytes(const Room* other = nullptr) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Unplace(Room& room) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t Free(int64_t bytes, absl::Status* why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(swapping_);
  absl::Status Evict(Room& victim, Evictable& rows) ABSL_EXCLUSIVE_LOCKS_REQUIRED(swapping_);
  absl::Status SpillRows(Room& room, Evictable& rows) ABSL_EXCLUSIVE_LOCKS_REQUIRED(swapping_);
  void CompactNow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(swapping_);
  // The one of those in `place` that was not used for the longest time, and may move. Its rows are
  // held by `rows`, and nobody can use it before it stands still again.
  Room* Oldest(v1::MemoryTable::Place place, std::shared_ptr<Evictable>* rows)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(swapping_, mutex_);
  // Waits until more than `ends` uses have ended. False: it is too late, or nothing is in use.
  bool WaitForUse(int64_t ends, absl::Time until) ABSL_EXCLUSIVE_LOCKS_REQUIRED(swapping_)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Tell(absl::string_view event) const;
  // Rooms of a model, each with the rows that it may have to bring in.
  using Held = std::vector<std::pair<std::shared_ptr<Room>, std::shared_ptr<Evictable>>>;
  // Marks what was not, and returns it.
  absl::StatusOr<Held> MarkPinned(absl::string_view model, bool pinned)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(swapping_);
  absl::Status BringIn(const Held& rooms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(swapping_);

  const MemoryOptions options_;
  absl::Mutex swapping_ ABSL_ACQUIRED_BEFORE(mutex_);  // held while rows move
  // What the command of an operator has done so far, while one is carried out.
  std::optional<v1::ShardMemoryChange> change_ ABSL_GUARDED_BY(swapping_);
  // The model of a batch, while room is made for the batch; null otherwise.
  const Room* stays_ ABSL_GUARDED_BY(swapping_) = nullptr;
  mutable absl::Mutex mutex_;  // never held for long
  absl::CondVar use_ended_;
  AddressMap map_ ABSL_GUARDED_BY(mutex_);
  std::vector<Room*> rooms_ ABSL_GUARDED_BY(mutex_);
  int64_t clock_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t ends_ ABSL_GUARDED_BY(mutex_) = 0;  // of uses, so far
  // See MemoryStatus.
  struct {
    int64_t host_bytes = 0;
    int64_t spilled_bytes = 0;
    int64_t evictions = 0;
    int64_t returns = 0;
    int64_t compactions = 0;
    int64_t failures = 0;
  } sums_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::shard
