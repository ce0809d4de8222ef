#include "shard/store/model.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "shard/store/portable_numbers.h"

namespace emberd::shard {

struct SharedStacks::Stack {
  ~Stack() {
    if (room != nullptr) memory->Return(*room);
  }

  std::vector<std::pair<std::string, std::string>> shape;  // what models must agree on
  int64_t bytes_per_partition = 0;
  std::shared_ptr<MemoryManager> memory;
  std::shared_ptr<MemoryManager::Room> room;
  std::unique_ptr<StackStore> store;

  // Guarded by SharedStacks::mutex_.
  std::vector<std::string> models;
  bool closed = false;  // the only model is still filling it
};

namespace {

// Every field that the rows or work on them depend on.
std::vector<std::pair<std::string, std::string>> ShapeOfShared(const ModelSpec& model,
                                                               const StackSpec& stack) {
  const TableSpec& table = stack.tables.front();
  return {{"seed_name", table.SeedName()},
          {"vocabulary_size", absl::StrCat(table.vocabulary_size)},
          {"embedding_dim", absl::StrCat(table.embedding_dim)},
          {"padded width", absl::StrCat(stack.embedding_dim)},
          {"rows per partition", absl::StrCat(stack.rows_per_partition)},
          {"initializer", table.initializer.ShortDebugString()},
          {"seed", absl::StrCat(model.seed)},
          {"optimizer", stack.optimizer.ShortDebugString()},
          {"storage_dtype", v1::DataType_Name(stack.storage_dtype)},
          {"on_nonfinite_gradient", stack.skip_nonfinite ? "SKIP_ROW" : "REJECT"},
          {"quantization", stack.quantized ? stack.quantization.ShortDebugString() : "absent"},
          {"result_mode", v1::ResultMode_Name(stack.result_mode)},
          {"partitions", absl::StrCat(model.partitions, ", ", model.partition_count, " from ",
                                      model.first_partition, " on")}};
}

absl::Status CheckSharable(const StackSpec& stack) {
  if (stack.tables.size() == 1 && stack.tables[0].row_offset == 0 &&
      stack.tables[0].shard_rotation == 0 && !stack.stochastic_rounding) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("stack ", stack.name, ": resource '", stack.resource,
                   "' needs a stack of one table without row_offset, shard_rotation and "
                   "stochastic rounding; it has ",
                   stack.tables.size(), " tables"));
}

absl::Status CheckPlace(const ModelSpec& spec) {
  const bool power_of_two =
      spec.partition_count > 0 && std::has_single_bit(static_cast<unsigned>(spec.partition_count));
  if (!power_of_two || spec.partition_count > 64 || spec.first_partition < 0 ||
      spec.first_partition % spec.partition_count != 0 ||
      spec.first_partition > spec.partitions - spec.partition_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("model ", spec.name, ": partition_count ", spec.partition_count,
                     " must be a power of two of at most 64, and first_partition ",
                     spec.first_partition, " a multiple of it below ", spec.partitions));
  }
  return absl::OkStatus();
}

absl::StatusOr<const StackStore::Slot*> FindSlot(const StackStore& store, const std::string& name) {
  if (name.empty()) return nullptr;
  for (const StackStore::Slot& slot : store.slots()) {
    if (slot.info.name == name) return &slot;
  }
  return absl::InvalidArgumentError(absl::StrCat("slot \"", name, "\": stack ", store.spec().name,
                                                 " has no such optimizer slot"));
}

// Resolves rows and strands.
absl::Status AddRows(const ModelSpec& spec, const RowSelection& selection, bool writing,
                     RowTarget& target) {
  std::vector<bool> touched(spec.partition_count);
  const int64_t limit = target.store->rows_per_partition();
  const int end = spec.first_partition + spec.partition_count;
  for (size_t i = 0; i < selection.partitions.size(); ++i) {
    const int partition = selection.partitions[i];
    const int64_t local = selection.local_rows[i];
    if (partition < spec.first_partition || partition >= end || local < 0 || local >= limit) {
      return absl::OutOfRangeError(
          absl::StrCat("row ", i, ": partition ", partition, ", local row ", local, " must be in [",
                       spec.first_partition, ", ", end, ") and [0, ", limit, ")"));
    }
    const int k = partition - spec.first_partition;
    const int live = target.store->RangeOf(local).columns;
    if (writing && (live == 0 || (target.slot == nullptr || target.slot->columns > 1)) &&
        selection.columns > live) {
      return absl::InvalidArgumentError(
          absl::StrCat("row ", i, ": columns ", selection.columns, " must be in [1, ", live, "]"));
    }
    target.rows.push_back(k * limit + local);
    if (!touched[k]) target.strands.push_back(&target.store->strand(k));
    touched[k] = true;
  }
  return absl::OkStatus();
}

}  // namespace

std::shared_ptr<StackStore> SharedStacks::Share::store() const {
  return {stack_, stack_->store.get()};
}

void SharedStacks::Share::Open() {
  if (all_ == nullptr) return;
  absl::MutexLock lock(&all_->mutex_);
  stack_->closed = false;
}

void SharedStacks::Share::Leave() {
  const std::shared_ptr<SharedStacks> all = std::move(all_);
  all_ = nullptr;
  if (all == nullptr) return;
  absl::MutexLock lock(&all->mutex_);
  std::vector<std::string>& models = stack_->models;
  models.erase(std::find(models.begin(), models.end(), model_));
  // `stack_` holds it still: its memory does not go under the mutex.
  if (models.empty()) all->stacks_.erase(stack_->store->spec().resource);
}

absl::StatusOr<SharedStacks::Share> SharedStacks::Take(const ModelSpec& model,
                                                       const StackSpec& stack, bool alone) {
  RETURN_IF_ERROR(CheckSharable(stack));
  absl::MutexLock making(&making_);
  ASSIGN_OR_RETURN(std::shared_ptr<Stack> here, Join(model, stack, alone));
  if (here == nullptr) {
    ASSIGN_OR_RETURN(here, Make(model, stack));
    here->models = {model.name};
    here->closed = alone;
    absl::MutexLock lock(&mutex_);
    stacks_[stack.resource] = here;
  }
  return Share(shared_from_this(), std::move(here), model.name);
}

absl::StatusOr<std::shared_ptr<SharedStacks::Stack>> SharedStacks::Join(const ModelSpec& model,
                                                                        const StackSpec& stack,
                                                                        bool alone) {
  absl::MutexLock lock(&mutex_);
  const auto found = stacks_.find(stack.resource);
  if (found == stacks_.end()) return nullptr;
  Stack& here = *found->second;
  const std::string holders = absl::StrJoin(here.models, "', '");
  if (here.closed) {
    return absl::UnavailableError(absl::StrCat("model '", holders, "', which holds resource '",
                                               stack.resource, "', is being restored; retry"));
  }
  if (alone) {
    return absl::FailedPreconditionError(absl::StrCat("model ", model.name, ": resource '",
                                                      stack.resource, "' is held by '", holders,
                                                      "', whose rows would be replaced"));
  }
  const auto wanted = ShapeOfShared(model, stack);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] == here.shape[i]) continue;
    return absl::AlreadyExistsError(
        absl::StrCat("table '", stack.tables[0].name, "' of model '", model.name, "': resource '",
                     stack.resource, "' is held by '", holders, "' with ", wanted[i].first, " ",
                     here.shape[i].second, ", not ", wanted[i].second));
  }
  here.models.push_back(model.name);
  return found->second;
}

absl::StatusOr<std::shared_ptr<SharedStacks::Stack>> SharedStacks::Make(
    const ModelSpec& model, const StackSpec& stack) const {
  auto made = std::make_shared<Stack>();
  made->shape = ShapeOfShared(model, stack);
  made->bytes_per_partition = StackStore::BytesPerPartition(stack);
  made->memory = options_.memory;
  // With a space, this is the name of no model.
  auto room = made->memory->Take(absl::StrCat("resource ", stack.resource),
                                 {{stack.name, made->bytes_per_partition}});
  if (!room.ok()) return Annotate(room.status(), absl::StrCat("model ", model.name));
  made->room = *std::move(room);
  made->memory->MayEvict(*made->room, {});  // nothing that could leave
  ASSIGN_OR_RETURN(made->store, StackStore::Create(model, stack, options_));
  return made;
}

int64_t SharedStacks::bytes_per_partition() const {
  absl::MutexLock lock(&mutex_);
  int64_t bytes = 0;
  for (const auto& [resource, stack] : stacks_) bytes += stack->bytes_per_partition;
  return bytes;
}

absl::StatusOr<std::shared_ptr<Model>> Model::Create(const ModelSpec& spec,
                                                     const EngineOptions& options,
                                                     SharedStacks* shared, bool alone) {
  RETURN_IF_ERROR(CheckPlace(spec));
  // A hostile shape must not overflow the sum: each stack is checked on its own first.
  int64_t bytes = 0, own_bytes = 0;
  std::vector<MemoryManager::Table> tables;
  for (const StackSpec& stack : spec.stacks) {
    RETURN_IF_ERROR(StackStore::CheckShape(stack, spec.partition_count));
    bytes += StackStore::BytesPerPartition(stack);
    if (!stack.resource.empty()) continue;
    tables.push_back({stack.name, StackStore::BytesPerPartition(stack)});
    own_bytes += tables.back().bytes;
  }
  std::shared_ptr<Model> model(new Model(spec, options.memory, bytes, own_bytes));
  ASSIGN_OR_RETURN(model->room_, model->memory_->Take(spec.name, std::move(tables)));
  RETURN_IF_ERROR(model->MakeStacks(options, shared, alone));
  return model;
}

absl::Status Model::MakeStacks(const EngineOptions& options, SharedStacks* shared, bool alone) {
  int tables = 0;
  for (const StackSpec& stack : spec_.stacks) tables += static_cast<int>(stack.tables.size());
  for (const StackSpec& stack : spec_.stacks) {
    if (stack.resource.empty()) {
      ASSIGN_OR_RETURN(stacks_.emplace_back(), StackStore::Create(spec_, stack, options));
    } else {
      ASSIGN_OR_RETURN(SharedStacks::Share share, shared->Take(spec_, stack, alone));
      stacks_.push_back(share.store());
      shares_.push_back(std::move(share));
    }
    hot_rows_.push_back(std::make_unique<HotRowSketches>(*stacks_.back(), HotRowCounters(tables)));
  }
  return absl::OkStatus();
}

Model::~Model() {
  if (room_ != nullptr) memory_->Return(*room_);
}

void Model::OpenShared() {
  for (SharedStacks::Share& share : shares_) share.Open();
}

void Model::Drop() {
  dropped_ = true;
  memory_->Return(*room_, /*soon=*/true);
  for (SharedStacks::Share& share : shares_) share.Leave();
}

void Model::MayEvict() {
  // Where all is shared, nothing can leave.
  memory_->MayEvict(*room_,
                    own_bytes_per_partition_ > 0 ? weak_from_this() : std::weak_ptr<Evictable>());
}

absl::Status Model::Spill(SpillFile& file) {
  for (const auto& stack : stacks_) {
    if (stack->spec().resource.empty()) RETURN_IF_ERROR(stack->Spill(file));
  }
  return absl::OkStatus();
}

void Model::DropRows() {
  for (const auto& stack : stacks_) {
    if (stack->spec().resource.empty()) stack->DropRows();
  }
}

absl::Status Model::Fetch(SpillFile& file) {
  file.Rewind();
  absl::Status status;
  for (const auto& stack : stacks_) {
    if (status.ok() && stack->spec().resource.empty()) status = stack->Fetch(file);
  }
  if (status.ok()) status = file.CheckRead();
  if (!status.ok()) DropRows();
  return status;
}

absl::StatusOr<RowTarget> ResolveRows(const Model& model, const RowSelection& selection,
                                      size_t value_count, bool writing) {
  if (selection.stack < 0 || selection.stack >= model.stack_count()) {
    return absl::OutOfRangeError(
        absl::StrCat("stack ", selection.stack, " must be in [0, ", model.stack_count(), ")"));
  }
  RowTarget target;
  target.store = &model.stack(selection.stack);
  ASSIGN_OR_RETURN(target.slot, FindSlot(*target.store, selection.slot));
  target.columns = selection.columns;
  const int width = target.slot != nullptr ? target.slot->columns : target.store->width();
  if (selection.columns < 1 || selection.columns > width) {
    return absl::InvalidArgumentError(
        absl::StrCat("columns ", selection.columns, " must be in [1, ", width, "]"));
  }
  const size_t rows = selection.partitions.size();
  if (selection.local_rows.size() != rows || value_count != rows * selection.columns) {
    return absl::InvalidArgumentError(
        absl::StrCat(rows, " partitions, ", selection.local_rows.size(), " local rows and ",
                     value_count, " values for ", selection.columns, " columns do not match"));
  }
  RETURN_IF_ERROR(AddRows(model.spec(), selection, writing, target));
  return target;
}

void CopyRowsOut(const RowTarget& target, int64_t begin, int64_t end, float* values) {
  StackStore& store = *target.store;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = target.rows[i];
    float* out = values + i * target.columns;
    store.EnsureRow(row);
    if (target.slot != nullptr) {
      std::copy_n(target.slot->data() + row * target.slot->columns, target.columns, out);
    } else {
      ReadStoredRow(store.dtype(), store.weights() + row * store.row_bytes(),
                    absl::MakeSpan(out, target.columns));
    }
  }
}

void CopyRowsIn(const RowTarget& target, int64_t begin, int64_t end, const float* values) {
  StackStore& store = *target.store;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = target.rows[i];
    const float* in = values + i * target.columns;
    store.BeforeWrite(row);
    store.EnsureRow(row);
    if (target.slot != nullptr) {
      std::copy_n(in, target.columns, target.slot->data() + row * target.slot->columns);
    } else {
      WriteStoredRow(store.dtype(), absl::MakeSpan(in, target.columns),
                     store.weights() + row * store.row_bytes());
    }
  }
}

// ---- Which rows are looked up most

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
    absl::MutexLock lock(&mutex_);
    int64_t at = to_next_;
    for (; at < entries.entry_count; at += NextDistance()) {
      noted_.push_back(entries.entries[at].row);
    }
    to_next_ = at - entries.entry_count;
    if (noted_.size() >= kMaxNoted) full.swap(noted_);
  }
  if (full.empty()) return;
  absl::MutexLock lock(&sketches_mutex_);
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
    absl::MutexLock lock(&mutex_);
    noted.swap(noted_);
  }
  std::vector<HotTable> tables;
  absl::MutexLock lock(&sketches_mutex_);
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
