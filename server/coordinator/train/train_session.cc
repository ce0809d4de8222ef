#include "server/coordinator/train/train_session.h"

#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/coordinator/gradients.h"
#include "server/coordinator/lookup_request.h"
#include "server/ops/logging.h"
#include "server/rpc/call_context.h"

namespace emberd::server {
namespace {

// Microseconds from construction to now.
class Stopwatch {
 public:
  absl::Duration elapsed() const { return absl::Now() - began_; }
  int64_t us() const { return absl::ToInt64Microseconds(elapsed()); }

 private:
  const absl::Time began_ = absl::Now();
};

}  // namespace

// A batch that has been cut into mini-batches, with what its answer needs.
struct TrainSession::Batch {
  std::shared_ptr<const preprocess::PreprocessedBatch> preprocessed;
  std::vector<int> order;
  v1::DataType activation_dtype = v1::FLOAT32;
};

absl::StatusOr<std::unique_ptr<TrainSession>> TrainSession::Start(
    const CoordinatorResources& resources, v1::TrainStart start, rpc::CallContext* context) {
  if (absl::Status status = CompleteTrainStart(&start); !status.ok()) return status;
  rpc::LinkedContext finding(context, resources.shard_call);
  auto model = resources.registry->Find(start.model_id(), finding.get());
  if (!model.ok()) return model.status();
  const GroupMember::Environment environment{resources.collective, resources.fanout,
                                             resources.coordinator, resources.shard_call};
  auto member = GroupMember::Join(environment, *model, start, context);
  if (!member.ok()) return member.status();
  return std::unique_ptr<TrainSession>(
      new TrainSession(resources, *std::move(model), *std::move(member), context));
}

TrainSession::TrainSession(const CoordinatorResources& resources,
                           std::shared_ptr<const ServedModel> model,
                           std::unique_ptr<GroupMember> member, rpc::CallContext* context)
    : resources_(resources),
      model_(std::move(model)),
      member_(std::move(member)),
      context_(context),
      metrics_(resources.metrics->Group(model_->config.name(), member_->group())),
      next_lookup_(member_->next_step()),
      next_update_(next_lookup_),
      next_gather_(next_lookup_),
      next_apply_(next_lookup_),
      watch_(context, [this] { Fail(absl::CancelledError("the trainer ended its stream")); }) {}

TrainSession::~TrainSession() {
  std::map<int64_t, Step> unfinished;
  {
    absl::MutexLock lock(&mutex_);
    unfinished.swap(steps_);
  }
  for (const auto& [number, step] : unfinished) {
    resources_.batches->Erase(step.handle);
    resources_.fanout->Release(model_->id, step.handle);
  }
}

v1::TrainStarted TrainSession::started() const {
  v1::TrainStarted started;
  started.set_next_step(member_->next_step());
  started.set_generation(member_->generation());
  return started;
}

absl::Status TrainSession::AdmitLookup(int64_t step) {
  absl::MutexLock lock(&mutex_);
  if (step != next_lookup_) {
    return absl::InvalidArgumentError(
        absl::StrCat("lookup.step is ", step, "; the next lookup is that of step ", next_lookup_));
  }
  if (step - next_update_ >= kMaxLookupsAhead) {
    return absl::InvalidArgumentError(
        absl::StrCat("lookup.step is ", step, ", but the update of step ", next_update_,
                     " has not been sent; at most ", kMaxLookupsAhead, " lookups may be ahead"));
  }
  ++next_lookup_;
  return absl::OkStatus();
}

absl::Status TrainSession::AdmitUpdate(int64_t step) {
  absl::MutexLock lock(&mutex_);
  if (step != next_update_) {
    return absl::InvalidArgumentError(
        absl::StrCat("update.step is ", step, "; the next update is that of step ", next_update_));
  }
  if (step >= next_lookup_) {
    return absl::InvalidArgumentError(
        absl::StrCat("update.step is ", step, ", but its lookup has not been sent"));
  }
  ++next_update_;
  return absl::OkStatus();
}

void TrainSession::EndRequests() {
  absl::MutexLock lock(&mutex_);
  ended_ = true;
}

void TrainSession::Fail(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) return;
    failure_ = status;
  }
  metrics_->AddFailure(status.code());
}

void TrainSession::Finish() {
  const absl::Status failure = Failure();
  member_->Leave(failure.ok() ? "it has finished" : std::string(failure.message()),
                 /*finished=*/failure.ok());
}

absl::Status TrainSession::Failure() {
  absl::MutexLock lock(&mutex_);
  return failure_;
}

absl::Status TrainSession::Await(const std::function<bool()>& ready, const std::string& what,
                                 int64_t* waited_us) {
  const Stopwatch watch;
  const auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !failure_.ok() || ready(); };
  absl::MutexLock lock(&mutex_);
  const bool in_time = mutex_.AwaitWithTimeout(absl::Condition(&over), member_->step_timeout());
  *waited_us += watch.us();
  resources_.metrics->ObserveStage(ops::Stage::kWaitForUpdate,
                                   absl::ToDoubleSeconds(watch.elapsed()));
  if (!in_time) return absl::DeadlineExceededError(absl::StrCat(what, ": it did not come in time"));
  return failure_;
}

void TrainSession::Record(const RankWait& wait, v1::StepTimes* times) {
  times->set_wait_for_ranks_us(times->wait_for_ranks_us() + absl::ToInt64Microseconds(wait.waited));
  if (wait.slowest_rank >= 0) {
    times->set_slowest_rank(wait.slowest_rank);
    resources_.metrics->ObserveStage(ops::Stage::kWaitForRanks, absl::ToDoubleSeconds(wait.waited));
  }
}

absl::StatusOr<TrainLookupOutput> TrainSession::Lookup(int64_t step,
                                                       const v1::LookupRequest& request) {
  auto output = TryLookup(step, request);
  if (output.ok()) {
    metrics_->ObserveLookup(output->times);
    return output;
  }
  Fail(output.status());
  member_->Leave(absl::StrCat("lookup of step ", step, ": ", output.status().message()),
                 /*finished=*/false);
  return output;
}

absl::StatusOr<v1::TrainUpdateResult> TrainSession::Update(
    int64_t step, const v1::ApplyGradientsRequest& request) {
  auto result = TryUpdate(step, request);
  if (result.ok()) {
    metrics_->ObserveUpdate(result->times());
    return result;
  }
  Fail(result.status());
  member_->Leave(absl::StrCat("update of step ", step, ": ", result.status().message()),
                 /*finished=*/false);
  return result;
}

absl::StatusOr<TrainLookupOutput> TrainSession::TryLookup(int64_t step,
                                                          const v1::LookupRequest& request) {
  if (absl::Status status = Failure(); !status.ok()) return status;
  const Stopwatch watch;
  v1::StepTimes times;
  times.set_slowest_rank(-1);
  auto batch = Preprocess(step, request, &times);
  if (!batch.ok()) return batch.status();

  const int64_t unseen = member_->options().pipelined() ? 1 : 0;
  int64_t waited_us = 0;
  absl::Status status =
      Await([&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return next_apply_ >= step - unseen; },
            absl::StrCat("the lookup of step ", step, " waits for the update of step ",
                         step - unseen - 1),
            &waited_us);
  times.set_wait_for_update_us(waited_us);
  if (!status.ok()) return status;
  RankWait wait;
  status = member_->WaitForProgress(step, context_, &wait);
  Record(wait, &times);
  if (!status.ok()) return status;

  auto output = GatherAndKeep(step, *std::move(batch), &times);
  if (!output.ok()) return output;
  absl::MutexLock lock(&mutex_);
  const auto found = steps_.find(step);  // gone if the trainer did not wait for the answer
  if (found != steps_.end()) found->second.lookup_time = watch.elapsed();
  return output;
}

absl::StatusOr<TrainSession::Batch> TrainSession::Preprocess(int64_t step,
                                                             const v1::LookupRequest& request,
                                                             v1::StepTimes* times) {
  const Stopwatch watch;
  auto input = [&] {
    ops::StageTimer timer(resources_.metrics, ops::Stage::kDecode);
    return DecodeLookup(request, *model_, resources_.max_message_bytes);
  }();
  if (!input.ok()) return input.status();
  preprocess::Preprocessor& preprocessor = *model_->preprocessor;
  auto sorted = preprocessor.Sort(input->features);
  if (!sorted.ok()) return sorted.status();
  RankWait wait;
  const auto find_cuts = [&] {
    auto cuts = preprocessor.FindCuts(sorted->get());
    if (absl::IsResourceExhausted(cuts.status())) model_->metrics->AddRefused();
    return cuts;
  };
  auto cuts =
      member_->AgreeOnCuts(step, (*sorted)->needs_minibatches(), find_cuts, context_, &wait);
  if (!cuts.ok()) return cuts.status();
  auto batch = preprocessor.Finish(*std::move(sorted), *cuts);
  if (!batch.ok()) return batch.status();
  const absl::Duration worked = watch.elapsed() - wait.waited;
  Record(wait, times);
  times->set_preprocess_us(absl::ToInt64Microseconds(worked));
  resources_.metrics->ObserveStage(ops::Stage::kPreprocess, absl::ToDoubleSeconds(worked));
  model_->Observe(**batch);
  return Batch{*std::move(batch), std::move(input->order), input->activation_dtype};
}

absl::StatusOr<TrainLookupOutput> TrainSession::GatherAndKeep(int64_t step, Batch batch,
                                                              v1::StepTimes* times) {
  Stopwatch watch;
  const uint64_t handle = NewBatchHandle();
  rpc::LinkedContext gathering(context_, resources_.shard_call);
  auto results = resources_.fanout->Gather(model_, batch.preprocessed, handle, gathering.get());
  if (!results.ok()) return results.status();
  times->set_shards_us(watch.us());
  auto kept = std::make_shared<const KeptBatch>(model_, *batch.preprocessed, *results);
  const int64_t bytes = kept->bytes();
  absl::Status status = resources_.batches->Insert(handle, std::move(kept), bytes,
                                                   absl::Now() + resources_.batch_ttl);
  if (!status.ok()) {
    resources_.fanout->Release(model_->id, handle);
    return status;
  }
  {
    absl::MutexLock lock(&mutex_);
    steps_[step].handle = handle;
    next_gather_ = step + 1;
  }
  TrainLookupOutput output;
  ops::StageTimer timer(resources_.metrics, ops::Stage::kCombine);
  const Stopwatch combining;
  output.lookup.activations =
      CombineActivations(*results, *model_, *batch.preprocessed, batch.activation_dtype);
  times->set_combine_us(combining.us());
  output.lookup.model = model_;
  output.lookup.order = std::move(batch.order);
  output.lookup.statistics = batch.preprocessed->statistics();
  output.times = *times;
  return output;
}

absl::StatusOr<v1::TrainUpdateResult> TrainSession::TryUpdate(
    int64_t step, const v1::ApplyGradientsRequest& request) {
  const Stopwatch watch;
  v1::TrainUpdateResult result;
  result.set_step(step);
  v1::StepTimes* times = result.mutable_times();
  times->set_slowest_rank(-1);
  const bool pipelined = member_->options().pipelined();
  int64_t waited_us = 0;
  // Pipelined: the next lookup must not see this update, so it goes first.
  absl::Status status = Await(
      [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        if (!pipelined) return next_gather_ > step;
        return next_gather_ > step + 1 || (ended_ && next_lookup_ == next_gather_);
      },
      absl::StrCat("the update of step ", step, " waits for the lookup of step ",
                   pipelined ? step + 1 : step),
      &waited_us);
  times->set_wait_for_update_us(waited_us);
  if (!status.ok()) return status;
  auto rows = Apply(step, request, times);
  if (!rows.ok()) return rows.status();
  SetRowCounts(*rows, &result);

  absl::Duration lookup_time;
  {
    absl::MutexLock lock(&mutex_);
    next_apply_ = step + 1;
    lookup_time = steps_.at(step).lookup_time;
    steps_.erase(step);
  }
  LogIfSlow(step, lookup_time + watch.elapsed(), *times);
  status = member_->TellProgress(step + 1, context_);
  if (!status.ok()) return status;
  return result;
}

absl::StatusOr<RowCounts> TrainSession::Apply(int64_t step,
                                              const v1::ApplyGradientsRequest& request,
                                              v1::StepTimes* times) {
  uint64_t handle = 0;
  {
    absl::MutexLock lock(&mutex_);
    handle = steps_.at(step).handle;
  }
  auto batch = resources_.batches->Claim(handle);
  if (!batch.ok()) return batch.status();
  absl::Cleanup unclaim = [&] { resources_.batches->Unclaim(handle); };
  auto input = [&] {
    ops::StageTimer timer(resources_.metrics, ops::Stage::kDecode);
    return DecodeGradients(request, **batch);
  }();
  if (!input.ok()) return input.status();
  const Stopwatch watch;
  Fanout::UpdateName name;
  name.handle = handle;
  name.group_part = member_->Part(step);
  auto staged = resources_.fanout->Stage(*input, **batch, name, context_);
  if (!staged.ok()) return staged.status();
  RankWait wait;
  absl::Status status = member_->AllStaged(step, context_, &wait);
  Record(wait, times);
  if (!status.ok()) return status;
  auto rows = (*staged)->Commit();
  times->set_shards_us(absl::ToInt64Microseconds(watch.elapsed() - wait.waited));
  if (rows.ok()) resources_.batches->Erase(handle);
  return rows;
}

void TrainSession::LogIfSlow(int64_t step, absl::Duration time, const v1::StepTimes& times) {
  if (time < resources_.slow_step) return;
  ops::Log(ops::LogLevel::kWarning, "slow step",
           {{"model", model_->config.name()},
            {"group", member_->group()},
            {"rank", member_->rank()},
            {"step", step},
            {"ms", absl::ToInt64Milliseconds(time)},
            {"wait_for_ranks_us", times.wait_for_ranks_us()},
            {"slowest_rank", times.slowest_rank()},
            {"wait_for_lookup_us", times.wait_for_update_us()},
            {"shards_us", times.shards_us()},
            {"trace", rpc::TraceId(context_->trace())}});
}

}  // namespace emberd::server
