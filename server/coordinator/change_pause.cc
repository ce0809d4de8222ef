#include "server/coordinator/change_pause.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/steady_time.h"

namespace emberd::coordinator {
namespace {

// How long changes may take to end, and when they are decided here in place of a coordinator that
// may be gone.
constexpr absl::Duration kSettlePatience = absl::Seconds(10);
constexpr absl::Duration kDecideAfter = absl::Seconds(1);
constexpr absl::Duration kFirstSettleWait = absl::Microseconds(500);
constexpr absl::Duration kLongestSettleWait = absl::Milliseconds(20);
// A shard that does not hear of it goes on when the lease is over.
constexpr absl::Duration kResumeDeadline = absl::Seconds(1);

}  // namespace

ChangePause::ChangePause(const step::ShardSet& shards, step::Mutations* mutations,
                         step::ServedModelPtr model)
    : shards_(shards), mutations_(mutations), model_(std::move(model)), id_(rpc::RandomId()) {}

absl::StatusOr<ChangePause::Answers> ChangePause::Ask(const std::string& group, int64_t after_step,
                                                      rpc::CallContext* context) {
  auto request = step::OfRows<internal::v1::PauseChangesRequest>(model_->id, model_->history);
  request.set_pause_id(id_);
  request.set_lease_ms(absl::ToInt64Milliseconds(kLease));
  request.set_group(group);
  request.set_after_step(after_step);
  paused_ = true;
  Answers answers(shards_.size());
  // Two who pause at once meet at shard 0.
  RETURN_IF_ERROR(shards_.OnAllFirstZero([&](int shard) -> absl::Status {
    ASSIGN_OR_RETURN(answers[shard], shards_[shard].PauseChanges(request, context));
    return absl::OkStatus();
  }));
  return answers;
}

absl::Status ChangePause::HoldGroup(const std::string& group, int64_t after_step,
                                    rpc::CallContext* context) {
  return Ask(group, after_step, context).status();
}

absl::StatusOr<std::string> ChangePause::FindMovingMutation(const Answers& answers, bool decide,
                                                            rpc::CallContext* context) {
  std::map<std::pair<std::string, uint64_t>, std::vector<bool>> held;
  std::map<std::pair<std::string, uint64_t>, host::Mutation> names;
  for (size_t shard = 0; shard < answers.size(); ++shard) {
    for (const internal::v1::HeldMutation& mutation : answers[shard].mutations()) {
      ASSIGN_OR_RETURN(const host::Mutation name, host::MutationOf(mutation.name()));
      const std::pair key(name.client_id, name.sequence);
      names[key] = name;
      held[key].resize(answers.size());
      held[key][shard] = true;
      if (mutation.making()) return absl::StrCat("update ", name.sequence, " of ", name.client_id);
    }
  }
  for (const auto& [key, on_shard] : held) {
    const host::Mutation& name = names[key];
    bool moving = true;
    for (size_t shard = 0; shard < answers.size() && moving; ++shard) {
      if (on_shard[shard]) continue;
      // Made there, so the word is on its way here; or not even voted on.
      internal::v1::FindMutationRequest request;
      *request.mutable_mutation() = host::NameToProto(name);
      ASSIGN_OR_RETURN(const auto found, shards_[shard].FindMutation(request, context));
      moving = found.state() == internal::v1::FindMutationResponse::COMMITTED;
    }
    if (!moving) continue;
    if (decide) RETURN_IF_ERROR(mutations_->Find(name, context).status());
    return absl::StrCat("update ", name.sequence, " of client '", name.client_id, "'");
  }
  return std::string();
}

void ChangePause::CommitStep(int64_t step, bool is_made,
                             const std::vector<std::pair<int, internal::v1::HeldStep>>& held,
                             rpc::CallContext* context) {
  std::vector<int> holding(shards_.size(), -1);  // index in `held`, by shard
  std::vector<int> shards;
  for (size_t i = 0; i < held.size(); ++i) {
    if (!held[i].second.complete() || held[i].second.held_step() != step) continue;
    holding[held[i].first] = static_cast<int>(i);
    shards.push_back(held[i].first);
  }
  const auto commit = [&](int shard) {
    const internal::v1::HeldStep& here = held[holding[shard]].second;
    auto request = step::OfRows<internal::v1::DecideStepRequest>(model_->id, model_->history);
    request.set_group(here.group());
    // Whoever opens another generation may give up what nobody has made: in the name of that one,
    // this word could make it on some shards after it is gone on others.
    request.set_generation(is_made ? here.generation() : here.held_generation());
    request.set_step(step);
    request.set_commit(true);
    return shards_[shard].DecideStep(request, context).status();
  };
  shards_.On(shards, commit).IgnoreError();  // who asks next sees what has become of the step
}

absl::StatusOr<std::string> ChangePause::FindMovingStep(const Answers& answers, bool decide,
                                                        rpc::CallContext* context) {
  std::map<std::string, std::vector<std::pair<int, internal::v1::HeldStep>>> groups;
  for (size_t shard = 0; shard < answers.size(); ++shard) {
    for (const internal::v1::HeldStep& step : answers[shard].groups()) {
      groups[step.group()].emplace_back(static_cast<int>(shard), step);
    }
  }
  for (const auto& [name, steps] : groups) {
    const internal::v1::HeldStep& first = steps.front().second;
    // Where it is not, the word on a step is on its way to a shard.
    const bool level = std::all_of(steps.begin(), steps.end(), [&](const auto& on_shard) {
      const internal::v1::HeldStep& step = on_shard.second;
      return step.known() == first.known() && step.next_step() == first.next_step() &&
             !step.making();
    });
    const bool complete = steps.size() == answers.size() &&
                          std::all_of(steps.begin(), steps.end(), [&](const auto& on_shard) {
                            const internal::v1::HeldStep& step = on_shard.second;
                            // Of one generation: parts of another may be those of another trainer.
                            return step.complete() && step.held_step() == first.held_step() &&
                                   step.held_generation() == first.held_generation();
                          });
    // Where all shards are in a later generation than the parts, they refuse the word to commit.
    const bool may_be_made =
        complete && std::any_of(steps.begin(), steps.end(), [](const auto& on_shard) {
          return on_shard.second.generation() == on_shard.second.held_generation();
        });
    if (level && !may_be_made) continue;
    if (decide) {
      // The word to commit is said only when all shards hold the whole step: where one has made it,
      // the others must.
      int64_t made = -1;
      for (const auto& [shard, step] : steps) {
        if (step.known()) made = std::max(made, step.next_step() - 1);
      }
      CommitStep(level ? first.held_step() : made, /*is_made=*/!level, steps, context);
    }
    return absl::StrCat("a step of group '", name, "'");
  }
  return std::string();
}

absl::StatusOr<std::string> ChangePause::FindMoving(const Answers& answers, bool decide,
                                                    rpc::CallContext* context) {
  for (const internal::v1::PauseChangesResponse& answer : answers) {
    if (answer.entering() > 0) return std::string("an update that is being checked");
  }
  ASSIGN_OR_RETURN(std::string moving, FindMovingMutation(answers, decide, context));
  if (!moving.empty()) return moving;
  return FindMovingStep(answers, decide, context);
}

absl::StatusOr<ChangePause::Answers> ChangePause::Settle(rpc::CallContext* context) {
  const absl::Time began = SteadyNow();
  absl::Duration wait = kFirstSettleWait;
  while (true) {
    ASSIGN_OR_RETURN(Answers answers, Ask("", 0, context));
    const absl::Duration waited = SteadyNow() - began;
    ASSIGN_OR_RETURN(const std::string moving, FindMoving(answers, waited > kDecideAfter, context));
    // Each answer was given behind a closed gate. A change that a shard did not list had been made
    // there, or will not be decided, for every change needs the votes of all shards.
    if (moving.empty()) return answers;
    RETURN_IF_ERROR(context->CheckNotCancelled());
    if (waited > kSettlePatience || SteadyNow() > context->deadline()) {
      return absl::UnavailableError(absl::StrCat(moving, " did not end within ",
                                                 absl::FormatDuration(waited),
                                                 ", and no checkpoint can be taken while it "
                                                 "is in progress; try again"));
    }
    absl::SleepFor(wait);
    wait = std::min(wait * 2, kLongestSettleWait);
  }
}

void ChangePause::Resume() {
  if (!std::exchange(paused_, false)) return;
  internal::v1::ResumeChangesRequest request;
  request.set_model_id(model_->id);
  request.set_pause_id(id_);
  rpc::CallContext context(SteadyNow() + kResumeDeadline);
  shards_.Ask(&host::ShardBackend::ResumeChanges, request, &context).IgnoreError();
}

}  // namespace emberd::coordinator
