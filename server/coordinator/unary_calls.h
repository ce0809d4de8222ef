// Calls of EmbeddingService without their transport: a step as two calls, Lookup and
// ApplyGradients, and logical rows by table and id, ReadRows, AssignRows and ExportTable.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "preprocess/plan/plan.h"
#include "server/coordinator/resources.h"
#include "server/rpc/call_context.h"
#include "server/step/served_model.h"
#include "server/step/shard_set.h"
#include "server/step/step.h"

namespace emberd::coordinator {

// Thread-safe. Methods block until the answer is there; `context` carries the caller's deadline and
// cancellation. Errors and their codes: see emberd/v1/embedding_service.proto.
class UnarySteps {
 public:
  // `resources` must outlive it.
  explicit UnarySteps(const CoordinatorResources* resources) : resources_(resources) {}

  // `role`: the caller's. PERMISSION_DENIED for a lookup that would keep a batch of one who may not
  // train.
  absl::StatusOr<step::LookupOutput> Lookup(const v1::LookupRequest& request, v1::Token::Role role,
                                            rpc::CallContext* context);
  absl::StatusOr<v1::ApplyGradientsResponse> ApplyGradients(
      const v1::ApplyGradientsRequest& request, rpc::CallContext* context);
  absl::StatusOr<v1::ReleaseBatchResponse> ReleaseBatch(const v1::ReleaseBatchRequest& request,
                                                        rpc::CallContext* context);

 private:
  const CoordinatorResources* const resources_;
};

// Which values of which table.
struct RowTarget {
  int stack = 0;
  const preprocess::TablePlan* table = nullptr;
  std::string slot;  // empty: weights
  int columns = 0;
};

// Thread-safe. Methods block until the answer is there. Errors: see embedding_service.proto.
class RowAccess {
 public:
  // `resources` must outlive it. An answer has at most `max_message_bytes`.
  RowAccess(const CoordinatorResources* resources, int64_t max_message_bytes)
      : resources_(resources), max_message_bytes_(max_message_bytes) {}

  absl::StatusOr<v1::ReadRowsResponse> ReadRows(const v1::ReadRowsRequest& request,
                                                rpc::CallContext* context);
  absl::StatusOr<v1::AssignRowsResponse> AssignRows(const v1::AssignRowsRequest& request,
                                                    rpc::CallContext* context);
  // Gives the next message, of about 1 MiB; nothing: the export is complete. `context` must outlive
  // it.
  using NextRows = std::function<absl::StatusOr<std::optional<v1::ExportTableResponse>>()>;
  absl::StatusOr<NextRows> StartExport(const v1::ExportTableRequest& request,
                                       rpc::CallContext* context);

 private:
  absl::StatusOr<v1::ExportTableResponse> ExportRows(const step::ServedModel& model,
                                                     const RowTarget& target, int64_t first,
                                                     int64_t count, rpc::CallContext* context);
  absl::StatusOr<v1::Tensor> ReadTableRows(const step::ServedModel& model, const RowTarget& target,
                                           const preprocess::IntSpan& ids,
                                           rpc::CallContext* context);
  // To `data`, row by row in the order of the ids.
  absl::Status ReadRowsTo(const step::ServedModel& model, const RowTarget& target,
                          absl::Span<const int64_t> ids, char* data, rpc::CallContext* context);
  absl::StatusOr<v1::AssignRowsResponse> Assign(const step::ServedModel& model,
                                                const v1::AssignRowsRequest& request,
                                                const host::Mutation& mutation,
                                                rpc::CallContext* context);
  // One attempt at an assignment; request i is for shard i.
  absl::StatusOr<step::MadeMutation> TryAssign(
      const host::Mutation& mutation,
      const std::vector<internal::v1::AssignShardRowsRequest>& requests, rpc::CallContext* context);

  const CoordinatorResources* const resources_;
  const int64_t max_message_bytes_;
};

}  // namespace emberd::coordinator
