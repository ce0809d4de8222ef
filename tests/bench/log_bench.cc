// What storage.durability LOG costs, and how long it takes to come back: a coordinator, two shard
// processes and a trainer on this machine, 26 features of width 64 with Adagrad.
//
// Limits are measured in the same run: of `steps` the same trainer on a cluster that keeps no log,
// in turns; of `replay` (without its checkpoint) the steps that were logged, as they were made.
// `first_answer` is the time from a kill -9 of a shard, over its start, to the first lookup that is
// answered; `recovery` is the part of it that the shard reads its checkpoint (`checkpoint`) and
// log.
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
namespace log_bench {

constexpr int kShards = 2, kRepeats = 5;
// Two turns of files of the log, and the tables, have their memory then.
constexpr int kWarmTurns = 3;
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

// What a shard says once it is back, in the part of its log that begins at `from`: the life before
// wrote into the same file. 0: it is not back yet.
double RecoveryFigure(const testing::Cluster& cluster, int shard, size_t from,
                      absl::string_view field) {
  const std::string log = cluster.ShardLog(shard);
  const size_t line = log.find("back from the log", from);
  if (line == std::string::npos) return 0;
  const std::string name = absl::StrCat(" ", field, "=");
  const size_t at = log.find(name, line);
  double value = 0;
  if (at == std::string::npos) return value;
  const std::vector<std::string> words =
      absl::StrSplit(log.substr(at + name.size(), 32), absl::ByAnyChar(" \n"), absl::SkipEmpty());
  if (words.empty() || !absl::SimpleAtod(words[0], &value)) return 0;
  return value;
}

// Until a lookup is answered again.
double SecondsToFirstAnswer(testing::Cluster& cluster, int shard) {
  const absl::Time killed = absl::Now();
  cluster.KillShard(shard);
  DieUnless(cluster.RestartShard(shard));
  client::ClientOptions options = cluster.client_options();
  options.deadline = absl::Seconds(1);
  const auto client = client::Client::Connect(options);
  DieUnless(client.status());
  const std::vector<int64_t> ids = {0, 1, 2, 3};  // of all partitions
  while (true) {
    const auto model = (*client)->DescribeModel("step");
    if (model.ok() && (*client)->ReadRows(*model, model->tables[0].name, ids).ok()) break;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return absl::ToDoubleSeconds(absl::Now() - killed);
}

// A cluster whose log goes round: before each turn a checkpoint lets it drop what the last one
// wrote, and keep the files for this one.
struct LoggedCluster {
  explicit LoggedCluster(const std::string& fsync)
      : cluster(StartCluster(Storage(folder, fsync))),
        client(*client::Client::Connect(cluster->client_options())) {}

  const TempDir folder = *TempDir::Create();
  const std::unique_ptr<testing::Cluster> cluster;
  const std::unique_ptr<client::Client> client;
  std::vector<double> rates;
};

void Steps(int bag, Report* report) {
  const StepOptions options = {.shape = {.bag = bag}, .steps = 12};
  const auto rate = [&](const testing::Cluster& cluster) {
    return options.shape.batch / RunSteps(cluster.client_options(), options).step;
  };
  const auto memory = StartCluster("");
  std::vector<double> memory_rates;
  LoggedCluster page_cache("NEVER"), always("ALWAYS");
  for (int turn = 0; turn < kWarmTurns + kRepeats; ++turn) {
    memory_rates.push_back(rate(*memory));
    for (LoggedCluster* const logged : {&page_cache, &always}) {
      if (turn > 0) DieUnless(logged->client->SaveCheckpoint("step", {}).status());
      logged->rates.push_back(rate(*logged->cluster));
    }
    if (turn + 1 == kWarmTurns) {
      for (auto* const rates : {&memory_rates, &page_cache.rates, &always.rates}) rates->clear();
    }
  }
  const double limit = MedianRate(memory_rates);
  const std::string name = absl::StrCat("log/steps/bag", bag);
  report->Add({name + "/page_cache", MedianRate(page_cache.rates), "examples/s", 1, 64, limit});
  report->Add({name + "/fsync_always", MedianRate(always.rates), "examples/s", 1, 64, limit});
}

void Replay(int bag, Report* report) {
  const StepOptions options = {.shape = {.bag = bag}, .steps = 40};
  const TempDir folder = *TempDir::Create();
  const auto cluster = StartCluster(Storage(folder, "NEVER"));
  const StepSeconds live = RunSteps(cluster->client_options(), options);
  std::vector<double> rates;
  for (int i = 0; i < kRepeats; ++i) {
    size_t ends[kShards];
    for (int shard = 0; shard < kShards; ++shard) ends[shard] = cluster->ShardLog(shard).size();
    // Both at once, as they have both worked on each step.
    for (int shard = 0; shard < kShards; ++shard) cluster->KillShard(shard);
    for (int shard = 0; shard < kShards; ++shard) DieUnless(cluster->RestartShard(shard));
    double slowest = 0;
    for (int shard = 0; shard < kShards; ++shard) {
      double seconds = 0;
      while (seconds == 0) {
        absl::SleepFor(absl::Milliseconds(5));
        seconds = RecoveryFigure(*cluster, shard, ends[shard], "seconds");
      }
      seconds -= RecoveryFigure(*cluster, shard, ends[shard], "checkpoint_seconds");
      slowest = std::max(slowest, seconds);
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
  const size_t end = cluster->ShardLog(0).size();
  const double seconds = SecondsToFirstAnswer(*cluster, 0);
  const auto figure = [&](absl::string_view field) {
    return RecoveryFigure(*cluster, 0, end, field);
  };
  report->Add({"log/first_answer", seconds, "s", 1, 64, 0});
  report->Add({"log/first_answer/recovery", figure("seconds"), "s", 1, 64, 0});
  report->Add({"log/first_answer/checkpoint", figure("checkpoint_seconds"), "s", 1, 64, 0});
  report->Add({"log/first_answer/read", figure("bytes") / kGiB, "GiB", 1, 64, 0});
}

EMBERD_BENCHMARK(log, argc, argv) {
  Report report(argc, argv);
  for (const int bag : {1, 20}) {
    if (report.Wants(absl::StrCat("log/steps/bag", bag))) Steps(bag, &report);
    if (report.Wants(absl::StrCat("log/replay/bag", bag))) Replay(bag, &report);
  }
  if (report.Wants("log/first_answer")) FirstAnswer(&report);
  return report.Finish();
}

}  // namespace log_bench
}  // namespace emberd::bench
