// Puts records into words.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "emberd/internal/v1/log.pb.h"
#include "server/log/inspect.h"
#include "server/log/log_reader.h"

namespace emberd::server {

// Of one log, whose records it is shown in order: so that it learns the names of models.
class EntryWriter {
 public:
  LogEntry Write(const internal::v1::LogRecord& record, const LogPosition& position);

 private:
  void Learn(const internal::v1::LogRecord& record);
  std::string ModelName(uint64_t id) const;
  void Describe(const internal::v1::LogRecord& record, LogEntry* entry) const;
  void DescribeState(const internal::v1::LogState& state, LogEntry* entry) const;
  void DescribeModel(const internal::v1::LogRecord& record, LogEntry* entry) const;
  void DescribeChange(const internal::v1::LogRecord& record, LogEntry* entry) const;
  void DescribeGroup(const internal::v1::LogRecord& record, LogEntry* entry) const;
  void DescribeStep(const internal::v1::LogRecord& record, LogEntry* entry) const;

  std::map<uint64_t, std::string> names_;    // of models
  std::map<std::string, uint64_t> changes_;  // models of changes that are held
};

}  // namespace emberd::server
