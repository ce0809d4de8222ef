// How the dense replicas of the trainers of a run stay equal. The embeddings are emberd's matter:
// the trainers are the ranks of one of its groups. Here their dense gradients are summed, round by
// round, and all of them apply the same sum:
//
//   1. Begin: where to start, which is not the beginning for a trainer that replaces a dead one;
//   2. every trainer looks its batch up and computes gradients;
//   3. Reduce: the dense gradients are summed over the trainers;
//   4. they send the gradients of their embeddings;
//   5. Finish: when all of these have been applied, the next round begins.
//
// A trainer that loses its stream to emberd says Leave, and joins its group there anew; as a
// synchronous group begins a new generation only with all of its ranks, the others are told by
// ABORTED from Reduce or Finish to do the same, and then call again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/demo/wire.h"

namespace emberd::demo {

// What a trainer puts into a round.
struct Contribution {
  int64_t round = 0;
  uint64_t generation = 0;  // of emberd's group; 0: one whose members do not depend on each other
  int64_t examples = 0;     // 0: no batch this time
  std::vector<float>
      gradient;  // of the dense parameters, summed over the examples; empty if there are none
  std::vector<float> logits = {};  // predictions made before the update
  std::vector<float> labels = {};
};
struct GradientSum {
  int64_t examples = 0;
  std::vector<float> gradient = {};  // empty if there are no examples
};
// How a trainer's round went. Seconds of emberd are as the coordinator measured them.
struct RoundReport {
  uint64_t generation = 0;  // as in Contribution
  int64_t rows_updated = 0;
  int64_t minibatches = 0;
  double dense_seconds = 0;       // forward and backward
  double wait_seconds = 0;        // of the trainer for emberd
  double preprocess_seconds = 0;  // from here on: of lookup and update together
  double shard_seconds = 0;
  double combine_seconds = 0;
  double rank_seconds = 0;  // waiting for other ranks
};
// Where a trainer starts.
struct Position {
  int64_t round = 0;
  bool summed = false;                  // the round's gradients have been summed already
  std::vector<float> dense_state = {};  // DenseModel::State; empty: as it is made
};

// A trainer's side. Not thread-safe.
class Group {
 public:
  virtual ~Group() = default;

  virtual absl::StatusOr<Position> Begin() = 0;
  virtual absl::StatusOr<GradientSum> Reduce(const Contribution& contribution) = 0;
  // Blocks until all have finished the round.
  virtual absl::Status Finish(const RoundReport& report) = 0;
  // The trainer is not in `generation` of emberd's group any more; 0: in none.
  virtual void Leave(uint64_t generation) = 0;
  // Something that people should know.
  virtual void Report(const std::string& message) = 0;
};

// Over one end of a socket pair whose other end a Hub holds.
class SocketGroup : public Group {
 public:
  explicit SocketGroup(int socket) : socket_(socket), reader_(socket) {}

  absl::StatusOr<Position> Begin() override;
  absl::StatusOr<GradientSum> Reduce(const Contribution& contribution) override;
  absl::Status Finish(const RoundReport& report) override;
  void Leave(uint64_t generation) override;
  void Report(const std::string& message) override;

 private:
  absl::StatusOr<std::string> Expect(uint32_t kind);

  int socket_;
  FrameReader reader_;
};

// Kinds of frames: the first four go to the hub.
enum FrameKind : uint32_t {
  kReport = 1,
  kContribution,
  kApplied,
  kLeave,
  kPosition,
  kSum,
  kNextRound,
  kJoinAnew
};

std::string Encode(const Contribution& contribution);
std::string Encode(const GradientSum& sum);
std::string Encode(const RoundReport& report);
std::string Encode(const Position& position);
// False if the bytes are not of this kind.
bool Decode(std::string_view bytes, Contribution* contribution);
bool Decode(std::string_view bytes, GradientSum* sum);
bool Decode(std::string_view bytes, RoundReport* report);
bool Decode(std::string_view bytes, Position* position);

}  // namespace emberd::demo
