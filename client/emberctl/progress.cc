#include "client/emberctl/progress.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/emberctl/output.h"
#include "client/emberctl/terminal.h"

namespace emberd::emberctl {
namespace {

// Without a terminal, lines of one phase are this far apart.
constexpr absl::Duration kPause = absl::Seconds(10);
constexpr int kMinBar = 4;
constexpr int kMaxBar = 24;

}  // namespace

std::string ProgressText(int64_t bytes, int64_t total, int64_t done, absl::Duration passed) {
  std::string text;
  if (total > 0)
    absl::StrAppend(&text, Percent(double(std::min(bytes, total)), double(total)), "  ");
  absl::StrAppend(&text, Bytes(bytes));
  if (total > 0) absl::StrAppend(&text, " of ", Bytes(total));
  const double seconds = absl::ToDoubleSeconds(passed);
  if (seconds <= 0 || done <= 0) return text;
  const double rate = static_cast<double>(done) / seconds;
  absl::StrAppend(&text, "  ", Bytes(static_cast<int64_t>(rate)), "/s");
  if (bytes < total) {
    const double left = static_cast<double>(total - bytes) / rate;
    absl::StrAppend(&text, "  about ", Uptime(static_cast<int64_t>(left * 1000) + 999), " left");
  }
  return text;
}

std::string ProgressBar(const std::string& phase, int64_t bytes, int64_t total, int64_t done,
                        absl::Duration passed, int width) {
  const std::string text = ProgressText(bytes, total, done, passed);
  // The last column stays free: a terminal may begin a new line after it.
  const int room = width - 1 - static_cast<int>(absl::StrFormat("%-9s []  %s", phase, text).size());
  const int bar = std::clamp(room, kMinBar, kMaxBar);
  const int filled =
      total > 0 ? static_cast<int>(bar * double(std::min(bytes, total)) / double(total)) : 0;
  const std::string line = absl::StrFormat("%-9s [%s%s]  %s", phase, std::string(filled, '#'),
                                           std::string(bar - filled, '-'), text);
  return line.substr(0, static_cast<size_t>(std::max(0, width - 1)));
}

Progress::Progress(Session& session)
    : session_(session),
      mode_(session.json                    ? Mode::kNone
            : session.terminal && CanDraw() ? Mode::kBar
                                            : Mode::kLines) {}

Progress::~Progress() {
  if (mode_ == Mode::kBar && !phase_.empty()) session_.out << "\r\x1b[K" << std::flush;
}

void Progress::Show(const v1::CheckpointProgress& progress) {
  Show(progress.phase(), progress.bytes(), progress.total_bytes(),
       absl::Milliseconds(progress.elapsed_ms()));
}

void Progress::Show(const std::string& phase, int64_t bytes, int64_t total,
                    absl::Duration elapsed) {
  if (mode_ == Mode::kNone) return;
  if (phase != phase_) {
    phase_ = phase;
    first_bytes_ = bytes;
    first_elapsed_ = elapsed;
    told_ = false;
  }
  const int64_t done = bytes - first_bytes_;
  const absl::Duration passed = elapsed - first_elapsed_;
  if (mode_ == Mode::kBar) {
    session_.out << "\r"
                 << ProgressBar(phase, bytes, total, done, passed, Terminal::CurrentSize().columns)
                 << "\x1b[K" << std::flush;
  } else if (bytes + total > 0 && (!told_ || elapsed >= shown_ + kPause)) {
    told_ = true;
    shown_ = elapsed;
    session_.out << phase << ": " << ProgressText(bytes, total, done, passed) << std::endl;
  }
}

}  // namespace emberd::emberctl
