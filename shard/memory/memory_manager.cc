#include "shard/memory/memory_manager.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "base/steady_time.h"

namespace emberd::shard {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;  // of a spill file

}  // namespace

// What a MemoryManager knows of one model, or of one batch.
//
// All but `file` is guarded by the manager's mutex_; `file` by swapping_.
class MemoryManager::Room : public std::enable_shared_from_this<Room> {
 public:
  std::shared_ptr<MemoryManager> manager;
  std::string model;
  std::vector<Table> stacks;
  int64_t bytes = 0;            // of all stacks
  const Room* owner = nullptr;  // of a batch: its model, which does not leave for it
  v1::MemoryTable::Place place = v1::MemoryTable::SPARSECORE;
  bool moving = true;   // Take, Hold or an eviction is at it
  bool pinned = false;  // by an operator
  bool gone = false;
  int uses = 0;
  int64_t last_use = 0;
  std::weak_ptr<Evictable> rows;  // expired: they may not move yet, or not any more
  std::optional<SpillFile> file;  // of spilled rows
  int64_t file_bytes = 0;
  absl::Status damage;  // why the file cannot be read any more
};

// ---- Addresses, and files of spilled rows

std::optional<int64_t> AddressMap::Place(int64_t bytes) {
  int64_t address = 0;
  for (const auto& [begin, size] : taken_) {
    if (begin - address >= bytes) break;
    address = begin + size;
  }
  if (bytes_ - address < bytes) return std::nullopt;
  taken_[address] = bytes;
  used_ += bytes;
  return address;
}

void AddressMap::Free(int64_t address) {
  const auto found = taken_.find(address);
  if (found == taken_.end()) return;
  used_ -= found->second;
  taken_.erase(found);
}

int64_t AddressMap::largest_gap() const {
  int64_t largest = 0, address = 0;
  for (const auto& [begin, size] : taken_) {
    largest = std::max(largest, begin - address);
    address = begin + size;
  }
  return std::max(largest, bytes_ - address);
}

absl::StatusOr<SpillFile> SpillFile::Create(const std::string& folder) {
  std::string path = folder + "/spill-XXXXXX";
  FileDescriptor file(mkostemp(path.data(), O_CLOEXEC));
  if (file.get() < 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "eviction.spill_folder: no file can be made in ", folder, ": ", strerror(errno)));
  }
  unlink(path.c_str());
  return SpillFile(std::move(path), std::move(file));
}

absl::Status SpillFile::Write(absl::Span<const char> bytes) {
  if (static_cast<int64_t>(bytes.size()) > limit_ - bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("rows cannot be spilled: of eviction.spill_bytes, ", limit_,
                     " bytes are left, and at least ", bytes_ + bytes.size(), " are needed"));
  }
  while (!bytes.empty()) {
    // In pieces, so that the checksum is taken of what is in the cache.
    const absl::Span<const char> piece = bytes.subspan(0, kPieceBytes);
    const ssize_t written = pwrite(file_.get(), piece.data(), piece.size(), bytes_);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("rows cannot be spilled to ", path_, ": ",
                       written < 0 ? strerror(errno) : "nothing more can be written"));
    }
    crc_ = ExtendCrc32c(crc_, piece.subspan(0, written));
    bytes_ += written;
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

void SpillFile::Rewind() {
  read_ = 0;
  read_crc_ = 0;
}

absl::Status SpillFile::Read(absl::Span<char> bytes) {
  while (!bytes.empty()) {
    const absl::Span<char> piece = bytes.subspan(0, kPieceBytes);
    const ssize_t got = pread(file_.get(), piece.data(), piece.size(), read_);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      return absl::DataLossError(absl::StrCat(
          "rows spilled to ", path_, " cannot be read: ",
          got < 0 ? strerror(errno)
                  : absl::StrCat("the file ends after ", read_, " of ", bytes_, " bytes")));
    }
    read_crc_ = ExtendCrc32c(read_crc_, piece.subspan(0, got));
    read_ += got;
    bytes.remove_prefix(got);
  }
  return absl::OkStatus();
}

absl::Status SpillFile::CheckRead() const {
  if (read_ == bytes_ && read_crc_ == crc_) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("rows spilled to ", path_, " are damaged: their checksum has changed"));
}

absl::StatusOr<std::shared_ptr<MemoryManager>> MemoryManager::Create(MemoryOptions options) {
  if (!options.folder.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.folder, error);
    // Now, and not at the step that first needs it.
    RETURN_IF_ERROR(SpillFile::Create(options.folder).status());
  }
  return absl::WrapUnique(new MemoryManager(std::move(options)));
}

MemoryManager::MemoryManager(MemoryOptions options)
    : options_(std::move(options)), map_(options_.bytes) {}

void MemoryManager::Tell(absl::string_view event) const {
  if (options_.watch != nullptr) options_.watch(event);
}

// ---- Rooms and uses

absl::StatusOr<std::shared_ptr<const void>> MemoryManager::Keep(const std::shared_ptr<Room>& model,
                                                                int64_t bytes) {
  RETURN_IF_ERROR(Hold(model).status());
  ASSIGN_OR_RETURN(const std::shared_ptr<Room> room,
                   Take(model->model, {{.name = "", .bytes = bytes}}, model.get()));
  return std::shared_ptr<const void>(room.get(),
                                     [room](const void*) { room->manager->Return(*room); });
}

absl::StatusOr<std::shared_ptr<MemoryManager::Room>> MemoryManager::Take(const std::string& model,
                                                                         std::vector<Table> tables,
                                                                         const Room* owner) {
  auto room = std::make_shared<Room>();
  room->manager = shared_from_this();
  room->model = model;
  room->owner = owner;
  for (const Table& table : tables) room->bytes += table.bytes;
  room->stacks = std::move(tables);
  const auto enlist = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    room->last_use = ++clock_;
    rooms_.push_back(room.get());
    return room;
  };
  {
    absl::MutexLock lock(&mutex_);
    if (Place(*room).ok()) return enlist();
  }
  absl::MutexLock swapping(&swapping_);
  stays_ = owner;
  const absl::Status placed = PlaceOrWait(*room);
  stays_ = nullptr;
  absl::MutexLock lock(&mutex_);
  if (placed.ok()) return enlist();
  ++sums_.failures;
  return Annotate(placed, absl::StrCat(owner == nullptr ? "" : "a batch of ",
                                       absl::StrContains(model, ' ') ? "" : "model ", model));
}

void MemoryManager::MayEvict(Room& room, std::weak_ptr<Evictable> rows) {
  absl::MutexLock lock(&mutex_);
  if (evicts()) room.rows = std::move(rows);
  room.moving = false;
  ++ends_;
  use_ended_.SignalAll();
}

void MemoryManager::Return(Room& room, bool soon) {
  absl::MutexLock lock(&mutex_);
  room.pinned = false;
  if (soon) ++room.uses;
  if (soon || std::exchange(room.gone, true)) return;
  Unplace(room);
  if (room.place == v1::MemoryTable::HOST) sums_.host_bytes -= room.bytes;
  if (room.place == v1::MemoryTable::SPILLED) sums_.spilled_bytes -= room.file_bytes;
  rooms_.erase(std::find(rooms_.begin(), rooms_.end(), &room));
  ++ends_;
  use_ended_.SignalAll();
}

absl::StatusOr<MemoryManager::Use> MemoryManager::Hold(const std::shared_ptr<Room>& room) {
  const auto use_in_place = [&] {
    absl::MutexLock lock(&mutex_);
    room->last_use = ++clock_;
    const bool in_place = room->place == v1::MemoryTable::SPARSECORE && !room->moving;
    if (in_place) ++room->uses;
    return in_place;
  };
  if (!use_in_place()) {
    absl::MutexLock swapping(&swapping_);
    RETURN_IF_ERROR(Annotate(Enter(*room), absl::StrCat("model ", room->model)));
  }
  return Counted(room);
}

MemoryManager::Use MemoryManager::Counted(const std::shared_ptr<Room>& room) {
  return Use(room.get(), [room](const void*) {
    MemoryManager& manager = *room->manager;
    absl::MutexLock lock(&manager.mutex_);
    if (--room->uses > 0) return;
    ++manager.ends_;
    manager.use_ended_.SignalAll();
  });
}

bool MemoryManager::WaitForUse(int64_t ends, absl::Time until) {
  const auto used = [stays = stays_](const Room* room) { return room->uses > 0 && room != stays; };
  absl::MutexLock lock(&mutex_);
  while (ends_ == ends) {
    if (std::none_of(rooms_.begin(), rooms_.end(), used)) return false;
    if (!WaitSteadily(&use_ended_, &mutex_, until)) return false;
  }
  return true;
}

int64_t MemoryManager::PinnedBytes(const Room* other) const {
  int64_t bytes = 0;
  for (const Room* room : rooms_) {
    const bool stays = room->pinned || room == other;
    if (stays && room->place == v1::MemoryTable::SPARSECORE) bytes += room->bytes;
  }
  return bytes;
}

absl::Status MemoryManager::TooLarge(int64_t needed, int64_t used) const {
  const int64_t pinned = PinnedBytes();
  return absl::ResourceExhaustedError(absl::StrCat(
      "needs ", needed, " bytes in every partition; ", used, " of the budget of ", map_.bytes(),
      " (budgets.bytes_per_sparsecore) are in use",
      pinned > 0 ? absl::StrCat(", ", pinned, " of them by pinned models") : "", ", so ",
      needed - (map_.bytes() - used),
      " do not fit. Raise the budget if the machines have the memory, add shards, or store rows in "
      "16 bits",
      pinned > 0 ? ", or unpin a model" : ""));
}

// ---- Into the SparseCore

absl::Status MemoryManager::Enter(Room& room) {
  v1::MemoryTable::Place from;
  {
    absl::MutexLock lock(&mutex_);
    // Nobody makes room for rows that do not come.
    if (!room.damage.ok()) return room.damage;
    from = room.place;
    if (from == v1::MemoryTable::SPARSECORE) {
      ++room.uses;
      return absl::OkStatus();
    }
    room.moving = true;
    if (from == v1::MemoryTable::HOST) sums_.host_bytes -= room.bytes;
  }
  absl::Status status = PlaceOrWait(room);
  if (status.ok() && from == v1::MemoryTable::SPILLED) {
    const std::shared_ptr<Evictable> rows = room.rows.lock();
    status = rows == nullptr ? absl::NotFoundError("it was dropped") : rows->Fetch(*room.file);
    if (status.ok()) room.file.reset();
  }
  absl::MutexLock lock(&mutex_);
  room.moving = false;
  if (!status.ok()) {
    Unplace(room);
    if (from == v1::MemoryTable::HOST) sums_.host_bytes += room.bytes;
    if (absl::IsDataLoss(status)) room.damage = status;
    ++sums_.failures;
    return status;
  }
  room.place = v1::MemoryTable::SPARSECORE;
  if (from == v1::MemoryTable::SPILLED) sums_.spilled_bytes -= std::exchange(room.file_bytes, 0);
  ++sums_.returns;
  ++room.uses;
  return absl::OkStatus();
}

absl::Status MemoryManager::DamageOf(const Room& room) const {
  absl::MutexLock lock(&mutex_);
  return room.damage;
}

absl::Status MemoryManager::PlaceOrWait(Room& room) {
  const absl::Time until = SteadyNow() + absl::FromChrono(options_.wait);
  while (true) {
    int64_t free = 0, ends = 0;
    {
      absl::MutexLock lock(&mutex_);
      // It never fits, so nobody leaves for it, and it waits for nobody.
      const int64_t stay = PinnedBytes(stays_), used = map_.bytes() - map_.free_bytes();
      if (room.bytes > map_.bytes() - stay) return TooLarge(room.bytes, evicts() ? stay : used);
      free = map_.free_bytes();
      ends = ends_;
    }
    const auto place = [&] {
      absl::MutexLock lock(&mutex_);
      return Place(room);
    };
    // What lies in pieces needs nobody's memory.
    if (free >= room.bytes && !place().ok()) CompactNow();
    absl::Status disk;
    const absl::Status status = MakeRoom(place, std::max<int64_t>(room.bytes - free, 1), &disk);
    if (!absl::IsResourceExhausted(status) || !disk.ok() || !WaitForUse(ends, until)) return status;
  }
}

absl::Status MemoryManager::Place(Room& room) {
  for (Table& stack : room.stacks) {
    if (stack.address >= 0 || stack.bytes == 0) continue;
    const std::optional<int64_t> address = map_.Place(stack.bytes);
    if (!address.has_value()) {
      Unplace(room);
      return TooLarge(room.bytes, map_.bytes() - map_.free_bytes());
    }
    stack.address = *address;
  }
  return absl::OkStatus();
}

void MemoryManager::Unplace(Room& room) {
  for (Table& stack : room.stacks) {
    if (stack.address >= 0) map_.Free(stack.address);
    stack.address = -1;
  }
}

// ---- Out of it

absl::Status MemoryManager::MakeRoom(absl::FunctionRef<absl::Status()> fn, int64_t bytes,
                                     absl::Status* disk) {
  absl::Status status = fn();
  while (absl::IsResourceExhausted(status) && disk->ok() && Free(bytes, disk) > 0) status = fn();
  if (!absl::IsResourceExhausted(status)) return status;
  CompactNow();
  status = fn();
  if (!absl::IsResourceExhausted(status) || disk->ok()) return status;
  return absl::ResourceExhaustedError(
      absl::StrCat(status.message(), ". Other models could not make room: ", disk->message()));
}

MemoryManager::Room* MemoryManager::Oldest(v1::MemoryTable::Place place,
                                           std::shared_ptr<Evictable>* rows) {
  Room* oldest = nullptr;
  for (Room* room : rooms_) {
    const bool stays =
        room == stays_ || room->uses > 0 || (room->pinned && place == v1::MemoryTable::SPARSECORE);
    if (room->place != place || room->moving || stays) continue;
    if (oldest != nullptr && oldest->last_use < room->last_use) continue;
    // A model that is on its way out stays where it is.
    if (!room->rows.expired()) oldest = room;
  }
  if (oldest == nullptr) return nullptr;
  *rows = oldest->rows.lock();
  if (*rows == nullptr) return nullptr;
  oldest->moving = true;
  return oldest;
}

int64_t MemoryManager::Free(int64_t bytes, absl::Status* why) {
  int64_t freed = 0;
  while (freed < bytes && why->ok()) {
    std::shared_ptr<Evictable> rows;  // may be the last to hold them, and lets go without the mutex
    Room* victim = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      victim = Oldest(v1::MemoryTable::SPARSECORE, &rows);
    }
    if (victim == nullptr) break;
    *why = Evict(*victim, *rows);
    absl::MutexLock lock(&mutex_);
    victim->moving = false;
    if (!why->ok()) break;
    freed += victim->bytes;
    ++sums_.evictions;
    if (!change_.has_value()) continue;
    change_->add_evicted(victim->model);
    change_->set_evicted_bytes(change_->evicted_bytes() + victim->bytes);
  }
  if (freed > 0) Tell("free");
  return freed;
}

absl::Status MemoryManager::Evict(Room& victim, Evictable& rows) {
  bool to_host = victim.bytes <= options_.host_bytes;
  while (to_host) {
    std::shared_ptr<Evictable> older_rows;
    Room* older = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      if (sums_.host_bytes + victim.bytes <= options_.host_bytes) break;
      older = Oldest(v1::MemoryTable::HOST, &older_rows);
    }
    to_host = older != nullptr;
    if (!to_host) break;
    const absl::Status spilled = SpillRows(*older, *older_rows);
    absl::MutexLock lock(&mutex_);
    older->moving = false;
    RETURN_IF_ERROR(spilled);
    older->place = v1::MemoryTable::SPILLED;
    sums_.host_bytes -= older->bytes;
  }
  if (!to_host) RETURN_IF_ERROR(SpillRows(victim, rows));
  absl::MutexLock lock(&mutex_);
  Unplace(victim);
  victim.place = to_host ? v1::MemoryTable::HOST : v1::MemoryTable::SPILLED;
  if (to_host) sums_.host_bytes += victim.bytes;
  return absl::OkStatus();
}

absl::Status MemoryManager::SpillRows(Room& room, Evictable& rows) {
  ASSIGN_OR_RETURN(SpillFile file, SpillFile::Create(options_.folder));
  if (options_.spill_bytes > 0) {
    absl::MutexLock lock(&mutex_);
    file.set_limit(options_.spill_bytes - sums_.spilled_bytes);
  }
  RETURN_IF_ERROR(rows.Spill(file));
  rows.DropRows();
  absl::MutexLock lock(&mutex_);
  room.file_bytes = file.bytes();
  sums_.spilled_bytes += room.file_bytes;
  room.file = std::move(file);
  return absl::OkStatus();
}

void MemoryManager::CompactNow() {
  {
    absl::MutexLock lock(&mutex_);
    std::vector<Room*> placed = rooms_;
    std::sort(placed.begin(), placed.end(),
              [](const Room* a, const Room* b) { return a->last_use > b->last_use; });
    std::vector<Table*> stacks;
    for (Room* room : placed) {
      for (Table& stack : room->stacks) {
        if (stack.address >= 0) stacks.push_back(&stack);
      }
    }
    for (Table* stack : stacks) map_.Free(stack->address);
    // One behind the other, they fit: they did so before, with gaps.
    for (Table* stack : stacks) {
      const int64_t before = std::exchange(stack->address, map_.Place(stack->bytes).value_or(-1));
      if (stack->address == before || !change_.has_value()) continue;
      change_->set_moved_tables(change_->moved_tables() + 1);
    }
    ++sums_.compactions;
  }
  Tell("compact");
}

// ---- For operators

absl::StatusOr<MemoryManager::Held> MemoryManager::MarkPinned(absl::string_view model,
                                                              bool pinned) {
  // That are not as they are to be. If the pin is refused, these may be the last to hold rows, and
  // let go without the mutex.
  Held others;
  absl::MutexLock lock(&mutex_);
  bool found = false;
  int64_t bytes = 0;
  for (Room* room : rooms_) {
    if (room->model != model || room->owner != nullptr) continue;
    found = true;
    if (room->pinned == pinned) continue;
    others.emplace_back(room->shared_from_this(), room->rows.lock());
    bytes += room->bytes;
  }
  if (!found) return absl::NotFoundError(absl::StrCat("model '", model, "' is not declared here"));
  if (const int64_t already = PinnedBytes(); pinned && bytes > map_.bytes() - already) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "model '", model, "' cannot be pinned: it needs ", bytes, " bytes in every partition; ",
        already, " of the budget of ", map_.bytes(),
        " (budgets.bytes_per_sparsecore) belong to pinned models, so ",
        bytes - (map_.bytes() - already), " do not fit. Unpin another model, or raise the budget"));
  }
  for (const auto& [room, rows] : others) room->pinned = pinned;
  return others;
}

absl::Status MemoryManager::BringIn(const Held& rooms) {
  for (const auto& [room, rows] : rooms) {
    // On its way out, it may give its room back while others leave for it.
    if (rows == nullptr) continue;
    {
      absl::MutexLock lock(&mutex_);
      if (room->place == v1::MemoryTable::SPARSECORE) continue;
    }
    RETURN_IF_ERROR(Annotate(Enter(*room), absl::StrCat("model ", room->model)));
    Counted(room).reset();  // it is here; nobody uses it yet
    change_->set_returned(true);
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::ShardMemoryChange> MemoryManager::SetPinned(absl::string_view model,
                                                               bool pinned) {
  Held marked;  // may be the last to hold rows, and lets go without the mutexes
  absl::MutexLock swapping(&swapping_);
  ASSIGN_OR_RETURN(marked, MarkPinned(model, pinned));
  change_.emplace();
  const absl::Status in = pinned ? BringIn(marked) : absl::OkStatus();
  v1::ShardMemoryChange change = *std::exchange(change_, std::nullopt);
  change.set_changed(!marked.empty());
  if (in.ok()) return change;
  absl::MutexLock lock(&mutex_);
  for (const auto& [room, rows] : marked) room->pinned = false;
  return in;
}

v1::ShardMemoryChange MemoryManager::Compact() {
  absl::MutexLock swapping(&swapping_);
  change_.emplace();
  CompactNow();
  v1::ShardMemoryChange change = *std::exchange(change_, std::nullopt);
  change.set_changed(change.moved_tables() > 0);
  return change;
}

absl::StatusOr<v1::ShardMemoryChange> MemoryManager::ReleaseAll() {
  absl::MutexLock swapping(&swapping_);
  absl::Status disk;
  change_.emplace();
  Free(std::numeric_limits<int64_t>::max(), &disk);
  v1::ShardMemoryChange change = *std::exchange(change_, std::nullopt);
  RETURN_IF_ERROR(disk);
  change.set_changed(change.evicted_size() > 0);
  return change;
}

v1::MemoryStatus MemoryManager::Figures() const {
  absl::MutexLock lock(&mutex_);
  v1::MemoryStatus figures;
  figures.set_bytes(map_.bytes());
  figures.set_free_bytes(map_.free_bytes());
  figures.set_largest_gap_bytes(map_.largest_gap());
  figures.set_host_bytes(sums_.host_bytes);
  figures.set_host_budget_bytes(options_.host_bytes);
  figures.set_spilled_bytes(sums_.spilled_bytes);
  figures.set_pinned_bytes(PinnedBytes());
  figures.set_evictions(sums_.evictions);
  figures.set_returns(sums_.returns);
  figures.set_compactions(sums_.compactions);
  figures.set_failures(sums_.failures);
  std::vector<Room*> rooms = rooms_;
  std::sort(rooms.begin(), rooms.end(),
            [](const Room* a, const Room* b) { return a->last_use > b->last_use; });
  for (const Room* room : rooms) {
    if (room->owner != nullptr) figures.set_batch_bytes(figures.batch_bytes() + room->bytes);
    for (const Table& stack : room->stacks) {
      v1::MemoryTable& table = *figures.add_tables();
      table.set_model(room->model);
      table.set_stack(stack.name);
      table.set_bytes(stack.bytes);
      table.set_place(room->place);
      table.set_address(stack.address);
      table.set_uses(room->uses);
      table.set_pinned(room->pinned);
    }
  }
  const auto key = [](const v1::MemoryTable* table) {
    return table->address() >= 0 ? table->address() : std::numeric_limits<int64_t>::max();
  };
  auto& tables = *figures.mutable_tables();
  std::stable_sort(tables.pointer_begin(), tables.pointer_end(),
                   [&](const auto* a, const auto* b) { return key(a) < key(b); });
  return figures;
}

}  // namespace emberd::shard
