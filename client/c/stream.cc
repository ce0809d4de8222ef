// What goes over a training stream: sending never waits, and receiving has a time-out.
#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client/c/arguments.h"
#include "client/c/describe.h"
#include "client/c/handles.h"

namespace {

using emberd::c::Guarded;
using emberd::c::MakeError;
using emberd::client::TrainLookupResult;
using emberd::client::TrainUpdateResult;

emberd_error* SendLookup(emberd_stream* stream, int64_t step, const emberd_feature_ids* features,
                         int32_t count, bool concat) {
  return MakeError(Guarded([&]() -> absl::Status {
    ASSIGN_OR_RETURN(auto read, emberd::c::ReadFeatures(features, count));
    return stream->stream->SendLookup(step, read, {.concat = concat});
  }));
}

emberd_lookup* KeepLookup(TrainLookupResult found) {
  auto* lookup = new emberd_lookup;
  lookup->activations = std::move(found.activations);
  lookup->concat = found.concat;
  lookup->statistics = std::move(found.statistics);
  lookup->times = found.times;
  lookup->step = found.step;
  lookup->memory = std::move(found.memory);
  return lookup;
}

// What an update keeps as long as it reads its gradients; then *released becomes true.
std::shared_ptr<const void> Hold(std::shared_ptr<std::atomic<bool>>* released) {
  *released = std::make_shared<std::atomic<bool>>(false);
  return {released->get(), [flag = *released](const std::atomic<bool>*) {
            flag->store(true, std::memory_order_release);  // what was read was read before
          }};
}

}  // namespace

extern "C" {

int64_t emberd_stream_next_step(const emberd_stream* stream) { return stream->stream->next_step(); }
uint64_t emberd_stream_generation(const emberd_stream* stream) {
  return stream->stream->generation();
}
uint64_t emberd_stream_made_generation(const emberd_stream* stream) {
  return stream->stream->made_generation();
}

emberd_error* emberd_stream_send_lookup(emberd_stream* stream, int64_t step,
                                        const emberd_feature_ids* features, int32_t count) {
  return SendLookup(stream, step, features, count, /*concat=*/false);
}
emberd_error* emberd_stream_send_lookup_concat(emberd_stream* stream, int64_t step,
                                               const emberd_feature_ids* features, int32_t count) {
  return SendLookup(stream, step, features, count, /*concat=*/true);
}

emberd_error* emberd_stream_send_update(emberd_stream* stream, int64_t step,
                                        const emberd_gradient* gradients, int32_t count,
                                        const emberd_hyperparameter* hyperparameters,
                                        int32_t hyperparameter_count, emberd_lease** lease) {
  return emberd_stream_send_update_and_checkpoint(stream, step, gradients, count, hyperparameters,
                                                  hyperparameter_count, "", lease);
}

emberd_error* emberd_stream_send_update_and_checkpoint(
    emberd_stream* stream, int64_t step, const emberd_gradient* gradients, int32_t count,
    const emberd_hyperparameter* hyperparameters, int32_t hyperparameter_count,
    const char* checkpoint, emberd_lease** lease) {
  return emberd_stream_send_update_strided(stream, step, gradients, nullptr, count, hyperparameters,
                                           hyperparameter_count, checkpoint, lease);
}

emberd_error* emberd_stream_send_update_strided(emberd_stream* stream, int64_t step,
                                                const emberd_gradient* gradients,
                                                const int64_t* row_strides, int32_t count,
                                                const emberd_hyperparameter* hyperparameters,
                                                int32_t hyperparameter_count,
                                                const char* checkpoint, emberd_lease** lease) {
  std::shared_ptr<std::atomic<bool>> released;
  const absl::Status status = Guarded([&]() -> absl::Status {
    emberd::client::UpdateOptions options;
    if (lease != nullptr) options.memory = Hold(&released);
    ASSIGN_OR_RETURN(auto read, emberd::c::ReadGradients(gradients, row_strides, count));
    options.checkpoint = emberd::c::Text(checkpoint);
    ASSIGN_OR_RETURN(options.hyperparameters,
                     emberd::c::ReadHyperparameters(hyperparameters, hyperparameter_count));
    return stream->stream->SendUpdate(step, read, options);
  });
  if (lease != nullptr) *lease = new emberd_lease{std::move(released)};
  return MakeError(status);
}

emberd_error* emberd_stream_allocate_gradients(emberd_stream* stream, int64_t count,
                                               emberd_floats** floats) {
  *floats = nullptr;
  return MakeError(Guarded([&]() -> absl::Status {
    if (count < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("count: ", count, " is not allowed; it must be at least 0"));
    }
    *floats = new emberd_floats{stream->stream->AllocateGradients(count)};
    return absl::OkStatus();
  }));
}

emberd_error* emberd_stream_send_skip(emberd_stream* stream, int64_t step, const char* checkpoint) {
  return MakeError(Guarded([&] {
    emberd::client::UpdateOptions options;
    options.checkpoint = emberd::c::Text(checkpoint);
    options.skip = true;
    return stream->stream->SendUpdate(step, {}, options);
  }));
}

int32_t emberd_stream_receive_lookup(emberd_stream* stream, int64_t milliseconds,
                                     emberd_lookup** lookup, emberd_error** error) {
  *lookup = nullptr;
  *error = nullptr;
  if (!stream->stream->WaitForLookup(emberd::c::Timeout(milliseconds))) return 0;
  *error = MakeError(Guarded([&]() -> absl::Status {
    ASSIGN_OR_RETURN(TrainLookupResult found, stream->stream->ReceiveLookup());
    *lookup = KeepLookup(std::move(found));
    return absl::OkStatus();
  }));
  return 1;
}

int32_t emberd_stream_receive_update(emberd_stream* stream, int64_t milliseconds,
                                     emberd_update* update, emberd_error** error) {
  *update = {-1, 0, 0, 0};  // no step: who is interrupted sees whether an answer has come
  *error = nullptr;
  if (!stream->stream->WaitForUpdate(emberd::c::Timeout(milliseconds))) return 0;
  *error = MakeError(Guarded([&]() -> absl::Status {
    ASSIGN_OR_RETURN(const TrainUpdateResult updated, stream->stream->ReceiveUpdate());
    *update = {updated.step, updated.rows_updated, updated.rows_skipped, 0};
    if (!updated.checkpoint.empty()) {
      absl::MutexLock lock(&stream->mutex);
      stream->checkpoints.push_back(emberd::c::DescribeEnd(updated));
    }
    return absl::OkStatus();
  }));
  return 1;
}

emberd_text* emberd_stream_take_checkpoint(emberd_stream* stream) {
  absl::MutexLock lock(&stream->mutex);
  if (stream->checkpoints.empty()) return nullptr;
  auto* end = new emberd_text{std::move(stream->checkpoints.front())};
  stream->checkpoints.pop_front();
  return end;
}

void emberd_stream_free(emberd_stream* stream) {
  if (stream != nullptr) stream->stream->Cancel();  // a finish in progress holds the stream, too
  delete stream;
}

}  // extern "C"
