// A group of one: a trainer that runs by itself against a cluster that somebody else started.
#pragma once

#include "absl/time/time.h"
#include "client/demo/group.h"
#include "client/demo/metrics.h"

namespace emberd::demo {

// Prints a line every few seconds. Not thread-safe.
class SoloGroup : public Group {
 public:
  SoloGroup();

  absl::StatusOr<Position> Begin() override { return Position(); }
  absl::StatusOr<GradientSum> Reduce(const Contribution& contribution) override;
  absl::Status Finish(const RoundReport& report) override;
  void Leave(uint64_t) override {}
  void Report(const std::string& message) override;

  // The state so far, as a line.
  void Print() const;

 private:
  RollingMetrics metrics_;
  int64_t examples_ = 0;
  absl::Time start_, last_print_;
};

}  // namespace emberd::demo
