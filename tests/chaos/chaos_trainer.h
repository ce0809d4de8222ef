// A trainer of the chaos test: one rank of one group, in a process of its own, that goes on after
// whatever happens to it or to the cluster.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/client.h"

namespace emberd::chaos {

// How a group trains, and what its tables are held against.
enum class Mode {
  kSync,  // gradients depend on activations: one wrong bit shows; against an undisturbed cluster
  kPipelined,  // rows count their updates
  kBounded,    // the same; ranks may be kStalenessBound steps apart
  kUnary,      // the same, without a group: Lookup and ApplyGradients, each through any coordinator
};
inline constexpr int64_t kStalenessBound = 3;
std::optional<Mode> ModeOf(const std::string& name);
std::string NameOf(Mode mode);
// The name of the file in the control folder with the step that its trainers stop before.
std::string EndFileOf(Mode mode);

// Ranks look at the clock and tell their progress every so many steps.
inline constexpr int64_t kStride = 20;

// Every row begins at 0 and gains 1 with every update: SGD with a learning rate of 1 and gradients
// of -1. In each step rank r updates its own kRowsPerRank rows, which lie on all shards.
inline constexpr int kRowsPerRank = 32;
client::ModelDescription CountingModel(const std::string& name, int ranks);
client::ModelDescription ModelOf(Mode mode, int ranks);

// A mistake made on purpose, once, to see that the test finds it.
enum class Plant { kNone, kLost, kDoubled };

struct TrainerOptions {
  Mode mode = Mode::kSync;
  Plant plant = Plant::kNone;  // not in kSync
  int rank = 0;
  int size = 1;
  std::vector<std::string> addresses;
  // Holds "MODE.end", the step to stop before, once it is known, and "MODE.RANK", the rank's next
  // step.
  std::string control_folder;
};

// OK once every step before the end has been acknowledged. Failures that a trainer can do nothing
// about (a peer or process that died, a deadline) are retried by joining again; all others are
// returned.
absl::Status Train(const TrainerOptions& options);

// The number in a file of the control folder; -1: there is none yet.
int64_t ReadNumber(const std::string& folder, const std::string& name);
// Replaces it as a whole.
void WriteNumber(const std::string& folder, const std::string& name, int64_t number);

}  // namespace emberd::chaos
