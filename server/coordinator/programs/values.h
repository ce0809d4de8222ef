// What a handle names, or a step of a plan makes: a batch that is ready to be looked up, a tuple of
// tensors, which may be what a lookup found, or a tuple of all of these. Immutable and shared; what
// it holds counts against the budget of batches for as long as somebody has it. And what programs
// of kind ELEMENTWISE compute of tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "emberd/v1/program_service.pb.h"
#include "server/coordinator/programs/program_spec.h"
#include "server/rpc/budgets.h"
#include "server/step/step.h"

namespace emberd::coordinator {

// The batch of a lookup, which the shards keep until an update takes it or nobody has it any more.
class LookedUpBatch {
 public:
  LookedUpBatch(step::StepPath* path, uint64_t model_id, uint64_t handle)
      : path_(path), model_id_(model_id), handle_(handle) {}
  ~LookedUpBatch() {
    if (!left_) path_->Discard(model_id_, handle_);
  }
  LookedUpBatch(const LookedUpBatch&) = delete;
  LookedUpBatch& operator=(const LookedUpBatch&) = delete;
  uint64_t model_id() const { return model_id_; }
  uint64_t handle() const { return handle_; }
  // An update has taken the batch, or it expires there by itself.
  void LeaveToShards() { left_ = true; }

 private:
  step::StepPath* const path_;
  const uint64_t model_id_;
  const uint64_t handle_;
  std::atomic<bool> left_ = false;
};

class Program;
using ProgramPtr = std::shared_ptr<const Program>;

// What a tensor takes with its data, its name and its objects.
int64_t TensorBytes(const v1::NamedTensor& tensor);

// What a value takes besides its tensors, so that none is free.
inline constexpr int64_t kValueBytes = 512;
// What each handle takes, also another one of the same value.
inline constexpr int64_t kHandleBytes = 256;

// Tensors of a tuple, at most: each program of a chain may multiply them.
inline constexpr int64_t kMaxTupleTensors = 65'536;

struct Value {
  // A batch, and the LOOKUP that it was prepared for.
  std::optional<step::PreparedLookup> prepared;
  ProgramPtr prepared_for;

  // A tuple.
  Tensors tensors;
  std::shared_ptr<LookedUpBatch> looked_up;  // null: no update can follow
  std::weak_ptr<const Value> batch;          // that was looked up, for as long as somebody has it
  std::vector<int> places;  // of a lookup, by tensor: its place in what was found; -1: donated

  // A tuple of tuples; it has no tensors then.
  std::vector<std::shared_ptr<const Value>> elements;
  int64_t parts = 1;  // itself, and all of those below
  int levels = 0;     // of elements

  // A program, for the client that has compiled it.
  ProgramPtr program;

  // Of a batch and of what a lookup found, with all of their parts.
  std::shared_ptr<const v1::BatchStatistics> statistics;
  // Of the budget. Of what a lookup found, the first is that of the batch alone. Each tensor keeps
  // a share of its own.
  std::vector<rpc::BudgetShare> shares;

  int64_t bytes() const;
};
using ValuePtr = std::shared_ptr<const Value>;

// The whole value for 0; for k, its element k - 1, or a tuple of its tensor k - 1. A `place` has an
// output_index, and inner ones for elements of elements. INVALID_ARGUMENT if there is no such
// element; `what` names the value in errors.
absl::StatusOr<ValuePtr> ElementOf(const ValuePtr& value, int output_index,
                                   const std::string& what);
template <typename Place>
absl::StatusOr<ValuePtr> ElementAt(const ValuePtr& value, const Place& place,
                                   const std::string& what) {
  auto element = ElementOf(value, place.output_index(), what);
  for (int i = 0; element.ok() && i < place.inner_size(); ++i) {
    element = ElementOf(*element, place.inner(i), "an element of " + what);
  }
  return element;
}
// What a lookup found without its activations: the batch alone, with its own share of the budget.
ValuePtr BatchAlone(const Value& found);
// A copy of `value`, a part of what a lookup found, with the same part of `found`, what a later one
// found.
ValuePtr Renewed(const Value& value, const Value& found);

// A tuple of these tensors. RESOURCE_EXHAUSTED if the budget has no room.
absl::StatusOr<std::shared_ptr<Value>> MakeTuple(step::BatchStore* store, Tensors tensors);
// A tuple of the tensors that `make` gives, which is called when the budget has room for them.
// `bytes`: the TensorBytes that each will have.
absl::StatusOr<std::shared_ptr<Value>> MakeTuple(step::BatchStore* store,
                                                 const std::vector<int64_t>& bytes,
                                                 absl::FunctionRef<absl::StatusOr<Tensors>()> make);
class Handles;
// Of a caller's tensors, which are checked, or elements: INVALID_ARGUMENT for what is no tensor,
// and for too many parts or levels; NOT_FOUND for what is no handle.
absl::StatusOr<std::shared_ptr<Value>> ReadTuple(step::BatchStore* store, Handles* handles,
                                                 v1::Literal literal);

// What ELEMENTWISE programs compute: scale * (a + b), scale * (a - b) and scale * a.

// The results of all outputs of a completed spec, named like the tensors of their `a`. The
// arguments have as many tensors as operands name, and sizes that fit their shapes.
// INVALID_ARGUMENT: tensors differ in shape or type, or a size is outside of its range.
absl::StatusOr<Tensors> Compute(const v1::ProgramSpec& spec, const std::vector<Tensors>& arguments);

// What each of Compute's results will take, before any is made; the same arguments, and the same
// errors for sizes.
absl::StatusOr<std::vector<int64_t>> ResultBytes(const v1::ProgramSpec& spec,
                                                 const std::vector<Tensors>& arguments);

// How many tensors the result has, at most kMaxTupleTensors. INVALID_ARGUMENT if there were more,
// if an operand names one that its argument does not have, or a and b differ in number.
// `counts[i]`: tensors of argument i.
absl::StatusOr<int> CountResults(const v1::ProgramSpec& spec, const std::vector<int>& counts);

// Values under handles that clients hold. A handle belongs to a client. It is released when nothing
// was heard of this client for a while, because a trainer that died releases nothing.

// Random, never 0, with the number of the coordinator in the highest 12 bits.
uint64_t NewHandle(int coordinator);

// Thread-safe.
class Handles {
 public:
  Handles(int coordinator, absl::Duration lease) : coordinator_(coordinator), lease_(lease) {}
  // Leaves batches to the shards, where they expire: telling each might take long.
  ~Handles();

  // `share`: of the budget, for handles that are given together; goes with the last of them.
  uint64_t Insert(const std::string& client, ValuePtr value, rpc::BudgetShare share = nullptr);
  // Also renews the lease of its client. NOT_FOUND: memory handle not found.
  absl::StatusOr<ValuePtr> Find(uint64_t handle);
  // Nothing happens if it is gone.
  void Replace(uint64_t handle, ValuePtr value);
  // NOT_FOUND if one of them is unknown, or named twice.
  absl::Status CheckRelease(const std::vector<uint64_t>& handles) const;
  // Those that are unknown are left out. Returns how many there were.
  int64_t Release(const std::vector<uint64_t>& handles);
  int64_t ReleaseClient(const std::string& client);

  // Something was heard of the client.
  void Renew(const std::string& client);
  // Releases what belongs to clients who were silent for the lease; returns how many there were. To
  // be called every second: time in which this process stood still does not count.
  int64_t Sweep(absl::Time now);

  int64_t count() const;

 private:
  struct Entry {
    std::string client;
    ValuePtr value;
    rpc::BudgetShare share;
  };
  // Releases all handles of the clients for whose name and last sign of life `gone` is true.
  template <typename Gone>
  int64_t ReleaseClients(const Gone& gone);

  const int coordinator_;
  const absl::Duration lease_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, absl::Time> heard_ ABSL_GUARDED_BY(mutex_);  // by client
  rpc::SweepClock clock_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::coordinator
