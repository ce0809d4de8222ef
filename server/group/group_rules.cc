#include "server/group/group_rules.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::group {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

bool AllowedInName(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
         absl::string_view("_-.:/").find(c) != absl::string_view::npos;
}

absl::Status CheckSame(absl::string_view field, const absl::AlphaNum& given,
                       const absl::AlphaNum& others) {
  if (given.Piece() == others.Piece()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("options.", field, " is ", given, "; the other members joined with ", others));
}

}  // namespace

absl::Status CheckInRange(absl::string_view field, int64_t value, int64_t least, int64_t most) {
  if (least <= value && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, "; it must be in ", least, " .. ", most));
}

absl::Status CheckGroupName(absl::string_view field, absl::string_view name) {
  if (name.empty() || name.size() > kMaxGroupNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        field, " has ", name.size(), " bytes; it must have 1 to ", kMaxGroupNameBytes));
  }
  if (std::all_of(name.begin(), name.end(), AllowedInName)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is '", name, "'; it may hold letters, digits and _-.:/ only"));
}

absl::Status CheckGroupOptions(const v1::GroupOptions& options) {
  RETURN_IF_ERROR(CheckInRange("options.size", options.size(), 1, kMaxGroupSize));
  if (options.consistency() == v1::CONSISTENCY_UNSPECIFIED ||
      !v1::Consistency_IsValid(options.consistency())) {
    return absl::InvalidArgumentError(absl::StrCat("options.consistency is ", options.consistency(),
                                                   "; it must be SYNC, ASYNC or BOUNDED"));
  }
  RETURN_IF_ERROR(CheckInRange("options.staleness_bound", options.staleness_bound(), 0, kMaxInt32));
  RETURN_IF_ERROR(CheckInRange("options.first_step", options.first_step(), 0, kMaxFirstStep));
  return CheckInRange("options.step_timeout_ms", options.step_timeout_ms(), 1, kMaxInt32);
}

absl::Status CheckSameOptions(const v1::GroupOptions& given, const v1::GroupOptions& others) {
  RETURN_IF_ERROR(CheckSame("size", given.size(), others.size()));
  RETURN_IF_ERROR(CheckSame("consistency", v1::Consistency_Name(given.consistency()),
                            v1::Consistency_Name(others.consistency())));
  RETURN_IF_ERROR(CheckSame("staleness_bound", given.staleness_bound(), others.staleness_bound()));
  RETURN_IF_ERROR(CheckSame("pipelined", given.pipelined(), others.pipelined()));
  RETURN_IF_ERROR(CheckSame("first_step", given.first_step(), others.first_step()));
  return CheckSame("step_timeout_ms", given.step_timeout_ms(), others.step_timeout_ms());
}

absl::Status CheckRank(int rank, int size) { return CheckInRange("rank", rank, 0, size - 1); }

absl::Status CheckExchange(const internal::v1::AllGatherRequest& request) {
  RETURN_IF_ERROR(CheckInRange("group_key", request.group_key(), 0, kGroupKeys - 1));
  RETURN_IF_ERROR(CheckInRange("instance_key", request.instance_key(), 0, kMaxInt64));
  if (request.value().size() <= kMaxValueBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "value has ", request.value().size(), " bytes; at most ", kMaxValueBytes, " are allowed"));
}

absl::Status CheckAdvance(const internal::v1::AdvanceRequest& request) {
  RETURN_IF_ERROR(CheckInRange("next_step", request.next_step(), 0, kMaxInt64));
  // One that waited for a later step would wait for itself.
  if (request.wait_for() <= request.next_step()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "wait_for is ", request.wait_for(), "; it must be at most next_step, ", request.next_step()));
}

}  // namespace emberd::group
