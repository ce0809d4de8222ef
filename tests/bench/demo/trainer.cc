#include "tests/bench/demo/trainer.h"

#include <algorithm>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "tests/bench/demo/dataset.h"
#include "tests/bench/demo/embeddings.h"
#include "tests/bench/demo/saved_run.h"

namespace emberd::demo {

namespace {

// Reads a trainer's next batch while the current one is being trained on. Not thread-safe; the
// dataset must outlive it.
class Prefetcher {
 public:
  Prefetcher(const Dataset* dataset, const Schedule& schedule, int rank, int64_t first_round = 0)
      : dataset_(dataset), schedule_(schedule), rank_(rank), round_(first_round) {
    Begin();
  }

  // The batches of the rounds from first_round on. Empty ones beyond the end.
  absl::Status Next(Batch* batch) {
    absl::Status status = reading_.get();
    std::swap(*batch, next_);
    Begin();
    return status;
  }

 private:
  void Begin() {
    const ExampleRange range = schedule_.Range(round_++, rank_);
    reading_ = std::async(std::launch::async, [this, range] {
      return dataset_->ReadTrain(range.first, range.count, &next_);
    });
  }

  const Dataset* dataset_;
  Schedule schedule_;
  int rank_;
  int64_t round_;
  Batch next_;
  std::future<absl::Status> reading_;  // its end is awaited by the destructor
};

constexpr absl::Duration kPatience = absl::Minutes(2);
constexpr absl::Duration kPause = absl::Milliseconds(300);
constexpr absl::Duration kReportEvery = absl::Seconds(5);

// Errors that pass when a shard, a coordinator or another trainer returns, or when somebody resets
// the model.
bool MayPass(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kDataLoss:
      return true;
    default:
      return false;
  }
}

double SecondsSince(absl::Time start) { return absl::ToDoubleSeconds(absl::Now() - start); }

void AddTimes(const client::StepTimes& times, RoundReport* report) {
  report->preprocess_seconds += absl::ToDoubleSeconds(times.preprocess);
  report->shard_seconds += absl::ToDoubleSeconds(times.shards);
  report->combine_seconds += absl::ToDoubleSeconds(times.combine);
  report->rank_seconds += absl::ToDoubleSeconds(times.wait_for_ranks);
}

class Trainer {
 public:
  Trainer(const Experiment& experiment, const TrainerSetup& setup, Embeddings* embeddings,
          client::TrainOptions options, Group* group)
      : experiment_(experiment),
        rank_(setup.rank),
        checkpoint_every_(setup.checkpoint_every),
        saved_run_(setup.checkpoint_folder),
        group_(group),
        dense_(experiment.dataset->info(), experiment.parameters),
        steps_(embeddings, std::move(options)) {}

  absl::Status Run();

 private:
  // Takes over the state of a run that has begun.
  absl::Status Begin();
  absl::Status Read(std::shared_ptr<const Batch>* batch);
  // As far as it can without an error; goes on where the last call has stopped.
  absl::Status TryRound();
  absl::Status Learn();
  // The name of the checkpoint to ask for after this round; empty: none. The dense part is saved.
  std::string BeginCheckpoint();
  absl::Status Apply();
  // Joins emberd's group again after `why`, as soon as the cluster serves.
  absl::Status JoinAnew(absl::Status why);
  absl::Status Join() { return steps_.Join(round_ + (summed_ ? 1 : 0), OldestOpenStep()); }
  // The first whose update some rank may not know to be applied. Rounds end for all together.
  int64_t OldestOpenStep() const {
    return std::max<int64_t>(0, round_ - (experiment_.schedule.pipelined ? 1 : 0));
  }

  const Experiment& experiment_;
  const int rank_;
  const int64_t checkpoint_every_;
  const SavedRun saved_run_;
  Group* group_;
  DenseModel dense_;
  Steps steps_;
  std::unique_ptr<Prefetcher> batches_;
  int64_t round_ = 0;
  bool summed_ = false;                         // the dense part has learned from this round
  std::shared_ptr<const Batch> batch_, ahead_;  // of this round and of the next, once they are read
  RoundReport report_;
};

absl::Status Trainer::Run() {
  RETURN_IF_ERROR(Begin());
  while (round_ < experiment_.schedule.Rounds()) {
    absl::Status status = TryRound();
    if (!status.ok() && MayPass(status)) status = JoinAnew(std::move(status));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Trainer::Begin() {
  ASSIGN_OR_RETURN(Position position, group_->Begin());
  round_ = position.round;
  summed_ = position.summed;
  if (!position.dense_state.empty() && !dense_.SetState(position.dense_state)) {
    return absl::InternalError("the dense state is not that of this model");
  }
  // Steps whose update the trainer before may have left open. Its gradients are gone with it.
  const int64_t first = OldestOpenStep();
  batches_ =
      std::make_unique<Prefetcher>(experiment_.dataset.get(), experiment_.schedule, rank_, first);
  for (int64_t step = first; step < round_ + (summed_ ? 1 : 0); ++step) {
    RETURN_IF_ERROR(Read(&batch_));
    steps_.Add(step, batch_, nullptr);
    if (step < round_) batch_ = nullptr;
    group_->Report(absl::StrCat("begins after step ", step,
                                "; if its part of that update is missing still, it is left out"));
  }
  return absl::OkStatus();
}

absl::Status Trainer::Read(std::shared_ptr<const Batch>* batch) {
  auto read = std::make_shared<Batch>();
  RETURN_IF_ERROR(batches_->Next(read.get()));
  *batch = std::move(read);
  return absl::OkStatus();
}

absl::Status Trainer::TryRound() {
  if (!steps_.joined()) {
    RETURN_IF_ERROR(Join());
  }
  if (!summed_) {
    RETURN_IF_ERROR(Learn());
  }
  RETURN_IF_ERROR(Apply());
  report_.generation = steps_.generation();
  RETURN_IF_ERROR(group_->Finish(report_));
  ++round_;
  summed_ = false;
  batch_ = std::move(ahead_);
  ahead_ = nullptr;
  report_ = {};
  return absl::OkStatus();
}

// Looks the batch up, and lets the dense part learn from it.
absl::Status Trainer::Learn() {
  if (batch_ == nullptr) {
    RETURN_IF_ERROR(Read(&batch_));
  }
  RETURN_IF_ERROR(steps_.SendLookup(round_, *batch_));
  const absl::Time start = absl::Now();
  ASSIGN_OR_RETURN(const client::TrainLookupResult found, steps_.ReceiveLookup());
  report_.wait_seconds += SecondsSince(start);
  report_.minibatches = found.statistics.num_minibatches;
  AddTimes(found.times, &report_);

  // emberd preprocesses the next step's ids while this step computes.
  if (round_ + 1 < experiment_.schedule.Rounds()) {
    if (ahead_ == nullptr) {
      RETURN_IF_ERROR(Read(&ahead_));
    }
    RETURN_IF_ERROR(steps_.SendLookup(round_ + 1, *ahead_));
  }

  const absl::Time looked_up = absl::Now();
  std::vector<absl::Span<const float>> activations;
  for (const client::Activation& activation : found.activations) {
    activations.push_back(activation.values);
  }
  auto step = std::make_shared<const DenseStep>(dense_.Step(*batch_, activations));
  report_.dense_seconds = SecondsSince(looked_up);
  ASSIGN_OR_RETURN(const GradientSum sum,
                   group_->Reduce({.round = round_,
                                   .generation = steps_.generation(),
                                   .examples = batch_->size,
                                   .gradient = {step->parameter_gradients.begin(),
                                                step->parameter_gradients.end()},
                                   .logits = {step->logits.begin(), step->logits.end()},
                                   .labels = batch_->labels}));
  dense_.Update(Eigen::Map<const Vector>(sum.gradient.data(), sum.gradient.size()), sum.examples);
  steps_.Add(round_, batch_, std::move(step), BeginCheckpoint());
  summed_ = true;
  return absl::OkStatus();
}

// The dense part is there first: a checkpoint without it would be of no use.
std::string Trainer::BeginCheckpoint() {
  const int64_t steps = round_ + 1;
  // After the last one there is nothing to go on with.
  if (checkpoint_every_ == 0 || steps % checkpoint_every_ != 0 ||
      steps == experiment_.schedule.Rounds()) {
    return "";
  }
  std::string name = CheckpointName(steps);
  const absl::Status saved =
      saved_run_.SaveDense(name, {.round = steps, .dense_state = dense_.State()});
  if (saved.ok()) return name;
  group_->Report(absl::StrCat("has no checkpoint ", name, ": ", saved.ToString()));
  return "";
}

// Sends the embeddings' gradients, and waits until they have been applied: those of this step, or
// where steps are pipelined only of the one before, unless somebody is about to look at the tables.
absl::Status Trainer::Apply() {
  RETURN_IF_ERROR(steps_.SendUpdates());
  const bool last = round_ + 1 == experiment_.schedule.Rounds();
  const bool pipelined = experiment_.schedule.pipelined;
  const absl::Time start = absl::Now();
  if (last) {
    RETURN_IF_ERROR(steps_.Finish());
  }
  ASSIGN_OR_RETURN(
      const auto results,
      steps_.AwaitUpdates(pipelined && !last && !experiment_.EvaluatesAfter(round_) ? 1 : 0));
  report_.wait_seconds += SecondsSince(start);
  for (const client::TrainUpdateResult& result : results) {
    if (!result.checkpoint.empty()) {
      group_->Report(result.checkpoint_error.empty()
                         ? absl::StrCat("has saved checkpoint ", result.checkpoint)
                         : absl::StrCat("has no checkpoint ", result.checkpoint, ": ",
                                        result.checkpoint_error));
    }
    report_.rows_updated += result.rows_updated;
    AddTimes(result.times, &report_);
  }
  return absl::OkStatus();
}

absl::Status Trainer::JoinAnew(absl::Status why) {
  group_->Leave({steps_.generation()});
  steps_.Leave();
  const absl::Time start = absl::Now();
  absl::Time last_report = absl::InfinitePast();
  while (true) {
    if (absl::Now() - last_report >= kReportEvery) {
      last_report = absl::Now();
      group_->Report(absl::StrCat("waits: ", why.ToString()));
    }
    why = Join();
    if (why.ok()) {
      group_->Report(absl::StrCat(
          "goes on after ",
          absl::FormatDuration(absl::Trunc(absl::Now() - start, absl::Milliseconds(1)))));
      return absl::OkStatus();
    }
    group_->Leave({});
    if (!MayPass(why) || absl::Now() - start > kPatience) return why;
    absl::SleepFor(kPause);
  }
}

}  // namespace

absl::Status RunTrainer(const Experiment& experiment, const TrainerSetup& setup, Group* group) {
  std::vector<std::string> coordinators = setup.coordinators;
  const size_t preferred = setup.rank % coordinators.size();
  std::rotate(coordinators.begin(), coordinators.begin() + static_cast<ptrdiff_t>(preferred),
              coordinators.end());
  ASSIGN_OR_RETURN(
      const auto embeddings,
      Embeddings::Connect(coordinators,
                          DescribeModel(experiment.dataset->info(), experiment.parameters,
                                        experiment.schedule.batch_size)));
  client::TrainOptions options = experiment.group;
  options.group = setup.group_name.empty() ? embeddings->client_id() : setup.group_name;
  options.rank = setup.rank;
  return Trainer(experiment, setup, embeddings.get(), options, group).Run();
}

}  // namespace emberd::demo
