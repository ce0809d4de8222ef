#include "shard/store/shared_stacks.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

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

}  // namespace

std::shared_ptr<StackStore> SharedStacks::Share::store() const {
  return {stack_, stack_->store.get()};
}

void SharedStacks::Share::Open() {
  if (all_ == nullptr) return;
  MutexLock lock(&all_->mutex_);
  stack_->closed = false;
}

void SharedStacks::Share::Leave() {
  const std::shared_ptr<SharedStacks> all = std::move(all_);
  all_ = nullptr;
  if (all == nullptr) return;
  MutexLock lock(&all->mutex_);
  std::vector<std::string>& models = stack_->models;
  models.erase(std::find(models.begin(), models.end(), model_));
  // `stack_` holds it still: its memory does not go under the mutex.
  if (models.empty()) all->stacks_.erase(stack_->store->spec().resource);
}

absl::StatusOr<SharedStacks::Share> SharedStacks::Take(const ModelSpec& model,
                                                       const StackSpec& stack, bool alone) {
  RETURN_IF_ERROR(CheckSharable(stack));
  MutexLock making(&making_);
  ASSIGN_OR_RETURN(std::shared_ptr<Stack> here, Join(model, stack, alone));
  if (here == nullptr) {
    ASSIGN_OR_RETURN(here, Make(model, stack));
    here->models = {model.name};
    here->closed = alone;
    MutexLock lock(&mutex_);
    stacks_[stack.resource] = here;
  }
  return Share(shared_from_this(), std::move(here), model.name);
}

absl::StatusOr<std::shared_ptr<SharedStacks::Stack>> SharedStacks::Join(const ModelSpec& model,
                                                                        const StackSpec& stack,
                                                                        bool alone) {
  MutexLock lock(&mutex_);
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
  made->memory = memory_;
  // With a space, this is the name of no model.
  auto room = memory_->Take(absl::StrCat("resource ", stack.resource),
                            {{stack.name, made->bytes_per_partition}});
  if (!room.ok()) return Annotate(room.status(), absl::StrCat("model ", model.name));
  made->room = *std::move(room);
  memory_->MayEvict(*made->room, {});  // nothing that could leave
  ASSIGN_OR_RETURN(made->store, StackStore::Create(model, stack, options_));
  return made;
}

int64_t SharedStacks::bytes_per_partition() const {
  MutexLock lock(&mutex_);
  int64_t bytes = 0;
  for (const auto& [resource, stack] : stacks_) bytes += stack->bytes_per_partition;
  return bytes;
}

}  // namespace emberd::shard
