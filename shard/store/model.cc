#include "shard/store/model.h"

#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"

namespace emberd::shard {
namespace {

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

}  // namespace

absl::Status Budget::Take(int64_t bytes) {
  MutexLock lock(&mutex_);
  if (bytes > limit_ - used_) {
    return absl::ResourceExhaustedError(absl::StrCat("needs ", bytes, " bytes in every partition; ",
                                                     used_, " of the budget of ", limit_,
                                                     " are taken"));
  }
  used_ += bytes;
  return absl::OkStatus();
}

void Budget::Return(int64_t bytes) {
  MutexLock lock(&mutex_);
  used_ -= bytes;
}

absl::StatusOr<std::shared_ptr<Model>> Model::Create(const ModelSpec& spec,
                                                     const StoreOptions& options,
                                                     std::shared_ptr<Budget> budget,
                                                     Executor& executor) {
  if (absl::Status status = CheckPlace(spec); !status.ok()) return status;
  // A hostile shape must not overflow the sum: each stack is checked on its own first.
  int64_t bytes = 0;
  for (const StackSpec& stack : spec.stacks) {
    if (absl::Status status = StackStore::CheckShape(stack, spec.partition_count); !status.ok())
      return status;
    bytes += StackStore::BytesPerPartition(stack);
  }
  if (absl::Status status = budget->Take(bytes); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat("model ", spec.name, ": ", status.message()));
  }
  std::shared_ptr<Model> model(new Model(spec, std::move(budget), bytes));
  int tables = 0;
  for (const StackSpec& stack : spec.stacks) tables += static_cast<int>(stack.tables.size());
  for (const StackSpec& stack : spec.stacks) {
    absl::StatusOr<std::unique_ptr<StackStore>> store =
        StackStore::Create(spec, stack, options, executor);
    if (!store.ok()) return store.status();
    model->stacks_.push_back(*std::move(store));
    model->hot_rows_.push_back(
        std::make_unique<HotRowSketches>(*model->stacks_.back(), HotRowCounters(tables)));
  }
  return model;
}

}  // namespace emberd::shard
