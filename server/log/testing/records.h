// Records for tests of the log, told apart by a number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/log/log_reader.h"
#include "server/log/log_writer.h"

namespace emberd::log {

internal::v1::LogRecord StateRecord(uint64_t number);
internal::v1::LogRecord PlainRecord(uint64_t number, size_t padding = 0);
internal::v1::LogRecord VoteRecord(uint64_t number, const internal::v1::LogBlob& blob);
uint64_t NumberOf(const internal::v1::LogRecord& record);

// Bytes that only `number` has.
std::string BlobBytes(uint64_t number, size_t bytes);
absl::StatusOr<internal::v1::LogBlob> AppendBytes(LogWriter& writer, const std::string& bytes);

struct ReadRecord {
  internal::v1::LogRecord record;
  LogPosition position;
};
struct WholeLog {
  std::vector<ReadRecord> records;
  LogEnd end;
  std::vector<uint64_t> numbers() const;
};
absl::StatusOr<WholeLog> ReadWhole(const std::string& folder, LogFiles& files = DiskLogFiles());

}  // namespace emberd::log
