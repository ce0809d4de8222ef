// Checkpoints of a model of 1 million rows of width 64 with Adagrad (512 MB), all of them touched,
// on a coordinator and two shard processes that share this machine and its disk.
//
// Limits are measured in the same run, in turns with what they are held against, and in the same
// folder: of `save` the bare files written with fsync at the end of each, of `restore` the
// checkpoint's files read, both by as many threads as there are shards and, when reading, with
// nothing in the system's cache; of `steps` and `p99` the steps of the same trainer while nothing
// is saved; of `extra_memory` the bytes of the tables; of `incremental` the bytes of the rows that
// have changed.
#include <algorithm>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/temp_dir.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/checkpoint_load.h"
#include "tests/bench/raw_files.h"
#include "tests/bench/step_trainer.h"
#include "tests/testing/cluster.h"

namespace emberd::bench {
namespace checkpoint_bench {

constexpr int kRepeats = 7, kShards = 2;
constexpr StepShape kShape = {.features = 8, .batch = 1024, .width = 64, .rows = 125'000};
constexpr double kRowBytes = 2.0 * 64 * sizeof(float);  // with Adagrad's slot
constexpr double kTableBytes = 8.0 * 125'000 * kRowBytes;

// The value below which `share` of the values are.
double Quantile(std::vector<double> values, double share) {
  const auto at = static_cast<ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[at];
}
double MedianOf(const std::vector<double>& values) { return Quantile(values, 0.5); }

double SumOf(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum;
}

class CheckpointBench {
 public:
  CheckpointBench(testing::Cluster* cluster, std::string checkpoints, Report* report)
      : cluster_(cluster), folder_(std::move(checkpoints)), report_(report) {
    auto client = client::Client::Connect(cluster->client_options());
    DieUnless(client.status());
    client_ = *std::move(client);
    auto model = client_->DeclareModel(ModelText(kShape));
    DieUnless(model.status());
    model_ = *std::move(model);
    AssignRows(0, kShape.rows, 1);
    const client::SavedCheckpoint first = Save("first");
    sizes_ = FileSizes(FolderOf("first"));
    bytes_ = static_cast<double>(first.checkpoint.bytes);
  }

  void SaveAndRestore() {
    std::vector<double> save, raw_write, restore, raw_read;
    for (int i = 0; i < kRepeats; ++i) {
      raw_write.push_back(WriteRawFiles(folder_ + "/raw", sizes_, kShards));
      save.push_back(Seconds([&] { Save("idle"); }));
      DropFromCache(FolderOf("idle"));
      raw_read.push_back(ReadRawFiles(FolderOf("idle"), kShards));
      DieUnless(client_->DropModel(model_.name).status());
      DropFromCache(FolderOf("idle"));
      restore.push_back(Seconds(
          [&] { DieUnless(client_->RestoreCheckpoint(model_.name, {.name = "idle"}).status()); }));
      DieUnless(client_->DeleteCheckpoint(model_.name, "idle").status());
    }
    auto model = client_->DescribeModel(model_.name);
    DieUnless(model.status());
    model_ = *std::move(model);
    Add("save", bytes_ / MedianOf(save), "B/s", bytes_ / MedianOf(raw_write));
    Add("restore", bytes_ / MedianOf(restore), "B/s", bytes_ / MedianOf(raw_read));
  }

  void WhileTraining() {
    std::vector<double> quiet, busy, rates, quiet_rates, pauses, memory;
    {
      TrainingLoad load(cluster_->client_options(), kShape);
      absl::SleepFor(absl::Seconds(1));
      for (int i = 0; i < kRepeats; ++i) {
        load.TakeSteps();
        absl::SleepFor(absl::Seconds(2));
        Append(load.TakeSteps(), &quiet, &quiet_rates);
        const double before = ShardMemory("VmRSS:", /*reset=*/true);
        const client::SavedCheckpoint saved = Save("busy");
        Append(load.TakeSteps(), &busy, &rates);
        memory.push_back(ShardMemory("VmHWM:", /*reset=*/false) - before);
        pauses.push_back(absl::ToDoubleMilliseconds(saved.pause));
        DieUnless(client_->DeleteCheckpoint(model_.name, "busy").status());
      }
    }
    Add("steps_while_saving", MedianOf(rates), "steps/s", MedianOf(quiet_rates));
    Add("p99_while_saving", Quantile(busy, 0.99) * 1e3, "ms", Quantile(quiet, 0.99) * 1e3);
    Add("longest_step_while_saving", Quantile(busy, 1) * 1e3, "ms", Quantile(quiet, 1) * 1e3);
    Add("pause", MedianOf(pauses), "ms", 0);
    Add("longest_pause", Quantile(pauses, 1), "ms", 0);
    Add("extra_memory", Quantile(memory, 1), "B", kTableBytes);
  }

  // A tenth of the rows of each table: those that stand together, and any.
  void Incremental() {
    for (const bool together : {true, false}) {
      Save("whole");
      const int64_t count = kShape.rows / 10;
      AssignRows(together ? count : 0, count, together ? 1 : 10);
      const client::SavedCheckpoint saved = Save("changes", /*incremental=*/true);
      Add(together ? "incremental" : "incremental_scattered",
          static_cast<double>(saved.checkpoint.bytes), "B", kTableBytes / 10);
      for (const char* name : {"changes", "whole"}) {
        DieUnless(client_->DeleteCheckpoint(model_.name, name).status());
      }
    }
  }

 private:
  static double Seconds(const std::function<void()>& work) {
    const absl::Time start = absl::Now();
    work();
    return absl::ToDoubleSeconds(absl::Now() - start);
  }
  static void Append(const std::vector<double>& steps, std::vector<double>* all,
                     std::vector<double>* rates) {
    if (steps.empty()) return;
    all->insert(all->end(), steps.begin(), steps.end());
    rates->push_back(static_cast<double>(steps.size()) / SumOf(steps));
  }

  std::string FolderOf(const std::string& name) const {
    return absl::StrCat(folder_, "/", model_.name, "/", name);
  }
  client::SavedCheckpoint Save(const std::string& name, bool incremental = false) {
    auto saved = client_->SaveCheckpoint(model_.name, {.name = name, .incremental = incremental});
    DieUnless(saved.status());
    return *std::move(saved);
  }
  // `count` rows of each table: from `first` on, every stride-th.
  void AssignRows(int64_t first, int64_t count, int64_t stride) {
    constexpr int64_t kRowsAtOnce = 12'500;
    const std::vector<float> values(kRowsAtOnce * kShape.width, 0.5f);
    for (const client::TableInfo& table : model_.tables) {
      std::vector<int64_t> ids;
      for (int64_t i = 0; i < count; ++i) ids.push_back(first + i * stride);
      for (size_t done = 0; done < ids.size(); done += kRowsAtOnce) {
        const auto some = absl::MakeConstSpan(ids).subspan(done, kRowsAtOnce);
        DieUnless(client_
                      ->AssignRows(model_, table.name, some,
                                   absl::MakeConstSpan(values).first(some.size() * kShape.width))
                      .status());
      }
    }
  }
  // Of all shard processes, in bytes. `reset`: their peak begins anew.
  double ShardMemory(const std::string& field, bool reset) {
    double bytes = 0;
    for (int shard = 0; shard < kShards; ++shard) {
      const std::string process = absl::StrCat("/proc/", cluster_->shard_process(shard)->pid());
      if (reset) std::ofstream(process + "/clear_refs") << "5";
      std::ifstream status(process + "/status");
      for (std::string line; std::getline(status, line);) {
        const std::vector<std::string> words =
            absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
        double kilobytes = 0;
        if (words.size() > 1 && words[0] == field && absl::SimpleAtod(words[1], &kilobytes)) {
          bytes += kilobytes * 1024;
        }
      }
    }
    return bytes;
  }
  void Add(const std::string& name, double value, const std::string& unit, double limit) {
    report_->Add({"checkpoint/" + name, value, unit, kShards, kShape.width, limit});
  }

  testing::Cluster* const cluster_;
  const std::string folder_;
  Report* const report_;
  std::unique_ptr<client::Client> client_;
  client::Model model_;
  std::vector<int64_t> sizes_;  // of the files of a whole checkpoint
  double bytes_ = 0;
};

EMBERD_BENCHMARK(checkpoint, argc, argv) {
  Report report(argc, argv);
  auto folder = TempDir::Create();
  DieUnless(folder.status());
  auto cluster = testing::Cluster::Start(
      {.shards = kShards,
       .sparsecores_per_shard = 2,
       .config = absl::StrCat("storage { directory: '", folder->path(), "' }")});
  DieUnless(cluster.status());
  CheckpointBench bench(cluster->get(), folder->Path("checkpoints"), &report);
  if (report.Wants("checkpoint/files")) bench.SaveAndRestore();
  if (report.Wants("checkpoint/training")) bench.WhileTraining();
  if (report.Wants("checkpoint/incremental")) bench.Incremental();
  return report.Finish();
}

}  // namespace checkpoint_bench
}  // namespace emberd::bench
