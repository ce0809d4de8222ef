#include "server/log/inspect.h"

#include <filesystem>
#include <system_error>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/suggest.h"
#include "server/files/files.h"
#include "server/log/log_files.h"

namespace emberd::log {
namespace {

using internal::v1::LogBlob;
using internal::v1::LogRecord;

absl::StatusOr<bool> HoldsLog(const std::string& folder) {
  ASSIGN_OR_RETURN(const LogFolder found, ListLog(folder));
  return found.newest() > 0;
}

absl::StatusOr<LogSummary> VerifyOnce(const std::string& folder) {
  Buffer<char> buffer;
  LogSummary counted;
  ASSIGN_OR_RETURN(static_cast<LogEnd&>(counted),
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
  return counted;
}

absl::StatusOr<LogSummary> ShowOnce(const std::string& folder,
                                    absl::FunctionRef<absl::Status(const LogEntry&)> show) {
  EntryWriter writer;
  LogSummary counted;
  ASSIGN_OR_RETURN(static_cast<LogEnd&>(counted),
                   ReadLog(folder, [&](const LogRecord& record, const LogPosition& position) {
                     const LogEntry entry = writer.Write(record, position);
                     ++counted.records;
                     counted.blobs += BlobOf(record) == nullptr ? 0 : 1;
                     counted.bytes += entry.bytes;
                     return show(entry);
                   }));
  return counted;
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

std::string ChangeName(const internal::v1::MutationName& name) {
  return absl::StrCat(name.client_id(), "/", name.sequence());
}

std::string StepName(const std::string& group, int64_t step) {
  return absl::StrCat(group, "/", step);
}

// What each kind of record has to tell besides its model and its subject.
template <typename Kind>
std::string DetailsOf(const Kind& kind) {
  if constexpr (requires { kind.commit(); }) return kind.commit() ? "commit" : "abort";
  if constexpr (requires { kind.pinned(); }) return kind.pinned() ? "pinned" : "no longer pinned";
  if constexpr (requires { kind.rows_updated(); }) {
    if (kind.failed()) return "failed";
    std::string text = absl::StrCat(kind.rows_updated(), " rows updated");
    if (kind.rows_skipped() > 0) absl::StrAppend(&text, ", ", kind.rows_skipped(), " skipped");
    return text;
  }
  // DecideStepRequest has one, too: it is told apart above.
  if constexpr (requires { kind.history(); }) {
    return absl::StrCat("history ", HexId(kind.history()));
  }
  return "";
}

std::string DetailsOf(const internal::v1::LogBegins& begins) {
  return absl::StrCat("with segment ", begins.segment());
}

std::string DetailsOf(const internal::v1::LogState& state) {
  int64_t changes = 0;
  for (const auto& client : state.clients()) changes += client.made_size();
  return absl::StrCat(state.models_size(), " models, ", state.clients_size(), " clients with ",
                      changes, " changes, ", state.votes_size(), " votes, ", state.groups_size(),
                      " groups");
}

std::string DetailsOf(const internal::v1::LogModelMade& made) {
  std::string details = absl::StrCat("history ", HexId(made.create().history()));
  if (made.checkpoint_id() != 0) {
    absl::StrAppend(&details, ", rows of checkpoint ", HexId(made.checkpoint_id()));
  }
  return details;
}

std::string DetailsOf(const internal::v1::LogModelServed& served) {
  std::string details;
  for (const v1::StackLimit& stack : served.limits().stacks()) {
    absl::StrAppend(&details, details.empty() ? "limits " : ", ", stack.stack(), " ",
                    stack.max_ids_per_partition(), "/", stack.max_unique_ids_per_partition());
  }
  return details;
}

std::string DetailsOf(const internal::v1::LogCheckpoint& made) {
  return absl::StrCat("checkpoint ", HexId(made.checkpoint_id()), " as of segment ",
                      made.segment());
}

std::string DetailsOf(const internal::v1::LogVote& vote) {
  return vote.assigns_rows() ? "rows to assign" : "update";
}

std::string DetailsOf(const internal::v1::OpenGroupRequest& opened) {
  return absl::StrCat("generation ", opened.generation(), ", ", opened.size(), " ranks");
}

std::string DetailsOf(const internal::v1::LogPart& from) {
  const internal::v1::GroupPart& part = from.part();
  return absl::StrCat("rank ", part.rank(), " of ", part.size(), ", generation ",
                      part.generation());
}

// What a record is called: the name of its field.
std::string KindOf(const LogRecord& record) {
  const auto* const field = LogRecord::descriptor()->FindFieldByNumber(record.kind_case());
  return field == nullptr ? "unknown" : std::string(field->name());
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

std::string EntryWriter::ModelName(uint64_t id) const {
  const auto name = names_.find(id);
  return name == names_.end() ? HexId(id) : name->second;
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

template <typename Kind>
void EntryWriter::DescribeKind(const Kind& kind, LogEntry* entry) const {
  if constexpr (requires { kind.model_id(); }) entry->model = ModelName(kind.model_id());
  if constexpr (requires { kind.create(); }) entry->model = ModelName(kind.create().model_id());
  if constexpr (requires { kind.mutation(); }) {
    entry->subject = ChangeName(kind.mutation());
    const auto model = changes_.find(entry->subject);
    if (model != changes_.end()) entry->model = ModelName(model->second);
  }
  if constexpr (requires { kind.attempt(); }) entry->attempt = kind.attempt();
  if constexpr (requires { kind.group(); }) entry->subject = kind.group();
  if constexpr (requires { kind.step(); }) entry->subject = StepName(kind.group(), kind.step());
  if constexpr (requires { kind.part(); }) {
    entry->subject = StepName(kind.part().group(), kind.part().step());
  }
  entry->details = DetailsOf(kind);
}

void EntryWriter::Describe(const LogRecord& record, LogEntry* entry) const {
  switch (record.kind_case()) {
#define EMBERD_KIND(number, field) \
  case LogRecord::number:          \
    return DescribeKind(record.field(), entry)
    EMBERD_KIND(kState, state);
    EMBERD_KIND(kModelMade, model_made);
    EMBERD_KIND(kModelRemoved, model_removed);
    EMBERD_KIND(kModelServed, model_served);
    EMBERD_KIND(kModelPinned, model_pinned);
    EMBERD_KIND(kModelRenewed, model_renewed);
    EMBERD_KIND(kHistoryDropped, history_dropped);
    EMBERD_KIND(kCheckpoint, checkpoint);
    EMBERD_KIND(kVote, vote);
    EMBERD_KIND(kAttempt, attempt);
    EMBERD_KIND(kDecision, decision);
    EMBERD_KIND(kMade, made);
    EMBERD_KIND(kGroupOpened, group_opened);
    EMBERD_KIND(kPart, part);
    EMBERD_KIND(kStepDecided, step_decided);
    EMBERD_KIND(kStepMade, step_made);
    EMBERD_KIND(kGroupEnded, group_ended);
    EMBERD_KIND(kGroupForgotten, group_forgotten);
    EMBERD_KIND(kBegins, begins);
#undef EMBERD_KIND
    case LogRecord::kCheckpoints:
      for (const auto& made : record.checkpoints().made()) DescribeKind(made, entry);
      absl::StrAppend(&entry->details, " (models: ", record.checkpoints().made_size(), ")");
      return;
    case LogRecord::KIND_NOT_SET:
      return;
  }
}

}  // namespace emberd::log
