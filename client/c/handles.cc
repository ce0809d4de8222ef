#include "client/c/handles.h"

#include "base/thread_pools.h"
#include "client/c/describe.h"

namespace emberd::c {
namespace {

// Never destroyed: at the end of the process its threads may still wait for a server.
BlockingPool& Threads() {
  static auto* pool = new BlockingPool;
  return *pool;
}

}  // namespace

emberd_error* MakeError(const absl::Status& status) noexcept {
  if (status.ok()) return nullptr;
  return new emberd_error{status, std::string(status.message())};
}

absl::Duration Timeout(int64_t milliseconds) {
  return milliseconds < 0 ? absl::InfiniteDuration() : absl::Milliseconds(milliseconds);
}

}  // namespace emberd::c

using emberd::c::Guarded;

emberd_call* emberd_call::Begin(absl::FunctionRef<absl::StatusOr<Work>()> begin,
                                std::shared_ptr<emberd::c::LastProgress> progress) noexcept {
  auto* call = new emberd_call;
  call->progress_ = std::move(progress);
  const absl::Status status = Guarded([&]() -> absl::Status {
    ASSIGN_OR_RETURN(Work work, begin());
    if (emberd::c::Threads().Run([call, work = std::move(work)]() mutable { call->Run(&work); })) {
      return absl::OkStatus();
    }
    return absl::ResourceExhaustedError("this process can have no more threads");
  });
  if (!status.ok()) {
    call->status_ = status;
    call->ended_.Notify();
  }
  return call;
}

void emberd_call::Run(Work* work) {
  status_ = Guarded([&]() -> absl::Status {
    ASSIGN_OR_RETURN(result_, (*work)());
    return absl::OkStatus();
  });
  *work = nullptr;  // what it holds goes before somebody may end the process
  ended_.Notify();
}

extern "C" {

int32_t emberd_abi_version(void) { return EMBERD_ABI_VERSION; }
const char* emberd_version(void) { return EMBERD_VERSION; }

int32_t emberd_error_code(const emberd_error* error) {
  return error != nullptr ? static_cast<int32_t>(error->status.code()) : 0;
}
const char* emberd_error_message(const emberd_error* error) {
  return error != nullptr ? error->message.c_str() : "";
}
void emberd_error_free(emberd_error* error) { delete error; }

int32_t emberd_call_wait(emberd_call* call, int64_t milliseconds) {
  return call->Wait(emberd::c::Timeout(milliseconds)) ? 1 : 0;
}
emberd_error* emberd_call_error(emberd_call* call) { return emberd::c::MakeError(call->status()); }
void emberd_call_free(emberd_call* call) { delete call; }

emberd_client* emberd_call_take_client(emberd_call* call) { return call->Take<emberd_client>(); }
emberd_model* emberd_call_take_model(emberd_call* call) { return call->Take<emberd_model>(); }
emberd_lookup* emberd_call_take_lookup(emberd_call* call) { return call->Take<emberd_lookup>(); }
emberd_rows* emberd_call_take_rows(emberd_call* call) { return call->Take<emberd_rows>(); }
emberd_text* emberd_call_take_text(emberd_call* call) { return call->Take<emberd_text>(); }
emberd_stream* emberd_call_take_stream(emberd_call* call) { return call->Take<emberd_stream>(); }
emberd_answer* emberd_call_take_answer(emberd_call* call) { return call->Take<emberd_answer>(); }
emberd_text* emberd_call_take_progress(emberd_call* call) {
  if (call->progress() == nullptr) return nullptr;
  const auto progress = call->progress()->Take();
  return progress.has_value() ? new emberd_text{emberd::c::Describe(*progress)} : nullptr;
}
int32_t emberd_call_update(emberd_call* call, emberd_update* update) {
  const emberd_update* result = call->Get<emberd_update>();
  if (result != nullptr) *update = *result;
  return result != nullptr ? 1 : 0;
}

const char* emberd_model_json(const emberd_model* model) { return model->json.c_str(); }
void emberd_model_free(emberd_model* model) { delete model; }

int32_t emberd_lookup_activations(const emberd_lookup* lookup, emberd_activation* activations,
                                  int32_t capacity) {
  const auto count = static_cast<int32_t>(lookup->activations.size());
  for (int32_t i = 0; i < count && i < capacity; ++i) {
    const emberd::client::Activation& activation = lookup->activations[i];
    activations[i] = {activation.feature.c_str(), activation.values.data(), activation.samples,
                      activation.dim};
  }
  return count;
}

int32_t emberd_lookup_concat(const emberd_lookup* lookup, emberd_activation* all) {
  if (lookup->concat.empty()) return 0;
  const emberd::client::Activation& first = lookup->activations.front();
  *all = {"", lookup->concat.data(), first.samples, first.row_stride};
  return 1;
}
int32_t emberd_lookup_block(const emberd_lookup* lookup, emberd_block* block) {
  const auto& all = lookup->activations;
  if (all.empty() || all[0].values.empty() || !lookup->concat.empty()) return 0;
  const auto place = [](const emberd::client::Activation& one) {
    return reinterpret_cast<intptr_t>(one.values.data());
  };
  const intptr_t first = place(all[0]);
  const auto bytes = static_cast<intptr_t>(all[0].values.size() * sizeof(float));
  const intptr_t apart = all.size() > 1 ? place(all[1]) - first : bytes;
  if (apart < bytes || apart % sizeof(float) != 0) return 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].samples != all[0].samples || all[i].dim != all[0].dim ||
        place(all[i]) != first + static_cast<intptr_t>(i) * apart) {
      return 0;
    }
  }
  *block = {all[0].values.data(), static_cast<int64_t>(all.size()), all[0].samples, all[0].dim,
            apart / static_cast<intptr_t>(sizeof(float))};
  return 1;
}
int64_t emberd_lookup_step(const emberd_lookup* lookup) { return lookup->step; }
const char* emberd_lookup_statistics_json(emberd_lookup* lookup) {
  absl::MutexLock lock(&lookup->mutex);
  if (lookup->json.empty()) {
    lookup->json =
        emberd::c::Describe(lookup->statistics, lookup->step >= 0 ? &lookup->times : nullptr);
  }
  return lookup->json.c_str();
}
void emberd_lookup_free(emberd_lookup* lookup) { delete lookup; }

const float* emberd_rows_values(const emberd_rows* rows) { return rows->rows.values.data(); }
int64_t emberd_rows_count(const emberd_rows* rows) {
  const auto size = static_cast<int64_t>(rows->rows.values.size());
  return rows->rows.dim > 0 ? size / rows->rows.dim : 0;
}
int64_t emberd_rows_dim(const emberd_rows* rows) { return rows->rows.dim; }
void emberd_rows_free(emberd_rows* rows) { delete rows; }

const char* emberd_text_string(const emberd_text* text) { return text->text.c_str(); }
void emberd_text_free(emberd_text* text) { delete text; }

const char* emberd_answer_json(const emberd_answer* answer) { return answer->answer.json.c_str(); }
int32_t emberd_answer_tensors(const emberd_answer* answer, emberd_bytes* tensors,
                              int32_t capacity) {
  const auto count = static_cast<int32_t>(answer->answer.tensors.size());
  for (int32_t i = 0; i < count && i < capacity; ++i) {
    const std::string& data = answer->answer.tensors[i];
    tensors[i] = {data.data(), static_cast<int64_t>(data.size())};
  }
  return count;
}
emberd_kept* emberd_answer_take_kept(emberd_answer* answer, int32_t place) {
  absl::MutexLock lock(&answer->mutex);
  auto& kept = answer->answer.kept;
  const bool there = place >= 0 && place < static_cast<int32_t>(kept.size()) && kept[place];
  return there ? new emberd_kept{std::move(kept[place])} : nullptr;
}
void emberd_answer_free(emberd_answer* answer) { delete answer; }
void emberd_kept_free(emberd_kept* kept) { delete kept; }

float* emberd_floats_data(emberd_floats* floats) { return floats->memory.get(); }
void emberd_floats_free(emberd_floats* floats) { delete floats; }

int32_t emberd_lease_released(const emberd_lease* lease) {
  return lease->released == nullptr || lease->released->load(std::memory_order_acquire) ? 1 : 0;
}
void emberd_lease_free(emberd_lease* lease) { delete lease; }

}  // extern "C"
