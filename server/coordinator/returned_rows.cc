#include "server/coordinator/returned_rows.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"

namespace emberd::server {
namespace {

using internal::v1::FindMutationResponse;
using internal::v1::HeldStep;
using internal::v1::ListMadeResponse;
using internal::v1::MutationName;

// What one shard has made.
class Made {
 public:
  explicit Made(ListMadeResponse response) : response_(std::move(response)) {
    for (const HeldStep& group : response_.groups()) groups_[group.group()] = &group;
    for (const MutationName& name : response_.mutations()) {
      uint64_t& newest = newest_[name.client_id()];
      newest = std::max(newest, name.sequence());
      listed_.insert({name.client_id(), name.sequence()});
    }
  }
  const ListMadeResponse& response() const { return response_; }

  // Whether the shard may be where another one was before it was asked. A step is made where all
  // shards hold it, so that one of them is behind by that step at most.
  bool Follows(const HeldStep& ahead) const {
    const auto found = groups_.find(ahead.group());
    if (found == groups_.end()) return response_.forgotten_generation() >= ahead.generation();
    const HeldStep& here = *found->second;
    if (here.known() && here.next_step() >= ahead.next_step()) return true;
    // It was dropped, and begun anew.
    if (here.generation() > ahead.generation()) return true;
    return here.complete() && here.held_step() == ahead.next_step() - 1;
  }
  std::string PointOf(const std::string& group) const {
    const auto found = groups_.find(group);
    if (found == groups_.end() || !found->second->known()) return "none";
    return absl::StrCat("those before ", found->second->next_step());
  }

  bool Lists(const MutationName& name) const {
    return listed_.contains({name.client_id(), name.sequence()});
  }
  std::string NewestOf(const std::string& client_id) const {
    const auto newest = newest_.find(client_id);
    if (newest == newest_.end()) return "it knows none of this client";
    return absl::StrCat("the newest that it knows is ", newest->second);
  }

 private:
  const ListMadeResponse response_;
  absl::flat_hash_map<absl::string_view, const HeldStep*> groups_;
  absl::flat_hash_map<absl::string_view, uint64_t> newest_;  // by client
  absl::flat_hash_set<std::pair<absl::string_view, uint64_t>> listed_;
};

using AllMade = std::vector<std::unique_ptr<const Made>>;  // by shard

absl::StatusOr<AllMade> Ask(const ShardSet& shards, const internal::v1::ListMadeRequest& request,
                            rpc::CallContext* context) {
  ASSIGN_OR_RETURN(auto answers, shards.Ask(&ShardBackend::ListMade, request, context));
  AllMade all;
  for (ListMadeResponse& made : answers)
    all.push_back(std::make_unique<const Made>(std::move(made)));
  return all;
}

// Whether the shard neither made it nor holds it. What it may have forgotten counts as made.
absl::StatusOr<bool> IsUnknown(ShardBackend& shard, const MutationName& name,
                               rpc::CallContext* context) {
  internal::v1::FindMutationRequest request;
  *request.mutable_mutation() = name;
  const auto found = shard.FindMutation(request, context);
  if (found.ok()) return found->state() == FindMutationResponse::UNKNOWN;
  if (absl::IsFailedPrecondition(found.status())) return false;
  if (absl::IsInvalidArgument(found.status())) return false;
  return found.status();
}

// The first that `ahead` had made and `behind` has lost.
absl::StatusOr<std::string> LostBetween(const ShardBackend& ahead, const Made& made,
                                        ShardBackend& behind, const Made& now,
                                        rpc::CallContext* context) {
  for (const HeldStep& group : made.response().groups()) {
    if (!group.known() || now.Follows(group)) continue;
    return absl::StrCat("group '", group.group(), "': ", ahead.name(),
                        " has applied the steps before ", group.next_step(), ", ", behind.name(),
                        " ", now.PointOf(group.group()));
  }
  const MutationName* lost = nullptr;
  for (const MutationName& name : made.response().mutations()) {
    if (now.Lists(name)) continue;
    // Of the first client that has lost any, the one with the largest number.
    if (lost != nullptr && name.client_id() != lost->client_id()) break;
    if (lost != nullptr && name.sequence() < lost->sequence()) continue;
    ASSIGN_OR_RETURN(const bool unknown, IsUnknown(behind, name, context));
    if (unknown) lost = &name;
  }
  if (lost == nullptr) return std::string();
  return absl::StrCat("client '", lost->client_id(), "': ", ahead.name(), " has made mutation ",
                      lost->sequence(), ", ", behind.name(), " has not, and ",
                      now.NewestOf(lost->client_id()));
}

}  // namespace

absl::StatusOr<std::string> FindLostChange(const ShardSet& shards, uint64_t model_id,
                                           uint64_t history, rpc::CallContext* context) {
  internal::v1::ListMadeRequest request;
  request.set_model_id(model_id);
  request.set_history(history);
  // What some shard has made by now, all others hold or have made when they are asked again.
  ASSIGN_OR_RETURN(const AllMade before, Ask(shards, request, context));
  ASSIGN_OR_RETURN(const AllMade now, Ask(shards, request, context));
  for (size_t i = 0; i < before.size(); ++i) {
    for (size_t j = 0; j < now.size(); ++j) {
      if (i == j) continue;
      ASSIGN_OR_RETURN(std::string lost,
                       LostBetween(shards[i], *before[i], shards[j], *now[j], context));
      if (!lost.empty()) return lost;
    }
  }
  return std::string();
}

}  // namespace emberd::server
