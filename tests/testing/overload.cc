#include "tests/testing/overload.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "base/testing/sanitized.h"
#include "tests/testing/api.h"
#include "tests/testing/footprint.h"

namespace emberd::testing {
namespace {

constexpr int kFactor = 10;
constexpr int kVocabulary = 4096;
constexpr int kWidth = 8192;
constexpr int kSamples = 4;
// A sanitizer makes reading rows ten times slower; deadlines stay as they are.
constexpr int kIdsPerSample = kSanitized ? 250 : 2500;

std::string Model() {
  return absl::StrCat("name: 'overload' tables { name: 'wide' vocabulary_size: ", kVocabulary,
                      " embedding_dim: ", kWidth,
                      " combiner: SUM optimizer { sgd {} } } features { name: 'f' table: 'wide' }");
}

// 40 KB of ids that make the shards read 320 MB of rows; a tenth of both under a sanitizer.
std::string HeavyLookup(uint64_t model_id) {
  std::mt19937 random(1);
  std::vector<int32_t> ids(kSamples * kIdsPerSample);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % kVocabulary);
  v1::LookupRequest request;
  request.set_model_id(model_id);
  request.set_inference(true);
  v1::FeatureIds* feature = request.add_features();
  feature->set_feature("f");
  *feature->mutable_dense()->mutable_ids() = MakeTensor({kSamples, kIdsPerSample}, ids);
  return request.SerializeAsString();
}

int64_t ResidentKib(Cluster& cluster) {
  int64_t sum = 0;
  for (const pid_t pid : cluster.pids()) sum += FootprintOf(pid).resident_kib;
  return sum;
}

double SettledRate(const LoadResult& load) {
  return static_cast<double>(load.good_settled) / (load.seconds - 1);
}

// Asks the coordinator how many requests wait, again and again, until it goes.
class QueueWatch {
 public:
  explicit QueueWatch(const std::string& address) : api_(address), thread_([this] { Run(); }) {}
  ~QueueWatch() { Stop(); }
  int64_t Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return most_;
  }

 private:
  void Run() {
    for (; !stop_; absl::SleepFor(absl::Milliseconds(50))) {
      v1::GetStatsResponse stats;
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(2)));
      if (api_.admin->GetStats(&context, {}, &stats).ok()) {
        most_ = std::max<int64_t>(most_, stats.queued_requests());
      }
    }
  }

  const Api api_;
  std::atomic<bool> stop_ = false;
  int64_t most_ = 0;  // of the thread, until it is joined
  std::thread thread_;
};

// From `start` until five lookups in a row were answered, none more than three times as slow as
// before.
absl::Duration TimeToRecover(RequestLoad& load, absl::Time start, absl::Duration usual) {
  const absl::Time give_up = absl::Now() + absl::Minutes(1);
  absl::Time first_good = start;
  for (int in_a_row = 0; in_a_row < 5 && absl::Now() < give_up;) {
    const absl::Time sent = absl::Now();
    const bool good = load.SendOne().ok() && absl::Now() - sent < 3 * usual;
    if (in_a_row == 0) first_good = absl::Now();
    in_a_row = good ? in_a_row + 1 : 0;
  }
  return absl::Now() < give_up ? first_good - start : absl::InfiniteDuration();
}

}  // namespace

absl::StatusOr<OverloadResult> Overload(Cluster& cluster, absl::Duration duration,
                                        absl::Duration deadline) {
  const std::unique_ptr<client::Client> client = cluster.Connect();
  if (client == nullptr) return absl::UnavailableError("no client");
  absl::StatusOr<client::Model> model = client->DeclareModel(Model());
  if (!model.ok()) return model.status();
  const auto lookups = [&](absl::Duration limit) {
    return RequestLoad(cluster.address(), 4, "/emberd.v1.EmbeddingService/Lookup",
                       HeavyLookup(model->id), limit);
  };
  RequestLoad patient = lookups(kPatience);
  patient.RunClosed(4, absl::Seconds(1));  // tables and pools are touched once

  OverloadResult result;
  // What a pause of the machine has left is no measurement: it is made again.
  const LoadResult calm =
      Await([&] { return patient.RunClosed(1, duration); },
            [](const LoadResult& load) { return load.good > 0 || load.other > 0; });
  if (calm.good == 0) {
    return absl::InternalError(absl::StrCat("no lookup is answered: ", calm.other_error));
  }
  const absl::Duration usual = absl::Seconds(calm.seconds / static_cast<double>(calm.good));
  duration = std::max(duration, 20 * usual);
  result.peak = Await([&] { return SettledRate(patient.RunClosed(8, duration)); },
                      [&](double rate) { return rate * absl::ToDoubleSeconds(usual) >= 0.5; });
  RequestLoad load = lookups(std::max(deadline, 10 * usual));
  const int64_t before = ResidentKib(cluster);
  QueueWatch watch(cluster.address());
  result.flood = Await([&] { return load.RunOpen(kFactor * result.peak, duration); },
                       [](const LoadResult& flood) {
                         return flood.other > 0 || (flood.good > 0 && flood.refused > 0);
                       });
  result.recovery = TimeToRecover(load, result.flood.sending_ended, usual);
  result.serves = true;
  for (int i = 0; i < 5; ++i) result.serves &= patient.SendOne().ok();
  result.most_waiting = watch.Stop();
  result.goodput = SettledRate(result.flood);
  result.resident_growth_kib = ResidentKib(cluster) - before;
  return result;
}

}  // namespace emberd::testing
