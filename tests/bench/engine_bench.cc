// A whole step of one shard's engine: check and arrange a batch, gather, check gradients, update.
//
// Simulates the shard's part of training a table of 4 million rows of width 64 with Adagrad,
// batches of 16,384 samples with bags of 10 and 50, on two emulated SparseCores, without a network.
// Rows are there already (no first touch); buffers are warm. The caller's thread helps to arrange,
// so that `prepare` uses one more than `threads`. `tracked_apply` is an update after a checkpoint
// was taken, its limit the same before: both by processor time. Kernels beside the limits of
// memory: kernels_bench.
#include <algorithm>
#include <cmath>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "shard/engine.h"
#include "shard/testing/test_batch.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/ids.h"

namespace emberd::bench {
namespace engine_bench {

using shard::Batch;
using shard::StackSums;
using shard::testing::TestBatch;
using shard::testing::TestEntry;
using shard::testing::TestShape;

constexpr int kWidth = 64, kSamples = 16384, kPartitions = 2, kRepeats = 7;
constexpr int64_t kRows = 4'000'000;

shard::ModelSpec MakeModel() {
  shard::ModelSpec model;
  model.model_id = 1;
  model.partitions = model.partition_count = kPartitions;
  shard::StackSpec& stack = model.stacks.emplace_back();
  stack.name = "stack";
  stack.embedding_dim = kWidth;
  stack.rows_per_partition = kRows / kPartitions;
  stack.optimizer.set_learning_rate(0.01f);
  stack.optimizer.mutable_adagrad()->set_initial_accumulator(0.1f);
  shard::TableSpec& table = stack.tables.emplace_back();
  table.name = "table";
  table.vocabulary_size = table.padded_vocabulary_size = kRows;
  table.embedding_dim = kWidth;
  table.initializer.mutable_uniform()->set_lower(-0.1f);
  table.initializer.mutable_uniform()->set_upper(0.1f);
  return model;
}

std::vector<TestEntry> MakeEntries(bool zipf, int bag) {
  std::vector<uint32_t> ids = MakeIds(zipf, kRows, int64_t{kSamples} * bag);
  std::vector<TestEntry> entries;
  for (int sample = 0; sample < kSamples; ++sample) {
    const auto begin = ids.begin() + int64_t{sample} * bag;
    std::sort(begin, begin + bag);
    for (auto id = begin; id != std::unique(begin, begin + bag); ++id) {
      entries.push_back({sample, static_cast<int32_t>(*id % kPartitions),
                         static_cast<int32_t>(*id / kPartitions), 1.0f / bag});
    }
  }
  return entries;
}

// Updates of one batch, before and after a checkpoint was taken.
struct Updates {
  void Apply(shard::Engine& engine) const {
    shard::ApplyInput input;
    input.stacks.push_back({0, gradients, {}});
    std::promise<void> done;
    engine.Apply(shard::StagedUpdate(*shard::CheckedPart::Make(batch, input)),
                 [&](absl::StatusOr<shard::ApplyResult>) { done.set_value(); });
    done.get_future().wait();
  }
  double CpuSeconds(shard::Engine& engine) const {
    return MedianCpuSeconds(kRepeats, [&] { Apply(engine); });
  }

  std::string name;
  double count = 0;
  std::shared_ptr<const Batch> batch;
  std::vector<float> gradients;
  double untracked = 0;  // CPU seconds
};

Updates Run(Report& report, shard::Engine& engine, int threads, const std::string& name, bool zipf,
            int bag) {
  const std::vector<TestEntry> entries = MakeEntries(zipf, bag);
  TestBatch test_batch(entries, {kPartitions, kRows / kPartitions, kSamples}, 0, kPartitions,
                       kPartitions, 1);
  std::shared_ptr<const Batch> batch;
  const double prepare = MedianSeconds(
      kRepeats, [&] { batch = *engine.PrepareBatch(1, {test_batch.view()}, nullptr); });
  std::vector<StackSums> sums;
  const double gather = MedianSeconds(kRepeats, [&] {
    std::promise<void> done;
    engine.Gather(batch, {}, [&](absl::StatusOr<shard::GatherOutput> result) {
      sums = std::move(result->sums);
      done.set_value();
    });
    done.get_future().wait();
  });
  Updates updates = {name, static_cast<double>(entries.size()), batch,
                     std::vector<float>(sums[0].samples.size() * kWidth, 1e-3f)};
  const double apply = MedianSeconds(kRepeats, [&] { updates.Apply(engine); });
  const double count = updates.count;
  report.Add({name + "prepare", count / prepare, "ids/s", threads, kWidth, 0});
  report.Add({name + "gather", count / gather, "ids/s", threads, kWidth, 0});
  report.Add({name + "apply", count / apply, "ids/s", threads, kWidth, 0});
  report.Add({name + "step", (prepare + gather + apply) * 1e3, "ms", threads, kWidth, 0});
  updates.untracked = updates.CpuSeconds(engine);
  return updates;
}

// Once a checkpoint has been taken, the engine marks what changes. By processor time: what it costs
// is little beside what others on the machine do to the clock.
void RunTracked(Report& report, shard::Engine& engine, int threads,
                const std::vector<Updates>& all) {
  const auto snapshot = *engine.MakeSnapshot({1}, {});
  engine.StartSnapshot(*snapshot);
  engine.EndSnapshot(snapshot, /*kept=*/true);
  for (const Updates& updates : all) {
    report.Add({updates.name + "tracked_apply", updates.count / updates.CpuSeconds(engine), "ids/s",
                threads, kWidth, updates.count / updates.untracked});
  }
}

EMBERD_BENCHMARK(engine, argc, argv) {
  Report report(argc, argv);
  for (const int threads : {1, 2}) {
    CpuPool cpu(threads);
    const auto engine = *shard::Engine::Create({.cpu = &cpu, .eager_bytes = int64_t{8} << 30});
    if (!engine->CreateModel(MakeModel()).ok()) return 1;
    std::vector<Updates> updates;
    for (const bool zipf : {false, true}) {
      for (const int bag : {10, 50}) {
        const std::string name =
            "engine/" + std::string(zipf ? "zipf" : "uniform") + "/bag" + std::to_string(bag) + "/";
        if (!report.Wants(name)) continue;
        updates.push_back(Run(report, *engine, threads, name, zipf, bag));
      }
    }
    RunTracked(report, *engine, threads, updates);
  }
  return report.Finish();
}

}  // namespace engine_bench
}  // namespace emberd::bench
