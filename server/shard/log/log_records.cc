#include "server/shard/log/log_records.h"

namespace emberd::server {
namespace {

template <typename Message>
void SetGroup(uint64_t model_id, const std::string& group, Message* message) {
  message->set_model_id(model_id);
  message->set_group(group);
}

template <typename Message>
void SetResult(const absl::StatusOr<RowCounts>& rows, Message* message) {
  message->set_failed(!rows.ok());
  if (rows.ok()) SetRowCounts(*rows, message);
}

}  // namespace

internal::v1::LogRecord VoteRecord(const internal::v1::MutationName& mutation, uint64_t attempt,
                                   uint64_t model_id, bool assigns_rows,
                                   const internal::v1::LogBlob& blob) {
  internal::v1::LogRecord record;
  internal::v1::LogVote* vote = record.mutable_vote();
  *vote->mutable_mutation() = mutation;
  vote->set_attempt(attempt);
  vote->set_model_id(model_id);
  vote->set_assigns_rows(assigns_rows);
  *vote->mutable_blob() = blob;
  return record;
}

internal::v1::LogRecord AttemptRecord(const internal::v1::MutationName& mutation,
                                      uint64_t attempt) {
  internal::v1::LogRecord record;
  *record.mutable_attempt()->mutable_mutation() = mutation;
  record.mutable_attempt()->set_attempt(attempt);
  return record;
}

internal::v1::LogRecord DecisionRecord(const internal::v1::MutationName& mutation, uint64_t attempt,
                                       bool commit) {
  internal::v1::LogRecord record;
  *record.mutable_decision()->mutable_mutation() = mutation;
  record.mutable_decision()->set_attempt(attempt);
  record.mutable_decision()->set_commit(commit);
  return record;
}

internal::v1::LogRecord MadeRecord(const internal::v1::MutationName& mutation,
                                   const absl::StatusOr<RowCounts>& rows) {
  internal::v1::LogRecord record;
  *record.mutable_made()->mutable_mutation() = mutation;
  SetResult(rows, record.mutable_made());
  return record;
}

internal::v1::LogRecord OpenedRecord(const internal::v1::OpenGroupRequest& request) {
  internal::v1::LogRecord record;
  *record.mutable_group_opened() = request;
  return record;
}

internal::v1::LogRecord PartRecord(uint64_t model_id, const internal::v1::GroupPart& part,
                                   const internal::v1::LogBlob& blob) {
  internal::v1::LogRecord record;
  record.mutable_part()->set_model_id(model_id);
  *record.mutable_part()->mutable_part() = part;
  *record.mutable_part()->mutable_blob() = blob;
  return record;
}

internal::v1::LogRecord DecidedRecord(const internal::v1::DecideStepRequest& request) {
  internal::v1::LogRecord record;
  *record.mutable_step_decided() = request;
  return record;
}

internal::v1::LogRecord StepMadeRecord(uint64_t model_id, const std::string& group, int64_t step,
                                       const absl::StatusOr<RowCounts>& rows) {
  internal::v1::LogRecord record;
  SetGroup(model_id, group, record.mutable_step_made());
  record.mutable_step_made()->set_step(step);
  SetResult(rows, record.mutable_step_made());
  return record;
}

internal::v1::LogRecord EndedRecord(uint64_t model_id, const std::string& group) {
  internal::v1::LogRecord record;
  SetGroup(model_id, group, record.mutable_group_ended());
  return record;
}

internal::v1::LogRecord ForgottenRecord(uint64_t model_id, const std::string& group) {
  internal::v1::LogRecord record;
  SetGroup(model_id, group, record.mutable_group_forgotten());
  return record;
}

internal::v1::LogRecord ModelMadeRecord(const internal::v1::CreateModelRequest& create) {
  internal::v1::LogRecord record;
  *record.mutable_model_made()->mutable_create() = create;
  return record;
}

internal::v1::LogRecord ModelRemovedRecord(uint64_t model_id) {
  internal::v1::LogRecord record;
  record.mutable_model_removed()->set_model_id(model_id);
  return record;
}

internal::v1::LogRecord ModelServedRecord(uint64_t model_id,
                                          const internal::v1::ModelLimits* limits) {
  internal::v1::LogRecord record;
  record.mutable_model_served()->set_model_id(model_id);
  if (limits != nullptr) *record.mutable_model_served()->mutable_limits() = *limits;
  return record;
}

internal::v1::LogRecord ModelPinnedRecord(uint64_t model_id, bool pinned) {
  internal::v1::LogRecord record;
  record.mutable_model_pinned()->set_model_id(model_id);
  record.mutable_model_pinned()->set_pinned(pinned);
  return record;
}

internal::v1::LogRecord ModelRenewedRecord(uint64_t model_id, uint64_t history) {
  internal::v1::LogRecord record;
  record.mutable_model_renewed()->set_model_id(model_id);
  record.mutable_model_renewed()->set_history(history);
  return record;
}

internal::v1::LogRecord HistoryDroppedRecord(uint64_t history) {
  internal::v1::LogRecord record;
  record.mutable_history_dropped()->set_history(history);
  return record;
}

internal::v1::LogRecord CheckpointRecord(uint64_t model_id, uint64_t history,
                                         uint64_t checkpoint_id, uint64_t segment) {
  internal::v1::LogRecord record;
  record.mutable_checkpoint()->set_model_id(model_id);
  record.mutable_checkpoint()->set_history(history);
  record.mutable_checkpoint()->set_checkpoint_id(checkpoint_id);
  record.mutable_checkpoint()->set_segment(segment);
  return record;
}

}  // namespace emberd::server
