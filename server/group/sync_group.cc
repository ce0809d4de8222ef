// A SYNC group: all ranks join, and are then members of one generation until one of them leaves,
// joins again or misses a deadline.
#include <algorithm>
#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/group/group.h"

namespace emberd::group {
namespace {

namespace pb = internal::v1;

struct ExchangeKey {
  int64_t instance_key = 0;  // the step
  int group_key = 0;         // which exchange of the step

  auto operator<=>(const ExchangeKey&) const = default;
};

std::string NameOf(const ExchangeKey& key) {
  return absl::StrCat("exchange ", key.group_key, " of step ", key.instance_key);
}

ExchangeKey KeyOf(const pb::AllGatherRequest& request) {
  return {request.instance_key(), request.group_key()};
}

// The exchanges of one generation: who has brought a value, who waits.
class ExchangeTable {
 public:
  // `owner` begins the message of every error made here, e.g. "group 'g'".
  ExchangeTable(std::string owner, int size, absl::Duration timeout)
      : owner_(std::move(owner)), size_(size), timeout_(timeout), forgotten_(kGroupKeys) {}

  // One rank's value. The last one answers all.
  void Contribute(pb::AllGatherRequest request, GatherDone done, Event* event) {
    const ExchangeKey key = KeyOf(request);
    const int rank = request.rank();
    std::string& value = *request.mutable_value();
    const auto answer = [&](auto result) { Answer(done, std::move(result), &event->answers); };
    if (auto kept = FindKept(request); kept.has_value()) return answer(*std::move(kept));
    auto found = open_.find(key);
    if (found == open_.end()) {
      if (absl::Status status = CheckNew(key); !status.ok()) return answer(std::move(status));
      Open open;
      open.values.resize(size_);
      open.arrival_us.resize(size_);
      open.first = event->now;
      found = open_.emplace(key, std::move(open)).first;
    }
    Open& open = found->second;
    if (open.values[rank].has_value()) {
      if (*open.values[rank] != value) return answer(OtherValue(key, rank));
      const auto calls =
          std::count_if(open.waiting.begin(), open.waiting.end(),
                        [rank](const WaitingRank& call) { return call.rank == rank; });
      if (calls >= kMaxCallsPerRank) {
        return answer(Error(absl::StatusCode::kResourceExhausted,
                            absl::StrCat(calls, " calls of rank ", rank, " wait for ", NameOf(key),
                                         " already; at most ", kMaxCallsPerRank, " are allowed")));
      }
    } else {
      bytes_ += static_cast<int64_t>(value.size());
      open.values[rank] = std::move(value);
      open.arrival_us[rank] = absl::ToInt64Microseconds(event->now - open.first);
      ++open.present;
    }
    open.waiting.push_back({{event->ticket, std::move(done)}, rank});
    if (open.present == size_) Complete(found, &event->answers);
  }

  // The same once the generation is over: what had been complete is answered, the rest gets `end`.
  void ContributeLate(const pb::AllGatherRequest& request, const absl::Status& end, GatherDone done,
                      Event* event) {
    Answer(std::move(done), FindKept(request).value_or(end), &event->answers);
  }

  // The call gets `status`; its value stays. False: no call of that ticket waits.
  bool Withdraw(Ticket ticket, const absl::Status& status, Answers* answers) {
    for (auto& [key, open] : open_) {
      if (WithdrawFrom(&open.waiting, ticket, status, answers)) return true;
    }
    return false;
  }

  // Every waiting call gets `end`, and nothing is open any more.
  void End(const absl::Status& end, Answers* answers) {
    for (auto& [key, open] : open_) {
      for (WaitingRank& call : open.waiting) Answer(std::move(call.done), end, answers);
    }
    open_.clear();
    bytes_ = kept_bytes_;
  }

  // When the first open exchange is overdue, and what misses there; InfiniteFuture: none is open.
  absl::Time deadline() const {
    return open_.empty() ? absl::InfiniteFuture() : Oldest()->second.first + timeout_;
  }

  ExchangeKey overdue_key() const { return Oldest()->first; }

  std::vector<int> missing_ranks() const {
    std::vector<int> missing;
    const Open& open = Oldest()->second;
    for (int rank = 0; rank < size_; ++rank) {
      if (!open.values[rank].has_value()) missing.push_back(rank);
    }
    return missing;
  }

  size_t open() const { return open_.size(); }
  size_t kept() const { return kept_.size(); }

  size_t waiting() const {
    size_t calls = 0;
    for (const auto& [key, open] : open_) calls += open.waiting.size();
    return calls;
  }

  int64_t bytes() const { return bytes_; }  // of all values held

 private:
  struct WaitingRank : Waiting<GatherDone> {
    int rank = 0;
  };
  struct Open {
    std::vector<std::optional<std::string>> values;  // by rank
    std::vector<int64_t> arrival_us;
    int present = 0;
    absl::Time first;
    std::vector<WaitingRank> waiting;
  };
  struct Kept {
    ExchangeKey key;
    pb::AllGatherResponse gathered;
    int64_t bytes = 0;
  };

  absl::Status Error(absl::StatusCode code, absl::string_view text) const {
    return absl::Status(code, absl::StrCat(owner_, ": ", text));
  }

  absl::Status OtherValue(const ExchangeKey& key, int rank) const {
    return Error(absl::StatusCode::kInvalidArgument,
                 absl::StrCat("value: rank ", rank, " sent another value to ", NameOf(key),
                              " before; it must not change"));
  }

  // The answer to who asks again; nothing: its exchange is not kept.
  std::optional<absl::StatusOr<pb::AllGatherResponse>> FindKept(
      const pb::AllGatherRequest& request) const {
    for (const Kept& kept : kept_) {
      if (kept.key != KeyOf(request)) continue;
      if (kept.gathered.values(request.rank()) == request.value()) return kept.gathered;
      return OtherValue(kept.key, request.rank());
    }
    return std::nullopt;
  }

  // OK: a new exchange may begin.
  absl::Status CheckNew(const ExchangeKey& key) const {
    const std::optional<int64_t>& forgotten = forgotten_[key.group_key];
    if (forgotten.has_value() && key.instance_key <= *forgotten) {
      return Error(absl::StatusCode::kOutOfRange,
                   absl::StrCat("instance_key is ", key.instance_key, "; ", NameOf(key),
                                " is over, and its values are no longer kept"));
    }
    if (open_.size() >= kMaxOpenExchanges) {
      return Error(absl::StatusCode::kResourceExhausted,
                   absl::StrCat(open_.size(), " exchanges wait for ranks already; at most ",
                                kMaxOpenExchanges, " are allowed"));
    }
    return absl::OkStatus();
  }

  void Complete(std::map<ExchangeKey, Open>::iterator open, Answers* answers) {
    Kept kept;
    kept.key = open->first;
    const std::vector<int64_t>& arrival_us = open->second.arrival_us;
    kept.gathered.mutable_arrival_us()->Assign(arrival_us.begin(), arrival_us.end());
    for (std::optional<std::string>& value : open->second.values) {
      kept.bytes += static_cast<int64_t>(value->size());
      kept.gathered.add_values(*std::move(value));
    }
    // One copy for all calls.
    const auto gathered = std::make_shared<const pb::AllGatherResponse>(kept.gathered);
    for (WaitingRank& call : open->second.waiting)
      answers->push_back([done = std::move(call.done), gathered] { done(*gathered); });
    open_.erase(open);
    kept_bytes_ += kept.bytes;
    kept_.push_back(std::move(kept));
    while (kept_.size() > 1 && (kept_.size() > kMaxKeptExchanges || kept_bytes_ > kMaxKeptBytes)) {
      const Kept& oldest = kept_.front();
      std::optional<int64_t>& forgotten = forgotten_[oldest.key.group_key];
      forgotten = std::max(forgotten.value_or(oldest.key.instance_key), oldest.key.instance_key);
      kept_bytes_ -= oldest.bytes;
      bytes_ -= oldest.bytes;
      kept_.pop_front();
    }
  }

  // The open exchange that began first.
  std::map<ExchangeKey, Open>::const_iterator Oldest() const {
    return std::min_element(open_.begin(), open_.end(), [](const auto& a, const auto& b) {
      return a.second.first < b.second.first;
    });
  }

  const std::string owner_;
  const int size_;
  const absl::Duration timeout_;
  std::map<ExchangeKey, Open> open_;
  std::deque<Kept> kept_;                          // oldest first
  std::vector<std::optional<int64_t>> forgotten_;  // by group_key: newest no longer kept
  int64_t kept_bytes_ = 0;
  int64_t bytes_ = 0;
};

class SyncGroup final : public Group {
 public:
  SyncGroup(const GroupId& id, const v1::GroupOptions& options, absl::Time now)
      : Group(id, options, now) {}

  void Join(const pb::JoinRequest& request, JoinDone done, Event* event) override {
    const absl::Status again =
        Error(absl::StatusCode::kAborted, absl::StrCat("rank ", request.rank(), " joined again",
                                                       live() ? InStep() : "", "; join again"));
    if (live()) EndLive(again, event);
    if (const auto before = joining_.find(request.rank()); before != joining_.end()) {
      Answer(std::move(before->second.done), again, &event->answers);
      joining_.erase(before);
    }
    joining_[request.rank()] = {
        {event->ticket, std::move(done)}, request.coordinator(), event->now + step_timeout()};
    if (static_cast<int>(joining_.size()) < size()) return;

    pb::JoinResponse membership;
    membership.set_generation(event->NextGeneration());
    for (const auto& [rank, joining] : joining_) membership.add_coordinators(joining.coordinator);
    for (auto& [rank, joining] : joining_)
      Answer(std::move(joining.done), membership, &event->answers);
    joining_.clear();
    Begin(membership.generation());
  }

  void Leave(const pb::LeaveRequest& request, Event* event) override {
    if (!live() || generation_->number != request.generation()) return;
    EndByLeave(request.rank(), request.reason(), event);
  }

  void AllGather(pb::AllGatherRequest request, GatherDone done, Event* event) override {
    if (!Knows(request.generation()))
      return Answer(std::move(done), OverError(request.generation()), &event->answers);
    if (live()) {
      const int64_t step = request.instance_key();
      generation_->step = std::max(generation_->step.value_or(step), step);
      generation_->exchanges.Contribute(std::move(request), std::move(done), event);
    } else {
      generation_->exchanges.ContributeLate(request, generation_->end, std::move(done), event);
    }
  }

  void Watch(uint64_t generation, int rank, StatusDone done, Event* event) override {
    const auto refuse = [&](const absl::Status& status) { Answer(done, status, &event->answers); };
    if (!Knows(generation)) return refuse(OverError(generation));
    if (!live()) return refuse(generation_->end);
    const int most = 4 * size();
    if (static_cast<int>(generation_->watches.size()) >= most) {
      return refuse(Error(absl::StatusCode::kResourceExhausted,
                          absl::StrCat(generation_->watches.size(),
                                       " calls watch it already; at most ", most, " are allowed")));
    }
    generation_->watches.push_back({{event->ticket, std::move(done)}, rank});
  }

  void Adopt(uint64_t generation, Event* event) override {
    if (generation_.has_value() && HasBeen(generation, generation_->number)) return;
    if (live()) EndLive(OverError(generation_->number), event);
    Begin(generation);
  }

  void End(uint64_t generation, const absl::Status& status, Event* event) override {
    if (live() && generation_->number == generation) EndLive(status, event);
  }

  bool Knows(uint64_t generation) const override {
    return generation_.has_value() && generation_->number == generation;
  }

  void Withdraw(Ticket ticket, const absl::Status& status, Event* event) override {
    for (auto joining = joining_.begin(); joining != joining_.end(); ++joining) {
      if (joining->second.ticket != ticket) continue;
      Answer(std::move(joining->second.done), status, &event->answers);
      joining_.erase(joining);
      return;
    }
    if (!generation_.has_value()) return;
    if (generation_->exchanges.Withdraw(ticket, status, &event->answers)) return;
    for (const Watching& watch : generation_->watches) {
      if (watch.ticket != ticket) continue;
      const int rank = watch.rank;
      WithdrawFrom(&generation_->watches, ticket, status, &event->answers);
      return EndByLeave(rank, "its coordinator is gone", event);
    }
  }

  void Expire(Event* event) override {
    ExpireJoins(event);
    if (!live() || generation_->exchanges.deadline() > event->now) return;
    const ExchangeTable& exchanges = generation_->exchanges;
    const ExchangeKey key = exchanges.overdue_key();
    EndLive(Error(absl::StatusCode::kDeadlineExceeded,
                  absl::StrCat(RankList(exchanges.missing_ranks()), " did not come to exchange ",
                               key.group_key, " of step ", key.instance_key, " within ",
                               options_.step_timeout_ms(), " ms; join again")),
            event);
  }

  void Close(const absl::Status& status, Event* event) override {
    for (auto& [rank, joining] : joining_) Answer(std::move(joining.done), status, &event->answers);
    joining_.clear();
    if (live()) EndLive(status, event);
  }

  bool vacant() const override { return joining_.empty() && !live(); }

  GroupLoad load() const override {
    GroupLoad load;
    load.joining = joining_.size();
    if (!generation_.has_value()) return load;
    load.waiting = generation_->exchanges.waiting() + generation_->watches.size();
    load.open_exchanges = generation_->exchanges.open();
    load.kept_exchanges = generation_->exchanges.kept();
    load.value_bytes = generation_->exchanges.bytes();
    return load;
  }

  absl::Time deadline() const override {
    absl::Time first = live() ? generation_->exchanges.deadline() : absl::InfiniteFuture();
    for (const auto& [rank, joining] : joining_) first = std::min(first, joining.deadline);
    return first;
  }

 private:
  struct Joining : Waiting<JoinDone> {
    std::string coordinator;
    absl::Time deadline;
  };
  struct Watching : Waiting<StatusDone> {
    int rank = 0;
  };
  struct Generation {
    Generation(uint64_t number, std::string owner, int size, absl::Duration timeout)
        : number(number), exchanges(std::move(owner), size, timeout) {}

    const uint64_t number;
    absl::Status end;  // OK: it lives
    ExchangeTable exchanges;
    std::optional<int64_t> step;  // the highest that a member has come to
    std::vector<Watching> watches;
  };

  void Begin(uint64_t generation) {
    generation_.emplace(generation, name(), size(), step_timeout());
  }

  bool live() const { return generation_.has_value() && generation_->end.ok(); }

  // " in step 17", for errors; empty before the first exchange.
  std::string InStep() const {
    return generation_->step.has_value() ? absl::StrCat(" in step ", *generation_->step) : "";
  }

  void EndLive(const absl::Status& status, Event* event) {
    generation_->end = status;
    generation_->exchanges.End(status, &event->answers);
    for (auto& watch : generation_->watches) Answer(std::move(watch.done), status, &event->answers);
    generation_->watches.clear();
  }

  // Ends what lives. `why`: may be empty.
  void EndByLeave(int rank, const std::string& why, Event* event) {
    EndLive(Error(absl::StatusCode::kAborted,
                  absl::StrCat("rank ", rank, " left", InStep(),
                               why.empty() ? "" : absl::StrCat(" (", why, ")"), "; join again")),
            event);
  }

  void ExpireJoins(Event* event) {
    std::vector<int> missing;
    for (int rank = 0; rank < size(); ++rank) {
      if (!joining_.contains(rank)) missing.push_back(rank);
    }
    std::erase_if(joining_, [&](auto& entry) {
      if (entry.second.deadline > event->now) return false;
      Answer(std::move(entry.second.done),
             Error(absl::StatusCode::kDeadlineExceeded,
                   absl::StrCat(RankList(missing), " did not join within ",
                                options_.step_timeout_ms(), " ms")),
             &event->answers);
      return true;
    });
  }

  std::map<int, Joining> joining_;        // by rank
  std::optional<Generation> generation_;  // the newest; nothing is live while somebody joins
};

}  // namespace

std::unique_ptr<Group> MakeSyncGroup(const GroupId& id, const v1::GroupOptions& options,
                                     absl::Time now) {
  return std::make_unique<SyncGroup>(id, options, now);
}

}  // namespace emberd::group
