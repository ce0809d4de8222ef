#include "server/group/group_checks.h"

#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"

namespace emberd::server {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

absl::Status Invalid(const GroupId& id, absl::string_view text) {
  return absl::InvalidArgumentError(absl::StrCat("group '", id.group, "': ", text));
}

absl::Status CheckRange(const GroupId& id, absl::string_view field, int64_t value, int64_t least,
                        int64_t most) {
  if (least <= value && value <= most) return absl::OkStatus();
  return Invalid(id, absl::StrCat(field, " is ", value, "; it must be in ", least, " .. ", most));
}

absl::Status CheckSame(const GroupId& id, absl::string_view field, int64_t given, int64_t others) {
  if (given == others) return absl::OkStatus();
  return Invalid(id, absl::StrCat("options.", field, " is ", given,
                                  "; the other members joined with ", others));
}

}  // namespace

absl::Status CheckGroupName(const GroupId& id) {
  if (!id.group.empty() && id.group.size() <= kMaxGroupNameBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("group: a name of ", id.group.size(),
                                                 " bytes; it must have 1 .. ", kMaxGroupNameBytes));
}

absl::Status CheckGroupOptions(const GroupId& id, const v1::GroupOptions& options) {
  absl::Status status = CheckRange(id, "options.size", options.size(), 1, kMaxGroupSize);
  if (status.ok() && (options.consistency() == v1::CONSISTENCY_UNSPECIFIED ||
                      !v1::Consistency_IsValid(options.consistency()))) {
    status = Invalid(id, absl::StrCat("options.consistency is ", options.consistency(),
                                      "; it must be SYNC, ASYNC or BOUNDED"));
  }
  status.Update(CheckRange(id, "options.staleness_bound", options.staleness_bound(), 0, kMaxInt32));
  status.Update(CheckRange(id, "options.first_step", options.first_step(), 0, kMaxInt64));
  status.Update(CheckRange(id, "options.step_timeout_ms", options.step_timeout_ms(), 1, kMaxInt32));
  return status;
}

absl::Status CheckRank(const GroupId& id, int rank, int size) {
  return CheckRange(id, "rank", rank, 0, size - 1);
}

absl::Status CheckSameOptions(const GroupId& id, const v1::GroupOptions& given,
                              const v1::GroupOptions& others) {
  absl::Status status = CheckSame(id, "size", given.size(), others.size());
  if (status.ok() && given.consistency() != others.consistency()) {
    status = Invalid(
        id, absl::StrCat("options.consistency is ", v1::Consistency_Name(given.consistency()),
                         "; the other members joined with ",
                         v1::Consistency_Name(others.consistency())));
  }
  status.Update(
      CheckSame(id, "staleness_bound", given.staleness_bound(), others.staleness_bound()));
  status.Update(CheckSame(id, "pipelined", given.pipelined(), others.pipelined()));
  status.Update(CheckSame(id, "first_step", given.first_step(), others.first_step()));
  status.Update(
      CheckSame(id, "step_timeout_ms", given.step_timeout_ms(), others.step_timeout_ms()));
  return status;
}

absl::Status CheckExchange(const GroupId& id, const ExchangeCall& call) {
  absl::Status status =
      CheckRange(id, "group_key", call.key.group_key, 0, ExchangeTable::kGroupKeys - 1);
  status.Update(CheckRange(id, "instance_key", call.key.instance_key, 0, kMaxInt64));
  if (status.ok() && call.value.size() > ExchangeTable::kMaxValueBytes) {
    status = Invalid(id, absl::StrCat("value has ", call.value.size(), " bytes; at most ",
                                      ExchangeTable::kMaxValueBytes, " are allowed"));
  }
  return status;
}

absl::Status CheckAdvance(const GroupId& id, const AdvanceCall& call) {
  absl::Status status = CheckRange(id, "next_step", call.next_step, 0, kMaxInt64);
  // One that waited for a later step would wait for itself.
  if (status.ok() && call.wait_for > call.next_step) {
    status = Invalid(id, absl::StrCat("wait_for is ", call.wait_for,
                                      "; it must be at most next_step, ", call.next_step));
  }
  return status;
}

}  // namespace emberd::server
