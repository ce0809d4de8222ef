// The other side of SocketGroup: sums the trainers' gradients, and tells all of them to join anew
// when one has to.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/bench/demo/group.h"

namespace emberd::demo {

// Not thread-safe: an event loop polls socket(rank) for input and calls OnReadable. Without a
// trainer that is gone the others wait, until Replace brings another.
class Hub {
 public:
  struct Events {
    // All trainers of a round have contributed; contributions are in the order of ranks.
    std::function<void(const std::vector<Contribution>&, const GradientSum&)> on_sum;
    // All have applied. The next round begins when this returns.
    std::function<void(int64_t round, const std::vector<RoundReport>&)> on_round;
    std::function<void(int rank, const std::string& message)> on_report;
    std::function<void(int rank)> on_gone;
    // DenseModel::State after all sums so far, for a trainer that starts late.
    std::function<std::vector<float>()> dense_state;
  };

  // sockets: the hub's ends, by rank. They stay the caller's. `start`: where all trainers begin.
  Hub(std::vector<int> sockets, Events events, const Position& start = {});

  int size() const { return static_cast<int>(members_.size()); }
  int live() const;
  // -1 once the trainer is gone.
  int socket(int rank) const { return members_[rank].gone ? -1 : members_[rank].socket; }

  void OnReadable(int rank);
  // Another trainer takes the place of one that is gone; it begins where the run is.
  void Replace(int rank, int socket);

 private:
  struct Member {
    explicit Member(int s) : socket(s), reader(s) {}
    int socket;
    FrameReader reader;
    bool gone = false;
    bool waiting = false;  // has contributed, or applied, and waits for the others
    uint64_t generation = 0;
    Contribution contribution;
    RoundReport report;
  };

  void Handle(int rank, const Frame& frame);
  // The member has contributed or applied, in a generation of emberd's group.
  void Wait(int rank, uint64_t generation);
  // A member is not in `generation` any more; 0: in none that we have heard of.
  void Leave(uint64_t generation);
  void TellToJoin(int rank);
  void Drop(int rank);
  void Send(int rank, uint32_t kind, const std::string& payload);
  void Advance();
  void Sum();
  void EndRound();

  std::vector<Member> members_;
  Events events_;
  int64_t round_ = 0;
  uint64_t latest_ = 0;  // generation that we have heard of
  uint64_t broken_ = 0;  // latest generation that is known to be over
  bool summed_ = false;  // this round's gradients are summed; they are being applied
};

}  // namespace emberd::demo
