// The exchanges of one generation of a SYNC group: who has brought a value, who waits.
//
// Pure state, as its Group is: the caller brings locks and clock, and gives the answers.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/group/collective.h"
#include "server/group/group.h"

namespace emberd::group {

struct ExchangeKey {
  int64_t instance_key = 0;  // the step
  int group_key = 0;         // which exchange of the step

  auto operator<=>(const ExchangeKey&) const = default;
};

class ExchangeTable {
 public:
  static constexpr int kGroupKeys = 16;   // group_key is in 0 .. 15
  static constexpr size_t kMaxOpen = 64;  // exchanges that wait for ranks
  static constexpr size_t kMaxKept = 16;  // complete ones that answer repeated requests
  static constexpr int64_t kMaxKeptBytes = int64_t{1} << 20;  // of these; the newest always stays
  static constexpr size_t kMaxValueBytes = size_t{64} << 10;
  static constexpr int kMaxWaitingPerRank = 4;  // calls of one rank in one exchange

  // `owner` begins the message of every error made here, e.g. "group 'g'".
  ExchangeTable(std::string owner, int size, absl::Duration timeout);

  // One rank's value. The last one answers all.
  void Contribute(internal::v1::AllGatherRequest request, Collective::GatherDone done,
                  Event* event);
  // The same once the generation is over: what had been complete is answered, the rest gets `end`.
  void ContributeLate(const internal::v1::AllGatherRequest& request, const absl::Status& end,
                      Collective::GatherDone done, Event* event);

  // The call gets `status`; its value stays. False: no call of that ticket waits.
  bool Withdraw(Ticket ticket, const absl::Status& status, Answers* answers);
  // Every waiting call gets `end`, and nothing is open any more.
  void End(const absl::Status& end, Answers* answers);

  // When the first open exchange is overdue, and what misses there; InfiniteFuture: none is open.
  absl::Time deadline() const;
  ExchangeKey overdue_key() const;
  std::vector<int> missing_ranks() const;

  size_t open() const { return open_.size(); }
  size_t kept() const { return kept_.size(); }
  size_t waiting() const;
  int64_t bytes() const { return bytes_; }  // of all values held

 private:
  struct WaitingRank : Waiting<Collective::GatherDone> {
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
    internal::v1::AllGatherResponse gathered;
    int64_t bytes = 0;
  };

  absl::Status Error(absl::StatusCode code, absl::string_view text) const;
  absl::Status OtherValue(const ExchangeKey& key, int rank) const;
  const Kept* FindKept(const ExchangeKey& key) const;
  // OK: a new exchange may begin.
  absl::Status CheckNew(const ExchangeKey& key) const;
  void Complete(std::map<ExchangeKey, Open>::iterator open, Answers* answers);
  // The open exchange that began first.
  std::map<ExchangeKey, Open>::const_iterator Oldest() const;

  const std::string owner_;
  const int size_;
  const absl::Duration timeout_;
  std::map<ExchangeKey, Open> open_;
  std::deque<Kept> kept_;                          // oldest first
  std::vector<std::optional<int64_t>> forgotten_;  // by group_key: newest no longer kept
  int64_t kept_bytes_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace emberd::group
