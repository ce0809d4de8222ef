// How the trainers of a run stay in step. Each keeps a replica of the dense model; the replicas
// stay equal because all of them apply the same sum of gradients. Rounds are in lockstep, which
// makes a run repeatable bit by bit:
//
//   1. every trainer looks its batch up and computes gradients;
//   2. Reduce: the dense gradients are summed over the trainers (so all lookups precede all
//   updates);
//   3. one after the other, in the order of their ranks, they apply the gradients of their
//   embeddings;
//   4. Finish: when the last has, the next round begins.
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
  int64_t examples = 0;  // 0: no batch this time
  std::vector<float>
      gradient;  // of the dense parameters, summed over the examples; empty if there are none
  std::vector<float> logits = {};  // predictions made before the update
  std::vector<float> labels = {};
};
struct GradientSum {
  int64_t examples = 0;
  std::vector<float> gradient = {};  // empty if there are no examples
};
// How a trainer's round went.
struct RoundReport {
  int64_t rows_updated = 0;
  int64_t minibatches = 0;
  double lookup_seconds = 0, dense_seconds = 0, apply_seconds = 0;
};

// A trainer's side. Not thread-safe.
class Group {
 public:
  virtual ~Group() = default;

  virtual absl::StatusOr<GradientSum> Reduce(const Contribution& contribution) = 0;
  // Blocks until the trainers of lower rank have applied theirs.
  virtual absl::Status AwaitTurn() = 0;
  // Blocks until all have applied theirs.
  virtual absl::Status Finish(const RoundReport& report) = 0;
  // Something that people should know.
  virtual void Report(const std::string& message) = 0;
};

// Over one end of a socket pair whose other end a Hub holds.
class SocketGroup : public Group {
 public:
  explicit SocketGroup(int socket) : socket_(socket), reader_(socket) {}

  absl::StatusOr<GradientSum> Reduce(const Contribution& contribution) override;
  absl::Status AwaitTurn() override;
  absl::Status Finish(const RoundReport& report) override;
  void Report(const std::string& message) override;

 private:
  absl::StatusOr<std::string> Expect(uint32_t kind);

  int socket_;
  FrameReader reader_;
};

// Kinds of frames: the first three go to the hub.
enum FrameKind : uint32_t { kReport = 1, kContribution, kApplied, kSum, kTurn, kNextRound };

std::string Encode(const Contribution& contribution);
std::string Encode(const GradientSum& sum);
std::string Encode(const RoundReport& report);
// False if the bytes are not of this kind.
bool Decode(std::string_view bytes, Contribution* contribution);
bool Decode(std::string_view bytes, GradientSum* sum);
bool Decode(std::string_view bytes, RoundReport* report);

}  // namespace emberd::demo
