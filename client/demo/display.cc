#include "client/demo/display.h"

#include <algorithm>
#include <cmath>

#include <sys/ioctl.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"

namespace emberd::demo {

namespace {

constexpr absl::Duration kTerminalEvery = absl::Milliseconds(500), kLineEvery = absl::Seconds(5);
constexpr int kBarWidth = 20;

size_t TerminalWidth(int descriptor) {
  winsize size{};
  return ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

std::string Short(double number) {
  if (std::abs(number) >= 999.5e3) return absl::StrFormat("%.2f M", number / 1e6);
  if (std::abs(number) >= 999.5) return absl::StrFormat("%.1f k", number / 1e3);
  return absl::StrFormat("%.0f", number);
}

std::string ProgressLine(const Progress& progress) {
  const double done = progress.total == 0 ? 1.0
                                          : static_cast<double>(progress.examples) /
                                                static_cast<double>(progress.total);
  const int filled = static_cast<int>(std::clamp(done, 0.0, 1.0) * kBarWidth);
  std::string line = absl::StrFormat(
      "[%s%s] %.0f%%  %s examples  %s/s  loss %.4f  AUC %.4f  %s rows touched",
      std::string(filled, '#'), std::string(kBarWidth - filled, '.'), 100 * done,
      Short(static_cast<double>(progress.examples)), Short(progress.examples_per_second),
      progress.loss, progress.auc, Short(static_cast<double>(progress.rows_touched)));
  if (progress.shards.empty()) return line;
  absl::StrAppend(&line, "  shards");
  for (const ShardTraffic& shard : progress.shards) {
    absl::StrAppend(
        &line, " ",
        shard.reachable ? absl::StrFormat("%.2f", shard.rows_per_second / 1e6) : "down");
  }
  return absl::StrCat(line, " M rows/s");
}

std::string WrapProgress(const std::string& line, size_t width) {
  std::string wrapped;
  size_t used = 0;
  for (absl::string_view part : absl::StrSplit(line, "  ")) {
    if (used > 0 && used + 2 + part.size() <= width) {
      absl::StrAppend(&wrapped, "  ", part);
      used += 2 + part.size();
    } else {
      absl::StrAppend(&wrapped, used > 0 ? "\n" : "", part.substr(0, width));
      used = std::min(width, part.size());
    }
  }
  return wrapped;
}

Display::Display(std::FILE* stream) : stream_(stream), terminal_(isatty(fileno(stream)) == 1) {}

bool Display::Due(absl::Time now) const {
  return now - last_ >= (terminal_ ? kTerminalEvery : kLineEvery);
}

void Display::Show(const Progress& progress, absl::Time now) {
  last_ = now;
  const std::string line = ProgressLine(progress);
  if (!terminal_) return Print(line);
  Erase();
  live_ = WrapProgress(line, TerminalWidth(fileno(stream_)) - 1);
  std::fputs(live_.c_str(), stream_);
  std::fflush(stream_);
}

// Back to the beginning of the first live line, and away with all that follows.
void Display::Erase() {
  if (live_.empty()) return;
  const int64_t up = std::count(live_.begin(), live_.end(), '\n');
  std::fputs(up > 0 ? absl::StrCat("\r\x1b[", up, "A\x1b[J").c_str() : "\r\x1b[J", stream_);
}

void Display::ShowLast(const Progress& progress) {
  Show(progress, absl::Now());
  Finish();
}

void Display::Print(const std::string& line) {
  // On a terminal the line takes the place of the live ones, which are drawn again below it.
  Erase();
  std::fprintf(stream_, "%s\n%s", line.c_str(), live_.c_str());
  std::fflush(stream_);
}

void Display::Finish() {
  if (!live_.empty()) std::fputc('\n', stream_);
  live_.clear();
}

}  // namespace emberd::demo
