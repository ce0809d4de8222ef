// Checkpoints of models as plain data: see checkpoint_service.proto.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace emberd::client {

// A training group, and the step that it goes on from.
struct GroupStep {
  std::string group;
  int64_t next_step = 0;
};

struct CheckpointInfo {
  std::string model;
  std::string name;
  absl::Time saved_at;
  int64_t bytes = 0;   // of its own files
  int64_t rows = 0;    // of weights, in its own files
  std::string parent;  // the checkpoint that it builds on; empty: none, it is full
  int32_t chain = 0;   // checkpoints that it needs besides itself
  std::vector<GroupStep> groups;
  bool automatic = false;  // made by the cluster itself, which removes it when newer ones are there
  int64_t changes = 0;     // updates and assignments that its rows had seen
};

struct CheckpointList {
  std::vector<CheckpointInfo> checkpoints;  // newest first
  std::vector<std::string> damaged;         // folders that cannot be read, with the reason
};

// How far a save, a restore or a change of what is served is.
struct CheckpointProgress {
  std::string phase;  // "pausing", "saving", "checking", "restoring", "loading"
  int64_t bytes = 0;
  int64_t total_bytes = 0;  // as far as it is known; grows while saving
  absl::Duration elapsed;
};
// Called by the thread that waits for the end.
using ProgressSink = std::function<void(const CheckpointProgress&)>;

struct SaveOptions {
  std::string name = {};  // empty: the cluster chooses one
  bool incremental =
      false;  // only what has changed since the newest checkpoint, if that is allowed
  ProgressSink progress = {};
  absl::Duration deadline = absl::Hours(24);
};
struct SavedCheckpoint {
  CheckpointInfo checkpoint;
  absl::Duration pause;  // how long updates were held back
};

struct RestoreOptions {
  std::string name = {};  // empty: the newest
  // A ModelConfig as text proto or JSON with the same tables, but another storage type or another
  // optimizer; empty: that of the checkpoint. ALREADY_EXISTS if the model is declared otherwise.
  std::string config = {};
  ProgressSink progress = {};
  absl::Duration deadline = absl::Hours(24);
};

struct ServeOptions {
  std::string name = {};  // of the checkpoint; empty: the newest
  std::string serve_as =
      {};  // the name of the model that serves it; empty: that of the checkpoint's
  // How rows are stored, "FLOAT32", "BFLOAT16" or "FLOAT16"; empty: as they are served by now, or
  // else as in the checkpoint.
  std::string storage_dtype = {};
  ProgressSink progress = {};
  absl::Duration deadline = absl::Hours(24);
};
}  // namespace emberd::client
