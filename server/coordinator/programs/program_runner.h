// The steps that plans are made of: what each kind of program does with its arguments, on the one
// path of a step that unary calls and streams take too.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "emberd/v1/program_service.pb.h"
#include "server/coordinator/programs/program_cache.h"
#include "server/coordinator/programs/values.h"
#include "server/coordinator/resources.h"
#include "server/rpc/call_context.h"

namespace emberd::coordinator {

// Thread-safe.
class ProgramRunner {
 public:
  // `resources` must outlive it.
  explicit ProgramRunner(const CoordinatorResources* resources);

  // A batch for a LOOKUP, or the tensors for another program.
  absl::StatusOr<ValuePtr> Prepare(const Program& program, v1::Literal batch,
                                   rpc::CallContext* context);
  // The activations of a batch that was prepared for this program.
  absl::StatusOr<ValuePtr> Lookup(const Program& program, const Value& batch,
                                  rpc::CallContext* context);
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

}  // namespace emberd::coordinator
