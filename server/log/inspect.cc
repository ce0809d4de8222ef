#include "server/log/inspect.h"

#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/files/files.h"
#include "server/log/log_format.h"
#include "server/log/log_reader.h"

namespace emberd::log {
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
    const std::string path = files::PathIn(folder, name);
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
  ASSIGN_OR_RETURN(const std::vector<std::string> folders, files::FoldersIn(folder));
  for (const std::string& name : folders) {
    const std::string inside = files::PathIn(folder, name);
    const std::string log = name == "log" ? inside : files::PathIn(inside, "log");
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

namespace {

using internal::v1::LogRecord;
using internal::v1::LogState;
using internal::v1::MutationName;

std::string ChangeName(const MutationName& name) {
  return absl::StrCat(name.client_id(), "/", name.sequence());
}

std::string StepName(const std::string& group, int64_t step) {
  return absl::StrCat(group, "/", step);
}

std::string HexOf(uint64_t id) { return absl::StrCat(absl::Hex(id, absl::kZeroPad16)); }

// "3 rows updated, 1 skipped"
template <class Counts>
std::string RowsText(const Counts& made) {
  if (made.failed()) return "failed";
  std::string text = absl::StrCat(made.rows_updated(), " rows updated");
  if (made.rows_skipped() > 0) absl::StrAppend(&text, ", ", made.rows_skipped(), " skipped");
  return text;
}

// What a record is called: the name of its field.
std::string KindOf(const LogRecord& record) {
  const auto* const field = LogRecord::descriptor()->FindFieldByNumber(record.kind_case());
  return field == nullptr ? "unknown" : std::string(field->name());
}

}  // namespace

std::string EntryWriter::ModelName(uint64_t id) const {
  const auto name = names_.find(id);
  return name == names_.end() ? HexOf(id) : name->second;
}

void EntryWriter::Learn(const LogRecord& record) {
  for (const auto& model : record.state().models()) {
    names_[model.create().model_id()] = model.create().config().name();
  }
  if (record.has_model_made()) {
    const auto& create = record.model_made().create();
    names_[create.model_id()] = create.config().name();
  }
  for (const auto& held : record.state().votes()) {
    changes_[ChangeName(held.vote().mutation())] = held.vote().model_id();
  }
  if (record.has_vote()) {
    changes_[ChangeName(record.vote().mutation())] = record.vote().model_id();
  }
}

LogEntry EntryWriter::Write(const LogRecord& record, const LogPosition& position) {
  Learn(record);
  LogEntry entry;
  entry.sequence = position.sequence;
  entry.segment = position.segment;
  entry.offset = position.offset;
  entry.kind = KindOf(record);
  entry.bytes = position.bytes;
  if (const auto* const blob = BlobOf(record); blob != nullptr) {
    entry.bytes += static_cast<int64_t>(blob->bytes());
  }
  Describe(record, &entry);
  if (record.has_made()) changes_.erase(ChangeName(record.made().mutation()));
  if (record.has_decision() && !record.decision().commit()) {
    changes_.erase(ChangeName(record.decision().mutation()));
  }
  return entry;
}

void EntryWriter::Describe(const LogRecord& record, LogEntry* entry) const {
  switch (record.kind_case()) {
    case LogRecord::kState:
      return DescribeState(record.state(), entry);
    case LogRecord::kVote:
    case LogRecord::kAttempt:
    case LogRecord::kDecision:
    case LogRecord::kMade:
      return DescribeChange(record, entry);
    case LogRecord::kPart:
    case LogRecord::kStepDecided:
    case LogRecord::kStepMade:
      return DescribeStep(record, entry);
    case LogRecord::kGroupOpened:
    case LogRecord::kGroupEnded:
    case LogRecord::kGroupForgotten:
      return DescribeGroup(record, entry);
    default:
      return DescribeModel(record, entry);
  }
}

void EntryWriter::DescribeState(const LogState& state, LogEntry* entry) const {
  int64_t changes = 0;
  for (const auto& client : state.clients()) changes += client.made_size();
  entry->details = absl::StrCat(state.models_size(), " models, ", state.clients_size(),
                                " clients with ", changes, " changes, ", state.votes_size(),
                                " votes, ", state.groups_size(), " groups");
}

void EntryWriter::DescribeModel(const LogRecord& record, LogEntry* entry) const {
  switch (record.kind_case()) {
    case LogRecord::kModelMade: {
      const auto& made = record.model_made();
      entry->model = ModelName(made.create().model_id());
      entry->details = absl::StrCat("history ", HexOf(made.create().history()));
      if (made.checkpoint_id() != 0) {
        absl::StrAppend(&entry->details, ", rows of checkpoint ", HexOf(made.checkpoint_id()));
      }
      return;
    }
    case LogRecord::kModelRemoved:
      entry->model = ModelName(record.model_removed().model_id());
      return;
    case LogRecord::kModelServed:
      entry->model = ModelName(record.model_served().model_id());
      for (const v1::StackLimit& stack : record.model_served().limits().stacks()) {
        absl::StrAppend(&entry->details, entry->details.empty() ? "limits " : ", ", stack.stack(),
                        " ", stack.max_ids_per_partition(), "/",
                        stack.max_unique_ids_per_partition());
      }
      return;
    case LogRecord::kModelPinned:
      entry->model = ModelName(record.model_pinned().model_id());
      entry->details = record.model_pinned().pinned() ? "pinned" : "no longer pinned";
      return;
    case LogRecord::kModelRenewed:
      entry->model = ModelName(record.model_renewed().model_id());
      entry->details = absl::StrCat("history ", HexOf(record.model_renewed().history()));
      return;
    case LogRecord::kHistoryDropped:
      entry->details = absl::StrCat("history ", HexOf(record.history_dropped().history()));
      return;
    case LogRecord::kCheckpoint:
      entry->model = ModelName(record.checkpoint().model_id());
      entry->details = absl::StrCat("checkpoint ", HexOf(record.checkpoint().checkpoint_id()),
                                    " as of segment ", record.checkpoint().segment());
      return;
    default:
      return;
  }
}

void EntryWriter::DescribeChange(const LogRecord& record, LogEntry* entry) const {
  const auto name = [&](const MutationName& mutation) {
    entry->subject = ChangeName(mutation);
    const auto model = changes_.find(entry->subject);
    if (model != changes_.end()) entry->model = ModelName(model->second);
  };
  if (record.has_vote()) {
    name(record.vote().mutation());
    entry->attempt = record.vote().attempt();
    entry->details = record.vote().assigns_rows() ? "rows to assign" : "update";
  } else if (record.has_attempt()) {
    name(record.attempt().mutation());
    entry->attempt = record.attempt().attempt();
  } else if (record.has_decision()) {
    name(record.decision().mutation());
    entry->attempt = record.decision().attempt();
    entry->details = record.decision().commit() ? "commit" : "abort";
  } else {
    name(record.made().mutation());
    entry->details = RowsText(record.made());
  }
}

void EntryWriter::DescribeGroup(const LogRecord& record, LogEntry* entry) const {
  if (record.has_group_opened()) {
    const auto& opened = record.group_opened();
    entry->model = ModelName(opened.model_id());
    entry->subject = opened.group();
    entry->details =
        absl::StrCat("generation ", opened.generation(), ", ", opened.size(), " ranks");
  } else if (record.has_group_ended()) {
    entry->model = ModelName(record.group_ended().model_id());
    entry->subject = record.group_ended().group();
  } else {
    entry->model = ModelName(record.group_forgotten().model_id());
    entry->subject = record.group_forgotten().group();
  }
}

void EntryWriter::DescribeStep(const LogRecord& record, LogEntry* entry) const {
  if (record.has_part()) {
    const auto& part = record.part().part();
    entry->model = ModelName(record.part().model_id());
    entry->subject = StepName(part.group(), part.step());
    entry->details = absl::StrCat("rank ", part.rank(), " of ", part.size(), ", generation ",
                                  part.generation(), part.skip() ? ", skipped" : "");
  } else if (record.has_step_decided()) {
    const auto& decided = record.step_decided();
    entry->model = ModelName(decided.model_id());
    entry->subject = StepName(decided.group(), decided.step());
    entry->details = decided.commit() ? "commit" : "abort";
  } else {
    const auto& made = record.step_made();
    entry->model = ModelName(made.model_id());
    entry->subject = StepName(made.group(), made.step());
    entry->details = RowsText(made);
  }
}

}  // namespace emberd::log
