#include "server/group/group.h"

#include <algorithm>
#include <array>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/sha256.h"
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

int HostOf(const GroupId& id, int shards) {
  std::string text;
  for (int shift = 0; shift < 64; shift += 8)
    text.push_back(static_cast<char>(id.model_id >> shift));
  const std::array<uint8_t, 32> digest = Sha256(text + id.group);
  uint64_t hash = 0;
  for (int i = 0; i < 8; ++i) hash = hash << 8 | digest[i];
  return static_cast<int>(hash % static_cast<uint64_t>(shards));
}

Group::Group(const GroupId& id, const v1::GroupOptions& options, absl::Time now)
    : id_(id), options_(options), last_call_(now) {}

void Group::AllGather(internal::v1::AllGatherRequest, GatherDone done, Event* event) {
  Answer(std::move(done), RefuseVerb("AllGather", "SYNC"), &event->answers);
}

void Group::Advance(const internal::v1::AdvanceRequest&, StatusDone done, Event* event) {
  Answer(std::move(done), RefuseVerb("Advance", "BOUNDED"), &event->answers);
}

absl::Status Group::RefuseVerb(absl::string_view verb, absl::string_view kind) const {
  return Error(absl::StatusCode::kFailedPrecondition,
               absl::StrCat("it is ", v1::Consistency_Name(options_.consistency()), "; ", verb,
                            " is for ", kind, " groups"));
}

absl::Status Group::Error(absl::StatusCode code, absl::string_view text) const {
  return absl::Status(code, absl::StrCat(name(), ": ", text));
}

std::string Group::name() const { return absl::StrCat("group '", id_.group, "'"); }

absl::Status Group::OverError(uint64_t generation) const {
  return Error(absl::StatusCode::kAborted,
               absl::StrCat("generation ", generation, " is over; join again"));
}

std::string RankList(const std::vector<int>& ranks) {
  std::vector<std::string> runs;
  for (size_t begin = 0, end; begin < ranks.size(); begin = end) {
    end = begin + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - begin >= 3) {
      runs.push_back(absl::StrCat(ranks[begin], "-", ranks[end - 1]));
    } else {
      for (size_t i = begin; i < end; ++i) runs.push_back(absl::StrCat(ranks[i]));
    }
  }
  if (ranks.size() == 1) return absl::StrCat("rank ", runs[0]);
  if (runs.size() == 1) return absl::StrCat("ranks ", runs[0]);
  const std::string last = std::move(runs.back());
  runs.pop_back();
  return absl::StrCat("ranks ", absl::StrJoin(runs, ", "), " and ", last);
}

}  // namespace emberd::group
