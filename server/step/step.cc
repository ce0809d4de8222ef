#include "server/step/step.h"

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "server/rpc/message.h"
#include "server/step/request_reader.h"

namespace emberd::step {
namespace {

// Measures work from its construction on, without what hooks wait meanwhile.
class WorkTimer {
 public:
  // Calls a hook.
  template <typename Hook>
  auto Wait(const Hook& hook) {
    const absl::Time began = SteadyNow();
    auto result = hook();
    waited_ += SteadyNow() - began;
    return result;
  }
  absl::Duration worked() const { return SteadyNow() - began_ - waited_; }
  int64_t worked_us() const { return absl::ToInt64Microseconds(worked()); }

 private:
  const absl::Time began_ = SteadyNow();
  absl::Duration waited_;
};

// What room is made for, in errors.
constexpr char kAnswer[] = "the answer";

// A few ids are sorted sooner than another thread wakes up.
constexpr int64_t kTinyAnswer = int64_t{512} << 10;  // bytes
constexpr int64_t kTinySize = 4096;                  // ids

// Of each id: its key twice while keys are sorted, and its cell of the batch.
constexpr int64_t kBytesOfId = 36;

void CountRefusal(const ServedModel& model, const absl::Status& status) {
  if (absl::IsResourceExhausted(status)) model.metrics->Add(ops::MetricId::kBatchesRefused);
}

}  // namespace

absl::StatusOr<LookupOutput> StepPath::Lookup(const ServedModelPtr& model,
                                              const v1::LookupRequest& request,
                                              rpc::CallContext* context, StepHooks* hooks,
                                              v1::StepTimes* times) {
  RETURN_IF_ERROR(CheckInference(*model, request.inference()));
  ASSIGN_OR_RETURN(const PreparedLookup prepared,
                   Prepare(model, request, /*later=*/false, context, hooks, times));
  return LookUp(prepared, request.inference(), context, hooks, times);
}

absl::StatusOr<PreparedLookup> StepPath::Prepare(const ServedModelPtr& model,
                                                 const v1::LookupRequest& request, bool later,
                                                 rpc::CallContext* context, StepHooks* hooks,
                                                 v1::StepTimes* times) {
  ASSIGN_OR_RETURN(const rpc::CallContext::Room room_of_copy,
                   MakeRoomForSharedIds(options_.regions, request, context));
  const WorkTimer decoding;
  LookupInput input;
  std::shared_ptr<const SharedOutput> output;
  v1::LookupRequest copied;  // if its ids lie in the client's memory
  {
    ops::StageTimer timer(metrics_, ops::Stage::kDecode);
    const bool copy = request.shared().has_ids();
    if (copy) {
      copied = request;
      RETURN_IF_ERROR(CopySharedIds(options_.regions, &copied));
    }
    ASSIGN_OR_RETURN(input,
                     DecodeLookup(copy ? copied : request, *model, options_.max_activation_bytes));
    if (later && request.shared().has_activations()) {
      return absl::InvalidArgumentError(
          "shared.activations is set; the batch is prepared for lookups to come, whose activations "
          "cannot be shared");
    }
    ASSIGN_OR_RETURN(output, FindSharedOutput(options_.regions, request.shared(), input, *model));
  }
  int64_t size = 0;
  for (const preprocess::FeatureInput& feature : input.features) {
    size += preprocess::RoughSize(feature);
  }
  const bool tiny = input.activation_bytes <= kTinyAnswer && size <= kTinySize;
  const CpuPool::Alone alone(tiny);
  absl::Duration preprocessing = decoding.worked();
  rpc::CallContext::Room room, room_to_sort;
  // Before anything is computed: a few bytes may ask for very many.
  if (!later) {
    ASSIGN_OR_RETURN(room, context->MakeRoom(input.activation_bytes, kAnswer));
  }
  if (!tiny) {
    ASSIGN_OR_RETURN(room_to_sort, context->MakeRoom(kBytesOfId * size, "sorting the ids", true));
  }
  ASSIGN_OR_RETURN(const Batch batch, Preprocess(*model, input.features, hooks, &preprocessing));
  times->set_preprocess_us(absl::ToInt64Microseconds(preprocessing));
  model->Observe(*batch);
  return PreparedLookup{model,
                        batch,
                        std::move(input.order),
                        input.activation_dtype,
                        input.activation_bytes,
                        room,
                        std::move(output),
                        tiny};
}

absl::StatusOr<LookupOutput> StepPath::LookUp(const PreparedLookup& prepared, bool inference,
                                              rpc::CallContext* context, StepHooks* hooks,
                                              v1::StepTimes* times) {
  const ServedModelPtr& model = prepared.model;
  const Batch& batch = prepared.batch;
  RETURN_IF_ERROR(CheckInference(*model, inference));
  const CpuPool::Alone alone(prepared.tiny);
  rpc::CallContext::Room room = prepared.room;
  if (room == nullptr) {
    ASSIGN_OR_RETURN(room, context->MakeRoom(prepared.activation_bytes, kAnswer));
  }
  RETURN_IF_ERROR(hooks->BeforeGather());
  LookupOutput output;
  // Random, so that handles of different coordinators and lives do not meet.
  output.batch_handle = inference ? 0 : rpc::RandomId();
  const WorkTimer gathering;
  rpc::LinkedContext gather(context, hooks->gather_limit());
  const v1::DataType dtype = prepared.activation_dtype;
  const std::shared_ptr<const SharedOutput> memory =
      prepared.output != nullptr ? prepared.output
                                 : TakeOutput(*model, batch->feature_samples(), dtype);
  ASSIGN_OR_RETURN(const auto results,
                   fanout_->Gather(model, batch, output.batch_handle, dtype, memory, gather.get()));
  times->set_shards_us(gathering.worked_us());
  ops::StageTimer timer(metrics_, ops::Stage::kCombine);
  const WorkTimer combining;
  if (output.batch_handle != 0) {
    const absl::Time expiry =
        hooks->owns_batch() ? absl::InfiniteFuture() : SteadyNow() + options_.batch_ttl;
    RETURN_IF_ERROR(Keep(prepared, results, output.batch_handle, expiry));
    hooks->OnKept(output.batch_handle);
  }
  output.model = model;
  output.order = prepared.order;
  output.statistics = batch->statistics();
  output.activations = ActivationsIn(*memory, *model, *batch, dtype);
  // The room is given back when gRPC has sent the activations.
  output.activations.owner = KeepBoth(std::move(room), std::move(output.activations.owner));
  CombineActivations(results, *model, *batch, dtype, *memory, output.order, fanout_->cpu());
  times->set_combine_us(combining.worked_us());
  return output;
}

absl::StatusOr<StepPath::Batch> StepPath::Preprocess(
    const ServedModel& model, absl::Span<const preprocess::FeatureInput> features, StepHooks* hooks,
    absl::Duration* time) {
  WorkTimer timer;
  const absl::Cleanup record = [&] {
    *time += timer.worked();
    metrics_->ObserveStage(ops::Stage::kPreprocess, absl::ToDoubleSeconds(timer.worked()));
  };
  preprocess::Preprocessor& preprocessor = *model.preprocessor;
  auto sorted = preprocessor.Sort(features);
  CountRefusal(model, sorted.status());
  if (!sorted.ok()) return sorted.status();
  ASSIGN_OR_RETURN(const bool needed,
                   timer.Wait([&] { return hooks->AnyNeedsCuts((*sorted)->needs_minibatches()); }));
  uint64_t cuts = 0;
  if (needed) {
    const absl::StatusOr<uint64_t> own = preprocessor.FindCuts(sorted->get());
    CountRefusal(model, own.status());
    if (!own.ok()) return own.status();
    ASSIGN_OR_RETURN(cuts, timer.Wait([&] { return hooks->CutsOfAll(*own); }));
  }
  auto batch = preprocessor.Finish(sorted->get(), cuts);
  CountRefusal(model, batch.status());
  if (!batch.ok()) model.observed->Observe((*sorted)->statistics(), /*refused=*/true);
  return batch;
}

absl::Status StepPath::Keep(const PreparedLookup& prepared,
                            absl::Span<const host::GatherResult> results, uint64_t handle,
                            absl::Time expiry) {
  auto kept = std::make_shared<KeptBatch>(prepared.model, *prepared.batch, results);
  kept->tiny = prepared.tiny;
  const int64_t bytes = kept->bytes();
  absl::Status status = batches_.Insert(handle, std::move(kept), bytes, expiry);
  if (!status.ok()) fanout_->Release(prepared.model->id, handle);
  return status;
}

absl::StatusOr<MadeMutation> StepPath::Update(const UpdateName& name,
                                              const v1::ApplyGradientsRequest& gradients,
                                              rpc::CallContext* context, StepHooks* hooks,
                                              v1::StepTimes* times) {
  const auto batch = Claim(name.model_id, name.handle);
  if (absl::IsNotFound(batch.status())) return FindMade(name, batch.status(), context);
  if (!batch.ok()) return batch.status();
  const absl::Cleanup unclaim = [&] { batches_.Unclaim(name.handle); };
  const CpuPool::Alone alone((*batch)->tiny);
  GradientInput input;
  {
    ops::StageTimer timer(metrics_, ops::Stage::kDecode);
    ASSIGN_OR_RETURN(input, ReadGradients(gradients, **batch, options_.regions, fanout_->cpu()));
  }
  const auto attempt = [&](uint64_t number) {
    UpdateName attempted = name;
    attempted.attempt = number;
    return TryUpdate(attempted, input, **batch, context, hooks, times);
  };
  ASSIGN_OR_RETURN(
      const MadeMutation made,
      name.group_part.has_value() ? attempt(0) : mutations_->Make(name.mutation, context, attempt));
  if (!made.replayed && !name.skip) {
    std::vector<bool> given;
    for (const FeatureGradientView& view : input.features) given.push_back(view.given());
    (*batch)->model->ObserveUpdate(given);
  }
  if (made.replayed) {
    Discard(name.model_id, name.handle);  // it may have been made with another batch
  } else {
    batches_.Erase(name.handle);
  }
  return made;
}

absl::StatusOr<MadeMutation> StepPath::TryUpdate(const UpdateName& name, const GradientInput& input,
                                                 const KeptBatch& batch, rpc::CallContext* context,
                                                 StepHooks* hooks, v1::StepTimes* times) {
  WorkTimer timer;
  ASSIGN_OR_RETURN(const auto staged, fanout_->Stage(input, batch, name, context));
  RETURN_IF_ERROR(timer.Wait([&] { return hooks->BeforeCommit(); }));
  ASSIGN_OR_RETURN(const host::RowCounts rows, staged->Commit());
  times->set_shards_us(timer.worked_us());
  return MadeMutation{rows, staged->replayed()};
}

absl::StatusOr<MadeMutation> StepPath::FindMade(const UpdateName& name,
                                                const absl::Status& no_batch,
                                                rpc::CallContext* context) {
  if (name.group_part.has_value()) return no_batch;
  ASSIGN_OR_RETURN(const std::optional<host::RowCounts> rows,
                   mutations_->Find(name.mutation, context));
  if (!rows.has_value()) return no_batch;
  return MadeMutation{*rows, /*replayed=*/true};
}

absl::StatusOr<std::shared_ptr<const KeptBatch>> StepPath::Claim(uint64_t model_id,
                                                                 uint64_t handle) {
  ASSIGN_OR_RETURN(auto batch, batches_.Claim(handle));
  if (batch->model->id == model_id) return batch;
  batches_.Unclaim(handle);
  return absl::InvalidArgumentError(absl::StrCat("batch_handle ", handle, " belongs to model_id ",
                                                 absl::Hex(batch->model->id, absl::kZeroPad16),
                                                 ", not ", absl::Hex(model_id, absl::kZeroPad16)));
}

void StepPath::RenewBatches() {
  const absl::Time now = SteadyNow();
  if (now < renewed_ + options_.batch_ttl / 4) return;
  renewed_ = now;
  const std::vector<uint64_t> handles = batches_.Endless();
  if (!handles.empty()) fanout_->RenewBatches(handles);
}

absl::Status StepPath::Release(uint64_t model_id, uint64_t handle) {
  RETURN_IF_ERROR(Claim(model_id, handle).status());
  Discard(model_id, handle);
  return absl::OkStatus();
}

void StepPath::Discard(uint64_t model_id, uint64_t handle) {
  batches_.Erase(handle);
  fanout_->Release(model_id, handle);
}

}  // namespace emberd::step
