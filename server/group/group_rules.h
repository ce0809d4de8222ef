// What requests of training groups may hold, wherever they enter: at a coordinator, at the host of
// a group, at a shard. Errors: INVALID_ARGUMENT with the field, its value and the range; which
// request or group it was, the caller adds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "emberd/internal/v1/groups.pb.h"
#include "emberd/v1/train.pb.h"

namespace emberd::group {

inline constexpr int kMaxGroupSize = 1024;
inline constexpr size_t kMaxGroupNameBytes = 128;
inline constexpr int64_t kMaxFirstStep = int64_t{1} << 62;
// So that the step after it has a number, too.
inline constexpr int64_t kMaxStep = std::numeric_limits<int64_t>::max() - 1;

// Of the exchanges of a SYNC group.
inline constexpr int kGroupKeys = 16;            // group_key is in 0 .. 15
inline constexpr size_t kMaxOpenExchanges = 64;  // that wait for ranks
inline constexpr size_t kMaxKeptExchanges = 16;  // complete ones that answer repeated requests
inline constexpr int64_t kMaxKeptBytes = int64_t{1} << 20;  // of these; the newest always stays
inline constexpr size_t kMaxValueBytes = size_t{64} << 10;
inline constexpr int kMaxCallsPerRank = 4;  // of one rank in one exchange

absl::Status CheckInRange(absl::string_view field, int64_t value, int64_t least, int64_t most);

// 1 to 128 letters, digits and _-.:/
absl::Status CheckGroupName(absl::string_view field, absl::string_view name);
// Of options whose defaults have been filled in.
absl::Status CheckGroupOptions(const v1::GroupOptions& options);
// A member's options against those that the other members joined with.
absl::Status CheckSameOptions(const v1::GroupOptions& given, const v1::GroupOptions& others);
absl::Status CheckRank(int rank, int size);
absl::Status CheckExchange(const internal::v1::AllGatherRequest& request);
absl::Status CheckAdvance(const internal::v1::AdvanceRequest& request);

}  // namespace emberd::group
