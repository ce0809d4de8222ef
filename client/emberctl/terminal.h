// The screen of a command that draws it again and again.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <termios.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

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
  // Waits until `time` for something to happen.
  Event WaitUntil(absl::Time time);

 private:
  Terminal() = default;
  void CatchSignals();
  void SetKeys();

  bool has_keys_ = false;
  termios keys_before_{};
};

}  // namespace emberd::emberctl
