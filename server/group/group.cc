#include "server/group/group.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/sha256.h"

namespace emberd::group {

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
