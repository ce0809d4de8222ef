#include "tests/bench/demo/training.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/socket.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "tests/bench/demo/metrics.h"

namespace emberd::demo {
namespace {
constexpr int64_t kHeldOutBatch = 2048;
constexpr int64_t kWindow = 32'768;  // examples of the running loss and AUC
constexpr int kPollMilliseconds = 100;
constexpr absl::Duration kTrainerPatience = absl::Seconds(5);
constexpr int kMaxReplacements = 10;
}  // namespace

absl::StatusOr<Evaluation> EvaluateHeldOut(const Dataset& dataset, const DenseModel& dense,
                                           Embeddings* embeddings, int64_t examples,
                                           const std::function<bool()>& cancelled) {
  Vector logits(examples);
  std::vector<float> labels;
  Batch batch;
  for (int64_t first = 0; first < examples; first += kHeldOutBatch) {
    if (cancelled()) return absl::CancelledError("the evaluation was cancelled");
    RETURN_IF_ERROR(dataset.ReadTest(first, std::min(kHeldOutBatch, examples - first), &batch));
    ASSIGN_OR_RETURN(const client::LookupResult lookup, embeddings->Lookup(batch));
    std::vector<absl::Span<const float>> activations;
    for (const client::Activation& activation : lookup.activations) {
      activations.push_back(activation.values);
    }
    logits.segment(first, batch.size) = dense.Predict(batch, activations);
    labels.insert(labels.end(), batch.labels.begin(), batch.labels.end());
  }
  return Evaluation{Auc({logits.data(), labels.size()}, labels), LogLoss(logits, labels)};
}

absl::StatusOr<double> PlantedAuc(const Dataset& dataset, int64_t examples) {
  Batch batch;
  RETURN_IF_ERROR(dataset.ReadTest(0, examples, &batch));
  return batch.true_probability.empty() ? -1.0 : Auc(batch.true_probability, batch.labels);
}

Training::Training(Setup setup)
    : setup_(std::move(setup)),
      dense_(setup_.experiment->dataset->info(), setup_.experiment->parameters),
      metrics_(kWindow),
      rounds_done_(setup_.start.round) {
  const Schedule& schedule = setup_.experiment->schedule;
  result_.examples_before =
      std::min(schedule.examples, rounds_done_ * schedule.batch_size * schedule.trainers);
  result_.examples = shown_examples_ = result_.examples_before;
}

absl::Status Training::Run() {
  start_ = absl::Now();
  absl::Status status = Start();
  if (status.ok()) status = Loop();
  result_.seconds = Seconds();
  for (auto& trainer : trainers_) {
    if (trainer != nullptr) trainer->Stop(kTrainerPatience);
  }
  setup_.display->Finish();
  return status;
}

absl::Status Training::Start() {
  const Position& start = setup_.start;
  if (!start.dense_state.empty() && !dense_.SetState(start.dense_state)) {
    return absl::DataLossError("the saved dense part is not that of this model");
  }
  const int trainers = setup_.experiment->schedule.trainers;
  sockets_.resize(trainers);
  trainers_.resize(trainers);
  std::vector<int> sockets;
  for (int rank = 0; rank < trainers; ++rank) {
    ASSIGN_OR_RETURN(const int socket, StartTrainer(rank));
    sockets.push_back(socket);
  }
  hub_ = std::make_unique<Hub>(
      sockets,
      Hub::Events{.on_sum = [this](const auto& c, const auto& sum) { OnSum(c, sum); },
                  .on_round = [this](int64_t round, const auto& r) { OnRound(round, r); },
                  .on_report =
                      [this](int rank, const std::string& message) {
                        setup_.display->Print(absl::StrCat("trainer ", rank, " ", message));
                      },
                  .on_gone = [this](int rank) { OnGone(rank); },
                  .dense_state = [this] { return dense_.State(); }},
      start);
  return absl::OkStatus();
}

absl::StatusOr<int> Training::StartTrainer(int rank) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return absl::ResourceExhaustedError("no socket pair");
  }
  sockets_[rank] = FileDescriptor(ends[0]);
  const FileDescriptor theirs(ends[1]);
  ASSIGN_OR_RETURN(trainers_[rank],
                   ChildProcess::Start(setup_.trainer_command(rank), {.extra = theirs.get()}));
  return ends[0];
}

absl::Status Training::Loop() {
  while (hub_->live() > 0 && trainer_status_.ok()) {
    std::vector<pollfd> waiting;
    for (int rank = 0; rank < hub_->size(); ++rank)
      waiting.push_back({hub_->socket(rank), POLLIN, 0});
    poll(waiting.data(), waiting.size(), kPollMilliseconds);
    for (int rank = 0; rank < hub_->size(); ++rank) {
      if (waiting[rank].revents != 0) hub_->OnReadable(rank);
    }
    if (setup_.stop_requested()) return absl::CancelledError("stopped");
    if (!setup_.cluster_runs()) return absl::UnavailableError("the cluster is gone");
    for (const std::string& event : setup_.monitor->TakeEvents()) setup_.display->Print(event);
    const absl::Time now = absl::Now();
    const bool busy = result_.examples > result_.examples_before &&
                      rounds_done_ < setup_.experiment->schedule.Rounds();
    if (busy && setup_.display->Due(now)) setup_.display->Show(CurrentProgress(), now);
  }
  setup_.display->ShowLast(CurrentProgress());
  return trainer_status_;
}

void Training::OnSum(const std::vector<Contribution>& contributions, const GradientSum& sum) {
  dense_.Update(Eigen::Map<const Vector>(sum.gradient.data(), sum.gradient.size()), sum.examples);
  for (const Contribution& contribution : contributions) {
    metrics_.Add(contribution.logits, contribution.labels);
    if (contribution.examples > 0) ++result_.batches;
  }
  result_.examples += sum.examples;
}

void Training::OnRound(int64_t round, const std::vector<RoundReport>& reports) {
  const bool one_update = setup_.experiment->group.consistency == client::Consistency::kSync;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const RoundReport& report = reports[rank];
    // The rows of one update are the same for every rank.
    if (!one_update || rank == 0) result_.total.rows_updated += report.rows_updated;
    result_.total.minibatches += report.minibatches;
    result_.total.dense_seconds += report.dense_seconds;
    result_.total.wait_seconds += report.wait_seconds;
    result_.total.preprocess_seconds += report.preprocess_seconds;
    result_.total.shard_seconds += report.shard_seconds;
    result_.total.combine_seconds += report.combine_seconds;
    result_.total.rank_seconds += report.rank_seconds;
  }
  rounds_done_ = round + 1;
  if (setup_.experiment->EvaluatesAfter(round)) Evaluate();
}

void Training::OnGone(int rank) {
  if (rounds_done_ == setup_.experiment->schedule.Rounds()) return;  // it is done
  ChildProcess& trainer = *trainers_[rank];
  const bool ended = trainer.WaitFor(kTrainerPatience);
  trainer.Stop(absl::ZeroDuration());
  const std::string end = absl::StrCat("trainer ", rank, " ", trainer.End());
  // One that ends by itself has said why, and would do so again.
  if (!ended || trainer.exit_status() >= 0 || result_.replaced_trainers == kMaxReplacements) {
    trainer_status_ = absl::UnavailableError(end);
    return;
  }
  setup_.display->Print(absl::StrCat(end, "; it is started again"));
  ++result_.replaced_trainers;
  const absl::StatusOr<int> socket = StartTrainer(rank);
  if (socket.ok()) {
    hub_->Replace(rank, *socket);
  } else {
    trainer_status_ = socket.status();
  }
}

// The trainers wait meanwhile: the point belongs to one state of the tables.
void Training::Evaluate() {
  const absl::Time start = absl::Now();
  const double seconds = Seconds();
  const absl::StatusOr<Evaluation> evaluation =
      EvaluateHeldOut(*setup_.experiment->dataset, dense_, setup_.embeddings,
                      setup_.experiment->held_out, setup_.stop_requested);
  if (evaluation.ok()) {
    result_.curve.push_back({.examples = result_.examples,
                             .seconds = seconds,
                             .loss = metrics_.log_loss(),
                             .auc = metrics_.auc(),
                             .held_out_auc = evaluation->auc});
  } else {
    setup_.display->Print(
        absl::StrCat("no point of the learning curve: ", evaluation.status().ToString()));
  }
  paused_ += absl::Now() - start;
}

double Training::Seconds() const { return absl::ToDoubleSeconds(absl::Now() - start_ - paused_); }

Progress Training::CurrentProgress() {
  const double seconds = Seconds();
  Progress progress;
  progress.examples = result_.examples;
  progress.total = setup_.experiment->schedule.examples;
  progress.examples_per_second = static_cast<double>(result_.examples - shown_examples_) /
                                 std::max(1e-3, seconds - shown_seconds_);
  progress.loss = metrics_.log_loss();
  progress.auc = metrics_.auc();
  if (!result_.curve.empty()) progress.held_out_auc = result_.curve.back().held_out_auc;
  progress.rows_touched = result_.total.rows_updated;
  progress.shards = setup_.monitor->Traffic();
  shown_examples_ = result_.examples;
  shown_seconds_ = seconds;
  return progress;
}

}  // namespace emberd::demo
