// Runs a case in the JSON form in which jax-tpu-embedding's behaviour is recorded: the same inputs
// give the same numbers.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"

namespace emberd::preprocess {

struct JaxCaseOptions {
  // Weights that sum to zero: JAX's quotient (NaN or infinite), or a gain of 0 as everywhere else
  // in emberd.
  bool divide_by_zero = true;
};

// `test_case` holds `kind` (preprocess, stacking, hash, keys or split) and `input`; the result has
// the form of `expected`. Where JAX aborts the process, the result is {"fatal": message, "code":
// name of the status code}. INVALID_ARGUMENT for another kind or a malformed case. Limits of stacks
// are part of the result only where the case gives limits to tables; JAX asks a callback for them.
// What a case leaves no choice in follows JAX where the Preprocessor does not: trailing samples
// that do not divide are dropped, and ids have no upper bound, for a case names no vocabulary.
absl::StatusOr<nlohmann::json> RunJaxCase(const nlohmann::json& test_case,
                                          const JaxCaseOptions& options = {});

}  // namespace emberd::preprocess
