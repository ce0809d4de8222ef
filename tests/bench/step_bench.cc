// A step end to end: Lookup and ApplyGradients of one trainer over loopback gRPC against a
// coordinator and two shard processes. It stands for a recommender's sparse part (26 features of
// width 64, batch 4096, Zipf-skewed ids) without the trainer's dense part, with all processes on
// one machine: a real cluster would not share its CPUs.
//
// Limit of the payload rates: the raw-RPC rate for the same bytes (raw_rpc.h), measured in the same
// run.
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "server/ops/rpc_names.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/raw_rpc.h"
#include "tests/testing/cluster.h"
#include "tests/testing/metrics.h"

namespace emberd::bench {
namespace {

constexpr int kFeatures = 26;
constexpr int kBatch = 4096;
constexpr int kWidth = 64;
constexpr int kRows = 200'000;
constexpr int kRepeats = 9;

std::string ModelText(const std::string& name) {
  std::string text =
      absl::StrCat("name: '", name, "' optimizer { adagrad {} learning_rate: 0.01 }\n");
  for (int i = 0; i < kFeatures; ++i) {
    absl::StrAppend(&text, "tables { name: 't", i, "' vocabulary_size: ", kRows,
                    " embedding_dim: ", kWidth,
                    " combiner: SUM initializer { uniform { lower: -0.1 upper: 0.1 } } }\n");
    absl::StrAppend(&text, "features { name: 'f", i, "' table: 't", i, "' batch_size: ", kBatch,
                    " }\n");
  }
  return text;
}

struct Batch {
  std::vector<std::vector<int32_t>> ids;  // by feature
  std::vector<std::string> names;
  std::vector<client::FeatureIds> features;
};

Batch MakeBatch(int bag) {
  std::mt19937 random(7);
  // Zipf with exponent near 1, by inversion of its continuous form.
  std::uniform_real_distribution<double> uniform(0, 1);
  Batch batch;
  batch.ids.resize(kFeatures);
  for (int i = 0; i < kFeatures; ++i) batch.names.push_back(absl::StrCat("f", i));
  for (int i = 0; i < kFeatures; ++i) {
    for (int k = 0; k < kBatch * bag; ++k) {
      batch.ids[i].push_back(static_cast<int32_t>(std::pow(kRows, uniform(random))) - 1);
    }
    batch.features.push_back(
        {batch.names[i], client::DenseIds{absl::MakeConstSpan(batch.ids[i]), bag}, {}});
  }
  return batch;
}

void Die(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << "step_bench: " << status << "\n";
  std::exit(1);
}

// Seconds that the coordinator has spent in each stage so far.
std::map<std::string, double> StageSeconds(const testing::Cluster& cluster) {
  const std::string page = testing::FetchMetrics(cluster.http_address());
  std::map<std::string, double> seconds;
  for (size_t i = 0; i < ops::kStageCount; ++i) {
    const std::string name(ops::StageName(static_cast<ops::Stage>(i)));
    seconds[name] = testing::MetricSum(page, "emberd_stage_duration_seconds_sum",
                                       absl::StrCat("stage=\"", name, "\""));
  }
  return seconds;
}

void Measure(const testing::Cluster& cluster, int bag, client::WireType wire, Report* report) {
  const std::string wire_name = wire == client::WireType::kFloat32 ? "float32" : "bfloat16";
  const std::string name = absl::StrCat("step/bag", bag, "/", wire_name);
  if (!report->Wants(name)) return;
  client::ClientOptions options = cluster.client_options();
  options.activation_type = wire;
  options.gradient_type = wire;
  auto client = client::Client::Connect(options);
  Die(client.status());
  auto model = (*client)->DeclareModel(ModelText("step"));
  Die(model.status());

  const Batch batch = MakeBatch(bag);
  const std::vector<float> gradient(kBatch * kWidth, 1e-3f);
  std::vector<client::FeatureGradient> gradients;
  for (const std::string& feature : batch.names) gradients.push_back({feature, gradient, kBatch});
  double lookup_seconds = 0;
  double apply_seconds = 0;
  std::map<std::string, double> before;
  double all_seconds = 0;
  int calls = 0;
  const double step = MedianSeconds(kRepeats, [&] {
    if (calls++ == 1) before = StageSeconds(cluster);  // the first call warms up
    const absl::Time start = absl::Now();
    auto found = (*client)->Lookup(*model, batch.features);
    Die(found.status());
    const absl::Time looked_up = absl::Now();
    Die((*client)->ApplyGradients(*model, found->batch, gradients).status());
    if (calls > 1) {
      lookup_seconds += absl::ToDoubleSeconds(looked_up - start) / kRepeats;
      apply_seconds += absl::ToDoubleSeconds(absl::Now() - looked_up) / kRepeats;
      all_seconds += absl::ToDoubleSeconds(absl::Now() - start);
    }
  });

  const double payload = static_cast<double>(kBatch) * kFeatures * kWidth *
                         (wire == client::WireType::kFloat32 ? 4 : 2);
  auto raw = RawRpc::Start(static_cast<int64_t>(payload));
  Die(raw.status());
  const double raw_lookup =
      MedianSeconds(kRepeats, [&] { Die((*raw)->Call(int64_t{4} * kBatch * kFeatures * bag)); });
  const double rows = static_cast<double>(kBatch) * kFeatures * bag;
  report->Add({absl::StrCat(name, "/examples"), kBatch / step, "examples/s", 1, kWidth, 0});
  report->Add({absl::StrCat(name, "/rows"), rows / step, "rows/s", 1, kWidth, 0});
  report->Add({absl::StrCat(name, "/lookup_payload"), payload / lookup_seconds, "B/s", 1, kWidth,
               payload / raw_lookup});
  report->Add({absl::StrCat(name, "/apply_payload"), payload / apply_seconds, "B/s", 1, kWidth,
               payload / raw_lookup});
  for (const auto& [stage, seconds] : StageSeconds(cluster)) {
    report->Add({absl::StrCat(name, "/stage/", stage), (seconds - before[stage]) / all_seconds,
                 "share of step", 1, kWidth, 0});
  }
}

int Main(int argc, char** argv) {
  Report report(argc, argv);
  auto cluster = testing::Cluster::Start({.shards = 2, .sparsecores_per_shard = 2});
  Die(cluster.status());
  for (const int bag : {1, 20}) {
    for (const auto wire : {client::WireType::kFloat32, client::WireType::kBfloat16}) {
      Measure(**cluster, bag, wire, &report);
    }
  }
  return report.Finish();
}

}  // namespace
}  // namespace emberd::bench

int main(int argc, char** argv) { return emberd::bench::Main(argc, argv); }
