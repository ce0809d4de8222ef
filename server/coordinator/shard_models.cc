#include "server/coordinator/shard_models.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/steady_time.h"

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

// ---- What one shard has made and another one has lost

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

absl::StatusOr<AllMade> Ask(const step::ShardSet& shards,
                            const internal::v1::ListMadeRequest& request,
                            rpc::CallContext* context) {
  ASSIGN_OR_RETURN(auto answers, shards.Ask(&host::ShardBackend::ListMade, request, context));
  AllMade all;
  for (ListMadeResponse& made : answers)
    all.push_back(std::make_unique<const Made>(std::move(made)));
  return all;
}

// Whether the shard neither made it nor holds it. What it may have forgotten counts as made.
absl::StatusOr<bool> IsUnknown(host::ShardBackend& shard, const MutationName& name,
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
absl::StatusOr<std::string> LostBetween(const host::ShardBackend& ahead, const Made& made,
                                        host::ShardBackend& behind, const Made& now,
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

bool HasPinnedTable(const v1::ModelConfig& config) {
  return std::any_of(config.tables().begin(), config.tables().end(),
                     [](const v1::TableConfig& table) { return table.residency() == v1::PINNED; });
}

constexpr absl::Duration kUndoDeadline = absl::Seconds(2);

}  // namespace

absl::StatusOr<std::string> FindLostChange(const step::ShardSet& shards, uint64_t model_id,
                                           uint64_t history, rpc::CallContext* context) {
  auto request = step::OfRows<internal::v1::ListMadeRequest>(model_id, history);
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

// ---- Models made, reset and dropped

ShardModels ModelChanges::Ask(rpc::CallContext* context) const {
  ShardModels models = ShardModels::Ask(shards_, context);
  if (!models.complete().ok()) return models;
  for (const ShardModels::Returned& returned : models.EveryReturned()) {
    const auto lost = FindLostChange(shards_, returned.model_id, returned.history, context);
    if (!lost.ok()) continue;  // the rows stay refused, and whoever asks next tries again
    if (!lost->empty()) {
      models.SetLostChange(returned.model_id, *lost);
      continue;
    }
    auto request =
        step::OfRows<internal::v1::ServeModelRequest>(returned.model_id, returned.history);
    const auto serve = [&](int shard) {
      return shards_[shard].ServeModel(request, context).status();
    };
    shards_.On(returned.shards, serve).IgnoreError();  // as above: whoever asks next tries again
  }
  return models;
}

internal::v1::CreateModelRequest ModelChanges::MakeRequest(const step::ServedModel& model,
                                                           uint64_t history,
                                                           const ShardModels& before,
                                                           int shard) const {
  internal::v1::CreateModelRequest request;
  request.set_model_id(model.id);
  *request.mutable_config() = model.config;
  request.set_shards(topology_.shards);
  request.set_sparsecores_per_shard(topology_.sparsecores_per_shard);
  request.set_shard_index(shard);
  request.set_plan_fingerprint(model.plan.fingerprint);
  request.set_history(history);
  request.set_replaces(before.OnShard(shard, model.config.name()).history());
  if (model.read_only()) *request.mutable_serves() = model.serves;
  const internal::v1::ModelLimits limits = model.LimitsNow();
  if (limits.version() > 0) *request.mutable_limits() = limits;
  request.set_pinned(before.Merged(model.id).pinned() || HasPinnedTable(model.config));
  return request;
}

absl::Status ModelChanges::RestoreOnAll(const step::ServedModel& model, uint64_t history,
                                        const ShardModels& before, const RowSource& source,
                                        rpc::CallContext* context) {
  if (source.still_wanted != nullptr) RETURN_IF_ERROR(source.still_wanted());
  if (source.begins != nullptr && !model.read_only()) RETURN_IF_ERROR(source.begins(history));
  step::ShardTransfers transfers(shards_);
  internal::v1::BeginRestoreRequest request;
  request.set_transfer_id(transfers.id());
  request.mutable_chain()->Add(source.chain.begin(), source.chain.end());
  RETURN_IF_ERROR(shards_.OnAllFirstZero([&](int shard) {
    internal::v1::BeginRestoreRequest here = request;
    *here.mutable_create() = MakeRequest(model, history, before, shard);
    return shards_[shard].BeginRestore(here, context).status();
  }));
  const absl::Status read = transfers.Await(context, source.report).status();
  if (absl::IsDataLoss(read) && source.begins != nullptr) RETURN_IF_ERROR(source.begins(0));
  RETURN_IF_ERROR(read);
  transfers.Keep();
  return source.still_wanted == nullptr ? absl::OkStatus() : source.still_wanted();
}

absl::Status ModelChanges::Make(const step::ServedModel& model, uint64_t history,
                                const ShardModels& before, const RowSource* source,
                                rpc::CallContext* context, bool fill) {
  std::vector<internal::v1::CreateModelResponse> created(shards_.size());
  const auto create = [&](int shard) -> absl::Status {
    const internal::v1::CreateModelRequest request = MakeRequest(model, history, before, shard);
    ASSIGN_OR_RETURN(created[shard], shards_[shard].CreateModel(request, context));
    return absl::OkStatus();
  };
  const auto serve = [&](int shard) {
    auto request = step::OfRows<internal::v1::ServeModelRequest>(model.id, history);
    const absl::Status status = shards_[shard].ServeModel(request, context).status();
    ReachFailpoint("model.serves");
    return status;
  };
  RETURN_IF_ERROR(source == nullptr ? shards_.OnAllFirstZero(create)
                                    : RestoreOnAll(model, history, before, *source, context));
  for (size_t i = 1; i < created.size(); ++i) {
    // Another model may have gone, or come, before this one was made here, and after it on shard 0.
    if (created[i].shared_with() == created[0].shared_with()) continue;
    return absl::AbortedError(absl::StrCat(
        "model '", model.config.name(), "' would share rows with [", created[0].shared_with(),
        "] on ", shards_[0].name(), ", but with [", created[i].shared_with(), "] on ",
        shards_[i].name(), "; try again, or declare or drop what not all of these shards name"));
  }
  RETURN_IF_ERROR(context->CheckNotCancelled());
  ReachFailpoint("model.is_made");
  return fill ? absl::OkStatus() : shards_.OnAllFirstZero(serve);
}

bool ModelChanges::TakeBack(const Leftover& leftover) {
  auto request = step::OfRows<internal::v1::DropModelRequest>(leftover.model_id, leftover.history);
  request.set_unless_serving(true);
  rpc::CallContext context(SteadyNow() + kUndoDeadline);
  const absl::Status status = shards_[leftover.shard].DropModel(request, &context).status();
  if (leftover.shard == 0) {
    // The word is shard 0's. Where it serves the rows, nothing is left over.
    if (!status.ok()) return absl::IsFailedPrecondition(status);
    std::vector<Leftover> others;
    for (const int shard : shards_.From(1)) {
      others.push_back({leftover.model_id, leftover.history, shard});
    }
    absl::MutexLock lock(&mutex_);
    leftovers_.insert(leftovers_.end(), others.begin(), others.end());
    return true;
  }
  return status.ok() || absl::IsFailedPrecondition(status);
}

void ModelChanges::Undo(uint64_t model_id, uint64_t history) {
  {
    absl::MutexLock lock(&mutex_);
    leftovers_.push_back({model_id, history, 0});
  }
  Retry();
  Retry();  // the other shards, of which the first one has told
}

void ModelChanges::Retry() {
  std::vector<Leftover> leftovers;
  {
    absl::MutexLock lock(&mutex_);
    leftovers.swap(leftovers_);
  }
  if (leftovers.empty()) return;
  std::vector<char> done(leftovers.size());
  threads_->RunEach(static_cast<int>(leftovers.size()),
                    [&](int i) { done[i] = TakeBack(leftovers[i]); });
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < leftovers.size(); ++i) {
    if (!done[i]) leftovers_.push_back(leftovers[i]);
  }
}

absl::Status TakeRows(const std::string& model, const GiveUpRows& give_up,
                      absl::FunctionRef<absl::StatusOr<uint64_t>()> change) {
  if (give_up == nullptr) return change().status();
  // The note is written before the shards are asked. Whoever makes rows of a checkpoint tells the
  // shards first, and reads the note before they serve. So one of the two sees the other.
  RETURN_IF_ERROR(give_up(model, 0));
  const absl::StatusOr<uint64_t> history = change();
  if (!history.ok()) {
    return Annotate(history.status(),
                    absl::StrCat("model '", model,
                                 "' does not come back from the checkpoints of before any more, "
                                 "whatever else was done; call again"));
  }
  // A checkpoint may have been saved since the note. One of whoever has declared the model by now
  // stays good.
  return *history == 0 ? absl::OkStatus() : give_up(model, *history);
}

absl::StatusOr<std::optional<uint64_t>> ModelChanges::Drop(const std::string& name,
                                                           uint64_t model_id, uint64_t known,
                                                           rpc::CallContext* context) {
  const ShardModels before = Ask(context);
  RETURN_IF_ERROR(before.complete());
  bool found = known != 0;
  for (size_t i = 0; i < shards_.size(); ++i) {
    for (const internal::v1::HostedModel& here : before.AllOnShard(static_cast<int>(i), name)) {
      found = true;
      if (known != 0) continue;
      known = here.history();
      model_id = here.model_id();
    }
  }
  if (!found) return std::nullopt;
  RETURN_IF_ERROR(shards_.OnAllFirstZero([&](int shard) -> absl::Status {
    auto request = step::OfRows<internal::v1::DropModelRequest>(model_id, known);
    RETURN_IF_ERROR(shards_[shard].DropModel(request, context).status());
    for (const internal::v1::HostedModel& here : before.AllOnShard(shard, name)) {
      if (here.history() == known) continue;
      request.set_model_id(here.model_id());
      request.set_history(here.history());
      RETURN_IF_ERROR(shards_[shard].DropModel(request, context).status());
    }
    return absl::OkStatus();
  }));
  return before.OnShard(0, name).history();
}

absl::Status ModelChanges::DropHistory(uint64_t model_id, uint64_t history, bool unless_only,
                                       rpc::CallContext* context) {
  return shards_.OnAllFirstZero([&](int shard) {
    auto request = step::OfRows<internal::v1::DropModelRequest>(model_id, history);
    request.set_unless_only(unless_only);
    return shards_[shard].DropModel(request, context).status();
  });
}

}  // namespace emberd::coordinator
