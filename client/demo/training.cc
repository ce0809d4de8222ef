#include "client/demo/training.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <poll.h>
#include <sys/socket.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/demo/evaluate.h"

namespace emberd::demo {

namespace {
constexpr int64_t kWindow = 32'768;  // examples of the running loss and AUC
constexpr int kPollMilliseconds = 100;
constexpr absl::Duration kTrainerPatience = absl::Seconds(5);
}  // namespace

Training::Training(Setup setup)
    : setup_(std::move(setup)),
      dense_(setup_.experiment->dataset->info(), setup_.experiment->parameters),
      metrics_(kWindow) {}

absl::Status Training::Run() {
  start_ = absl::Now();
  absl::Status status = StartTrainers();
  std::vector<int> sockets;
  for (const Descriptor& socket : sockets_) sockets.push_back(socket.get());
  Hub hub(sockets, {.on_sum = [this](const auto& c, const auto& sum) { OnSum(c, sum); },
                    .on_round = [this](int64_t round, const auto& r) { OnRound(round, r); },
                    .on_report =
                        [this](int rank, const std::string& message) {
                          setup_.display->Print(absl::StrCat("trainer ", rank, " ", message));
                        },
                    .on_gone = [this](int rank) { OnGone(rank); }});
  if (status.ok()) status = Loop(&hub);
  result_.seconds = Seconds();
  for (auto& trainer : trainers_) trainer->Stop(kTrainerPatience);

  setup_.display->Finish();
  return status;
}

absl::Status Training::StartTrainers() {
  for (int rank = 0; rank < setup_.experiment->schedule.trainers; ++rank) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
      return absl::ResourceExhaustedError("no socket pair");
    }
    sockets_.emplace_back(ends[0]);
    const Descriptor theirs(ends[1]);
    auto trainer = Child::Start(setup_.trainer_command(rank), {.extra = theirs.get()});
    if (!trainer.ok()) return trainer.status();
    trainers_.push_back(*std::move(trainer));
  }
  return absl::OkStatus();
}

absl::Status Training::Loop(Hub* hub) {
  while (hub->live() > 0) {
    std::vector<pollfd> waiting;
    for (int rank = 0; rank < hub->size(); ++rank)
      waiting.push_back({hub->socket(rank), POLLIN, 0});
    poll(waiting.data(), waiting.size(), kPollMilliseconds);
    for (int rank = 0; rank < hub->size(); ++rank) {
      if (waiting[rank].revents != 0) hub->OnReadable(rank);
    }
    if (setup_.stop_requested()) return absl::CancelledError("stopped");
    if (!setup_.cluster_runs()) return absl::UnavailableError("the cluster is gone");
    for (const std::string& event : setup_.monitor->TakeEvents()) setup_.display->Print(event);
    const absl::Time now = absl::Now();
    const bool busy = result_.examples > 0 && rounds_done_ < setup_.experiment->schedule.Rounds();
    if (busy && setup_.display->Due(now)) setup_.display->Show(CurrentProgress(), now);
  }
  setup_.display->ShowLast(CurrentProgress());
  if (rounds_done_ == setup_.experiment->schedule.Rounds()) return absl::OkStatus();
  return absl::UnavailableError("all trainers are gone");
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
  for (const RoundReport& report : reports) {
    result_.total.rows_updated += report.rows_updated;
    result_.total.minibatches += report.minibatches;
    result_.total.lookup_seconds += report.lookup_seconds;
    result_.total.dense_seconds += report.dense_seconds;
    result_.total.apply_seconds += report.apply_seconds;
  }
  rounds_done_ = round + 1;
  if (CurvePointAfter(round) != CurvePointAfter(round - 1)) Evaluate();
}

// Points stand at equal distances of the square root of the round: a model learns most at first.
// The last round has one.
int64_t Training::CurvePointAfter(int64_t round) const {
  const double done =
      static_cast<double>(round + 1) / static_cast<double>(setup_.experiment->schedule.Rounds());
  return static_cast<int64_t>(std::sqrt(done) * setup_.experiment->curve_points);
}

void Training::OnGone(int rank) {
  if (rounds_done_ == setup_.experiment->schedule.Rounds()) return;  // it is done
  ++result_.lost_trainers;
  trainers_[rank]->WaitFor(kTrainerPatience);
  trainers_[rank]->Stop(absl::ZeroDuration());
  setup_.display->Print(absl::StrCat("trainer ", rank, " ", trainers_[rank]->End(),
                                     "; its share of the examples is left out"));
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
  progress.rows_touched = result_.total.rows_updated;
  progress.shards = setup_.monitor->Traffic();
  shown_examples_ = result_.examples;
  shown_seconds_ = seconds;
  return progress;
}

}  // namespace emberd::demo
