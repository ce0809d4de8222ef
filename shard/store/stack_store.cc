#include "shard/store/stack_store.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/floats.h"
#include "base/status.h"
#include "preprocess/batch/csr.h"
#include "shard/memory/memory_manager.h"
#include "shard/store/portable_numbers.h"

namespace emberd::shard {
namespace {

constexpr int64_t kChunkBytes = 4096;
constexpr int kMaxWidth = 8192;

}  // namespace

void WriteStoredRow(v1::DataType dtype, absl::Span<const float> values, char* row) {
  auto* halves = reinterpret_cast<uint16_t*>(row);
  if (dtype == v1::BFLOAT16) {
    std::transform(values.begin(), values.end(), halves, ToBfloat16);
  } else if (dtype == v1::FLOAT16) {
    std::transform(values.begin(), values.end(), halves, ToFloat16);
  } else {
    std::memcpy(row, values.data(), values.size() * sizeof(float));
  }
}

void ReadStoredRow(v1::DataType dtype, const char* row, absl::Span<float> values) {
  const auto* halves = reinterpret_cast<const uint16_t*>(row);
  if (dtype == v1::BFLOAT16) {
    std::transform(halves, halves + values.size(), values.begin(), FromBfloat16);
  } else if (dtype == v1::FLOAT16) {
    std::transform(halves, halves + values.size(), values.begin(), FromFloat16);
  } else {
    std::memcpy(values.data(), row, values.size() * sizeof(float));
  }
}

absl::Status StackStore::CheckShape(const StackSpec& spec, int partitions) {
  if (spec.embedding_dim < 8 || spec.embedding_dim > kMaxWidth || spec.embedding_dim % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("stack ", spec.name, ": embedding_dim ", spec.embedding_dim,
                     " must be a multiple of 8 in [8, ", kMaxWidth, "]"));
  }
  const int64_t most = preprocess::MaxRowsPerPartition(partitions);
  if (spec.rows_per_partition < 1 || spec.rows_per_partition > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("stack ", spec.name, ": rows_per_partition ", spec.rows_per_partition,
                     " must be in [1, ", most, "] for ", partitions, " partitions on one shard"));
  }
  if (spec.storage_dtype != v1::FLOAT32 && spec.storage_dtype != v1::BFLOAT16 &&
      spec.storage_dtype != v1::FLOAT16) {
    return absl::InvalidArgumentError(absl::StrCat("stack ", spec.name, ": storage_dtype ",
                                                   v1::DataType_Name(spec.storage_dtype),
                                                   " must be FLOAT32, BFLOAT16 or FLOAT16"));
  }
  return absl::OkStatus();
}

int64_t StackStore::BytesPerPartition(const StackSpec& spec) {
  int64_t row = RowBytes(spec);
  for (const config::SlotInfo& slot : config::OptimizerSlots(spec.optimizer)) {
    row += slot.one_per_row ? 4 : spec.embedding_dim * 4;
  }
  return row * spec.rows_per_partition;
}

StackStore::StackStore(const ModelSpec& model, const StackSpec& spec)
    : spec_(spec),
      bytes_per_partition_(BytesPerPartition(spec)),
      partitions_(model.partition_count),
      all_partitions_(model.partitions),
      first_partition_(model.first_partition),
      seed_(model.seed),
      strands_(std::make_unique<Strand[]>(model.partition_count)) {
  for (const TableSpec& table : spec.tables) {
    initializers_.emplace_back(model.seed, table.SeedName(), table.initializer);
  }
}

absl::StatusOr<std::unique_ptr<StackStore>> StackStore::Create(const ModelSpec& model,
                                                               const StackSpec& spec,
                                                               const EngineOptions& options) {
  RETURN_IF_ERROR(CheckShape(spec, model.partition_count));
  std::unique_ptr<StackStore> store(new StackStore(model, spec));
  RETURN_IF_ERROR(store->MakeRanges());
  RETURN_IF_ERROR(store->Reserve(options));
  return store;
}

void StackStore::FillIfSmall(const EngineOptions& options) {
  if (bytes_per_partition_ * partitions_ > options.eager_bytes) return;
  constexpr int64_t kRowsPerTask = 4096;
  options.cpu->ParallelFor((rows() + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    const int64_t end = std::min(rows(), (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) EnsureRow(row);
  });
}

absl::Status StackStore::MakeRanges() {
  for (size_t i = 0; i < spec_.tables.size(); ++i) {
    const TableSpec& table = spec_.tables[i];
    const int64_t rows = table.padded_vocabulary_size / all_partitions_;
    if (rows < 1 || table.row_offset < 0 || table.row_offset > spec_.rows_per_partition - rows ||
        table.vocabulary_size < 1 || table.vocabulary_size > rows * all_partitions_ ||
        table.embedding_dim < 1 || table.embedding_dim > width() || table.shard_rotation < 0 ||
        table.shard_rotation >= all_partitions_) {
      return absl::InvalidArgumentError(
          absl::StrCat("stack ", spec_.name, ": table ", table.name, " does not fit: row_offset ",
                       table.row_offset, ", padded_vocabulary_size ", table.padded_vocabulary_size,
                       ", vocabulary_size ", table.vocabulary_size, ", embedding_dim ",
                       table.embedding_dim, ", shard_rotation ", table.shard_rotation));
    }
    ranges_.push_back(
        {table.row_offset, table.row_offset + rows, table.embedding_dim, static_cast<int>(i)});
  }
  std::sort(ranges_.begin(), ranges_.end(),
            [](const RowRange& a, const RowRange& b) { return a.begin < b.begin; });
  std::vector<RowRange> covered;
  int64_t end = 0;
  for (const RowRange& range : ranges_) {
    if (range.begin < end) {
      return absl::InvalidArgumentError(
          absl::StrCat("stack ", spec_.name, ": table ", spec_.tables[range.table].name,
                       " at row_offset ", range.begin, " overlaps the rows before ", end));
    }
    if (range.begin > end) covered.push_back({end, range.begin, 0, -1});
    covered.push_back(range);
    end = range.end;
  }
  if (end < spec_.rows_per_partition) covered.push_back({end, spec_.rows_per_partition, 0, -1});
  ranges_ = std::move(covered);
  return absl::OkStatus();
}

absl::Status StackStore::Reserve(const EngineOptions& options) {
  const auto map = [&](size_t bytes_per_row) {
    const int64_t bytes = static_cast<int64_t>(bytes_per_row) * rows();
    return MappedMemory::Map(bytes, bytes <= options.huge_page_bytes);
  };
  ASSIGN_OR_RETURN(weights_, map(row_bytes()));
  for (const config::SlotInfo& info : config::OptimizerSlots(spec_.optimizer)) {
    const int columns = info.one_per_row ? 1 : width();
    ASSIGN_OR_RETURN(MappedMemory memory, map(columns * sizeof(float)));
    slots_.push_back({info, columns, std::move(memory)});
  }
  while ((int64_t{2} << chunk_shift_) * static_cast<int64_t>(row_bytes()) <= kChunkBytes)
    ++chunk_shift_;
  const int64_t chunks = ((rows() - 1) >> chunk_shift_) + 1;
  ASSIGN_OR_RETURN(bitmap_, MappedMemory::Map((chunks + 63) / 64 * 8, false));
  missing_chunks_ = chunks;
  for (int k = 0; k < partitions_; ++k) {
    const int64_t first = ChunkOf(k * rows_per_partition());
    changes_.emplace_back(first, ChunkOf((k + 1) * rows_per_partition() - 1) - first + 1);
  }
  return absl::OkStatus();
}

std::vector<Strand*> StackStore::AllStrands() {
  std::vector<Strand*> strands;
  for (int k = 0; k < partitions_; ++k) strands.push_back(&strands_[k]);
  return strands;
}

const RowRange& StackStore::RangeOf(int64_t row) const {
  const int64_t local = row % rows_per_partition();
  return *std::upper_bound(ranges_.begin(), ranges_.end(), local,
                           [](int64_t value, const RowRange& r) { return value < r.end; });
}

int64_t StackStore::IdOf(int64_t row) const {
  const RowRange& range = RangeOf(row);
  const int64_t k = row / rows_per_partition();
  const int64_t local = row % rows_per_partition() - range.begin;
  const int64_t partition =
      (first_partition_ + k - spec_.tables[range.table].shard_rotation + all_partitions_) %
      all_partitions_;
  return local * all_partitions_ + partition;
}

uint64_t StackStore::NextRoundingKey(int64_t step, uint64_t rng_seed) {
  constexpr uint64_t kUnnumbered = uint64_t{1} << 63;
  uint64_t number = kUnnumbered;
  if (step >= 0) {
    number = static_cast<uint64_t>(step);
  } else if (rng_seed == 0) {
    number |= static_cast<uint64_t>(unnumbered_updates_++);
  }
  if (!spec_.stochastic_rounding) return 0;  // counted all the same: checkpoints have the number
  const uint64_t seed = rng_seed == 0 ? seed_ : rng_seed;
  return SubKey(NamedKey(seed, absl::StrCat("rounding of ", spec_.name)), number);
}

int64_t StackStore::BytesOf(int64_t chunks) const {
  return std::min(bytes_per_partition_ * partitions_, state_bytes() * (chunks << chunk_shift_));
}

int64_t StackStore::ChangedBytes() const {
  int64_t chunks = 0;
  for (const RowChanges& changes : changes_) chunks += changes.changed();
  return BytesOf(chunks);
}

bool StackStore::Touched(int64_t begin, int64_t end) const {
  for (int64_t chunk = ChunkOf(begin); chunk <= ChunkOf(end - 1); ++chunk) {
    if (ChunkTouched(chunk)) return true;
  }
  return false;
}

bool StackStore::AllTouched(int64_t first, absl::Span<const int32_t> local) const {
  return std::all_of(local.begin(), local.end(),
                     [&](int32_t row) { return ChunkTouched(ChunkOf(first + row)); });
}

StackStore::LocalRows StackStore::RowsOfChunk(int k, int64_t chunk) const {
  const int64_t first = k * rows_per_partition();
  return {std::max<int64_t>((chunk << chunk_shift_) - first, 0),
          std::min(((chunk + 1) << chunk_shift_) - first, rows_per_partition())};
}

void StackStore::InitializeChunk(int64_t chunk) {
  const absl::MutexLock lock(&locks_[chunk % kLocks]);
  const uint64_t bit = uint64_t{1} << (chunk % 64);
  if (Word(chunk).load(std::memory_order_relaxed) & bit) return;
  std::vector<float> values(width());
  const int64_t end = std::min(rows(), (chunk + 1) << chunk_shift_);
  const RowRange* range = nullptr;
  for (int64_t row = chunk << chunk_shift_; row < end; ++row) {
    const int64_t local = row % rows_per_partition();
    if (range == nullptr || local < range->begin || local >= range->end) range = &RangeOf(row);
    if (range->table >= 0) InitializeRow(row, *range, values);
  }
  SetTouched(chunk);
}

void StackStore::SetTouched(int64_t chunk) {
  Word(chunk).fetch_or(uint64_t{1} << (chunk % 64), std::memory_order_release);
  missing_chunks_.fetch_sub(1, std::memory_order_release);
}

void StackStore::LoadWeights(int k, int64_t first, absl::Span<const char> rows) {
  const int64_t begin = k * rows_per_partition() + first;
  const int64_t end = begin + static_cast<int64_t>(rows.size() / row_bytes());
  for (int64_t chunk = ChunkOf(begin); chunk <= ChunkOf(end - 1); ++chunk) {
    const int64_t chunk_begin = chunk << chunk_shift_;
    const int64_t chunk_end = std::min(this->rows(), (chunk + 1) << chunk_shift_);
    if (chunk_begin < begin || chunk_end > end) {
      EnsureRow(chunk_begin);  // others of its rows are not among these
      continue;
    }
    const absl::MutexLock lock(&locks_[chunk % kLocks]);
    if (ChunkTouched(chunk)) continue;
    for (int64_t row = chunk_begin; row < chunk_end; ++row) {
      InitializeSlots(row, RangeOf(row).columns);
    }
    SetTouched(chunk);
  }
  std::memcpy(weights_.data() + begin * row_bytes(), rows.data(), rows.size());
}

void StackStore::LoadSlot(int k, int slot, int64_t first, absl::Span<const float> values) {
  const Slot& to = slots_[slot];
  const int64_t begin = k * rows_per_partition() + first;
  const int64_t end = begin + static_cast<int64_t>(values.size()) / to.columns;
  for (int64_t chunk = ChunkOf(begin); chunk <= ChunkOf(end - 1); ++chunk) {
    EnsureRow(std::max(begin, chunk << chunk_shift_));
  }
  std::copy(values.begin(), values.end(), to.data() + begin * to.columns);
}

void StackStore::InitializeRow(int64_t row, const RowRange& range, std::vector<float>& values) {
  const TableSpec& table = spec_.tables[range.table];
  const int64_t id = IdOf(row);
  // Rows that pad the vocabulary hold zeros.
  // Zeros are written, too: what an update will need is taken now, when it can still be refused.
  char* const weights = weights_.data() + row * row_bytes();
  if (id < table.vocabulary_size && !initializers_[range.table].AllZero()) {
    initializers_[range.table].Fill(id, absl::MakeSpan(values.data(), range.columns));
    WriteStoredRow(dtype(), absl::MakeSpan(values.data(), range.columns), weights);
  } else {
    std::memset(weights, 0, row_bytes());
  }
  InitializeSlots(row, range.columns);
}

void StackStore::InitializeSlots(int64_t row, int columns) {
  for (const Slot& slot : slots_) {
    float* first = slot.data() + row * slot.columns;
    std::fill(first, first + std::min(slot.columns, columns), slot.info.initial_value);
  }
}

// Rows on their way to a spill file and back.

absl::Status StackStore::ForTouchedBytes(
    absl::FunctionRef<absl::Status(absl::Span<char> bytes)> fn) const {
  const auto visit = [&](char* data, int64_t row_bytes) -> absl::Status {
    const int64_t chunks = ((rows() - 1) >> chunk_shift_) + 1;
    for (int64_t begin = 0; begin < chunks;) {
      int64_t end = begin;
      while (end < chunks && ChunkTouched(end)) ++end;
      if (end > begin) {
        const int64_t first = begin << chunk_shift_;
        const int64_t last = std::min(rows(), end << chunk_shift_);
        RETURN_IF_ERROR(fn(absl::MakeSpan(data + first * row_bytes, (last - first) * row_bytes)));
      }
      begin = end + 1;
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(visit(weights_.data(), static_cast<int64_t>(row_bytes())));
  for (const Slot& slot : slots_) {
    RETURN_IF_ERROR(visit(slot.memory.data(), slot.columns * static_cast<int64_t>(sizeof(float))));
  }
  return absl::OkStatus();
}

absl::Status StackStore::Spill(SpillFile& file) const {
  return ForTouchedBytes([&](absl::Span<char> bytes) { return file.Write(bytes); });
}

void StackStore::DropRows() {
  weights_.Clear();
  for (Slot& slot : slots_) slot.memory.Clear();
}

absl::Status StackStore::Fetch(SpillFile& file) {
  return ForTouchedBytes([&](absl::Span<char> bytes) { return file.Read(bytes); });
}

NewPages::NewPages(const StackStore& store) : store_(store) {
  const int64_t small = sysconf(_SC_PAGESIZE);
  const auto add = [&](int64_t row_bytes, const MappedMemory& memory) {
    arrays_.push_back({row_bytes, memory.huge_pages() ? int64_t{kHugePage} : small, {}});
  };
  add(static_cast<int64_t>(store.row_bytes()), store.weights_memory());
  for (const StackStore::Slot& slot : store.slots()) {
    add(slot.columns * static_cast<int64_t>(sizeof(float)), slot.memory);
  }
}

void NewPages::Add(int64_t row) {
  if (store_.Touched(row, row + 1)) return;
  for (Array& array : arrays_) {
    const int64_t page = row * array.row_bytes / array.page_bytes;
    if (array.pages.contains(page)) continue;
    const int64_t begin = page * array.page_bytes / array.row_bytes;
    const int64_t end = ((page + 1) * array.page_bytes - 1) / array.row_bytes + 1;
    if (store_.Touched(begin, std::min(end, store_.rows()))) continue;
    array.pages.insert(page);
  }
}

int64_t NewPages::bytes() const {
  int64_t bytes = 0;
  for (const Array& array : arrays_) {
    bytes += static_cast<int64_t>(array.pages.size()) * array.page_bytes;
  }
  return bytes;
}

// ---- What has changed

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
