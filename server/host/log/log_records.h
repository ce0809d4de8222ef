// The records of the log (log.proto), each from what it tells.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffer_pool.h"
#include "emberd/internal/v1/log.pb.h"
#include "server/host/mutation_record.h"
#include "shard/engine.h"
#include "shard/update/staged_update.h"

namespace emberd::host {

// The part of an update as bytes, and back: what the log keeps of it (LogPartHeader in log.proto).
// The entries are those that the engine has arranged, so that they need not be arranged again.

// Points into the part, which must outlive it.
class EncodedPart {
 public:
  explicit EncodedPart(const shard::CheckedPart& part);
  EncodedPart(const EncodedPart&) = delete;
  EncodedPart& operator=(const EncodedPart&) = delete;
  absl::Span<const absl::Span<const char>> pieces() const { return pieces_; }

 private:
  std::string head_;
  std::vector<absl::Span<const char>> pieces_;
};

// Checks all that it reads, but not again that gradients are finite: sums of rows may not be.
// `owner` keeps `bytes`, which begin at a multiple of 4; gradients stay there, entries go to
// buffers of `pool`. INVALID_ARGUMENT: these are not the bytes of a part of this model. NOT_FOUND:
// the engine does not know the model.
absl::StatusOr<std::shared_ptr<const shard::CheckedPart>> DecodePart(
    uint64_t model_id, absl::Span<const char> bytes, std::shared_ptr<const void> owner,
    shard::Engine* engine, BufferPool& pool);

internal::v1::LogRecord VoteRecord(const internal::v1::MutationName& mutation, uint64_t attempt,
                                   uint64_t model_id, bool assigns_rows,
                                   const internal::v1::LogBlob& blob);
internal::v1::LogRecord AttemptRecord(const internal::v1::MutationName& mutation, uint64_t attempt);
internal::v1::LogRecord DecisionRecord(const internal::v1::MutationName& mutation, uint64_t attempt,
                                       bool commit);
internal::v1::LogRecord MadeRecord(const internal::v1::MutationName& mutation,
                                   const absl::StatusOr<RowCounts>& rows);

internal::v1::LogRecord PartRecord(uint64_t model_id, const internal::v1::GroupPart& part,
                                   const internal::v1::LogBlob& blob);
internal::v1::LogRecord DecidedRecord(const internal::v1::DecideStepRequest& request);
internal::v1::LogRecord StepMadeRecord(uint64_t model_id, const std::string& group, int64_t step,
                                       const absl::StatusOr<RowCounts>& rows);
internal::v1::LogRecord EndedRecord(uint64_t model_id, const std::string& group);
internal::v1::LogRecord ForgottenRecord(uint64_t model_id, const std::string& group);

internal::v1::LogRecord ModelMadeRecord(const internal::v1::CreateModelRequest& create);
internal::v1::LogRecord ModelRemovedRecord(uint64_t model_id);
// `limits`: of a model that is served already; null: it is served from now on.
internal::v1::LogRecord ModelServedRecord(uint64_t model_id,
                                          const internal::v1::ModelLimits* limits);
internal::v1::LogRecord ModelPinnedRecord(uint64_t model_id, bool pinned);
internal::v1::LogRecord ModelRenewedRecord(uint64_t model_id, uint64_t history);
internal::v1::LogRecord HistoryDroppedRecord(uint64_t history);

}  // namespace emberd::host
