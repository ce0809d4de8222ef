#include "server/log/inspect.h"

#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/folders.h"
#include "server/log/log_entry.h"
#include "server/log/log_format.h"
#include "server/log/log_reader.h"

namespace emberd::server {
namespace {

using internal::v1::LogBlob;
using internal::v1::LogRecord;

absl::StatusOr<bool> HoldsLog(const std::string& folder) {
  ASSIGN_OR_RETURN(const LogFolder found, ListLog(folder));
  return found.newest() > 0;
}

// `counted` has the figures.
LogSummary SummaryOf(const LogEnd& end, LogSummary counted) {
  LogSummary& summary = counted;
  summary.first_segment = end.first_segment;
  summary.next_segment = end.next_segment;
  summary.next_sequence = end.next_sequence;
  summary.shard = end.shard;
  summary.shards = end.shards;
  summary.fsync = v1::StorageConfig::Fsync_Name(end.fsync);
  summary.torn_bytes = end.torn_bytes;
  summary.torn = end.torn;
  return summary;
}

absl::StatusOr<LogSummary> VerifyOnce(const std::string& folder) {
  Buffer<char> buffer;
  LogSummary counted;
  ASSIGN_OR_RETURN(const LogEnd end,
                   ReadLog(folder, [&](const LogRecord& record, const LogPosition& position) {
                     counted.bytes += position.bytes;
                     // What later states hold has records of its own.
                     if (counted.records++ > 0 && record.has_state()) return absl::OkStatus();
                     for (const LogBlob& blob : BlobsOf(record)) {
                       ++counted.blobs;
                       counted.bytes += static_cast<int64_t>(blob.bytes());
                       RETURN_IF_ERROR(ReadBlob(folder, blob, buffer).status());
                     }
                     return absl::OkStatus();
                   }));
  return SummaryOf(end, std::move(counted));
}

absl::StatusOr<LogSummary> ShowOnce(const std::string& folder,
                                    absl::FunctionRef<absl::Status(const LogEntry&)> show) {
  EntryWriter writer;
  LogSummary counted;
  ASSIGN_OR_RETURN(const LogEnd end,
                   ReadLog(folder, [&](const LogRecord& record, const LogPosition& position) {
                     const LogEntry entry = writer.Write(record, position);
                     ++counted.records;
                     counted.blobs += BlobOf(record) == nullptr ? 0 : 1;
                     counted.bytes += entry.bytes;
                     return show(entry);
                   }));
  return SummaryOf(end, std::move(counted));
}

// A file's name, its bytes, and when it was written last.
using FileLook = std::tuple<std::string, int64_t, std::filesystem::file_time_type>;

absl::StatusOr<std::vector<FileLook>> LookAt(const std::string& folder) {
  ASSIGN_OR_RETURN(const LogFolder found, ListLog(folder));
  std::vector<FileLook> looks;
  for (const auto& [segment, name] : found.files()) {
    const std::string path = PathIn(folder, name);
    std::error_code gone;
    looks.emplace_back(name, LogFileBytes(path), std::filesystem::last_write_time(path, gone));
  }
  return looks;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> FindLogs(const std::string& folder) {
  ASSIGN_OR_RETURN(const bool own, HoldsLog(folder));
  if (own) return std::vector<std::string>{folder};
  std::vector<std::string> logs;
  ASSIGN_OR_RETURN(const std::vector<std::string> folders, FoldersIn(folder));
  for (const std::string& name : folders) {
    const std::string inside = PathIn(folder, name);
    const std::string log = name == "log" ? inside : PathIn(inside, "log");
    if (name != "log" && !absl::StartsWith(name, "shard-")) continue;
    ASSIGN_OR_RETURN(const bool holds, HoldsLog(log));
    if (holds) logs.push_back(log);
  }
  if (!logs.empty()) return logs;
  return absl::NotFoundError(
      absl::StrCat(folder,
                   ": there is no log here, in log/ or in shard-*/log/; give the cluster's "
                   "storage.directory, the folder of a shard in it, or that of its log"));
}

absl::StatusOr<LogSummary> ShowLog(const std::string& folder,
                                   absl::FunctionRef<absl::Status(const LogEntry&)> show) {
  uint64_t shown = 0;
  absl::Status stopped;
  const auto read = [&]() -> absl::StatusOr<LogSummary> {
    const absl::StatusOr<LogSummary> summary = ShowOnce(folder, [&](const LogEntry& entry) {
      if (entry.sequence <= shown) return absl::OkStatus();
      shown = entry.sequence;
      return stopped = show(entry);
    });
    // What `show` says is no reason to read again.
    return stopped.ok() ? summary : LogSummary();
  };
  const absl::StatusOr<LogSummary> summary = ReadMovingLog(folder, read);
  RETURN_IF_ERROR(stopped);
  return summary;
}

absl::StatusOr<LogSummary> ReadMovingLog(const std::string& folder,
                                         absl::FunctionRef<absl::StatusOr<LogSummary>()> read) {
  constexpr int kMostTries = 10;
  absl::Status last;
  for (int tries = 1;; ++tries) {
    ASSIGN_OR_RETURN(const std::vector<FileLook> before, LookAt(folder));
    absl::StatusOr<LogSummary> summary = read();
    // What is wrong twice in the same place stays so.
    if (summary.ok() || tries == kMostTries || summary.status() == last) return summary;
    last = summary.status();
    ASSIGN_OR_RETURN(const std::vector<FileLook> after, LookAt(folder));
    if (before == after) return summary;
  }
}

absl::StatusOr<LogSummary> VerifyLog(const std::string& folder) {
  return ReadMovingLog(folder, [&] { return VerifyOnce(folder); });
}

}  // namespace emberd::server
