// Checkpoints that are served: the weights of a model under training, read-only.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/config.h"
#include "server/checkpoint/manifest.h"
#include "server/checkpoint/verify.h"
#include "server/coordinator/checkpoints.h"
#include "server/coordinator/progress_reporter.h"

namespace emberd::server {
namespace {

// A model of this name for lookups alone: what is looked up is the same, and nothing is kept for
// updates. `dtype` UNSPECIFIED: rows are stored as they were.
absl::StatusOr<v1::ModelConfig> ServingConfig(v1::ModelConfig config, const std::string& name,
                                              v1::DataType dtype) {
  config.set_name(name);
  config.clear_optimizer();
  config.mutable_optimizer()->mutable_none();
  config.clear_enable_variable_deduplication();  // rows that stay as they are, of its own
  for (v1::TableConfig& table : *config.mutable_tables()) {
    table.clear_optimizer();
    table.clear_update_rounding();
    table.clear_on_nonfinite_gradient();
    table.clear_resource();
    table.clear_residency();
    if (dtype != v1::DATA_TYPE_UNSPECIFIED) table.set_storage_dtype(dtype);
  }
  RETURN_IF_ERROR(config::CompleteModel(&config));
  return config;
}

}  // namespace

Checkpoints::Progress Checkpoints::Serve(const v1::ServeCheckpointRequest& request,
                                         const Report& report, rpc::CallContext* context) {
  ASSIGN_OR_RETURN(CheckpointChain chain, ChainOf(request.model(), request.name()));
  const v1::CheckpointManifest& manifest = chain.front().manifest();
  const std::string& name = request.serve_as().empty() ? request.model() : request.serve_as();
  v1::DataType dtype = request.storage_dtype();
  if (dtype == v1::DATA_TYPE_UNSPECIFIED) {
    const auto served = registry_->FindByName(name, context);
    if (served.ok() && (*served)->read_only()) {
      dtype = (*served)->config.tables(0).storage_dtype();
    }
  }
  ASSIGN_OR_RETURN(const v1::ModelConfig config, ServingConfig(manifest.config(), name, dtype));
  const v1::CheckpointInfo info = InfoOf(manifest);
  const int64_t total = BytesOf(chain);
  ProgressReporter reporter(report);
  bool begun = false;
  const auto tell = [&](int64_t bytes, int64_t) -> absl::Status {
    if (!begun) RETURN_IF_ERROR(reporter.Begin("loading"));
    begun = true;
    return reporter(bytes, std::max(bytes, total));
  };
  const RowSource source = {std::move(chain), tell};
  ASSIGN_OR_RETURN(const auto model, registry_->Serve(config, source, context));
  v1::CheckpointProgress done = reporter.Done(info);
  done.set_model_id(model->id);
  done.set_history(model->history);
  return done;
}

absl::StatusOr<std::shared_ptr<const ServedModel>> Checkpoints::ServeAgain(
    const ServedModel& lost, const BytesReport& report, rpc::CallContext* context) {
  ASSIGN_OR_RETURN(RowSource source, FindRows(lost.serves.model(), lost.serves.checkpoint()));
  if (source.chain.front().manifest().checkpoint_id() != lost.serves.checkpoint_id()) {
    return absl::NotFoundError(absl::StrCat("checkpoint '", ServesText(lost.serves),
                                            "' was removed; another checkpoint has its name now"));
  }
  source.report = report;
  return registry_->Serve(lost.config, source, context);
}

}  // namespace emberd::server
