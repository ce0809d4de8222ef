#include "server/coordinator/shard_models.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::coordinator {

using internal::v1::HostedModel;

namespace {

// Whether `a` is more to be read than `b`.
bool Newer(const HostedModel& a, const HostedModel& b) {
  if (a.serving() != b.serving()) return a.serving();
  if (a.serves().version() != b.serves().version()) {
    return a.serves().version() > b.serves().version();
  }
  return a.history() > b.history();
}

}  // namespace

ShardModels ShardModels::Ask(const step::ShardSet& shards, rpc::CallContext* context) {
  std::vector<Answer> answers(shards.size());
  const auto ask = [&](int shard) {
    answers[shard] = shards[shard].ListModels({}, context);
    return answers[shard].status();
  };
  shards.OnAll(ask).IgnoreError();  // see complete()
  return ShardModels(std::move(answers));
}

absl::Status ShardModels::complete() const {
  for (const Answer& answer : answers_) {
    if (!answer.ok()) return answer.status();
  }
  return absl::OkStatus();
}

absl::Status ShardModels::CheckUnfilled(uint64_t model_id, uint64_t history) const {
  RETURN_IF_ERROR(complete());
  for (size_t i = 0; i < answers_.size(); ++i) {
    const HostedModel* const model = Find(static_cast<int>(i), model_id);
    if (model == nullptr) {
      return absl::DataLossError(
          absl::StrCat("shard ", i,
                       " has lost the rows that were assigned so far, as after a restart; declare "
                       "the model again and begin anew"));
    }
    if (model->history() != history) {
      return absl::AbortedError(
          "another client has declared the model since, and fills it; wait until it has");
    }
  }
  return absl::OkStatus();
}

const HostedModel* ShardModels::Find(int shard, uint64_t model_id) const {
  const HostedModel* newest = nullptr;
  for (const HostedModel& model : answers_[shard]->models()) {
    if (model.model_id() != model_id) continue;
    if (newest == nullptr || Newer(model, *newest)) newest = &model;
  }
  return newest;
}

template <typename Use>
void ShardModels::ForEach(const Use& use) const {
  for (size_t i = 0; i < answers_.size(); ++i) {
    if (!answers_[i].ok()) continue;
    for (const HostedModel& model : answers_[i]->models()) use(static_cast<int>(i), model);
  }
}

std::vector<HostedModel> ShardModels::HistoriesOf(uint64_t model_id) const {
  std::vector<HostedModel> histories;
  ForEach([&](int, const HostedModel& model) {
    if (model.model_id() != model_id) return;
    const auto seen =
        std::find_if(histories.begin(), histories.end(),
                     [&](const HostedModel& other) { return other.history() == model.history(); });
    if (seen == histories.end()) {
      histories.push_back(model);
    } else {
      seen->set_serving(seen->serving() && model.serving());
    }
  });
  std::sort(histories.begin(), histories.end(),
            [](const HostedModel& a, const HostedModel& b) { return Newer(b, a); });
  return histories;
}

internal::v1::ServedRows ShardModels::ServesOf(uint64_t model_id, uint64_t history) const {
  internal::v1::ServedRows serves;
  for (const HostedModel& model : HistoriesOf(model_id)) {
    if (history == 0 || model.history() == history) serves = model.serves();
  }
  return serves;
}

internal::v1::ModelLimits ShardModels::LimitsOf(uint64_t model_id, uint64_t history) const {
  internal::v1::ModelLimits limits;
  if (answers_.empty() || !answers_[0].ok()) return limits;
  for (const HostedModel& model : answers_[0]->models()) {
    if (model.model_id() != model_id) continue;
    if (history != 0 && model.history() != history) continue;
    if (model.limits().version() >= limits.version()) limits = model.limits();
  }
  return limits;
}

HostedModel ShardModels::Merged(uint64_t model_id) const {
  HostedModel merged;
  ForEach([&](int, const HostedModel& model) {
    if (model.model_id() != model_id) return;
    merged.set_model_id(model_id);
    merged.set_pinned(merged.pinned() || model.pinned());
    merged.set_changes(std::max(merged.changes(), model.changes()));
    merged.set_pins_log(merged.pins_log() || model.pins_log());
  });
  return merged;
}

uint64_t ShardModels::WholeHistory(uint64_t model_id) const {
  const auto answered = static_cast<size_t>(std::count_if(
      answers_.begin(), answers_.end(), [](const Answer& answer) { return answer.ok(); }));
  uint64_t whole = 0;
  for (const HostedModel& candidate : HistoriesOf(model_id)) {
    std::set<int> serving;
    ForEach([&](int shard, const HostedModel& model) {
      const bool same = model.model_id() == model_id && model.history() == candidate.history();
      if (same && model.serving() && model.damage().empty()) serving.insert(shard);
    });
    if (serving.size() == answered) whole = candidate.history();
  }
  return whole;
}

std::vector<ShardModels::Hosted> ShardModels::EveryTrained() const {
  std::vector<Hosted> all;
  std::set<uint64_t> seen;
  ForEach([&](int shard, const HostedModel& model) {
    const bool trained = model.serves().model().empty();
    if (trained && seen.insert(model.model_id()).second) all.push_back({shard, model});
  });
  return all;
}

std::vector<uint64_t> ShardModels::Ids() const {
  std::set<uint64_t> ids;
  ForEach([&](int, const HostedModel& model) { ids.insert(model.model_id()); });
  return {ids.begin(), ids.end()};
}

uint64_t ShardModels::FindName(const std::string& name) const {
  for (size_t i = 0; i < answers_.size(); ++i) {
    const uint64_t id = OnShard(static_cast<int>(i), name).model_id();
    if (id != 0) return id;
  }
  return 0;
}

HostedModel ShardModels::OnShard(int shard, const std::string& name) const {
  HostedModel newest;
  for (const HostedModel& model : AllOnShard(shard, name)) {
    if (newest.history() == 0 || Newer(model, newest)) newest = model;
  }
  return newest;
}

std::vector<HostedModel> ShardModels::AllOnShard(int shard, const std::string& name) const {
  std::vector<HostedModel> found;
  if (!answers_[shard].ok()) return found;
  for (const HostedModel& model : answers_[shard]->models()) {
    if (model.name() == name) found.push_back(model);
  }
  return found;
}

bool ShardModels::Dropped(uint64_t history) const {
  return std::any_of(answers_.begin(), answers_.end(), [history](const Answer& answer) {
    return answer.ok() && std::find(answer->dropped().begin(), answer->dropped().end(), history) !=
                              answer->dropped().end();
  });
}

std::vector<ShardModels::Returned> ShardModels::EveryReturned() const {
  std::vector<Returned> all;
  for (const uint64_t id : Ids()) {
    Returned returned{id, WholeHistory(id), {}};
    for (size_t i = 0; i < answers_.size() && returned.history != 0; ++i) {
      const HostedModel* const model = answers_[i].ok() ? Find(static_cast<int>(i), id) : nullptr;
      if (model != nullptr && model->returned()) returned.shards.push_back(static_cast<int>(i));
    }
    if (!returned.shards.empty()) all.push_back(std::move(returned));
  }
  return all;
}

ModelVerdict ShardModels::Judge(uint64_t model_id, uint64_t known) const {
  ModelVerdict verdict;
  verdict.history = WholeHistory(model_id);
  if (verdict.history != 0) {
    const auto lost = lost_changes_.find(model_id);
    verdict.state = lost == lost_changes_.end() ? ModelState::kServing : ModelState::kLost;
    if (lost != lost_changes_.end()) verdict.lost_change = lost->second;
    return verdict;
  }
  std::vector<int> without;  // shards that answered, and do not serve it
  bool unfinished = false, mixed = false, answered = false;
  bool restoring = false;    // until it is over, rows of before may be gone on some shards
  bool first_waits = false;  // shard 0, which is told first to serve, has not been told
  for (size_t i = 0; i < answers_.size(); ++i) {
    if (!answers_[i].ok()) continue;
    answered = true;
    const int shard = static_cast<int>(i);
    const HostedModel* const model = Find(shard, model_id);
    if (model != nullptr && model->serving()) {
      if (verdict.damage.empty()) verdict.damage = model->damage();
      mixed |= verdict.history != 0 && verdict.history != model->history();
      if (verdict.history == 0) verdict.history = model->history();
      if (mixed || !model->damage().empty()) without.push_back(shard);
      continue;
    }
    without.push_back(shard);
    unfinished |= model != nullptr;
    restoring |= model != nullptr && model->restored();
    first_waits |= i == 0;
  }
  if (!answered) return verdict;
  if (restoring) {
    verdict.state = ModelState::kUnfinished;
    return verdict;
  }
  if (verdict.history == 0) {  // nobody serves it
    const bool lost = known != 0 && !Dropped(known);
    verdict.state = lost         ? ModelState::kLost
                    : unfinished ? ModelState::kUnfinished
                                 : ModelState::kAbsent;
    if (lost) verdict.without = std::move(without);
    return verdict;
  }
  // All shards had made it before the first was told to serve it, so they only wait for the word.
  const bool waiting = std::all_of(without.begin(), without.end(), [&](int shard) {
    return Find(shard, model_id) != nullptr && !Find(shard, model_id)->serving();
  });
  const bool wanted = Dropped(verdict.history) || (waiting && !first_waits);
  verdict.state = wanted ? ModelState::kUnfinished : ModelState::kLost;
  if (verdict.state == ModelState::kLost) verdict.without = std::move(without);
  return verdict;
}

}  // namespace emberd::coordinator
