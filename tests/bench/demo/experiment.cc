#include "tests/bench/demo/experiment.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include <CLI/CLI.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "tests/bench/demo/click_log.h"
#include "tests/bench/demo/dataset.h"

namespace emberd::demo {
namespace {

constexpr int64_t kClickExamples = 4'000'000, kQuickClickExamples = 300'000;
constexpr int64_t kHeldOut = 40'000, kQuickHeldOut = 20'000;
constexpr int64_t kMovieLensPasses = 12, kQuickMovieLensPasses = 2;
// How far from the planted optimum, or from the plain run, a run of the suggested length may end.
constexpr double kClickGap = 0.01, kQuickClickGap = 0.03, kPlainGap = 0.003;

void AsClickLog(const ExperimentOptions& options, Experiment* experiment) {
  const int64_t suggested = options.quick ? kQuickClickExamples : kClickExamples;
  const int64_t examples = options.examples > 0 ? options.examples : suggested;
  experiment->dataset =
      std::make_unique<ClickLog>(options.seed, examples, options.quick ? kQuickHeldOut : kHeldOut);
  experiment->schedule.examples = examples;
  if (examples >= kClickExamples) {
    experiment->max_gap = kClickGap;
  } else if (examples >= kQuickClickExamples) {
    experiment->max_gap = kQuickClickGap;
  } else {
    experiment->max_gap = 1;  // too short to judge
  }
}

absl::Status AsMovieLens(const ExperimentOptions& options, Experiment* experiment) {
  ASSIGN_OR_RETURN(auto dataset, OpenMovieLens(options.data, options.seed));
  const int64_t passes = options.quick ? kQuickMovieLensPasses : kMovieLensPasses;
  experiment->schedule.examples =
      options.examples > 0 ? options.examples : passes * dataset->train_size();
  experiment->schedule.batch_size = 256;
  experiment->parameters.embedding_dim = 16;
  experiment->parameters.dense_learning_rate = 0.02f;
  experiment->max_gap = kPlainGap;
  experiment->dataset = std::move(dataset);
  return absl::OkStatus();
}

absl::Status AsCriteo(const ExperimentOptions& options, Experiment* experiment) {
  ASSIGN_OR_RETURN(auto dataset,
                   OpenCriteoFile(options.data, 0, options.quick ? kQuickHeldOut : kHeldOut));
  int64_t examples = dataset->train_size();
  if (options.quick) examples = std::min(examples, kQuickClickExamples);
  if (options.examples > 0) examples = options.examples;
  experiment->schedule.examples = examples;
  experiment->max_gap = kPlainGap;
  experiment->dataset = std::move(dataset);
  return absl::OkStatus();
}

absl::Status CheckRange(const char* option, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(option, " is ", value, "; allowed are ", low, " to ", high));
}

// "tight": on the generated log a (source slot, partition) pair gets about 1.6 ids per example of a
// batch, so this cuts steps into several mini-batches. Far below it nothing fits any more: one
// popular id, which no cut of the vocabulary can divide, stands in half of the examples.
absl::Status SetLimits(const std::string& limits, Experiment* experiment) {
  int32_t* limit = &experiment->parameters.max_ids_per_partition;
  if (limits == "none") return absl::OkStatus();
  if (limits == "tight") {
    *limit = static_cast<int32_t>(std::max<int64_t>(8, experiment->schedule.batch_size * 4 / 5));
    return absl::OkStatus();
  }
  if (absl::SimpleAtoi(limits, limit) && *limit > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--limits is ", limits, "; allowed are none, tight and numbers from 1"));
}

absl::Status SetConsistency(const ExperimentOptions& options, Experiment* experiment) {
  client::TrainOptions* group = &experiment->group;
  absl::string_view consistency = options.consistency;
  if (consistency == "async") {
    group->consistency = client::Consistency::kAsync;
  } else if (absl::ConsumePrefix(&consistency, "bounded:") &&
             absl::SimpleAtoi(consistency, &group->staleness_bound) &&
             group->staleness_bound >= 0) {
    group->consistency = client::Consistency::kBounded;
  } else if (consistency != "sync") {
    return absl::InvalidArgumentError(absl::StrCat("--consistency is ", options.consistency,
                                                   "; allowed are sync, async and bounded:K"));
  }
  const bool sync = group->consistency == client::Consistency::kSync;
  if (options.pipelined && !sync) {
    return absl::InvalidArgumentError("--pipelined needs --consistency sync");
  }
  group->size = options.trainers;
  group->pipelined = experiment->schedule.pipelined = options.pipelined;
  return absl::OkStatus();
}

int64_t CurvePointAfter(const Experiment& experiment, int64_t round) {
  const double done =
      static_cast<double>(round + 1) / static_cast<double>(experiment.schedule.Rounds());
  return static_cast<int64_t>(std::sqrt(done) * experiment.curve_points);
}

}  // namespace

bool Experiment::EvaluatesAfter(int64_t round) const {
  return CurvePointAfter(*this, round) != CurvePointAfter(*this, round - 1);
}

void ExperimentOptions::AddTo(CLI::App* app) {
  app->add_option(
      "--data", data,
      "A click log in Criteo's TSV layout, or a directory with MovieLens as *.inter, *.user and "
      "*.item files; without it a click log with known best AUC is generated");
  app->add_option("--seed", seed,
                  "Seed of the generated log, the split, the order and all initial values")
      ->capture_default_str();
  app->add_option("--examples", examples, "Examples to train on (0: chosen for the data)")
      ->capture_default_str();
  app->add_option("--batch", batch, "Examples of a trainer's batch (0: chosen for the data)")
      ->capture_default_str();
  app->add_option("--trainers", trainers, "Trainer processes")->capture_default_str();
  app->add_option(
         "--consistency", consistency,
         "Consistency of the trainers' group: 'sync' (one batch of all trainers, one update per "
         "step), 'async' (each trainer's update as it comes), or 'bounded:K' (async, at "
         "most K steps apart)")
      ->capture_default_str();
  app->add_flag("--pipelined", pipelined,
                "With sync: a lookup does not wait for the update of the step before");
  app->add_flag("--quick", quick, "A short run, for a first look and for continuous integration");
  app->add_option(
         "--limits", limits,
         "Ids that a mini-batch may bring to one partition: a number, 'none', or 'tight' for "
         "several mini-batches per step; the tables end the same")
      ->capture_default_str();
}

std::vector<std::string> ExperimentOptions::Arguments() const {
  std::vector<std::string> arguments = {"--seed",        absl::StrCat(seed),
                                        "--examples",    absl::StrCat(examples),
                                        "--batch",       absl::StrCat(batch),
                                        "--trainers",    absl::StrCat(trainers),
                                        "--limits",      limits,
                                        "--consistency", consistency};
  if (!data.empty()) arguments.insert(arguments.end(), {"--data", data});
  if (pipelined) arguments.push_back("--pipelined");
  if (quick) arguments.push_back("--quick");
  return arguments;
}

absl::StatusOr<Experiment> MakeExperiment(const ExperimentOptions& options) {
  for (const absl::Status& status :
       {CheckRange("--examples", options.examples, 0, int64_t{1} << 40),
        CheckRange("--batch", options.batch, 0, 1 << 20),
        CheckRange("--trainers", options.trainers, 1, 64)}) {
    if (!status.ok()) return status;
  }
  Experiment experiment;
  experiment.parameters.seed = options.seed;
  absl::Status status;
  if (options.data.empty()) {
    AsClickLog(options, &experiment);
  } else if (std::filesystem::is_directory(options.data)) {
    status = AsMovieLens(options, &experiment);
  } else {
    status = AsCriteo(options, &experiment);
  }
  if (!status.ok()) return status;
  experiment.schedule.trainers = options.trainers;
  if (options.batch > 0) experiment.schedule.batch_size = options.batch;
  status = SetLimits(options.limits, &experiment);
  if (status.ok()) status = SetConsistency(options, &experiment);
  if (!status.ok()) return status;
  const int64_t held_out = options.quick ? kQuickHeldOut : kHeldOut;
  experiment.held_out = std::min(held_out, experiment.dataset->test_size());
  experiment.curve_points = options.quick ? 5 : 12;
  return experiment;
}

}  // namespace emberd::demo
