// Which values the slots of optimizers can have.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace emberd::config {

// INVALID_ARGUMENT names the first of the values, `columns` for each id, that the slot never has:
// sums of squares and counts are not negative, and the next step would make NaN of it. For values
// that come from outside; they are finite.
absl::Status CheckSlotValues(const std::string& table, const std::string& slot,
                             absl::Span<const int64_t> ids, absl::Span<const float> values);

}  // namespace emberd::config
