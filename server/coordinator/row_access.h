// Logical rows by table and id: ReadRows, AssignRows and ExportTable, without their transport.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "emberd/v1/embedding_service.pb.h"
#include "preprocess/plan/plan.h"
#include "server/coordinator/resources.h"
#include "server/host/shard_backend.h"
#include "server/rpc/call_context.h"
#include "server/step/mutations.h"
#include "server/step/served_model.h"

namespace emberd::coordinator {

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
  class Export;
  absl::StatusOr<std::unique_ptr<Export>> StartExport(const v1::ExportTableRequest& request,
                                                      rpc::CallContext* context);

 private:
  absl::StatusOr<v1::Tensor> ReadTableRows(const step::ServedModel& model, const RowTarget& target,
                                           const preprocess::IntSpan& ids,
                                           rpc::CallContext* context);
  // To `data`, row by row in the order of the ids.
  absl::Status ReadRowsTo(const step::ServedModel& model, const RowTarget& target,
                          absl::Span<const int64_t> ids, char* data, rpc::CallContext* context);
  // One attempt at an assignment; command i is for shard i.
  absl::StatusOr<step::MadeMutation> TryAssign(const std::vector<host::AssignCommand>& commands,
                                               rpc::CallContext* context);

  const CoordinatorResources* const resources_;
  const int64_t max_message_bytes_;
};

// An export, message by message.
class RowAccess::Export {
 public:
  // The next message of about 1 MiB; without rows: the export is complete.
  absl::StatusOr<v1::ExportTableResponse> Next();

 private:
  friend class RowAccess;
  Export(RowAccess* access, std::shared_ptr<const step::ServedModel> model, RowTarget target,
         int64_t first, int64_t end, rpc::CallContext* context)
      : access_(access),
        model_(std::move(model)),
        target_(std::move(target)),
        next_(first),
        end_(end),
        context_(context) {}

  RowAccess* const access_;
  const std::shared_ptr<const step::ServedModel> model_;
  const RowTarget target_;
  int64_t next_;
  const int64_t end_;
  rpc::CallContext* const context_;
};

}  // namespace emberd::coordinator
