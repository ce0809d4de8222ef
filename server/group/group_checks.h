// What is allowed in the requests of a training group. Errors: INVALID_ARGUMENT with the field, its
// value and the range, in a message that begins with the group's name.
#pragma once

#include "absl/status/status.h"
#include "server/group/collective.h"
#include "server/group/group.h"

namespace emberd::server {

inline constexpr int kMaxGroupSize = 1024;
inline constexpr size_t kMaxGroupNameBytes = 128;

absl::Status CheckGroupName(const GroupId& id);
// Of options whose defaults have been filled in.
absl::Status CheckGroupOptions(const GroupId& id, const v1::GroupOptions& options);
absl::Status CheckRank(const GroupId& id, int rank, int size);
// A member's options against those that the other members joined with.
absl::Status CheckSameOptions(const GroupId& id, const v1::GroupOptions& given,
                              const v1::GroupOptions& others);
absl::Status CheckExchange(const GroupId& id, const ExchangeCall& call);
absl::Status CheckAdvance(const GroupId& id, const AdvanceCall& call);

}  // namespace emberd::server
