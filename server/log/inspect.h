// What is in logs, for people: of folders, and of each record.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/internal/v1/log.pb.h"
#include "server/log/log_reader.h"

namespace emberd::log {

// The folders of logs that a folder stands for: itself, that of a shard, or those of all shards of
// a storage.directory, in order. NOT_FOUND: there is no log.
absl::StatusOr<std::vector<std::string>> FindLogs(const std::string& folder);

// A record, in words.
struct LogEntry {
  uint64_t sequence = 0;
  uint64_t segment = 0;
  int64_t offset = 0;
  std::string kind;     // "vote"
  std::string model;    // its name, or its id in 16 hex digits where the log has not named it yet
  std::string subject;  // "CLIENT/SEQUENCE" of a change, "GROUP/STEP" of a group's step
  uint64_t attempt = 0;
  std::string details;  // "commit"
  int64_t bytes = 0;    // with its blob
};

struct LogSummary : LogEnd {
  uint64_t records = 0;
  uint64_t blobs = 0;
  int64_t bytes = 0;  // of both
};

// Calls `show` with each record of a log, in order and once. Errors are those of ReadLog, and of
// `show`, which ends the reading. The shard may be at work: see ReadMovingLog.
absl::StatusOr<LogSummary> ShowLog(const std::string& folder,
                                   absl::FunctionRef<absl::Status(const LogEntry&)> show);
// Reads every record and every blob that one of them names. DATA_LOSS: the first damage. The shard
// may be at work: see ReadMovingLog.
absl::StatusOr<LogSummary> VerifyLog(const std::string& folder);

// Calls `read`, and calls it again where it has failed and the files of the log are not what they
// were: what the shard writes, cuts or drops meanwhile may look like damage. Until it has failed in
// the same way twice, and a few times at most. The summary is that of the last reading.
absl::StatusOr<LogSummary> ReadMovingLog(const std::string& folder,
                                         absl::FunctionRef<absl::StatusOr<LogSummary>()> read);

// Puts the records of one log into words. It is shown them in order, and so learns the names of
// models.
class EntryWriter {
 public:
  LogEntry Write(const internal::v1::LogRecord& record, const LogPosition& position);

 private:
  void Learn(const internal::v1::LogRecord& record);
  std::string ModelName(uint64_t id) const;
  void Describe(const internal::v1::LogRecord& record, LogEntry* entry) const;
  // `kind`: the message in the record's oneof.
  template <typename Kind>
  void DescribeKind(const Kind& kind, LogEntry* entry) const;

  std::map<uint64_t, std::string> names_;    // of models
  std::map<std::string, uint64_t> changes_;  // models of changes that are held
};

}  // namespace emberd::log
