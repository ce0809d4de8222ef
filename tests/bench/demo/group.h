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
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/bench/demo/metrics.h"

namespace emberd::demo {

// What a trainer puts into a round.
struct Contribution {
  int64_t round = 0;
  uint64_t generation = 0;  // of emberd's group; 0: one whose members do not depend on each other
  int64_t examples = 0;     // 0: no batch this time
  // Of the dense parameters, summed over the examples; empty if there are none.
  std::vector<float> gradient = {};
  std::vector<float> logits = {};  // predictions made before the update
  std::vector<float> labels = {};

  template <typename Self>
  static auto Fields(Self& self) {
    return std::tie(self.round, self.generation, self.examples, self.gradient, self.logits,
                    self.labels);
  }
};

struct GradientSum {
  int64_t examples = 0;
  std::vector<float> gradient = {};  // empty if there are no examples

  template <typename Self>
  static auto Fields(Self& self) {
    return std::tie(self.examples, self.gradient);
  }
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

  template <typename Self>
  static auto Fields(Self& self) {
    return std::tie(self.generation, self.rows_updated, self.minibatches, self.dense_seconds,
                    self.wait_seconds, self.preprocess_seconds, self.shard_seconds,
                    self.combine_seconds, self.rank_seconds);
  }
};

// Where a trainer starts.
struct Position {
  int64_t round = 0;
  bool summed = false;                  // the round's gradients have been summed already
  std::vector<float> dense_state = {};  // DenseModel::State; empty: as it is made

  template <typename Self>
  static auto Fields(Self& self) {
    return std::tie(self.round, self.summed, self.dense_state);
  }
};

// A trainer is not in this generation of emberd's group any more; 0: in none.
struct Departure {
  uint64_t generation = 0;

  template <typename Self>
  static auto Fields(Self& self) {
    return std::tie(self.generation);
  }
};

// A trainer's side. Not thread-safe.
class Group {
 public:
  virtual ~Group() = default;

  virtual absl::StatusOr<Position> Begin() = 0;
  virtual absl::StatusOr<GradientSum> Reduce(const Contribution& contribution) = 0;
  // Blocks until all have finished the round.
  virtual absl::Status Finish(const RoundReport& report) = 0;
  virtual void Leave(const Departure& departure) = 0;
  // Something that people should know.
  virtual void Report(const std::string& message) = 0;
};

// A group of one: a trainer that runs by itself against a cluster that somebody else started.
// Prints a line every few seconds.
class SoloGroup : public Group {
 public:
  SoloGroup();

  absl::StatusOr<Position> Begin() override { return Position(); }
  absl::StatusOr<GradientSum> Reduce(const Contribution& contribution) override;
  absl::Status Finish(const RoundReport& report) override;
  void Leave(const Departure&) override {}
  void Report(const std::string& message) override;

  // The state so far, as a line.
  void Print() const;

 private:
  RollingMetrics metrics_;
  int64_t examples_ = 0;
  absl::Time start_, last_print_;
};

// Messages between the processes of the demo travel as frames over a socket pair: both ends are
// this very program on this machine, so numbers travel as they lie in memory.
struct Frame {
  // The first four go to the hub.
  enum Kind : uint32_t {
    kReport = 1,
    kContribution,
    kApplied,
    kLeave,
    kPosition,
    kSum,
    kNextRound,
    kJoinAnew
  };
  uint32_t kind = 0;
  std::string payload;
};

// Blocks until all is sent. UNAVAILABLE: the other end is gone.
absl::Status SendFrame(int socket, uint32_t kind, std::string_view payload);

// Frames out of a socket's bytes. Not thread-safe.
class FrameReader {
 public:
  explicit FrameReader(int socket) : socket_(socket) {}

  // Blocks for the next frame. UNAVAILABLE: the other end is gone.
  absl::StatusOr<Frame> Receive();
  // Takes in what has arrived, without waiting. UNAVAILABLE: the other end is gone.
  absl::Status Poll();
  // The next frame that is complete, if any.
  std::optional<Frame> Next();

 private:
  absl::Status Read(int flags);

  int socket_;
  std::string bytes_;
};

// The fields of a message, one behind the other. For the five structs above.
template <typename Message>
std::string Encode(const Message& message);
// False if the bytes are not of this kind.
template <typename Message>
bool Decode(std::string_view bytes, Message* message);

// Over one end of a socket pair whose other end a Hub holds.
class SocketGroup : public Group {
 public:
  explicit SocketGroup(int socket) : socket_(socket), reader_(socket) {}

  absl::StatusOr<Position> Begin() override;
  absl::StatusOr<GradientSum> Reduce(const Contribution& contribution) override;
  absl::Status Finish(const RoundReport& report) override;
  void Leave(const Departure& departure) override;
  void Report(const std::string& message) override;

 private:
  absl::StatusOr<std::string> Expect(uint32_t kind);

  int socket_;
  FrameReader reader_;
};

}  // namespace emberd::demo
