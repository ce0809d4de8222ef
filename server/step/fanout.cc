#include "server/step/fanout.h"

#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/step/activations.h"

namespace emberd::step {
namespace {

constexpr absl::Duration kReleaseDeadline = absl::Seconds(1);
constexpr absl::Duration kReleasePause = absl::Seconds(2);

// Whether no other rank takes part in the update.
bool IsAlone(const UpdateName& name) {
  return !name.group_part.has_value() || name.group_part->size() == 1;
}

}  // namespace

Fanout::Fanout(const ShardSet& shards, FanoutOptions options, Mutations* mutations,
               ops::Metrics* metrics)
    : shards_(shards),
      options_(options),
      mutations_(mutations),
      metrics_(metrics),
      release_after_ms_(shards.size()) {}

absl::StatusOr<std::vector<host::GatherResult>> Fanout::Gather(
    const ServedModelPtr& model, const std::shared_ptr<const preprocess::PreprocessedBatch>& batch,
    uint64_t handle, v1::DataType dtype, const std::shared_ptr<const SharedOutput>& output,
    rpc::CallContext* context) {
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
    command.batch_ttl = options_.batch_ttl;
    command.stacks = batch->ShardView(static_cast<int>(shard));
    command.owner = owner;
    command.activation_dtype = dtype;
    if (!places.empty() && shards_[shard].Lend(output->region)) {
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
    if (status.ok()) result->places = std::move(results[i].places);
    if (status.ok())
      status = Annotate(CheckGatherResult(*result, *model, *batch, dtype), shards_[i].name());
    ObserveLink(static_cast<int>(i), ops::Rpc::kShardGather, status, began);
    // Here, and not when all answers are there: the other shards are still at work.
    if (status.ok()) {
      status = Annotate(ArrangeUniqueRows(*model, *batch, static_cast<int>(i), pool_,
                                          options_.threads->cpu, &*result),
                        shards_[i].name());
    }
    if (status.ok()) {
      results[i] = *std::move(result);
    } else if (error.ok()) {
      error = status;
    }
  }
  if (error.ok()) return results;
  calls.clear();  // cancels what is still under way
  if (handle != 0) Release(model->id, handle);
  return error;
}

StagedUpdate::StagedUpdate(Fanout* fanout, const UpdateName& name, const std::string& trace)
    : fanout_(fanout), name_(name), context_(SteadyNow() + fanout->options_.shard_call, trace) {}

StagedUpdate::~StagedUpdate() {
  if (!decided_ && !name_.group_part.has_value()) {
    fanout_->mutations_->Abandon(name_.mutation, name_.attempt);
  }
}

bool StagedUpdate::replayed() const {
  return std::find(staged_.begin(), staged_.end(), true) == staged_.end();
}

absl::Status StagedUpdate::Stage(const GradientInput& input, const KeptBatch& batch,
                                 rpc::CallContext* context) {
  deadline_ = context->deadline();
  rpc::CancelWatch watch(context, [this] { context_.Cancel(); });
  ops::StageTimer timer(fanout_->metrics_, ops::Stage::kStage);
  std::vector<ShardGradients> gradients(fanout_->shards_.size());
  if (!name_.skip) fanout_->LayOut(input, batch, IsAlone(name_), &gradients);
  for (size_t i = 0; i < fanout_->shards_.size(); ++i) {
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
    calls_.push_back(fanout_->shards_[i].Apply(std::move(command), &context_));
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

absl::StatusOr<host::RowCounts> StagedUpdate::Commit() {
  ops::StageTimer timer(fanout_->metrics_, ops::Stage::kCommit);
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
    if (MayHaveMissed(updated.status())) updated = DecideAgain(shard);
    fanout_->ObserveLink(shard, ops::Rpc::kShardApply, updated.status(), began);
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

absl::StatusOr<host::RowCounts> StagedUpdate::DecideAgain(int shard) {
  if (!name_.group_part.has_value()) {
    return fanout_->mutations_->Commit(shard, name_.mutation, name_.attempt, deadline_,
                                       context_.trace());
  }
  auto request = OfRows<internal::v1::DecideStepRequest>(name_.model_id, histories_[shard]);
  request.set_group(name_.group_part->group());
  request.set_generation(name_.group_part->generation());
  request.set_step(name_.group_part->step());
  request.set_commit(true);
  return SayUntilHeard(fanout_->options_.shard_call, context_.trace(),
                       [&](rpc::CallContext* context) -> absl::StatusOr<host::RowCounts> {
                         ASSIGN_OR_RETURN(const auto decided,
                                          fanout_->shards_[shard].DecideStep(request, context));
                         return host::RowCountsOf(decided);
                       });
}

void Fanout::LayOut(const GradientInput& input, const KeptBatch& batch, bool alone,
                    std::vector<ShardGradients>* gradients) {
  options_.threads->cpu.ParallelFor(static_cast<int64_t>(shards_.size()), [&](int64_t i) {
    const auto shard = static_cast<int>(i);
    ShardGradients& to = (*gradients)[i];
    to.in_place = ReadsInPlace(input, batch, shard);
    if (alone && !to.in_place) {
      const auto take_block = [&](int64_t bytes) { return shards_[i].TakeBlock(bytes); };
      if (auto summed = SumsForShard(input, batch, shard, take_block)) {
        to = *std::move(summed);
        return;
      }
    }
    to.block = shards_[i].TakeBlock(GradientBytes(input, batch, shard, to.in_place));
    to.input = GradientsForShard(input, batch, shard, to.in_place, to.block);
  });
}

absl::StatusOr<std::unique_ptr<StagedUpdate>> Fanout::Stage(const GradientInput& input,
                                                            const KeptBatch& batch,
                                                            const UpdateName& name,
                                                            rpc::CallContext* context) {
  std::unique_ptr<StagedUpdate> staged(new StagedUpdate(this, name, context->trace()));
  RETURN_IF_ERROR(staged->Stage(input, batch, context));
  return staged;
}

bool Fanout::ReadsInPlace(const GradientInput& input, const KeptBatch& batch, int shard) const {
  return !options_.copy_gradients && AnyInPlace(input, batch) &&
         std::all_of(input.regions.begin(), input.regions.end(),
                     [&](const NamedRegion& region) { return shards_[shard].Lend(region); });
}

void Fanout::RenewBatches(const std::vector<uint64_t>& handles) {
  rpc::CallContext context(SteadyNow() + kReleaseDeadline);
  internal::v1::RenewBatchesRequest request;
  request.mutable_batch_handles()->Add(handles.begin(), handles.end());
  request.set_batch_ttl_ms(absl::ToInt64Milliseconds(options_.batch_ttl));
  shards_.Ask(&host::ShardBackend::RenewBatches, request, &context).IgnoreError();
}

void Fanout::Release(uint64_t model_id, uint64_t handle) {
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

void Fanout::ObserveLink(int shard, ops::Rpc rpc, const absl::Status& status, absl::Time began) {
  metrics_->ShardLink(shard)->Observe(rpc, status.code(),
                                      absl::ToDoubleSeconds(SteadyNow() - began));
}

}  // namespace emberd::step
