#include "server/step/step.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "server/rpc/message.h"
#include "server/step/activations.h"
#include "server/step/request_reader.h"

namespace emberd::step {
namespace {

constexpr absl::Duration kReleaseDeadline = absl::Seconds(1);
constexpr absl::Duration kReleasePause = absl::Seconds(2);

// Whether no other rank takes part in the update.
bool IsAlone(const UpdateName& name) {
  return !name.group_part.has_value() || name.group_part->size() == 1;
}

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

// An update that every shard has checked and holds. If it goes away undecided, shards are told to
// drop it (a rank's part of a group's step they keep, see ApplyHeader in shard_service.proto).
class StepPath::StagedUpdate {
 public:
  StagedUpdate(StepPath* path, const UpdateName& name, const std::string& trace)
      : path_(path), name_(name), context_(SteadyNow() + path->options_.shard_call, trace) {}
  ~StagedUpdate() {
    if (!decided_ && !name_.group_part.has_value()) {
      path_->mutations_->Abandon(name_.mutation, name_.attempt);
    }
  }
  // No row changes yet. The caller's deadline and cancellation count up to here, and not for the
  // Commit: it is all or nothing. `batch` and the memory of `input` must outlive it.
  absl::Status Stage(const GradientInput& input, const KeptBatch& batch, rpc::CallContext* context);
  // Makes the update on every shard; once. An error names a shard whose answer did not come; the
  // others have made the update. Where a stream broke, the decision is sent again in calls of its
  // own until the shard answers or time is over. ABORTED: another attempt has taken charge.
  absl::StatusOr<host::RowCounts> Commit();
  // Every shard had made it before.
  bool replayed() const { return std::find(staged_.begin(), staged_.end(), true) == staged_.end(); }

 private:
  // What each shard is sent.
  std::vector<ShardGradients> LayOut(const GradientInput& input, const KeptBatch& batch);
  // Whether the shard may read gradients where the client has put them.
  bool ReadsInPlace(const GradientInput& input, const KeptBatch& batch, int shard) const;
  absl::StatusOr<host::RowCounts> DecideAgain(int shard);

  StepPath* const path_;
  const UpdateName name_;
  rpc::CallContext context_;  // outlives the calls
  absl::Time deadline_;       // the caller's
  std::vector<std::unique_ptr<host::ApplyCall>> calls_;
  std::vector<bool> staged_;         // false: it had been made there before
  std::vector<uint64_t> histories_;  // by shard, of the rows that the batch has seen
  bool decided_ = false;
  host::RowCounts rows_;
};

absl::StatusOr<std::vector<host::GatherResult>> StepPath::Gather(
    const ServedModelPtr& model, const Batch& batch, uint64_t handle, v1::DataType dtype,
    const std::shared_ptr<const SharedOutput>& output, rpc::CallContext* context) {
  ops::StageTimer timer(metrics_, ops::Stage::kGatherWait);
  // Of the shards' views: the batch goes before the model whose preprocessor made it.
  const auto owner = KeepBoth(model, batch);
  std::vector<shard::SumPlaces> places = PlacesOfSums(*model, *batch, dtype, *output);
  std::vector<host::GatherResult> results(shards_.size());
  const auto start = [&](size_t shard) {
    host::GatherCommand command;
    command.model_id = model->id;
    command.history = model->history;
    command.batch_handle = handle;
    command.batch_ttl = options_.BatchTtlOnShards();
    command.stacks = batch->ShardView(static_cast<int>(shard));
    command.owner = owner;
    command.activation_dtype = dtype;
    if (!places.empty() && shards_[shard].Lend(output->region, context->deadline())) {
      command.places = {places, {}, output};
      command.region = output->region;
      results[shard].places = command.places;
    }
    command.answer_bytes = MaxGatherBytes(*model, command.stacks, command.places);
    if (shard + 1 < shards_.size()) {
      for (shard::SumPlaces& of_stack : places) {
        PassOver(command.stacks[of_stack.stack], &of_stack);
      }
    }
    return shards_[shard].Gather(std::move(command), context);
  };
  std::vector<std::unique_ptr<host::GatherCall>> calls;
  for (size_t i = 0; i < shards_.size(); ++i) calls.push_back(start(i));

  absl::Status error;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const absl::Time began = SteadyNow();
    auto result = calls[i]->Wait();
    absl::Status status = result.status();
    if (status.ok()) {
      result->places = std::move(results[i].places);
      status = CheckGatherResult(*result, *model, *batch, dtype);
    }
    ObserveLink(static_cast<int>(i), ops::Rpc::kShardGather, status, began);
    // Here, and not when all answers are there: the other shards are still at work.
    if (status.ok()) {
      status = ArrangeUniqueRows(*model, *batch, static_cast<int>(i), pool_, options_.threads->cpu,
                                 &*result);
    }
    if (status.ok()) {
      results[i] = *std::move(result);
    } else if (error.ok()) {
      error = result.ok() ? Annotate(status, shards_[i].name()) : status;  // a backend says which
    }
  }
  if (error.ok()) return results;
  calls.clear();  // cancels what is still under way
  if (handle != 0) ReleaseOnShards(model->id, handle);
  return error;
}

absl::Status StepPath::StagedUpdate::Stage(const GradientInput& input, const KeptBatch& batch,
                                           rpc::CallContext* context) {
  deadline_ = context->deadline();
  rpc::CancelWatch watch(context, [this] { context_.Cancel(); });
  ops::StageTimer timer(path_->metrics_, ops::Stage::kStage);
  std::vector<ShardGradients> gradients;
  if (!name_.skip) gradients = LayOut(input, batch);
  for (size_t i = 0; i < path_->shards_.size(); ++i) {
    host::ApplyCommand command;
    command.model_id = name_.model_id;
    command.batch_handle = name_.handle;
    command.history = batch.shards[i].history;
    histories_.push_back(command.history);
    command.mutation = name_.mutation;
    command.attempt = name_.attempt;
    command.group_part = name_.group_part;
    if (name_.skip) {
      command.input.step = input.step;
      command.input.skip = true;
    } else {
      command.block = std::move(gradients[i].block);
      command.input = std::move(gradients[i].input);
      if (gradients[i].in_place) {
        const auto shard = static_cast<int>(i);
        command.regions = input.regions;
        command.copied = [copied = command, &input, &batch, shard]() mutable {
          copied.block = nullptr;
          copied.regions.clear();
          copied.input = GradientsForShard(input, batch, shard, /*in_place=*/false);
          return std::move(copied);
        };
      }
    }
    calls_.push_back(path_->shards_[i].Apply(std::move(command), &context_));
  }
  absl::Status error;
  staged_.resize(calls_.size());
  for (size_t i = 0; i < calls_.size(); ++i) {
    auto outcome = calls_[i]->WaitStaged();
    if (outcome.ok()) {
      staged_[i] = !outcome->replayed;
      rows_ += outcome->rows;
    } else if (error.ok()) {
      error = outcome.status();
    }
  }
  if (Mistake("commit.before_all_votes")) return absl::OkStatus();
  return error;
}

absl::StatusOr<host::RowCounts> StepPath::StagedUpdate::Commit() {
  ops::StageTimer timer(path_->metrics_, ops::Stage::kCommit);
  decided_ = true;
  ReachFailpoint("update.votes_are_in");
  const absl::Time began = SteadyNow();
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (staged_[i]) calls_[i]->Decide(/*commit=*/true);
    ReachFailpoint("update.word_is_said");
  }
  absl::Status error;
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (!staged_[i]) continue;
    const int shard = static_cast<int>(i);
    auto updated = calls_[i]->WaitDone();
    // The stream also runs out of time where another rank was waited for; the shard holds this
    // rank's part all the same.
    if (!updated.ok() && MayHaveMissed(updated.status())) updated = DecideAgain(shard);
    path_->ObserveLink(shard, ops::Rpc::kShardApply, updated.status(), began);
    if (updated.ok()) {
      rows_ += *updated;
    } else if (error.ok()) {
      error = updated.status();
    }
  }
  if (!error.ok()) return error;
  ReachFailpoint("update.is_made");
  return rows_;
}

absl::StatusOr<host::RowCounts> StepPath::StagedUpdate::DecideAgain(int shard) {
  if (!name_.group_part.has_value()) {
    return path_->mutations_->Commit(shard, name_.mutation, name_.attempt, deadline_,
                                     context_.trace());
  }
  auto request = OfRows<internal::v1::DecideStepRequest>(name_.model_id, histories_[shard]);
  request.set_group(name_.group_part->group());
  request.set_generation(name_.group_part->generation());
  request.set_step(name_.group_part->step());
  request.set_commit(true);
  return SayUntilHeard(path_->options_.shard_call, context_.trace(),
                       [&](rpc::CallContext* context) -> absl::StatusOr<host::RowCounts> {
                         ASSIGN_OR_RETURN(const auto decided,
                                          path_->shards_[shard].DecideStep(request, context));
                         return host::RowCountsOf(decided);
                       });
}

std::vector<ShardGradients> StepPath::StagedUpdate::LayOut(const GradientInput& input,
                                                           const KeptBatch& batch) {
  std::vector<ShardGradients> gradients(path_->shards_.size());
  path_->options_.threads->cpu.ParallelFor(static_cast<int64_t>(gradients.size()), [&](int64_t i) {
    const auto shard = static_cast<int>(i);
    host::ShardBackend& backend = path_->shards_[i];
    ShardGradients& to = gradients[i];
    to.in_place = ReadsInPlace(input, batch, shard);
    if (IsAlone(name_) && !to.in_place) {
      const auto take_block = [&](int64_t bytes) { return backend.TakeBlock(bytes, deadline_); };
      if (auto summed = SumsForShard(input, batch, shard, take_block)) {
        to = *std::move(summed);
        return;
      }
    }
    to.block = backend.TakeBlock(GradientBytes(input, batch, shard, to.in_place), deadline_);
    to.input = GradientsForShard(input, batch, shard, to.in_place, to.block);
  });
  return gradients;
}

bool StepPath::StagedUpdate::ReadsInPlace(const GradientInput& input, const KeptBatch& batch,
                                          int shard) const {
  return !path_->options_.copy_gradients && AnyInPlace(input, batch) &&
         std::all_of(input.regions.begin(), input.regions.end(), [&](const NamedRegion& region) {
           return path_->shards_[shard].Lend(region, deadline_);
         });
}

void StepPath::ReleaseOnShards(uint64_t model_id, uint64_t handle) {
  rpc::CallContext context(SteadyNow() + kReleaseDeadline);
  internal::v1::ReleaseBatchRequest request;
  request.set_model_id(model_id);
  request.set_batch_handle(handle);
  const absl::Status released = shards_.OnAll([&](int shard) {
    // While one hangs, each call would take as long; the batches of a client may be many.
    if (absl::ToUnixMillis(SteadyNow()) < release_after_ms_[shard]) return absl::OkStatus();
    const absl::Status status = shards_[shard].ReleaseBatch(request, &context).status();
    if (absl::IsDeadlineExceeded(status)) {
      release_after_ms_[shard] = absl::ToUnixMillis(SteadyNow() + kReleasePause);
    }
    return status;
  });
  released.IgnoreError();
}

void StepPath::ObserveLink(int shard, ops::Rpc rpc, const absl::Status& status, absl::Time began) {
  metrics_->ShardLink(shard)->Observe(rpc, status.code(),
                                      absl::ToDoubleSeconds(SteadyNow() - began));
}

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
  const bool copy = request.shared().has_ids();
  rpc::CallContext::Room room_of_copy;
  if (copy) {
    const v1::SharedBlock& ids = request.shared().ids();
    RETURN_IF_ERROR(FindBlock(options_.regions, ids, "shared.ids").status());
    ASSIGN_OR_RETURN(room_of_copy, context->MakeRoom(static_cast<int64_t>(ids.size()), "the ids"));
  }
  const WorkTimer decoding;
  LookupInput input;
  std::shared_ptr<const SharedOutput> output;
  v1::LookupRequest copied;  // if its ids lie in the client's memory
  {
    ops::StageTimer timer(metrics_, ops::Stage::kDecode);
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
  const absl::Time began = SteadyNow();
  const WorkTimer gathering;
  rpc::LinkedContext gather(context, hooks->gather_limit());
  const v1::DataType dtype = prepared.activation_dtype;
  const std::shared_ptr<const SharedOutput> memory =
      prepared.output != nullptr ? prepared.output
                                 : TakeOutput(*model, batch->feature_samples(), dtype);
  ASSIGN_OR_RETURN(const auto results,
                   Gather(model, batch, output.batch_handle, dtype, memory, gather.get()));
  times->set_shards_us(gathering.worked_us());
  ops::StageTimer timer(metrics_, ops::Stage::kCombine);
  const WorkTimer combining;
  if (output.batch_handle != 0) {
    const absl::Time expiry =
        hooks->owns_batch() ? absl::InfiniteFuture() : began + options_.batch_ttl;
    RETURN_IF_ERROR(Keep(prepared, results, output.batch_handle, expiry));
    hooks->OnKept(output.batch_handle);
  }
  output.model = model;
  output.order = prepared.order;
  output.statistics = batch->statistics();
  output.activations = ActivationsIn(*memory, *model, *batch, dtype);
  // The room is given back when gRPC has sent the activations.
  output.activations.owner = KeepBoth(std::move(room), std::move(output.activations.owner));
  CombineActivations(results, *model, *batch, dtype, *memory, output.order, &options_.threads->cpu);
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
  if (!status.ok()) ReleaseOnShards(prepared.model->id, handle);
  return status;
}

absl::StatusOr<MadeMutation> StepPath::Update(const UpdateName& name,
                                              const v1::ApplyGradientsRequest& gradients,
                                              rpc::CallContext* context, StepHooks* hooks,
                                              v1::StepTimes* times) {
  const auto batch = Claim(name.model_id, name.handle);
  if (absl::IsNotFound(batch.status()) && !name.group_part.has_value()) {
    // What became of the update if it came before?
    ASSIGN_OR_RETURN(const std::optional<host::RowCounts> rows,
                     mutations_->Find(name.mutation, context));
    if (rows.has_value()) return MadeMutation{*rows, /*replayed=*/true};
  }
  if (!batch.ok()) return batch.status();
  const absl::Cleanup unclaim = [&] { batches_.Unclaim(name.handle); };
  const CpuPool::Alone alone((*batch)->tiny);
  GradientInput input;
  {
    ops::StageTimer timer(metrics_, ops::Stage::kDecode);
    ASSIGN_OR_RETURN(input,
                     ReadGradients(gradients, **batch, options_.regions, &options_.threads->cpu));
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
  StagedUpdate staged(this, name, context->trace());
  RETURN_IF_ERROR(staged.Stage(input, batch, context));
  RETURN_IF_ERROR(timer.Wait([&] { return hooks->BeforeCommit(); }));
  ASSIGN_OR_RETURN(const host::RowCounts rows, staged.Commit());
  times->set_shards_us(timer.worked_us());
  return MadeMutation{rows, staged.replayed()};
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
  if (handles.empty()) return;
  rpc::CallContext context(SteadyNow() + kReleaseDeadline);
  internal::v1::RenewBatchesRequest request;
  request.mutable_batch_handles()->Add(handles.begin(), handles.end());
  request.set_batch_ttl_ms(absl::ToInt64Milliseconds(options_.BatchTtlOnShards()));
  shards_.Ask(&host::ShardBackend::RenewBatches, request, &context).IgnoreError();
}

absl::Status StepPath::Release(uint64_t model_id, uint64_t handle) {
  RETURN_IF_ERROR(Claim(model_id, handle).status());
  Discard(model_id, handle);
  return absl::OkStatus();
}

void StepPath::Discard(uint64_t model_id, uint64_t handle) {
  batches_.Erase(handle);
  ReleaseOnShards(model_id, handle);
}

}  // namespace emberd::step
