// The other side of SocketGroup: sums the trainers' gradients and gives them their turns.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "client/demo/group.h"
#include "client/demo/wire.h"

namespace emberd::demo {

// Not thread-safe: an event loop polls socket(rank) for input and calls OnReadable. A trainer that
// is gone is left out from then on; the others go on.
class Hub {
 public:
  struct Events {
    // All trainers of a round have contributed; contributions are in the order of ranks, without
    // those that are gone.
    std::function<void(const std::vector<Contribution>&, const GradientSum&)> on_sum;
    // All have applied. The next round begins when this returns.
    std::function<void(int64_t round, const std::vector<RoundReport>&)> on_round;
    std::function<void(int rank, const std::string& message)> on_report;
    std::function<void(int rank)> on_gone;
  };

  // sockets: the hub's ends, by rank. They stay the caller's.
  Hub(std::vector<int> sockets, Events events);

  int size() const { return static_cast<int>(members_.size()); }
  int live() const;
  // -1 once the trainer is gone.
  int socket(int rank) const { return members_[rank].gone ? -1 : members_[rank].socket; }

  void OnReadable(int rank);

 private:
  struct Member {
    explicit Member(int s) : socket(s), reader(s) {}
    int socket;
    FrameReader reader;
    bool gone = false;
    bool contributed = false, applied = false;
    Contribution contribution;
    RoundReport report;
  };

  void Handle(int rank, const Frame& frame);
  void Drop(int rank);
  void Send(int rank, uint32_t kind, const std::string& payload);
  void Advance();
  void Sum();
  bool GiveTurn();
  void EndRound();

  std::vector<Member> members_;
  Events events_;
  int64_t round_ = 0;
  bool summed_ = false;  // this round's gradients are summed; turns are being taken
  int turn_ = -1;        // rank that applies now; -1: nobody
};

}  // namespace emberd::demo
