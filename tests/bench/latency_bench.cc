// Small lookups end to end: one sample of 26 features, for inference, against a coordinator and two
// shard processes on this machine; by one client, and by four at once.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/step_trainer.h"
#include "tests/testing/cluster.h"

namespace emberd::bench {
namespace latency_bench {

constexpr absl::Duration kNotMeasured = absl::Milliseconds(500);
constexpr absl::Duration kMeasured = absl::Seconds(3);

// Looks up until `end`; the times of the lookups that began after `begin`, in microseconds.
std::vector<double> LookUpUntil(client::Client* client, const client::Model& model,
                                const StepShape& shape, absl::Time begin, absl::Time end) {
  std::vector<std::string> names;
  std::vector<std::vector<int32_t>> ids;
  for (int f = 0; f < shape.features; ++f) {
    names.push_back(absl::StrCat("f", f));
    ids.push_back(MakeIds(shape, f));
  }
  std::vector<client::FeatureIds> features;
  for (int f = 0; f < shape.features; ++f) {
    features.push_back({names[f], client::DenseIds{absl::MakeConstSpan(ids[f]), shape.bag}});
  }
  std::vector<double> times;
  for (absl::Time start = absl::Now(); start < end; start = absl::Now()) {
    DieUnless(client->Lookup(model, features, {.inference = true}).status());
    if (start >= begin) times.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
  }
  return times;
}

void Measure(const testing::Cluster& cluster, const StepShape& shape, int clients,
             const std::string& name, Report* report) {
  std::vector<std::vector<double>> times(clients);
  std::vector<std::thread> threads;
  const absl::Time begin = absl::Now() + kNotMeasured;
  for (int i = 0; i < clients; ++i) {
    threads.emplace_back([&, i] {
      auto client = client::Client::Connect(cluster.client_options());
      DieUnless(client.status());
      auto model = (*client)->DeclareModel(ModelText(shape));
      DieUnless(model.status());
      times[i] = LookUpUntil(client->get(), *model, shape, begin, begin + kMeasured);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<double> all;
  for (const auto& some : times) all.insert(all.end(), some.begin(), some.end());
  std::sort(all.begin(), all.end());
  const auto add = [&](const std::string& what, double value, const std::string& unit) {
    report->Add(
        {absl::StrCat(name, "/clients", clients, "/", what), value, unit, clients, shape.width});
  };
  if (all.empty()) DieUnless(absl::InternalError("no lookup ended within the time"));
  add("p50", all[all.size() / 2], "us");
  add("p99", all[all.size() * 99 / 100], "us");
  add("rate", static_cast<double>(all.size()) / absl::ToDoubleSeconds(kMeasured), "lookups/s");
}

EMBERD_BENCHMARK(latency, argc, argv) {
  Report report(argc, argv);
  const StepShape shape = {.batch = 1, .width = 16, .rows = 10'000};
  for (const bool embedded : {false, true}) {
    const std::string name = embedded ? "latency/one_process" : "latency";
    auto cluster =
        testing::Cluster::Start({.shards = 2, .sparsecores_per_shard = 2, .embedded = embedded});
    DieUnless(cluster.status());
    for (const int clients : {1, 4}) {
      if (report.Wants(name)) Measure(**cluster, shape, clients, name, &report);
    }
  }
  return report.Finish();
}

}  // namespace latency_bench
}  // namespace emberd::bench
