// Limits that change while a model is served: shard 0 knows those that count, and every coordinator
// asks it each second.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/suggest.h"
#include "server/coordinator/model_registry.h"
#include "server/ops/logging.h"

namespace emberd::server {
namespace {

// How often a change begins again after another one has come between.
constexpr int kLimitAttempts = 8;

std::string LimitsText(const internal::v1::ModelLimits& limits) {
  return absl::StrJoin(limits.stacks(), ", ", [](std::string* out, const v1::StackLimit& stack) {
    absl::StrAppend(out, stack.stack(), " ", stack.max_ids_per_partition(), "/",
                    stack.max_unique_ids_per_partition());
  });
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ServedModel>> ModelRegistry::SetLimits(
    const std::string& name, const LimitChange& change, rpc::CallContext* context) {
  absl::MutexLock lock(&declaring_);
  for (int attempt = 1;; ++attempt) {
    ASSIGN_OR_RETURN(auto model, FindByName(name, context));
    ASSIGN_OR_RETURN(model, FindAnew(model->id, context));
    internal::v1::ServeModelRequest request;
    request.set_model_id(model->id);
    request.set_history(model->history);
    internal::v1::ModelLimits& limits = *request.mutable_limits();
    limits.set_version(model->live_limits->Get().version() + 1);
    ASSIGN_OR_RETURN(const std::vector<v1::StackLimit> stacks, change(*model, model->PlanNow()));
    limits.mutable_stacks()->Add(stacks.begin(), stacks.end());
    const absl::Status set = shards_[0]->ServeModel(request, context).status();
    if (absl::IsAborted(set) && attempt < kLimitAttempts) continue;
    RETURN_IF_ERROR(set);
    model->SetLimits(limits);
    ops::Log(ops::LogLevel::kInfo, "limits of a model changed",
             {{"model", name}, {"limits", LimitsText(limits)}});
    return model;
  }
}

absl::StatusOr<std::vector<v1::StackLimit>> ChangedLimits(const ServedModel& model,
                                                          const preprocess::Plan& now,
                                                          const v1::SetLimitsRequest& request) {
  const preprocess::Plan& from = request.declared() ? model.plan : now;
  std::vector<v1::StackLimit> limits;
  std::vector<std::string> names;
  for (const preprocess::StackPlan& stack : from.stacks) {
    v1::StackLimit& limit = limits.emplace_back();
    limit.set_stack(stack.name);
    limit.set_max_ids_per_partition(stack.max_ids_per_partition);
    limit.set_max_unique_ids_per_partition(stack.max_unique_ids_per_partition);
    names.push_back(stack.name);
  }
  std::vector<bool> given(limits.size());
  for (int i = 0; i < request.limits_size(); ++i) {
    const v1::StackLimit& wanted = request.limits(i);
    const std::string at = absl::StrCat("limits[", i, "]");
    size_t k = 0;
    while (k < names.size() && names[k] != wanted.stack()) ++k;
    if (k == names.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(at, ".stack is '", wanted.stack(), "', which model '", model.config.name(),
                       "' does not have; ", KnownNames("stacks", wanted.stack(), names)));
    }
    if (given[k]) {
      return absl::InvalidArgumentError(
          absl::StrCat(at, ".stack '", wanted.stack(), "' is repeated"));
    }
    given[k] = true;
    if (wanted.max_ids_per_partition() < 0 || wanted.max_unique_ids_per_partition() < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          at, ": the limits of stack '", wanted.stack(), "' are ", wanted.max_ids_per_partition(),
          " and ", wanted.max_unique_ids_per_partition(), "; they must be >= 0 (0: no limit)"));
    }
    limits[k] = wanted;
  }
  return limits;
}

}  // namespace emberd::server
