#include "server/coordinator/train/train_assembler.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::coordinator {
namespace {

absl::Status CheckSameStep(int64_t step, int64_t of_message) {
  if (step == of_message) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("step is ", of_message, " in a message of the request of step ", step));
}

absl::Status TooEarly(absl::string_view what, int64_t step, absl::string_view open,
                      int64_t open_step) {
  return absl::InvalidArgumentError(absl::StrCat(what, " of step ", step, " begins before the ",
                                                 open, " of step ", open_step, " is complete"));
}

}  // namespace

absl::StatusOr<std::optional<TrainStepRequest>> TrainAssembler::Add(v1::TrainRequest* message,
                                                                    int64_t bytes) {
  switch (message->request_case()) {
    case v1::TrainRequest::kLookup:
      return AddLookup(message->mutable_lookup(), bytes);
    case v1::TrainRequest::kUpdate:
      return AddUpdate(message->mutable_update(), bytes);
    case v1::TrainRequest::kStart:
      return absl::InvalidArgumentError("start: it was sent already, as the first message");
    case v1::TrainRequest::REQUEST_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("request: neither lookup nor update is set");
}

absl::StatusOr<std::optional<TrainStepRequest>> TrainAssembler::AddLookup(v1::TrainLookup* message,
                                                                          int64_t bytes) {
  if (update_.has_value()) return TooEarly("lookup", message->step(), "update", update_->step);
  if (!lookup_.has_value()) {
    lookup_.emplace().step = message->step();
    lookup_->lookup.emplace().set_activation_dtype(message->activation_dtype());
    if (message->has_shared()) lookup_->lookup->mutable_shared()->Swap(message->mutable_shared());
  }
  RETURN_IF_ERROR(CheckSameStep(lookup_->step, message->step()));
  lookup_->bytes += bytes;
  for (v1::FeatureIds& ids : *message->mutable_features()) {
    *lookup_->lookup->add_features() = std::move(ids);
  }
  if (message->continues()) return std::nullopt;
  return std::exchange(lookup_, std::nullopt);
}

absl::StatusOr<std::optional<TrainStepRequest>> TrainAssembler::AddUpdate(v1::TrainUpdate* update,
                                                                          int64_t bytes) {
  if (lookup_.has_value()) return TooEarly("update", update->step(), "lookup", lookup_->step);
  if (!update_.has_value()) {
    update_.emplace().step = update->step();
    update_->update.emplace().gradients.set_step(update->step());
  }
  RETURN_IF_ERROR(CheckSameStep(update_->step, update->step()));
  update_->bytes += bytes;
  TrainUpdateRequest& whole = *update_->update;
  for (v1::FeatureGradient& gradient : *update->mutable_gradients()) {
    *whole.gradients.add_gradients() = std::move(gradient);
  }
  for (v1::StepHyperparameters& of_table : *update->mutable_hyperparameters()) {
    *whole.gradients.add_hyperparameters() = std::move(of_table);
  }
  whole.skip |= update->skip();
  if (whole.skip && whole.gradients.gradients_size() > 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "update.skip is true in step ", update_->step, ", but gradients of feature \"",
        whole.gradients.gradients(0).feature(), "\" came with it; a skipped step has none"));
  }
  if (!update->checkpoint().empty()) whole.checkpoint = update->checkpoint();
  if (update->continues()) return std::nullopt;
  return std::exchange(update_, std::nullopt);
}

}  // namespace emberd::coordinator
