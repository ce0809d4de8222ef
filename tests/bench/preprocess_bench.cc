// Preprocessing of whole batches, in ids per second.
//
// zipf:      16,384 samples of 26 features with one id each, Zipf 1.05 over a million ids: the
// shape of a click log. published: jax-tpu-embedding's own benchmark, cut to one device of 4
// SparseCores among 512 partitions: features with
//            round(exp(N(1.5, 1.9))) ids a sample over 10^8 ids, 42 % of them Zipf 1.00278, the
//            rest uniform.
// Both differ from traffic in that batches repeat, which only the branch predictor could notice,
// and in that ids come as 32-bit arrays in memory.
//
// The limit is the rate at which this machine sorts packed 64-bit keys of the same number and
// length with the radix sort alone, on one thread, times the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "preprocess/batch/preprocessor.h"
#include "preprocess/batch/sort_and_merge.h"
#include "preprocess/plan/plan.h"
#include "tests/bench/bench_report.h"

namespace emberd::preprocess {
namespace preprocess_bench {

using bench::MedianCpuSeconds;
using bench::MedianSeconds;
using bench::Report;

// Ranks 0 to n - 1 with probability proportional to 1 / (rank + 1)^exponent, by inversion of the
// continuous law.
class Zipf {
 public:
  Zipf(double exponent, double n) : power_(1 - exponent), top_(std::pow(n + 1, power_) - 1) {}
  int32_t operator()(std::mt19937_64& random) {
    const double u = std::uniform_real_distribution<double>(0, 1)(random);
    return static_cast<int32_t>(std::pow(1 + u * top_, 1 / power_) - 1);
  }

 private:
  double power_, top_;
};

struct Workload {
  std::string name;
  v1::ModelConfig model;
  Topology topology;
  std::vector<std::vector<int32_t>> ids, splits;
  std::vector<FeatureInput> inputs;
  int64_t id_count = 0;

  void AddTable(int64_t vocabulary, int64_t samples) {
    const std::string name = absl::StrCat("t", model.tables_size());
    v1::TableConfig* table = model.add_tables();
    table->set_name(name);
    table->set_vocabulary_size(vocabulary);
    table->set_embedding_dim(16);
    table->set_combiner(v1::SUM);
    table->mutable_optimizer()->mutable_adagrad();
    v1::FeatureConfig* feature = model.add_features();
    feature->set_name(absl::StrCat("f_", name));
    feature->set_table(name);
    feature->set_batch_size(samples);
  }

  // Once all ids are there.
  void MakeInputs(int64_t samples) {
    for (size_t f = 0; f < ids.size(); ++f) {
      FeatureInput input;
      const absl::Span<const int32_t> values = ids[f];
      if (splits.empty()) {
        input.ids = DenseInput{values, static_cast<int64_t>(values.size()) / samples, samples};
      } else {
        input.ids = RaggedInput{absl::Span<const int32_t>(splits[f]), values};
      }
      inputs.push_back(input);
      id_count += static_cast<int64_t>(values.size());
    }
  }

  void SetLimits(int ids_per_partition, int unique_per_partition) {
    for (v1::TableConfig& table : *model.mutable_tables()) {
      table.set_max_ids_per_partition(ids_per_partition);
      table.set_max_unique_ids_per_partition(unique_per_partition);
    }
  }
};

// `stacked`: all tables in one stack, and ranks spread over the vocabulary, as a hash of a category
// would.
std::unique_ptr<Workload> ZipfWorkload(int64_t samples, bool stacked) {
  auto workload = std::make_unique<Workload>();
  workload->name = stacked ? "zipf_stacked" : "zipf";
  workload->topology = {1, 4};
  workload->model.mutable_plan()->set_auto_stack(stacked);
  workload->model.mutable_plan()->set_activation_bytes_limit(0);
  std::mt19937_64 random(1);
  Zipf zipf(1.05, 1e6);
  for (int f = 0; f < 26; ++f) {
    workload->AddTable(1000000, samples);
    std::vector<int32_t> ids(samples);
    for (int32_t& id : ids) {
      const int64_t rank = zipf(random);
      id = static_cast<int32_t>(stacked ? rank * 7368787 % 1000000 : rank);
    }
    workload->ids.push_back(std::move(ids));
  }
  workload->MakeInputs(samples);
  return workload;
}

std::unique_ptr<Workload> PublishedWorkload() {
  constexpr int64_t kSamples = 4 * 16384;
  auto workload = std::make_unique<Workload>();
  workload->name = "published";
  workload->topology = {128, 4};
  workload->model.mutable_plan()->set_auto_stack(false);
  std::mt19937_64 random(2);
  std::normal_distribution<double> log_count(1.5, 1.9);
  std::uniform_int_distribution<int32_t> uniform(0, 99999999);
  std::bernoulli_distribution skewed(0.42);
  Zipf zipf(1.00278, 1e8);
  for (int f = 0; f < 4; ++f) {
    workload->AddTable(100000000, kSamples);
    std::vector<int32_t> ids, splits = {0};
    for (int64_t s = 0; s < kSamples; ++s) {
      const auto n =
          static_cast<int64_t>(std::min(std::round(std::exp(log_count(random))), 1000.0));
      for (int64_t i = 0; i < n; ++i) {
        ids.push_back(skewed(random) ? std::min(zipf(random), 99999999) : uniform(random));
      }
      splits.push_back(static_cast<int32_t>(ids.size()));
    }
    workload->ids.push_back(std::move(ids));
    workload->splits.push_back(std::move(splits));
  }
  workload->MakeInputs(kSamples);
  return workload;
}

// Keys per second of the radix sort alone, for the workload's slots: as many keys, of 64 bits, with
// the bits that rows of the whole stack have.
double SortLimit(const Workload& workload, const Plan& plan) {
  const int slots = workload.topology.sparsecores_per_shard;
  const int partition_bits = BitsFor(plan.topology.partitions());
  std::mt19937_64 random(3);
  std::vector<std::vector<uint64_t>> keys;
  std::vector<int> bits;
  for (const StackPlan& stack : plan.stacks) {
    int64_t ids = 0;
    for (const FeaturePlan& feature : stack.features) ids += workload.ids[feature.feature].size();
    bits.push_back(partition_bits + BitsFor(stack.rows_per_partition));
    std::vector<uint64_t>& stack_keys = keys.emplace_back(ids / slots);
    for (size_t i = 0; i < stack_keys.size(); ++i) {
      stack_keys[i] = (random() & ((uint64_t{1} << bits.back()) - 1)) << 32 | i;
    }
  }
  std::vector<uint64_t> work, spare;
  const double seconds = MedianCpuSeconds(9, [&] {
    for (size_t k = 0; k < keys.size(); ++k) {
      for (int s = 0; s < slots; ++s) {
        work.assign(keys[k].begin(), keys[k].end());
        spare.resize(work.size());
        SortKeys(work.data(), spare.data(), static_cast<int64_t>(work.size()), bits[k], 32);
      }
    }
  });
  return static_cast<double>(workload.id_count) / seconds;
}

// Bytes that an id of the first stack moves through the processor on its way, by the algorithm:
// read by validation and extraction, written as a key and counted, moved by each sort pass, read
// and written by grouping. Of keys with 64 bits; those of small tables have 32.
double BytesPerId(const Plan& plan) {
  const int bits = BitsFor(plan.topology.partitions()) + BitsFor(plan.stacks[0].rows_per_partition);
  const int sort_passes = (bits + 10) / 11;
  return 4 + 4 + 8 + 8 + sort_passes * 16 + 8 + 12;
}

struct Measured {
  double ids_per_second = 0;
  v1::BatchStatistics statistics;
};

Measured Run(const Workload& workload, const Plan& plan, int threads) {
  CpuPool cpu(threads);
  auto preprocessor = std::make_unique<Preprocessor>(&workload.model, &plan, &cpu);
  Measured measured;
  const double seconds = (threads == 1 ? MedianCpuSeconds : MedianSeconds)(15, [&] {
    const auto batch = preprocessor->Run(workload.inputs);
    if (!batch.ok()) {
      std::fprintf(stderr, "%s\n", batch.status().ToString().c_str());
      std::exit(1);
    }
    measured.statistics = (*batch)->statistics();
  });
  measured.ids_per_second = static_cast<double>(workload.id_count) / seconds;
  return measured;
}

// Sets limits that force mini-batches: of what any pair saw, a quarter of the unique ids and the
// smallest of a quarter, three eighths, half, ... of the ids that the vocabulary can be cut down to
// (a hot id cannot be cut).
Plan TightenLimits(const v1::BatchStatistics& statistics, Workload* workload) {
  int64_t ids = 0, unique = 0;
  for (const auto& stack : statistics.stacks()) {
    ids = std::max(ids, stack.max_ids_per_partition());
    unique = std::max(unique, stack.max_unique_ids_per_partition());
  }
  for (int eighths = 2; eighths < 8; ++eighths) {
    workload->SetLimits(static_cast<int>(ids * eighths / 8), static_cast<int>(unique / 4));
    Plan plan = *MakePlan(workload->model, workload->topology);
    if (Preprocessor(&workload->model, &plan, nullptr).Run(workload->inputs).ok()) return plan;
  }
  std::fprintf(stderr, "%s: no limits force mini-batches\n", workload->name.c_str());
  std::exit(1);
}

void Measure(Workload* workload, Report* report) {
  if (!report->Wants(absl::StrCat("preprocess/", workload->name))) return;
  const Plan plan = *MakePlan(workload->model, workload->topology);
  const double limit = SortLimit(*workload, plan);
  Measured plain;
  for (int threads : {1, 2}) {
    plain = Run(*workload, plan, threads);
    report->Add({absl::StrCat("preprocess/", workload->name, "/plain"), plain.ids_per_second,
                 "ids/s", threads, 0, limit * threads});
  }
  report->Add(
      {absl::StrCat("preprocess/", workload->name, "/bytes_per_id"), BytesPerId(plan), "B/id", 1});
  const Plan tight = TightenLimits(plain.statistics, workload);
  for (int threads : {1, 2}) {
    const Measured cut = Run(*workload, tight, threads);
    report->Add({absl::StrCat("preprocess/", workload->name, "/minibatches_",
                              cut.statistics.num_minibatches()),
                 cut.ids_per_second, "ids/s", threads, 0, limit * threads});
  }
}

// Rates from 10^4 to 10^7 ids: they should not fall.
void MeasureGrowth(Report* report) {
  if (!report->Wants("preprocess/growth")) return;
  for (int64_t ids : {10000, 100000, 1000000, 10000000}) {
    const auto workload = ZipfWorkload(ids / 26, false);
    const Plan plan = *MakePlan(workload->model, workload->topology);
    report->Add({absl::StrCat("preprocess/growth/", ids), Run(*workload, plan, 1).ids_per_second,
                 "ids/s", 1, 0, SortLimit(*workload, plan)});
  }
}

EMBERD_BENCHMARK(preprocess, argc, argv) {
  Report report(argc, argv);
  Measure(ZipfWorkload(16384, false).get(), &report);
  Measure(ZipfWorkload(16384, true).get(), &report);
  Measure(PublishedWorkload().get(), &report);
  MeasureGrowth(&report);
  return report.Finish();
}

}  // namespace preprocess_bench
}  // namespace emberd::preprocess
