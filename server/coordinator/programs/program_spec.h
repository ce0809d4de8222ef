// What a program is asked to be: the spec completed and checked, its key, and whether what comes at
// run time has the shapes that it promises.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/program_service.pb.h"
#include "server/step/served_model.h"

namespace emberd::coordinator {

// A tuple of tensors, which several values may share.
using Tensors = std::vector<std::shared_ptr<const v1::NamedTensor>>;

// Every field filled in. `model` is the one that the spec names; null: it is an ELEMENTWISE.
// INVALID_ARGUMENT names the field, the value and the allowed range.
absl::StatusOr<v1::ProgramSpec> CompleteSpec(v1::ProgramSpec spec, const step::ServedModel* model);

// SHA-256 of a completed spec and the plan.
std::string ProgramKey(const v1::ProgramSpec& spec, const step::ServedModel* model);

// Adds what the buffers of info.spec(), a LOOKUP, hold. RESOURCE_EXHAUSTED if it allows more ids
// than they do.
absl::Status SizeBuffers(const step::ServedModel& model, v1::CompileResponse* info);

// The request of a lookup: the features that the batch gives, and those that the program does not
// have, without ids. INVALID_ARGUMENT where a feature is not as the program says.
absl::StatusOr<v1::LookupRequest> BatchRequest(const v1::ProgramSpec& spec,
                                               const step::ServedModel& model, v1::Literal batch);

// Whether the gradients of an UPDATE, its argument 1, are of its features and sizes.
absl::Status CheckGradients(const v1::ProgramSpec& spec, const Tensors& gradients);

// Whether argument `index` of an ELEMENTWISE has the tensors that it says.
absl::Status CheckArgument(const v1::ProgramSpec& spec, int index, const Tensors& tensors);

// "FLOAT32[2, 3]"
std::string TensorText(const v1::Tensor& tensor);

}  // namespace emberd::coordinator
