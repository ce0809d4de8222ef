#include "client/demo/trainer.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/demo/dense_model.h"
#include "client/demo/embeddings.h"
#include "client/demo/prefetcher.h"

namespace emberd::demo {

namespace {

constexpr absl::Duration kPatience = absl::Minutes(2);
constexpr absl::Duration kPause = absl::Milliseconds(300);
constexpr absl::Duration kReportEvery = absl::Seconds(5);

// Errors that pass when a shard or a coordinator returns.
bool MayPass(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kResourceExhausted:
      return true;
    default:
      return false;
  }
}

double SecondsSince(absl::Time start) { return absl::ToDoubleSeconds(absl::Now() - start); }

class Trainer {
 public:
  Trainer(const Experiment& experiment, int rank, Embeddings* embeddings, Group* group)
      : embeddings_(embeddings),
        group_(group),
        dense_(experiment.dataset->info(), experiment.parameters),
        batches_(experiment.dataset.get(), experiment.schedule, rank) {}

  absl::Status Round(int64_t round);

 private:
  absl::StatusOr<client::LookupResult> LookUp();
  absl::Status Reduce(int64_t round, const DenseStep& step);
  void Apply(const client::LookupResult& lookup, const DenseStep& step, RoundReport* report);

  Embeddings* embeddings_;
  Group* group_;
  DenseModel dense_;
  Prefetcher batches_;
  Batch batch_;
};

absl::Status Trainer::Round(int64_t round) {
  if (auto s = batches_.Next(&batch_); !s.ok()) return s;
  RoundReport report;
  client::LookupResult lookup;
  DenseStep step;
  if (batch_.size > 0) {
    const absl::Time start = absl::Now();
    absl::StatusOr<client::LookupResult> found = LookUp();
    if (!found.ok()) return found.status();
    lookup = *std::move(found);
    report.lookup_seconds = SecondsSince(start);
    report.minibatches = lookup.statistics.num_minibatches;

    const absl::Time looked_up = absl::Now();
    std::vector<absl::Span<const float>> activations;
    for (const client::Activation& activation : lookup.activations) {
      activations.push_back(activation.values);
    }
    step = dense_.Step(batch_, activations);
    report.dense_seconds = SecondsSince(looked_up);
  }
  if (auto s = Reduce(round, step); !s.ok()) return s;
  if (auto s = group_->AwaitTurn(); !s.ok()) return s;
  if (batch_.size > 0) Apply(lookup, step, &report);
  return group_->Finish(report);
}

absl::StatusOr<client::LookupResult> Trainer::LookUp() {
  const absl::Time start = absl::Now();
  absl::Time last_report = absl::InfinitePast();
  while (true) {
    absl::StatusOr<client::LookupResult> lookup = embeddings_->Lookup(batch_, /*inference=*/false);
    if (lookup.ok()) {
      if (last_report != absl::InfinitePast()) {
        group_->Report(absl::StrCat(
            "goes on after ",
            absl::FormatDuration(absl::Trunc(absl::Now() - start, absl::Milliseconds(1)))));
      }
      return lookup;
    }
    const absl::Status status = lookup.status();
    if (!MayPass(status) || absl::Now() - start > kPatience) return status;
    if (absl::Now() - last_report >= kReportEvery) {
      last_report = absl::Now();
      group_->Report(absl::StrCat("waits: ", status.ToString()));
    }
    absl::SleepFor(kPause);
    // A shard that came back empty must be told of the model. If it is still away, the next lookup
    // says so again.
    if (!absl::IsUnavailable(status)) embeddings_->Declare().IgnoreError();
  }
}

absl::Status Trainer::Reduce(int64_t round, const DenseStep& step) {
  Contribution contribution;
  contribution.round = round;
  contribution.examples = batch_.size;
  contribution.gradient.assign(step.parameter_gradients.begin(), step.parameter_gradients.end());
  contribution.logits.assign(step.logits.begin(), step.logits.end());
  contribution.labels = batch_.labels;
  const absl::StatusOr<GradientSum> sum = group_->Reduce(contribution);
  if (!sum.ok()) return sum.status();
  dense_.Update(Eigen::Map<const Vector>(sum->gradient.data(), sum->gradient.size()),
                sum->examples);
  return absl::OkStatus();
}

void Trainer::Apply(const client::LookupResult& lookup, const DenseStep& step,
                    RoundReport* report) {
  const absl::Time start = absl::Now();
  const absl::StatusOr<int64_t> rows =
      embeddings_->Apply(lookup, batch_.size, step.embedding_gradients);
  report->apply_seconds = SecondsSince(start);
  if (rows.ok()) {
    report->rows_updated = *rows;
  } else {
    group_->Report(absl::StrCat("leaves out an update: ", rows.status().ToString()));
  }
}

}  // namespace

absl::Status RunTrainer(const Experiment& experiment, const std::string& coordinator, int rank,
                        Group* group) {
  const auto embeddings = Embeddings::Connect(
      coordinator, DescribeModel(experiment.dataset->info(), experiment.parameters,
                                 experiment.schedule.batch_size));
  if (!embeddings.ok()) return embeddings.status();
  Trainer trainer(experiment, rank, embeddings->get(), group);
  for (int64_t round = 0; round < experiment.schedule.Rounds(); ++round) {
    if (auto s = trainer.Round(round); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace emberd::demo
