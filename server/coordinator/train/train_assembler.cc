#include "server/coordinator/train/train_assembler.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::server {
namespace {

template <typename Message>
absl::Status CheckSameStep(const TrainStepRequest& request, const Message& message) {
  if (request.step == message.step()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "step is ", message.step(), " in a message of the request of step ", request.step));
}

template <typename T>
void MoveAll(google::protobuf::RepeatedPtrField<T>* from,
             google::protobuf::RepeatedPtrField<T>* to) {
  for (T& value : *from) to->Add(std::move(value));
}

}  // namespace

absl::StatusOr<std::optional<TrainStepRequest>> TrainAssembler::Add(v1::TrainRequest* message,
                                                                    int64_t bytes) {
  const bool begins = !request_.has_value();
  if (begins) request_.emplace();
  request_->bytes += bytes;
  absl::Status status;
  bool continues = false;
  switch (message->request_case()) {
    case v1::TrainRequest::kLookup:
      if (begins) {
        request_->step = message->lookup().step();
        request_->lookup.emplace().set_activation_dtype(message->lookup().activation_dtype());
        if (message->lookup().has_shared()) {
          request_->lookup->mutable_shared()->Swap(message->mutable_lookup()->mutable_shared());
        }
      }
      continues = message->lookup().continues();
      status = AddLookup(message->mutable_lookup());
      break;
    case v1::TrainRequest::kUpdate:
      if (begins) {
        request_->step = message->update().step();
        request_->update.emplace().set_step(message->update().step());
      }
      continues = message->update().continues();
      status = AddUpdate(message->mutable_update());
      break;
    case v1::TrainRequest::kStart:
      status = absl::InvalidArgumentError("start: it was sent already, as the first message");
      break;
    case v1::TrainRequest::REQUEST_NOT_SET:
      status = absl::InvalidArgumentError("request: neither lookup nor update is set");
      break;
  }
  if (!status.ok()) return status;
  if (continues) return std::nullopt;
  return std::exchange(request_, std::nullopt);
}

absl::Status TrainAssembler::AddLookup(v1::TrainLookup* message) {
  if (!request_->lookup.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("lookup of step ", message->step(),
                                                   " begins before the update of step ",
                                                   request_->step, " is complete"));
  }
  RETURN_IF_ERROR(CheckSameStep(*request_, *message));
  MoveAll(message->mutable_features(), request_->lookup->mutable_features());
  return absl::OkStatus();
}

absl::Status TrainAssembler::AddUpdate(v1::TrainUpdate* message) {
  if (!request_->update.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("update of step ", message->step(),
                                                   " begins before the lookup of step ",
                                                   request_->step, " is complete"));
  }
  RETURN_IF_ERROR(CheckSameStep(*request_, *message));
  if (!message->checkpoint().empty()) request_->checkpoint = message->checkpoint();
  request_->skip |= message->skip();
  MoveAll(message->mutable_gradients(), request_->update->mutable_gradients());
  if (request_->skip && request_->update->gradients_size() > 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "update.skip is true in step ", request_->step, ", but gradients of feature \"",
        request_->update->gradients(0).feature(), "\" came with it; a skipped step has none"));
  }
  MoveAll(message->mutable_hyperparameters(), request_->update->mutable_hyperparameters());
  return absl::OkStatus();
}

}  // namespace emberd::server
