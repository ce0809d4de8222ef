// The failpoints of the tests' own build of the server. The variable EMBERD_FAILPOINT arms some of
// them, with commas in between: NAME=ACTION[:MILLISECONDS][@TIMES], where ACTION is
//   die      kill -9 of this process, MILLISECONDS after the failpoint was reached
//   stop     SIGSTOP likewise; SIGCONT lets it go on
//   wait     nothing else happens for MILLISECONDS
//   hold     the same as long as the file is there that EMBERD_HOLD names
//   mistake  it is made, every time
// TIMES: the first time (1, also without it), the second, ...
#include <atomic>
#include <cstdlib>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include <signal.h>
#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/failpoint.h"

namespace emberd {
namespace {

struct Armed {
  std::string name;
  std::string action;
  int64_t milliseconds = 0;
  int times = 1;
  std::atomic<int> reached{0};
};

void Read(const std::string& text, Armed* armed) {
  const std::pair<std::string, std::string> halves = absl::StrSplit(text, absl::MaxSplits('=', 1));
  const std::vector<std::string> times = absl::StrSplit(halves.second, '@');
  const std::vector<std::string> action = absl::StrSplit(times[0], ':');
  armed->name = halves.first;
  armed->action = action[0];
  const bool read = (times.size() < 2 || absl::SimpleAtoi(times[1], &armed->times)) &&
                    (action.size() < 2 || absl::SimpleAtoi(action[1], &armed->milliseconds)) &&
                    (armed->action == "die" || armed->action == "stop" || armed->action == "wait" ||
                     armed->action == "hold" || armed->action == "mistake");
  if (!read) std::abort();  // a mistake in a test
}

std::deque<Armed> FromEnvironment() {
  const char* const value = std::getenv("EMBERD_FAILPOINT");
  std::deque<Armed> armed;
  if (value == nullptr) return armed;
  for (const auto text : absl::StrSplit(value, ',', absl::SkipEmpty())) {
    Read(std::string(text), &armed.emplace_back());
  }
  return armed;
}

Armed* Find(const char* name) {
  static std::deque<Armed> all = FromEnvironment();
  for (Armed& armed : all) {
    if (armed.name == name) return &armed;
  }
  return nullptr;
}

}  // namespace

void ReachFailpoint(const char* name) {
  Armed* const armed = Find(name);
  if (armed == nullptr || ++armed->reached != armed->times) return;
  absl::SleepFor(absl::Milliseconds(armed->milliseconds));
  // To this thread, which goes no further.
  if (armed->action == "die") raise(SIGKILL);
  if (armed->action == "stop") raise(SIGSTOP);
  const char* const held_by = std::getenv("EMBERD_HOLD");
  while (armed->action == "hold" && held_by != nullptr && access(held_by, F_OK) == 0) {
    absl::SleepFor(absl::Milliseconds(5));
  }
}

bool Mistake(const char* name) {
  const Armed* const armed = Find(name);
  return armed != nullptr && armed->action == "mistake";
}

}  // namespace emberd
