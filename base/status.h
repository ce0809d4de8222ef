// Returning early from functions that may fail.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// Returns from the function around it if `expr`, an absl::Status, is not OK.
#define RETURN_IF_ERROR(expr)                                         \
  do {                                                                \
    if (absl::Status status_of_expr = (expr); !status_of_expr.ok()) { \
      return status_of_expr;                                          \
    }                                                                 \
  } while (false)

// Gives `target` (a variable, or a declaration of one) the value of `expr`, an absl::StatusOr;
// returns its status from the function around it if there is no value. A declaration with a comma
// outside of parentheses needs parentheses around it.
#define ASSIGN_OR_RETURN(target, ...) \
  EMBERD_ASSIGN_OR_RETURN(EMBERD_CONCATENATE(status_or_, __LINE__), target, __VA_ARGS__)

#define EMBERD_CONCATENATE(a, b) EMBERD_CONCATENATE_TOKENS(a, b)
#define EMBERD_CONCATENATE_TOKENS(a, b) a##b
#define EMBERD_ASSIGN_OR_RETURN(result, target, ...)   \
  auto result = (__VA_ARGS__);                         \
  if (!result.ok()) return std::move(result).status(); \
  target = *std::move(result)

namespace emberd {

// The same status with `context` and ": " before its message; OK stays OK.
absl::Status Annotate(const absl::Status& status, absl::string_view context);

// Whether an errno says that a path or its rights are wrong. The cause of others is the machine or
// its limits, as of a disk that does not answer, and they may pass.
bool IsWrongPath(int error);

}  // namespace emberd
