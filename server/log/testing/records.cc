#include "server/log/testing/records.h"

#include <random>
#include <utility>

#include "base/status.h"

namespace emberd::log {

using internal::v1::LogBlob;
using internal::v1::LogRecord;

LogRecord StateRecord(uint64_t number) {
  LogRecord record;
  record.mutable_state()->set_forgotten_generation(number);
  return record;
}

LogRecord PlainRecord(uint64_t number, size_t padding) {
  LogRecord record;
  record.mutable_group_ended()->set_model_id(number);
  record.mutable_group_ended()->set_group(std::string(padding, 'g'));
  return record;
}

LogRecord VoteRecord(uint64_t number, const LogBlob& blob) {
  LogRecord record;
  record.mutable_vote()->set_attempt(number);
  *record.mutable_vote()->mutable_blob() = blob;
  return record;
}

uint64_t NumberOf(const LogRecord& record) {
  if (record.has_state()) return record.state().forgotten_generation();
  if (record.has_vote()) return record.vote().attempt();
  return record.group_ended().model_id();
}

std::string BlobBytes(uint64_t number, size_t bytes) {
  std::mt19937_64 random(number);
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

absl::StatusOr<LogBlob> AppendBytes(LogWriter& writer, const std::string& bytes) {
  const absl::Span<const char> piece(bytes.data(), bytes.size());
  return writer.AppendBlob({&piece, 1});
}

std::vector<uint64_t> WholeLog::numbers() const {
  std::vector<uint64_t> all;
  for (const ReadRecord& read : records) all.push_back(NumberOf(read.record));
  return all;
}

absl::StatusOr<WholeLog> ReadWhole(const std::string& folder, LogFiles& files) {
  WholeLog log;
  ASSIGN_OR_RETURN(log.end, ReadLog(folder, files.BootId(),
                                    [&](const LogRecord& record, const LogPosition& position) {
                                      log.records.push_back({record, position});
                                      return absl::OkStatus();
                                    }));
  return log;
}

}  // namespace emberd::log
