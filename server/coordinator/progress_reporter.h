// How far a save, restore or the like is, as messages for who asked for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/steady_time.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "server/coordinator/checkpoints.h"
#include "server/coordinator/shard_transfers.h"

namespace emberd::server {

// Turns the progress of one phase into messages, at most ten in a second.
class ProgressReporter {
 public:
  explicit ProgressReporter(const Checkpoints::Report& report) : report_(report) {}

  absl::Status Begin(const std::string& phase) {
    progress_.set_phase(phase);
    progress_.set_bytes(0);
    progress_.set_total_bytes(0);
    return Send();
  }
  absl::Status operator()(int64_t bytes, int64_t total_bytes) {
    progress_.set_bytes(bytes);
    progress_.set_total_bytes(std::max(bytes, total_bytes));
    return SteadyNow() < sent_ + absl::Milliseconds(100) ? absl::OkStatus() : Send();
  }
  BytesReport bytes() {
    return [this](int64_t bytes, int64_t total_bytes) { return (*this)(bytes, total_bytes); };
  }
  v1::CheckpointProgress Done(const v1::CheckpointInfo& checkpoint) {
    progress_.set_done(true);
    progress_.set_elapsed_ms(absl::ToInt64Milliseconds(SteadyNow() - began_));
    *progress_.mutable_checkpoint() = checkpoint;
    return progress_;
  }

 private:
  absl::Status Send() {
    sent_ = SteadyNow();
    progress_.set_elapsed_ms(absl::ToInt64Milliseconds(sent_ - began_));
    return report_(progress_);
  }

  const Checkpoints::Report& report_;
  const absl::Time began_ = SteadyNow();
  absl::Time sent_ = absl::InfinitePast();
  v1::CheckpointProgress progress_;
};

}  // namespace emberd::server
