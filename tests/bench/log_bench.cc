// What storage.durability LOG costs, and how long it takes to come back: a coordinator, two shard
// processes and a trainer on this machine, 26 features of width 64 with Adagrad.
//
// Limits are measured in the same run: of `steps` the same trainer on a cluster that keeps no log,
// in turns; of `replay` the steps that were logged, as they were made. `first_answer` is the time
// from a kill -9 of a shard, over its start, to the first lookup that is answered.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/temp_dir.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/step_trainer.h"
#include "tests/testing/cluster.h"

namespace emberd::bench {
namespace {

constexpr int kShards = 2, kRepeats = 5;
constexpr double kGiB = 1 << 30;

std::unique_ptr<testing::Cluster> StartCluster(const std::string& storage) {
  auto cluster =
      testing::Cluster::Start({.shards = kShards, .sparsecores_per_shard = 2, .config = storage});
  DieUnless(cluster.status());
  return *std::move(cluster);
}

std::string Storage(const TempDir& folder, const std::string& fsync) {
  return absl::StrCat("storage { directory: '", folder.path(), "' durability: LOG fsync: ", fsync,
                      " log_bytes: 1099511627776 }");
}

double MedianRate(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// The number behind `field` in the newest line of the shard's log about its recovery.
double RecoveryFigure(const testing::Cluster& cluster, int shard, absl::string_view field) {
  const std::string log = cluster.ShardLog(shard);
  const size_t line = log.rfind("back from the log");
  const size_t at = line == std::string::npos ? line : log.find(absl::StrCat(field, "="), line);
  double value = 0;
  if (at == std::string::npos) return value;
  const std::vector<std::string> words = absl::StrSplit(log.substr(at + field.size() + 1, 32),
                                                        absl::ByAnyChar(" \n"), absl::SkipEmpty());
  if (!words.empty() && !absl::SimpleAtod(words[0], &value)) value = 0;
  return value;
}

// Until a lookup is answered again.
double SecondsToFirstAnswer(testing::Cluster& cluster, const StepShape& shape, int shard) {
  const absl::Time killed = absl::Now();
  cluster.KillShard(shard);
  DieUnless(cluster.RestartShard(shard));
  client::ClientOptions options = cluster.client_options();
  options.deadline = absl::Seconds(1);
  const auto client = client::Client::Connect(options);
  DieUnless(client.status());
  while (true) {
    const auto model = (*client)->DescribeModel("step");
    if (model.ok()) {
      const std::vector<int64_t> ids = {0, 1, 2, 3};
      std::vector<float> row(ids.size() * shape.width);
      if ((*client)->ReadRows(*model, model->tables[0].name, ids).ok()) break;
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
  return absl::ToDoubleSeconds(absl::Now() - killed);
}

void Steps(int bag, Report* report) {
  const StepOptions options = {.shape = {.bag = bag}, .steps = 12};
  const double examples = options.shape.batch;
  std::vector<double> memory, log, always;
  for (int i = 0; i < kRepeats; ++i) {
    memory.push_back(examples / RunSteps(StartCluster("")->client_options(), options).step);
    for (auto* const rates : {&log, &always}) {
      const TempDir folder = *TempDir::Create();
      const auto cluster = StartCluster(Storage(folder, rates == &log ? "NEVER" : "ALWAYS"));
      rates->push_back(examples / RunSteps(cluster->client_options(), options).step);
    }
  }
  const std::string name = absl::StrCat("log/steps/bag", bag);
  report->Add({name + "/page_cache", MedianRate(log), "examples/s", 1, 64, MedianRate(memory)});
  report->Add(
      {name + "/fsync_always", MedianRate(always), "examples/s", 1, 64, MedianRate(memory)});
}

void Replay(int bag, Report* report) {
  const StepOptions options = {.shape = {.bag = bag}, .steps = 40};
  const TempDir folder = *TempDir::Create();
  const auto cluster = StartCluster(Storage(folder, "NEVER"));
  const StepSeconds live = RunSteps(cluster->client_options(), options);
  std::vector<double> rates;
  for (int i = 0; i < kRepeats; ++i) {
    // Both at once, as they have both worked on each step.
    for (int shard = 0; shard < kShards; ++shard) cluster->KillShard(shard);
    for (int shard = 0; shard < kShards; ++shard) DieUnless(cluster->RestartShard(shard));
    double slowest = 0;
    for (int shard = 0; shard < kShards; ++shard) {
      while (RecoveryFigure(*cluster, shard, "seconds") == 0) absl::SleepFor(absl::Milliseconds(5));
      slowest = std::max(slowest, RecoveryFigure(*cluster, shard, "seconds"));
    }
    rates.push_back(options.steps / slowest);
  }
  report->Add(
      {absl::StrCat("log/replay/bag", bag), MedianRate(rates), "steps/s", 1, 64, 1 / live.step});
}

// A shard of 4 GB with a checkpoint, and 1 GB of log behind it.
void FirstAnswer(Report* report) {
  const StepShape shape = {.features = 8, .batch = 4096, .width = 64, .rows = 2'000'000};
  const TempDir folder = *TempDir::Create();
  const auto cluster = StartCluster(Storage(folder, "NEVER"));
  const auto client = client::Client::Connect(cluster->client_options());
  DieUnless(client.status());
  const auto model = (*client)->DeclareModel(ModelText(shape));
  DieUnless(model.status());
  constexpr int kRowsAtOnce = 50'000;
  const std::vector<float> values(int64_t{kRowsAtOnce} * shape.width, 0.5f);
  for (const auto& table : model->tables) {
    for (int first = 0; first < shape.rows; first += kRowsAtOnce) {
      std::vector<int64_t> ids(kRowsAtOnce);
      for (int i = 0; i < kRowsAtOnce; ++i) ids[i] = first + i;
      DieUnless((*client)->AssignRows(*model, table.name, ids, values).status());
    }
  }
  DieUnless((*client)->SaveCheckpoint("step", {.name = "whole"}).status());
  const double step_bytes = shape.elements() * sizeof(float) / kShards;
  const int steps = static_cast<int>(kGiB / step_bytes);
  RunSteps(cluster->client_options(), {.shape = shape, .steps = steps});
  const double seconds = SecondsToFirstAnswer(*cluster, shape, 0);
  report->Add({"log/first_answer", seconds, "s", 1, 64, 0});
  report->Add({"log/first_answer/recovery", RecoveryFigure(*cluster, 0, "seconds"), "s", 1, 64, 0});
  report->Add({"log/first_answer/checkpoint", RecoveryFigure(*cluster, 0, "checkpoint_seconds"),
               "s", 1, 64, 0});
  report->Add(
      {"log/first_answer/read", RecoveryFigure(*cluster, 0, "bytes") / kGiB, "GiB", 1, 64, 0});
}

int Main(int argc, char** argv) {
  Report report(argc, argv);
  for (const int bag : {1, 20}) {
    if (report.Wants(absl::StrCat("log/steps/bag", bag))) Steps(bag, &report);
    if (report.Wants(absl::StrCat("log/replay/bag", bag))) Replay(bag, &report);
  }
  if (report.Wants("log/first_answer")) FirstAnswer(&report);
  return report.Finish();
}

}  // namespace
}  // namespace emberd::bench

int main(int argc, char** argv) { return emberd::bench::Main(argc, argv); }
