// Logical rows by table and id: what Coordinator's ReadRows, AssignRows and StartExport work with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "emberd/v1/embedding_service.pb.h"
#include "preprocess/plan/plan.h"
#include "server/coordinator/coordinator.h"
#include "server/rpc/call_context.h"
#include "server/step/served_model.h"

namespace emberd::coordinator {

// Which values of which table.
struct RowTarget {
  int stack = 0;
  const preprocess::TablePlan* table = nullptr;
  std::string slot;  // empty: weights
  int columns = 0;
};

// An export, message by message.
class Coordinator::Export {
 public:
  // The next message of about 1 MiB; without rows: the export is complete.
  absl::StatusOr<v1::ExportTableResponse> Next();

 private:
  friend class Coordinator;
  Export(Coordinator* coordinator, std::shared_ptr<const step::ServedModel> model, RowTarget target,
         int64_t first, int64_t end, rpc::CallContext* context)
      : coordinator_(coordinator),
        model_(std::move(model)),
        target_(std::move(target)),
        next_(first),
        end_(end),
        context_(context) {}

  Coordinator* const coordinator_;
  const std::shared_ptr<const step::ServedModel> model_;
  const RowTarget target_;
  int64_t next_;
  const int64_t end_;
  rpc::CallContext* const context_;
};

}  // namespace emberd::coordinator
