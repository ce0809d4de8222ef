// Trains for a long while: a synchronous group of four trainers through two coordinators and two
// shards, with limits that cut every step into mini-batches. Beside it, one trainer does the same
// steps with whole batches on a cluster of its own. At the end both must have the same tables, to
// the bit, and no process of the group's cluster may have grown since the first tenth.
//
//   emberd_soak --minutes 30        exit status 0: all of that held
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/testing/cluster.h"
#include "tests/testing/footprint.h"
#include "tests/testing/group_training.h"
#include "tests/testing/training.h"

namespace emberd::soak {
namespace {

using testing::Cluster;
using testing::Footprint;

constexpr int kRanks = 4;
constexpr int kTightLimit = 4;
// Steps between two looks at the clock. Streams stay open over all of them.
constexpr int64_t kStride = 50;

struct Run {
  std::unique_ptr<Cluster> cluster;
  std::unique_ptr<client::Client> client;
  client::Model model;
};

absl::StatusOr<Run> StartRun(const testing::ClusterOptions& options, int limit) {
  Run run;
  auto cluster = Cluster::Start(options);
  if (!cluster.ok()) return cluster.status();
  run.cluster = *std::move(cluster);
  auto client = client::Client::Connect(run.cluster->client_options());
  if (!client.ok()) return client.status();
  run.client = *std::move(client);
  auto model = run.client->DeclareModel(testing::GroupModel("soak", limit));
  if (!model.ok()) return model.status();
  run.model = *std::move(model);
  return run;
}

// Ranks of one run on one stream each, and how far they all are.
class Trainers {
 public:
  Trainers(const Run& run, int ranks, int coordinators) : run_(run) {
    for (int rank = 0; rank < ranks; ++rank) {
      threads_.emplace_back([=, this] { Train(rank, ranks, rank % coordinators); });
    }
  }
  // No steps from `end` on. Ranks of a step in progress finish it.
  void EndAt(int64_t end) { end_ = end; }
  void Join() {
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t steps() const { return steps_; }
  absl::Status error() const {
    absl::MutexLock lock(&mutex_);
    return error_;
  }

 private:
  void Train(int rank, int ranks, int coordinator) {
    const absl::Status status = TrySteps(rank, ranks, coordinator);
    absl::MutexLock lock(&mutex_);
    if (error_.ok()) error_ = status;
  }

  absl::Status TrySteps(int rank, int ranks, int coordinator) {
    client::ClientOptions options;
    options.addresses = {run_.cluster->address(coordinator)};
    auto client = client::Client::Connect(options);
    if (!client.ok()) return client.status();
    auto stream = (*client)->Train(run_.model, {.group = "soak", .rank = rank, .size = ranks});
    if (!stream.ok()) return stream.status();
    for (int64_t step = 0; step < end_; step += kStride) {
      absl::Status status =
          testing::RunSteps(**stream, rank, ranks, step, step + kStride, /*pipelined=*/false);
      if (!status.ok()) return status;
      if (rank == 0) steps_ = step + kStride;
    }
    return (*stream)->Finish();
  }

  const Run& run_;
  std::atomic<int64_t> end_ = std::numeric_limits<int64_t>::max() / 2;
  std::atomic<int64_t> steps_ = 0;
  mutable absl::Mutex mutex_;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

std::map<pid_t, Footprint> Footprints(Run& run) {
  std::map<pid_t, Footprint> footprints;
  for (const pid_t pid : run.cluster->pids()) footprints[pid] = testing::FootprintOf(pid);
  return footprints;
}

// What grew, or empty.
std::string Growth(const std::map<pid_t, Footprint>& before,
                   const std::map<pid_t, Footprint>& after) {
  std::string text;
  for (const auto& [pid, then] : before) {
    const auto found = after.find(pid);
    const Footprint now = found == after.end() ? Footprint() : found->second;
    const bool flat = now.resident_kib > 0 &&
                      now.resident_kib <= then.resident_kib + testing::kAllowedGrowthKib &&
                      now.threads <= then.threads + 12 && now.descriptors <= then.descriptors + 12;
    if (flat) continue;
    absl::StrAppend(&text, "pid ", pid, ": ", then.resident_kib, " -> ", now.resident_kib, " KiB, ",
                    then.threads, " -> ", now.threads, " threads, ", then.descriptors, " -> ",
                    now.descriptors, " descriptors\n");
  }
  return text;
}

void Report(absl::Duration elapsed, const Trainers& group, Run& run) {
  int64_t resident_kib = 0;
  int64_t threads = 0;
  for (const auto& [pid, footprint] : Footprints(run)) {
    resident_kib += footprint.resident_kib;
    threads += footprint.threads;
  }
  std::printf("%6.1f min  %9lld steps  %6lld MiB  %4lld threads\n", absl::ToDoubleMinutes(elapsed),
              static_cast<long long>(group.steps()), static_cast<long long>(resident_kib / 1024),
              static_cast<long long>(threads));
  std::fflush(stdout);
}

absl::Status Soak(absl::Duration length) {
  auto group_run =
      StartRun({.shards = 2, .sparsecores_per_shard = 4, .coordinators = 2}, kTightLimit);
  if (!group_run.ok()) return group_run.status();
  auto single_run =
      StartRun({.shards = 1, .sparsecores_per_shard = 8, .embedded = true}, /*limit=*/0);
  if (!single_run.ok()) return single_run.status();

  const absl::Time began = absl::Now();
  Trainers group(*group_run, kRanks, 2);
  std::map<pid_t, Footprint> early;
  const absl::Duration pause = std::min(length / 20, absl::Seconds(30));
  // On a busy machine the first steps, for which threads and buffers are made, take a while.
  const auto begun = [&](int64_t strides, absl::Duration time) {
    return group.steps() >= strides * kStride && absl::Now() - began >= time;
  };
  while (!begun(4, length) && group.error().ok()) {
    absl::SleepFor(pause);
    if (early.empty() && begun(2, length / 10)) early = Footprints(*group_run);
    Report(absl::Now() - began, group, *group_run);
  }
  // Far enough ahead that no rank gets there before it has been told.
  const int64_t steps = group.steps() + 8 * kStride;
  group.EndAt(steps);
  group.Join();
  const std::map<pid_t, Footprint> late = Footprints(*group_run);
  if (!group.error().ok()) return group.error();

  std::printf("the same %lld steps, one trainer\n", static_cast<long long>(steps));
  std::fflush(stdout);
  Trainers single(*single_run, 1, 1);
  single.EndAt(steps);
  single.Join();
  if (!single.error().ok()) return single.error();
  auto group_digest = testing::Digest(*group_run->client, group_run->model);
  if (!group_digest.ok()) return group_digest.status();
  auto single_digest = testing::Digest(*single_run->client, single_run->model);
  if (!single_digest.ok()) return single_digest.status();
  std::printf("steps=%lld table_sha256=%s one_trainer=%s\n", static_cast<long long>(steps),
              group_digest->c_str(), single_digest->c_str());
  if (*group_digest != *single_digest) return absl::InternalError("the tables differ");
  const std::string growth = Growth(early, late);
  if (!growth.empty()) return absl::InternalError(absl::StrCat("it grew:\n", growth));
  std::printf("memory, threads and descriptors stayed flat\n");
  return absl::OkStatus();
}

}  // namespace
}  // namespace emberd::soak

int main(int argc, char** argv) {
  CLI::App app("Trains a synchronous group for a long while and checks tables and memory.");
  double minutes = 30;
  app.add_option("--minutes", minutes, "how long, in minutes")->check(CLI::Range(0.05, 10000.0));
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = emberd::soak::Soak(absl::Minutes(minutes));
  if (status.ok()) return 0;
  std::fprintf(stderr, "soak: %s\n", status.ToString().c_str());
  return 1;
}
