// Logging: one line an event, for people (TEXT) or for machines (JSON), through spdlog.
//
//   ops::Log(LogLevel::kWarning, "shard does not answer", {{"shard", 2}, {"address", address}});
// gives
//   2026-01-31T12:00:00.123Z W coordinator-0 shard does not answer shard=2 address=10.0.0.7:5002
// or
//   {"ts":"2026-01-31T12:00:00.123Z","level":"warning","process":"coordinator-0","message":"shard
//   does not answer",
//    "shard":2,"address":"10.0.0.7:5002"}
//
// The message is a constant; what varies goes into fields. Nothing important is only a log line:
// errors are statuses and figures are metrics.
#pragma once

#include <concepts>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::ops {

enum class LogLevel {
  kDebug = v1::LoggingConfig::DEBUG,
  kInfo = v1::LoggingConfig::INFO,
  kWarning = v1::LoggingConfig::WARNING,
  kError = v1::LoggingConfig::ERROR,
};

// A key and its value. JSON shows finite numbers and booleans bare, all else as a string.
struct LogField {
  LogField(std::string_view key, std::string value) : key(key), value(std::move(value)) {}
  LogField(std::string_view key, std::string_view value) : LogField(key, std::string(value)) {}
  LogField(std::string_view key, absl::string_view value) : LogField(key, std::string(value)) {}
  LogField(std::string_view key, const char* value) : LogField(key, std::string(value)) {}
  LogField(std::string_view key, const absl::Status& value) : LogField(key, value.ToString()) {}
  LogField(std::string_view key, bool value)
      : key(key), value(value ? "true" : "false"), bare(true) {}
  template <std::integral T>
  LogField(std::string_view key, T value) : key(key), value(std::to_string(value)), bare(true) {}
  LogField(std::string_view key, double value);

  std::string key;
  std::string value;
  bool bare = false;
};

// Call once at the start of a process; before that, INFO and above go to standard error as TEXT.
// `process` is its name in every line. gRPC's own messages take the same way. INVALID_ARGUMENT if
// the file cannot be opened for appending; then nothing has changed. Unset fields of `config` mean
// TEXT, INFO, standard error.
absl::Status SetUpLogging(const v1::LoggingConfig& config, const std::string& process);

// To be called after somebody, such as logrotate, has moved logging.file, if there is one: makes a
// new file under its name, and goes on in that. If that fails, the log goes on in the old one, and
// says why. Thread-safe.
void ReopenLog();

// True if the log goes to logging.file, not to standard error. Thread-safe.
bool LogsToFile();

// While one lives, what gRPC says on this thread is left out of the log. For calls of gRPC whose
// failure the caller reports better.
class QuietGrpc {
 public:
  QuietGrpc();
  ~QuietGrpc();
  QuietGrpc(const QuietGrpc&) = delete;
  QuietGrpc& operator=(const QuietGrpc&) = delete;
};

// Thread-safe. Control characters and invalid UTF-8 cannot break a line.
void Log(LogLevel level, std::string_view message, const std::vector<LogField>& fields = {});

// For what may happen over and over: at most one line per period. The next line that is written
// carries the number of lines left out since the last one, as "suppressed". Thread-safe.
class RateLimitedLog {
 public:
  explicit RateLimitedLog(absl::Duration period = absl::Seconds(5)) : period_(period) {}

  void Log(LogLevel level, std::string_view message, std::vector<LogField> fields = {});
  // The same with the time given.
  void LogAt(absl::Time now, LogLevel level, std::string_view message,
             std::vector<LogField> fields);
  // Whether the next line would be written at once.
  bool IsOver(absl::Time now) {
    absl::MutexLock lock(&mutex_);
    return now >= next_;
  }

 private:
  const absl::Duration period_;
  absl::Mutex mutex_;
  absl::Time next_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t suppressed_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A RateLimitedLog for each key. Thread-safe.
class KeyedLog {
 public:
  // Beyond so many keys within a period, the others share one line.
  static constexpr size_t kMaxKeys = 256;

  explicit KeyedLog(absl::Duration period) : period_(period) {}

  void Log(const std::string& key, LogLevel level, std::string_view message,
           std::vector<LogField> fields = {});

 private:
  const absl::Duration period_;
  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::shared_ptr<RateLimitedLog>> logs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::ops
