// What a command draws again and again: a whole screen, or one line of progress.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <termios.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/emberctl/session.h"
#include "emberd/v1/checkpoint_service.pb.h"

namespace emberd::emberctl {

// Whether standard output can be drawn on.
bool CanDraw();
// Whether to use colours there: not if the environment sets NO_COLOR.
bool WantsColors();

// Standard input and output, from Open until destruction: the alternate screen, no cursor, keys
// without echo. The destructor puts everything back. SIGINT, SIGTERM and SIGHUP do not end the
// process meanwhile but come as an event. At most one at a time; not thread-safe.
class Terminal {
 public:
  static absl::StatusOr<std::unique_ptr<Terminal>> Open();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  struct Size {
    int columns = 80;
    int rows = 24;
  };
  static Size CurrentSize();  // of standard output

  // Replaces what is on the screen. Lines must fit it.
  void Draw(const std::vector<std::string>& lines);

  struct Event {
    enum Kind { kTimeout, kKey, kResized, kStop } kind = kTimeout;
    char key = 0;
  };
  // Waits until `time`, by SteadyNow, for something to happen.
  Event WaitUntil(absl::Time time);

 private:
  Terminal() = default;
  void CatchSignals();
  void SetKeys();

  bool has_keys_ = false;
  termios keys_before_{};
};

// How far something long is: a bar on a terminal, a line now and then where there is none.
//
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
