// A plan of several programs: checked as a whole, then run step by step. Executing one program is
// the shortest plan.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/program_service.pb.h"
#include "server/coordinator/programs/program_cache.h"
#include "server/coordinator/programs/values.h"
#include "server/coordinator/resources.h"
#include "server/rpc/call_context.h"

namespace emberd::coordinator {

// The steps that plans are made of: what each kind of program does with its arguments, on the one
// path of a step that unary calls and streams take too. Thread-safe.
class ProgramRunner {
 public:
  // `resources` must outlive it.
  explicit ProgramRunner(const CoordinatorResources* resources);

  // A batch for a LOOKUP, or the tensors for another program.
  absl::StatusOr<ValuePtr> Prepare(const ProgramPtr& program, v1::Literal batch, Handles* handles,
                                   rpc::CallContext* context);
  // The activations of a batch, by the program that it was prepared for.
  absl::StatusOr<ValuePtr> Lookup(const ValuePtr& batch, rpc::CallContext* context);
  // How an UPDATE is made.
  struct UpdateTerms {
    const v1::UpdateArguments& arguments;
    v1::MutationId mutation;  // without a client_id: gets one of its own
    uint64_t rng_seed = 0;
  };
  // Applies gradients to the batch of a lookup.
  absl::StatusOr<v1::MadeUpdate> Update(const Program& program, const Value& looked_up,
                                        const Value& gradients, const UpdateTerms& terms,
                                        rpc::CallContext* context);
  absl::StatusOr<ValuePtr> Elementwise(const Program& program,
                                       const std::vector<ValuePtr>& arguments);

  step::BatchStore* store() { return &resources_->path->batches(); }

 private:
  // The model of the program as it is now. FAILED_PRECONDITION: its plan has changed.
  absl::StatusOr<step::ServedModelPtr> Find(const Program& program, rpc::CallContext* context);

  const CoordinatorResources* const resources_;
  const std::string client_id_;  // of updates that nobody named
  std::atomic<uint64_t> sequence_ = 0;
};

// One plan, by one thread: Check, then Run. What an operation makes is freed as soon as no other
// operation needs it.
class Chain {
 public:
  // `chained`: it is a caller's plan, not the execution of one program. What it is given must
  // outlive it. Its results take at most `max_answer_bytes` in the answer.
  Chain(ProgramRunner* runner, ProgramCache* programs, Handles* handles,
        v1::ExecuteChainedRequest request, bool chained, int64_t max_answer_bytes)
      : runner_(runner),
        programs_(programs),
        handles_(handles),
        request_(std::move(request)),
        chained_(chained),
        max_answer_bytes_(max_answer_bytes) {}

  // Finds all programs and data, prepares batches, and checks that the operations fit together.
  // Changes nothing.
  absl::Status Check(rpc::CallContext* context);
  // An error names the updates that were made, and donates nothing. CANCELLED or DEADLINE_EXCEEDED,
  // before the next operation: nobody waits any more.
  absl::Status Run(rpc::CallContext* context);

  // By result_index; null where there is none.
  const std::vector<ValuePtr>& results() const { return results_; }
  const std::vector<v1::MadeUpdate>& updates() const { return updates_; }
  // Whether a LOOKUP is in it. After Check.
  bool looks_up() const;
  // How many handles the results get.
  int64_t handles() const;

 private:
  struct Op {
    enum class Makes { kNothing, kLiteralBatch, kBatch, kTuple, kTupleOfTuples };
    Makes makes = Makes::kNothing;
    int tensors = 0;               // of a tuple
    int part = 0;                  // the one tensor that it is, from 1; 0: all
    int64_t bytes = 0;             // of an ELEMENTWISE's tensors, as far as known before it runs
    uint64_t lookup_model = 0;     // whose LOOKUP made the tuple, if an update may follow
    const void* lookup = nullptr;  // which that was
    ProgramPtr program;
    ValuePtr value;  // a literal; of a program, once it ran
    ValuePtr batch;  // that a LOOKUP looks up, or an UPDATE that donates, again
    int uses = 0;    // by operations that are still to come
  };

  absl::Status CheckPositions();
  absl::Status CheckOp(int position, rpc::CallContext* context);
  absl::Status CheckData(int position);
  absl::Status CheckProgram(int position, rpc::CallContext* context);
  absl::Status CheckLookup(int position, const Op& batch, rpc::CallContext* context);
  absl::Status CheckUpdate(int position, const Op& found, const Op& gradients);
  absl::Status CheckElementwise(int position, const std::vector<Op>& arguments);
  absl::Status CheckOutputs(int position);
  // Bytes of a tensor, counted from 1, of what PartOf gives, or of all of them for 0, as far as
  // they are known before the plan runs.
  static int64_t KnownBytes(const Op& part, int tensor);
  // Counts what a result takes in the answer. RESOURCE_EXHAUSTED: all together take too much.
  absl::Status CountAnswer(const v1::ChainedOutput& output, int64_t bytes);
  // Room for what has been counted.
  absl::Status MakeRoom(rpc::CallContext* context);
  // What `op` makes at a place: a ChainedInput, or a ChainedOutput.
  template <typename Place>
  absl::StatusOr<Op> PartOf(int op, const Place& place) const;
  // Of data with a handle: the value that the handle has now, in this chain.
  const ValuePtr& ValueOf(int position) const;
  absl::StatusOr<std::vector<ValuePtr>> Arguments(int position) const;
  absl::Status RunOp(int position, rpc::CallContext* context);
  // Puts results of the program at `position` in the place of the data that was donated for them.
  void Donate(int position);
  // The batch of `before` was updated: looks it up again, and renews all values of its old lookup.
  absl::Status LookUpAgain(int position, const Value& before, rpc::CallContext* context);
  absl::Status TakeOutputs(int position, rpc::CallContext* context);
  v1::MutationId MutationOf(int position) const;

  ProgramRunner* const runner_;
  ProgramCache* const programs_;
  Handles* const handles_;
  v1::ExecuteChainedRequest request_;
  const bool chained_;
  const int64_t max_answer_bytes_;
  std::vector<Op> ops_;
  absl::flat_hash_map<const void*, int> updated_;  // by lookup: the UPDATE of its batch
  std::vector<ValuePtr> results_;
  std::vector<int64_t> answer_bytes_;  // of each result
  int64_t answer_bytes_of_all_ = 0;
  int64_t room_bytes_ = 0;  // that there is room for
  std::vector<v1::MadeUpdate> updates_;
  absl::flat_hash_map<uint64_t, ValuePtr> data_;  // by handle: one value, whichever ops name it
  absl::flat_hash_set<uint64_t> donated_;         // handles that get their new values
};

}  // namespace emberd::coordinator
