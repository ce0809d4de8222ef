#include "client/emberctl/terminal.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/steady_time.h"
#include "client/emberctl/output.h"

namespace emberd::emberctl {
namespace {

constexpr char kEnter[] = "\x1b[?1049h\x1b[?25l\x1b[2J";  // alternate screen, no cursor
constexpr char kLeave[] = "\x1b[?25h\x1b[?1049l";
constexpr std::array<int, 4> kSignals = {SIGINT, SIGTERM, SIGHUP, SIGWINCH};

// Handlers can reach nothing but this: each signal is a byte in the pipe.
int signal_pipe[2] = {-1, -1};
std::array<struct sigaction, kSignals.size()> actions_before;

void OnSignal(int signal) {
  const int error = errno;
  const char byte = static_cast<char>(signal);
  if (write(signal_pipe[1], &byte, 1) < 0) {
    // Full: there is more than enough to wake up for.
  }
  errno = error;
}

void Write(absl::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(STDOUT_FILENO, text.data(), text.size());
    if (written < 0 && errno != EINTR && errno != EAGAIN) return;  // nobody looks any more
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
  }
}

bool IsSet(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

// Without a terminal, lines of one phase are this far apart.
constexpr absl::Duration kPause = absl::Seconds(10);
constexpr int kMinBar = 4;
constexpr int kMaxBar = 24;

}  // namespace

bool CanDraw() {
  const char* const kind = std::getenv("TERM");
  return isatty(STDOUT_FILENO) == 1 && kind != nullptr && std::strcmp(kind, "dumb") != 0;
}

bool WantsColors() { return CanDraw() && !IsSet("NO_COLOR"); }

absl::StatusOr<std::unique_ptr<Terminal>> Terminal::Open() {
  if (pipe2(signal_pipe, O_CLOEXEC | O_NONBLOCK) != 0) {
    return absl::ErrnoToStatus(errno, "cannot create a pipe for signals");
  }
  std::unique_ptr<Terminal> terminal(new Terminal());
  terminal->CatchSignals();
  terminal->SetKeys();
  Write(kEnter);
  return terminal;
}

Terminal::~Terminal() {
  Write(kLeave);
  if (has_keys_) tcsetattr(STDIN_FILENO, TCSAFLUSH, &keys_before_);
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &actions_before[i], nullptr);
  close(signal_pipe[0]);
  close(signal_pipe[1]);
}

void Terminal::CatchSignals() {
  struct sigaction action {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &action, &actions_before[i]);
  }
}

void Terminal::SetKeys() {
  if (tcgetattr(STDIN_FILENO, &keys_before_) != 0) return;  // input comes from somewhere else
  termios keys = keys_before_;
  keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
  keys.c_cc[VMIN] = 0;
  keys.c_cc[VTIME] = 0;
  keys.c_cc[VSUSP] = _POSIX_VDISABLE;  // a stopped process would leave the screen as it is
  has_keys_ = tcsetattr(STDIN_FILENO, TCSAFLUSH, &keys) == 0;
}

Terminal::Size Terminal::CurrentSize() {
  winsize window{};
  Size size;
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0 && window.ws_row > 0) {
    size = {window.ws_col, window.ws_row};
  }
  return size;
}

void Terminal::Draw(const std::vector<std::string>& lines) {
  // In one piece and without clearing first, so that nothing flickers.
  std::string screen = "\x1b[H";
  for (size_t i = 0; i < lines.size(); ++i) {
    absl::StrAppend(&screen, lines[i], "\x1b[K", i + 1 < lines.size() ? "\r\n" : "");
  }
  absl::StrAppend(&screen, "\x1b[J");
  Write(screen);
}

Terminal::Event Terminal::WaitUntil(absl::Time time) {
  while (true) {
    const int64_t wait_ms = std::clamp<int64_t>(
        absl::ToInt64Milliseconds(time - SteadyNow() + absl::Microseconds(999)), 0, 60'000);
    pollfd inputs[] = {{signal_pipe[0], POLLIN, 0}, {has_keys_ ? STDIN_FILENO : -1, POLLIN, 0}};
    if (poll(inputs, 2, static_cast<int>(wait_ms)) < 0) continue;  // by a signal, now in the pipe
    char byte = 0;
    if (inputs[0].revents != 0 && read(signal_pipe[0], &byte, 1) == 1) {
      return {byte == SIGWINCH ? Event::kResized : Event::kStop};
    }
    if (inputs[1].revents != 0) {
      if (read(STDIN_FILENO, &byte, 1) == 1) return {Event::kKey, byte};
      return {Event::kStop};  // the terminal is gone
    }
    if (SteadyNow() >= time) return {};
  }
}

std::string ProgressText(int64_t bytes, int64_t total, int64_t done, absl::Duration passed) {
  std::string text;
  if (total > 0) absl::StrAppend(&text, Percent(std::min(bytes, total), total), "  ");
  absl::StrAppend(&text, Bytes(bytes));
  if (total > 0) absl::StrAppend(&text, " of ", Bytes(total));
  const double seconds = absl::ToDoubleSeconds(passed);
  if (seconds <= 0 || done <= 0) return text;
  const double rate = done / seconds;
  absl::StrAppend(&text, "  ", Bytes(static_cast<int64_t>(rate)), "/s");
  if (bytes < total) {
    const double left = (total - bytes) / rate;
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
