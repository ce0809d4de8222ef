// emberctl log show and verify: what is in the logs of shards. Asks no server.
#include <string>

#include "absl/strings/str_cat.h"
#include "base/command_line.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/verbs/verb.h"
#include "server/log/inspect.h"

namespace emberd::emberctl {
namespace {

using log::LogEntry;
using log::LogSummary;

constexpr char kFolderHelp[] =
    "storage.directory of a cluster, the folder of a shard in it, or that of its log";

struct LogShowOptions {
  std::string folder;
  uint64_t from = 1;
  int64_t limit = 0;  // 0: none
};

std::string ColumnOr(const std::string& text) { return text.empty() ? "-" : text; }

// Padded by hand: a log is too long to be laid out before its first line is written.
std::string Padded(std::string text, size_t width) {
  if (text.size() < width) text.resize(width, ' ');
  return text + "  ";
}

std::string LineOf(const std::string& sequence, const std::string& place, const LogEntry& entry,
                   const std::string& attempt, const std::string& bytes) {
  std::string line =
      absl::StrCat(Padded(sequence, 10), Padded(place, 16), Padded(entry.kind, 15),
                   Padded(ColumnOr(entry.model), 16), Padded(ColumnOr(entry.subject), 24),
                   Padded(attempt, 16), Padded(bytes, 9), entry.details);
  line.resize(line.find_last_not_of(' ') + 1);
  return line;
}

void PrintHeading(std::ostream& out) {
  LogEntry heading;
  heading.kind = "record";
  heading.model = "model";
  heading.subject = "change or step";
  heading.details = "what";
  out << LineOf("sequence", "segment:byte", heading, "attempt", "bytes") << "\n";
}

void PrintEntry(const LogEntry& entry, std::ostream& out) {
  out << LineOf(absl::StrCat(entry.sequence), absl::StrCat(entry.segment, ":", entry.offset), entry,
                entry.attempt == 0 ? "-" : HexId(entry.attempt), Bytes(entry.bytes))
      << "\n";
}

Json JsonOf(const std::string& folder, const LogEntry& entry) {
  Json json = {{"log", folder},          {"sequence", entry.sequence}, {"segment", entry.segment},
               {"offset", entry.offset}, {"kind", entry.kind},         {"bytes", entry.bytes}};
  if (!entry.model.empty()) json["model"] = entry.model;
  if (!entry.subject.empty()) json["subject"] = entry.subject;
  if (entry.attempt != 0) json["attempt"] = HexId(entry.attempt);
  if (!entry.details.empty()) json["details"] = entry.details;
  return json;
}

absl::Status ShowOne(Session& session, const LogShowOptions& options, const std::string& folder) {
  if (!session.json) {
    session.out << folder << "\n";
    PrintHeading(session.out);
  }
  int64_t shown = 0;
  bool enough = false;  // which ends reading, without being an error
  const auto summary = log::ShowLog(folder, [&](const LogEntry& entry) {
    if (entry.sequence < options.from) return absl::OkStatus();
    enough = options.limit > 0 && shown == options.limit;
    if (enough) return absl::CancelledError("enough");
    ++shown;
    if (session.json) {
      session.out << Dump(JsonOf(folder, entry)) << "\n";
    } else {
      PrintEntry(entry, session.out);
    }
    return absl::OkStatus();
  });
  if (enough) return absl::OkStatus();
  RETURN_IF_ERROR(summary.status());
  if (!session.json && summary->torn_bytes > 0) {
    session.out << Bytes(summary->torn_bytes)
                << " after the last record are ignored: " << summary->torn << "\n";
  }
  return absl::OkStatus();
}

absl::Status ShowLogs(Session& session, const LogShowOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<std::string> logs, log::FindLogs(options.folder));
  for (const std::string& log : logs) RETURN_IF_ERROR(ShowOne(session, options, log));
  return absl::OkStatus();
}

std::string TextOf(const std::string& folder, const LogSummary& summary) {
  std::string text = absl::StrCat(
      folder, ": OK, shard ", summary.shard, " of ", summary.shards, ": ",
      Counted(static_cast<int64_t>(summary.records), "record"), " and ",
      Counted(static_cast<int64_t>(summary.blobs), "blob"), ", ", Bytes(summary.bytes), ", in ",
      Counted(static_cast<int64_t>(summary.next_segment - summary.first_segment), "segment"),
      ", up to record ", summary.next_sequence - 1);
  if (summary.torn_bytes > 0) {
    absl::StrAppend(&text, "; ", Bytes(summary.torn_bytes), " after it are ignored (", summary.torn,
                    ")");
  }
  return text;
}

Json JsonOf(const std::string& folder, const LogSummary& summary) {
  return {{"log", folder},
          {"shard", int64_t{summary.shard}},
          {"shards", int64_t{summary.shards}},
          {"fsync", v1::StorageConfig::Fsync_Name(summary.fsync)},
          {"records", summary.records},
          {"blobs", summary.blobs},
          {"bytes", summary.bytes},
          {"first_segment", summary.first_segment},
          {"next_segment", summary.next_segment},
          {"next_sequence", summary.next_sequence},
          {"torn_bytes", summary.torn_bytes},
          {"torn", summary.torn}};
}

absl::Status VerifyLogs(Session& session, const std::string& folder) {
  ASSIGN_OR_RETURN(const std::vector<std::string> logs, log::FindLogs(folder));
  Json all = Json::array();
  for (const std::string& log : logs) {
    ASSIGN_OR_RETURN(const LogSummary summary, log::VerifyLog(log));
    if (session.json) {
      all.push_back(JsonOf(log, summary));
    } else {
      session.out << TextOf(log, summary) << "\n";
    }
  }
  return session.json ? PrintJson(all, session.out) : absl::OkStatus();
}

}  // namespace

void AddLog(CLI::App& app, Session& session) {
  CLI::App& log = AddGroupOfVerbs(app, "log", "Show and check the logs of shards, without a server",
                                  "emberctl log verify /var/lib/emberd");
  auto [show, options] =
      AddVerb(log, session, "show", "List the records of logs, one per line",
              "emberctl log show /var/lib/emberd/shard-0002 --from 1000 --limit 20", ShowLogs);
  show->add_option("DIR", options->folder, kFolderHelp)->required();
  show->add_option("--from", options->from, "Begin with this record")
      ->check(Within(uint64_t{0}, uint64_t{1} << 50))  // -1 would be beyond all records
      ->capture_default_str();
  show->add_option("--limit", options->limit, "Show at most this many records of each log; 0: all")
      ->check(Within(int64_t{0}, int64_t{1} << 50))
      ->capture_default_str();
  auto [verify, folder] = AddVerb(
      log, session, "verify",
      "Read all records and blobs of logs, compare checksums, and show where the first damage is",
      "emberctl log verify /var/lib/emberd", VerifyLogs);
  verify->add_option("DIR", *folder, kFolderHelp)->required();
}

}  // namespace emberd::emberctl
