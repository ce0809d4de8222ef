#include "server/ops/logging.h"

#include <cmath>

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <nlohmann/json.hpp>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "base/steady_time.h"

namespace emberd::ops {
namespace {

constexpr char kTimestamp[] = "%Y-%m-%dT%H:%M:%S.%eZ";

struct Logger {
  std::shared_ptr<spdlog::logger> sink;
  bool json = false;
};

// UNSPECIFIED is INFO.
spdlog::level::level_enum ToSpdlog(v1::LoggingConfig::Level level) {
  switch (level) {
    case v1::LoggingConfig::DEBUG:
      return spdlog::level::debug;
    case v1::LoggingConfig::WARNING:
      return spdlog::level::warn;
    case v1::LoggingConfig::ERROR:
      return spdlog::level::err;
    default:
      return spdlog::level::info;
  }
}

// A JSON string, quotes included; bytes that are not UTF-8 become U+FFFD.
std::string Quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// `text` itself if it is one plain word (or, as the message, one plain line), else quoted.
std::string Plain(const std::string& text, bool allow_spaces) {
  if (text.empty() && !allow_spaces) return "\"\"";
  std::string quoted = Quoted(text);
  const bool escaped = quoted.size() != text.size() + 2;
  const bool separators = text.find_first_of(" =") != std::string::npos;
  return escaped || (separators && !allow_spaces) ? quoted : text;
}

// Everything after the part that spdlog's pattern writes.
std::string JsonTail(std::string_view message, const std::vector<LogField>& fields) {
  std::string line = absl::StrCat("\"message\":", Quoted(std::string(message)));
  for (const LogField& field : fields) {
    absl::StrAppend(&line, ",", Quoted(field.key), ":",
                    field.bare ? field.value : Quoted(field.value));
  }
  return line;
}

std::string TextTail(std::string_view message, const std::vector<LogField>& fields) {
  std::string line = Plain(std::string(message), /*allow_spaces=*/true);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=", Plain(field.value, /*allow_spaces=*/false));
  }
  return line;
}

Logger MakeLogger(spdlog::sink_ptr sink, const v1::LoggingConfig& config,
                  const std::string& process) {
  Logger logger;
  logger.json = config.format() == v1::LoggingConfig::JSON;
  logger.sink = std::make_shared<spdlog::logger>("emberd", std::move(sink));
  const auto literal = [](const std::string& text) {  // no pattern flags in it
    return absl::StrReplaceAll(text, {{"%", "%%"}});
  };
  logger.sink->set_pattern(
      logger.json
          ? absl::StrCat("{\"ts\":\"", kTimestamp,
                         "\",\"level\":\"%l\",\"process\":", literal(Quoted(process)), ",%v}")
          : absl::StrCat(kTimestamp, " %L ", literal(Plain(process, false)), " %v"),
      spdlog::pattern_time_type::utc);
  logger.sink->set_level(ToSpdlog(config.level()));
  logger.sink->flush_on(spdlog::level::debug);  // lines are few, and the last ones matter most
  return logger;
}

absl::StatusOr<spdlog::sink_ptr> MakeSink(const std::string& file) {
  if (file.empty()) return std::make_shared<spdlog::sinks::stderr_sink_mt>();
  try {
    return std::make_shared<spdlog::sinks::basic_file_sink_mt>(file);
  } catch (const spdlog::spdlog_ex& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("logging.file: \"", file, "\" cannot be opened: ", error.what()));
  }
}

// The process's logger, and what it was made of. Never destroyed: threads may log until the very
// end.
struct Current {
  static Current& Get() {
    static auto* const current = new Current;
    return *current;
  }

  absl::Mutex mutex;
  Logger logger ABSL_GUARDED_BY(mutex) =
      MakeLogger(std::make_shared<spdlog::sinks::stderr_sink_mt>(), v1::LoggingConfig(), "emberd");
  v1::LoggingConfig config ABSL_GUARDED_BY(mutex);
  std::string process ABSL_GUARDED_BY(mutex) = "emberd";
};

// Nothing has changed if the file cannot be opened.
absl::Status SetCurrent(const v1::LoggingConfig& config, const std::string& process) {
  ASSIGN_OR_RETURN(spdlog::sink_ptr sink, MakeSink(config.file()));
  Current& current = Current::Get();
  absl::MutexLock lock(&current.mutex);
  current.logger = MakeLogger(std::move(sink), config, process);
  current.config = config;
  current.process = process;
  return absl::OkStatus();
}

thread_local int quiet = 0;

// gRPC says the same for each connection that is tried, so it is logged at most once a minute.
void LogFromGrpc(gpr_log_func_args* args) {
  if (quiet > 0) return;
  static auto* const log = new KeyedLog(absl::Minutes(1));
  const LogLevel level = args->severity == GPR_LOG_SEVERITY_ERROR  ? LogLevel::kWarning
                         : args->severity == GPR_LOG_SEVERITY_INFO ? LogLevel::kInfo
                                                                   : LogLevel::kDebug;
  log->Log(args->message, level, args->message, {{"source", "grpc"}});
}

// Protobuf complains about every damaged message. The caller is told by a status; a log line each
// would let anyone fill the disk.
void LogFromProtobuf(google::protobuf::LogLevel, const char*, int, const std::string& message) {
  Log(LogLevel::kDebug, message, {{"source", "protobuf"}});
}

}  // namespace

LogField::LogField(std::string_view key, double value)
    : key(key), value(absl::StrCat(value)), bare(std::isfinite(value)) {}

QuietGrpc::QuietGrpc() { ++quiet; }
QuietGrpc::~QuietGrpc() { --quiet; }

absl::Status SetUpLogging(const v1::LoggingConfig& config, const std::string& process) {
  RETURN_IF_ERROR(SetCurrent(config, process));
  gpr_set_log_function(LogFromGrpc);
  google::protobuf::SetLogHandler(LogFromProtobuf);
  return absl::OkStatus();
}

void ReopenLog() {
  v1::LoggingConfig config;
  std::string process;
  {
    Current& current = Current::Get();
    absl::ReaderMutexLock lock(&current.mutex);
    config = current.config;
    process = current.process;
  }
  if (config.file().empty()) return;
  const absl::Status status = SetCurrent(config, process);
  if (status.ok()) {
    Log(LogLevel::kInfo, "the log goes on in a file that was opened anew");
  } else {
    Log(LogLevel::kError, "the log goes on in its old file", {{"reason", status.message()}});
  }
}

bool LogsToFile() {
  Current& current = Current::Get();
  absl::ReaderMutexLock lock(&current.mutex);
  return !current.config.file().empty();
}

void Log(LogLevel level, std::string_view message, const std::vector<LogField>& fields) {
  Current& current = Current::Get();
  Logger logger;
  {
    absl::ReaderMutexLock lock(&current.mutex);
    logger = current.logger;
  }
  const auto level_of_sink = ToSpdlog(static_cast<v1::LoggingConfig::Level>(level));
  if (!logger.sink->should_log(level_of_sink)) return;
  const std::string line = logger.json ? JsonTail(message, fields) : TextTail(message, fields);
  logger.sink->log(level_of_sink, spdlog::string_view_t(line.data(), line.size()));
}

void RateLimitedLog::Log(LogLevel level, std::string_view message, std::vector<LogField> fields) {
  LogAt(SteadyNow(), level, message, std::move(fields));
}

void RateLimitedLog::LogAt(absl::Time now, LogLevel level, std::string_view message,
                           std::vector<LogField> fields) {
  {
    absl::MutexLock lock(&mutex_);
    if (now < next_) {
      ++suppressed_;
      return;
    }
    next_ = now + period_;
    if (suppressed_ > 0) fields.emplace_back("suppressed", suppressed_);
    suppressed_ = 0;
  }
  ops::Log(level, message, fields);
}

void KeyedLog::Log(const std::string& key, LogLevel level, std::string_view message,
                   std::vector<LogField> fields) {
  std::shared_ptr<RateLimitedLog> log;
  {
    absl::MutexLock lock(&mutex_);
    if (logs_.size() >= kMaxKeys && !logs_.contains(key)) {
      absl::erase_if(logs_,
                     [now = SteadyNow()](const auto& entry) { return entry.second->IsOver(now); });
    }
    const bool shared = logs_.size() >= kMaxKeys && !logs_.contains(key);
    std::shared_ptr<RateLimitedLog>& entry = logs_[shared ? "" : key];
    if (entry == nullptr) entry = std::make_shared<RateLimitedLog>(period_);
    log = entry;
  }
  log->Log(level, message, std::move(fields));
}

}  // namespace emberd::ops
