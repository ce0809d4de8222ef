// Stacks that several models of one shard have in common (StackSpec::resource): their rows and
// slots are here once, with one line of work for each partition, whichever model it comes from.
//
// A stack is made for the first model that takes it, and forgotten when the last one leaves it: who
// takes it then gets new rows. Its memory goes when nobody works on it any more.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "shard/memory/memory_manager.h"
#include "shard/store/stack_store.h"
#include "shard/types.h"

namespace emberd::shard {

// Thread-safe.
class SharedStacks : public std::enable_shared_from_this<SharedStacks> {
 private:
  struct Stack;

 public:
  // Memory is taken from `memory`, where nothing of it is evicted.
  SharedStacks(const StoreOptions& options, std::shared_ptr<MemoryManager> memory)
      : options_(options), memory_(std::move(memory)) {}

  // The part that one model has in a stack. Movable.
  class Share {
   public:
    Share(Share&&) = default;
    Share& operator=(Share&&) = delete;
    ~Share() { Leave(); }

    // Lives as long as it is held by anybody.
    std::shared_ptr<StackStore> store() const;
    // The rows are there, and other models may take the stack. Only the model that is alone with it
    // says so.
    void Open();
    // The model goes. Idempotent.
    void Leave();

   private:
    friend class SharedStacks;
    Share(std::shared_ptr<SharedStacks> all, std::shared_ptr<Stack> stack, std::string model)
        : all_(std::move(all)), stack_(std::move(stack)), model_(std::move(model)) {}
    std::shared_ptr<SharedStacks> all_;  // null: it has left
    std::shared_ptr<Stack> stack_;
    std::string model_;
  };

  // `alone`: the rows come from elsewhere. FAILED_PRECONDITION then if other models have the stack;
  // those that want it before Open get UNAVAILABLE. ALREADY_EXISTS names the first difference to
  // the stack that is here. Of calls at one time, one makes it. Other errors: StackStore::Create,
  // and those of memory.
  absl::StatusOr<Share> Take(const ModelSpec& model, const StackSpec& stack, bool alone);

  // Of all stacks, in one partition.
  int64_t bytes_per_partition() const;

 private:
  // Adds the model to a stack that is here. Null: it is not.
  absl::StatusOr<std::shared_ptr<Stack>> Join(const ModelSpec& model, const StackSpec& stack,
                                              bool alone) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::shared_ptr<Stack>> Make(const ModelSpec& model, const StackSpec& stack) const;

  const StoreOptions options_;
  const std::shared_ptr<MemoryManager> memory_;
  Mutex making_ ABSL_ACQUIRED_BEFORE(mutex_);  // held while a stack is made, which may take long
  mutable Mutex mutex_;                        // never held for long
  std::map<std::string, std::shared_ptr<Stack>> stacks_ ABSL_GUARDED_BY(mutex_);  // by resource
};

}  // namespace emberd::shard
