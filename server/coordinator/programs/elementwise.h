// What ELEMENTWISE programs compute: scale * (a + b), scale * (a - b) and scale * a.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "emberd/v1/program_service.pb.h"
#include "server/coordinator/programs/program_spec.h"

namespace emberd::coordinator {

// What a tensor takes with its data, its name and its objects.
int64_t TensorBytes(const v1::NamedTensor& tensor);

// The results of all outputs of a completed spec, named like the tensors of their `a`. The
// arguments have as many tensors as operands name, and sizes that fit their shapes.
// INVALID_ARGUMENT: tensors differ in shape or type, or a size is outside of its range.
absl::StatusOr<Tensors> Compute(const v1::ProgramSpec& spec, const std::vector<Tensors>& arguments);

// What each of Compute's results will take, before any is made; the same arguments, and the same
// errors for sizes.
absl::StatusOr<std::vector<int64_t>> ResultBytes(const v1::ProgramSpec& spec,
                                                 const std::vector<Tensors>& arguments);

// More tensors than a tuple may have: programs that are chained multiply them.
inline constexpr int64_t kMaxTupleTensors = 65'536;

// How many tensors the result has, at most kMaxTupleTensors. INVALID_ARGUMENT if there were more,
// if an operand names one that its argument does not have, or a and b differ in number.
// `counts[i]`: tensors of argument i.
absl::StatusOr<int> CountResults(const v1::ProgramSpec& spec, const std::vector<int>& counts);

}  // namespace emberd::coordinator
