// Runs a case in the JSON form in which jax-tpu-embedding's behaviour is recorded: the same inputs
// give the same numbers. For golden tests and for explaining a batch from a shell.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"

namespace emberd::preprocess {

// `test_case` holds `kind` (preprocess, stacking, hash, keys or split) and `input`; the result has
// the form of `expected`. Where JAX aborts the process, the result is {"fatal": message}.
// INVALID_ARGUMENT for another kind or a malformed case. Limits of stacks are part of the result
// only where the case gives limits to tables; JAX asks a callback for them. Known mistakes of JAX
// are reproduced here (dropped trailing samples, division by zero weights, ids beyond the
// vocabulary); the Preprocessor does not share them.
absl::StatusOr<nlohmann::json> RunJaxCase(const nlohmann::json& test_case);

}  // namespace emberd::preprocess
