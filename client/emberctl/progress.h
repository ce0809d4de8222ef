// How far something long is: a bar on a terminal, a line now and then where there is none.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "client/emberctl/session.h"
#include "emberd/v1/checkpoint_service.pb.h"

namespace emberd::emberctl {

// Not thread-safe.
class Progress {
 public:
  // Draws on `session.out`; nothing with --json.
  explicit Progress(Session& session);
  // Leaves the line of the terminal empty.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `bytes` of `total` (0: not known yet) have been done `elapsed` after the beginning.
  void Show(const std::string& phase, int64_t bytes, int64_t total, absl::Duration elapsed);
  void Show(const v1::CheckpointProgress& progress);

 private:
  enum class Mode { kNone, kLines, kBar };

  Session& session_;
  const Mode mode_;
  std::string phase_;
  int64_t first_bytes_ = 0;       // when the phase began
  absl::Duration first_elapsed_;  // the same
  bool told_ = false;             // kLines: of this phase a line was written,
  absl::Duration shown_;          // and this was the last time
};

// "43%  1.2 GiB of 2.8 GiB  310.0 MiB/s  about 5s left": what is known of it. `done` and `passed`
// are of the time that the rate is taken over.
std::string ProgressText(int64_t bytes, int64_t total, int64_t done, absl::Duration passed);
// The same with a bar, in at most `width` characters.
std::string ProgressBar(const std::string& phase, int64_t bytes, int64_t total, int64_t done,
                        absl::Duration passed, int width);

}  // namespace emberd::emberctl
