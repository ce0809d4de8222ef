#include "server/group/exchange_table.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"

namespace emberd::group {
namespace {

std::string Name(const ExchangeKey& key) {
  return absl::StrCat("exchange ", key.group_key, " of step ", key.instance_key);
}

ExchangeKey KeyOf(const internal::v1::AllGatherRequest& request) {
  return {request.instance_key(), request.group_key()};
}

}  // namespace

ExchangeTable::ExchangeTable(std::string owner, int size, absl::Duration timeout)
    : owner_(std::move(owner)), size_(size), timeout_(timeout), forgotten_(kGroupKeys) {}

absl::Status ExchangeTable::Error(absl::StatusCode code, absl::string_view text) const {
  return absl::Status(code, absl::StrCat(owner_, ": ", text));
}

absl::Status ExchangeTable::OtherValue(const ExchangeKey& key, int rank) const {
  return Error(absl::StatusCode::kInvalidArgument,
               absl::StrCat("value: rank ", rank, " sent another value to ", Name(key),
                            " before; it must not change"));
}

void ExchangeTable::Contribute(internal::v1::AllGatherRequest request, Collective::GatherDone done,
                               Event* event) {
  const ExchangeKey key = KeyOf(request);
  const int rank = request.rank();
  std::string& value = *request.mutable_value();
  const auto answer = [&](auto result) { Answer(done, std::move(result), &event->answers); };
  if (const Kept* kept = FindKept(key); kept != nullptr) {
    if (kept->gathered.values(rank) != value) return answer(OtherValue(key, rank));
    return answer(kept->gathered);
  }
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
    const auto calls = std::count_if(open.waiting.begin(), open.waiting.end(),
                                     [rank](const WaitingRank& call) { return call.rank == rank; });
    if (calls >= kMaxWaitingPerRank) {
      return answer(Error(absl::StatusCode::kResourceExhausted,
                          absl::StrCat(calls, " calls of rank ", rank, " wait for ", Name(key),
                                       " already; at most ", kMaxWaitingPerRank, " are allowed")));
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

void ExchangeTable::ContributeLate(const internal::v1::AllGatherRequest& request,
                                   const absl::Status& end, Collective::GatherDone done,
                                   Event* event) {
  absl::StatusOr<internal::v1::AllGatherResponse> answer = end;
  const ExchangeKey key = KeyOf(request);
  if (const Kept* kept = FindKept(key); kept != nullptr) {
    if (kept->gathered.values(request.rank()) == request.value()) {
      answer = kept->gathered;
    } else {
      answer = OtherValue(key, request.rank());
    }
  }
  Answer(std::move(done), std::move(answer), &event->answers);
}

bool ExchangeTable::Withdraw(Ticket ticket, const absl::Status& status, Answers* answers) {
  for (auto& [key, open] : open_) {
    if (WithdrawFrom(&open.waiting, ticket, status, answers)) return true;
  }
  return false;
}

void ExchangeTable::End(const absl::Status& end, Answers* answers) {
  for (auto& [key, open] : open_) {
    for (WaitingRank& call : open.waiting) Answer(std::move(call.done), end, answers);
  }
  open_.clear();
  bytes_ = kept_bytes_;
}

absl::Time ExchangeTable::deadline() const {
  return open_.empty() ? absl::InfiniteFuture() : Oldest()->second.first + timeout_;
}

ExchangeKey ExchangeTable::overdue_key() const { return Oldest()->first; }

std::vector<int> ExchangeTable::missing_ranks() const {
  std::vector<int> missing;
  const Open& open = Oldest()->second;
  for (int rank = 0; rank < size_; ++rank) {
    if (!open.values[rank].has_value()) missing.push_back(rank);
  }
  return missing;
}

size_t ExchangeTable::waiting() const {
  size_t calls = 0;
  for (const auto& [key, open] : open_) calls += open.waiting.size();
  return calls;
}

const ExchangeTable::Kept* ExchangeTable::FindKept(const ExchangeKey& key) const {
  const auto kept = std::find_if(kept_.begin(), kept_.end(),
                                 [&key](const Kept& candidate) { return candidate.key == key; });
  return kept == kept_.end() ? nullptr : &*kept;
}

absl::Status ExchangeTable::CheckNew(const ExchangeKey& key) const {
  const std::optional<int64_t>& forgotten = forgotten_[key.group_key];
  if (forgotten.has_value() && key.instance_key <= *forgotten) {
    return Error(absl::StatusCode::kOutOfRange,
                 absl::StrCat("instance_key is ", key.instance_key, "; ", Name(key),
                              " is over, and its values are no longer kept"));
  }
  if (open_.size() >= kMaxOpen) {
    return Error(absl::StatusCode::kResourceExhausted,
                 absl::StrCat(open_.size(), " exchanges wait for ranks already; at most ", kMaxOpen,
                              " are allowed"));
  }
  return absl::OkStatus();
}

void ExchangeTable::Complete(std::map<ExchangeKey, Open>::iterator open, Answers* answers) {
  Kept kept;
  kept.key = open->first;
  const std::vector<int64_t>& arrival_us = open->second.arrival_us;
  kept.gathered.mutable_arrival_us()->Assign(arrival_us.begin(), arrival_us.end());
  for (std::optional<std::string>& value : open->second.values) {
    kept.bytes += static_cast<int64_t>(value->size());
    kept.gathered.add_values(*std::move(value));
  }
  // One copy for all calls.
  const auto gathered = std::make_shared<const internal::v1::AllGatherResponse>(kept.gathered);
  for (WaitingRank& call : open->second.waiting)
    answers->push_back([done = std::move(call.done), gathered] { done(*gathered); });
  open_.erase(open);
  kept_bytes_ += kept.bytes;
  kept_.push_back(std::move(kept));
  while (kept_.size() > 1 && (kept_.size() > kMaxKept || kept_bytes_ > kMaxKeptBytes)) {
    const Kept& oldest = kept_.front();
    std::optional<int64_t>& forgotten = forgotten_[oldest.key.group_key];
    forgotten = std::max(forgotten.value_or(oldest.key.instance_key), oldest.key.instance_key);
    kept_bytes_ -= oldest.bytes;
    bytes_ -= oldest.bytes;
    kept_.pop_front();
  }
}

std::map<ExchangeKey, ExchangeTable::Open>::const_iterator ExchangeTable::Oldest() const {
  return std::min_element(open_.begin(), open_.end(), [](const auto& a, const auto& b) {
    return a.second.first < b.second.first;
  });
}

}  // namespace emberd::group
