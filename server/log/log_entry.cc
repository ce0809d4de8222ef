#include "server/log/log_entry.h"

#include "absl/strings/str_cat.h"

namespace emberd::server {
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

}  // namespace emberd::server
