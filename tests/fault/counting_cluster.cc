#include "tests/fault/counting_cluster.h"

#include <numeric>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/testing/metrics.h"

namespace emberd::testing {
namespace {

constexpr int64_t kColumns = 4;

client::ModelDescription CountingModel() {
  client::TableDescription table;
  table.name = CountingCluster::kTable;
  table.vocabulary_size = CountingCluster::kRows;
  table.embedding_dim = kColumns;
  table.initializer = client::Initializer::Zeros();
  table.optimizer = client::Optimizer{"sgd", {{"learning_rate", 1.0}}};
  client::ModelDescription model;
  model.name = "count";
  model.tables = {table};
  model.features = {{"f", CountingCluster::kTable}};
  return model;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CountingCluster>> CountingCluster::Start(
    const std::map<std::string, std::string>& failpoints, const std::string& timeouts,
    const std::string& config, const std::string& power) {
  std::unique_ptr<CountingCluster> started(new CountingCluster());
  ASSIGN_OR_RETURN(started->cluster_,
                   Cluster::Start({.coordinators = 2,
                                   .config = absl::StrCat("timeouts { ", timeouts, " } ", config),
                                   .failpoints = failpoints,
                                   .power = power}));
  ASSIGN_OR_RETURN(started->first_, started->ConnectTo(0));
  ASSIGN_OR_RETURN(started->other_, started->ConnectTo(1));
  ASSIGN_OR_RETURN(started->model_, started->first_->DeclareModel(CountingModel()));
  started->ids_.resize(kRows);
  std::iota(started->ids_.begin(), started->ids_.end(), 0);
  return started;
}

absl::StatusOr<std::unique_ptr<client::Client>> CountingCluster::ConnectTo(int coordinator) const {
  client::ClientOptions options = cluster_->client_options();
  options.addresses = {cluster_->address(coordinator)};
  options.client_id = "trainer";
  return client::Client::Connect(options);
}

absl::StatusOr<client::LookupResult> CountingCluster::Lookup(client::Client& client) const {
  return client.Lookup(model_, {{"f", client::DenseIds{absl::MakeConstSpan(ids_), 1}}});
}

absl::StatusOr<client::ApplyResult> CountingCluster::Apply(client::Client& client,
                                                           client::BatchHandle batch,
                                                           uint64_t sequence,
                                                           absl::Duration deadline) const {
  const std::vector<float> gradients(kRows * kColumns, -1.0f);
  client::ApplyOptions options;
  options.sequence = sequence;
  options.deadline = deadline;
  batch.coordinator = 0;
  return client.ApplyGradients(model_, batch, {{"f", gradients, kRows}}, options);
}

absl::StatusOr<client::ApplyResult> CountingCluster::Retry(client::BatchHandle batch,
                                                           uint64_t sequence) const {
  auto applied = Apply(*other_, batch, sequence);
  if (!absl::IsNotFound(applied.status())) return applied;
  ASSIGN_OR_RETURN(const client::LookupResult found, Lookup(*other_));
  return Apply(*other_, found.batch, sequence);
}

std::vector<float> CountingCluster::Counts(client::Client& client) const {
  const auto rows = client.ReadRows(model_, kTable, ids_);
  EXPECT_TRUE(rows.ok()) << rows.status();
  std::vector<float> counts;
  for (int64_t i = 0; rows.ok() && i < kRows; ++i) counts.push_back(rows->values[i * kColumns]);
  return counts;
}

template <typename Work>
absl::Status CountingCluster::OnAllRanks(const Work& work) {
  std::vector<absl::Status> statuses(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] { statuses[rank] = work(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

void CountingCluster::Leave() {
  for (Rank& rank : ranks_) rank.stream.reset();
  ranks_.clear();
}

absl::StatusOr<int64_t> CountingCluster::Join(const std::vector<int>& coordinators,
                                              absl::Duration step_timeout) {
  Leave();
  ranks_.resize(kRanks);
  RETURN_IF_ERROR(OnAllRanks([&](int rank) -> absl::Status {
    Rank& me = ranks_[rank];
    ASSIGN_OR_RETURN(me.client, ConnectTo(coordinators[rank]));
    ASSIGN_OR_RETURN(
        me.stream,
        me.client->Train(
            model_, {.group = "run", .rank = rank, .size = kRanks, .step_timeout = step_timeout}));
    return absl::OkStatus();
  }));
  return ranks_[0].stream->next_step();
}

absl::Status CountingCluster::Step(int64_t step, int dying, bool skip) {
  return OnAllRanks([&](int rank) { return StepOf(rank, step, rank == dying, skip); });
}

absl::Status CountingCluster::StepOf(int rank, int64_t step, bool dies, bool skip) {
  client::TrainStream& stream = *ranks_[rank].stream;
  RETURN_IF_ERROR(
      stream.SendLookup(step, {{{"f", client::DenseIds{absl::MakeConstSpan(ids_), 1}}}}));
  RETURN_IF_ERROR(stream.ReceiveLookup().status());
  if (dies) {
    // When the part of the other rank waits on both shards, and it has asked the group's host who
    // else is there.
    const auto calls = [&] {
      double sum = 0;
      for (const int shard : {0, 1}) {
        sum += MetricSum(FetchMetrics(cluster_->shard_http_address(shard)),
                         "emberd_in_flight_requests");
      }
      return sum;
    };
    if (!Eventually([&] { return calls() >= 3; })) {
      return absl::InternalError("the part of the other rank does not come");
    }
    ranks_[rank].stream.reset();
    return absl::OkStatus();
  }
  const std::vector<float> gradients(kRows * kColumns, -1.0f);
  RETURN_IF_ERROR(skip ? stream.SendUpdate(step, {}, {.skip = true})
                       : stream.SendUpdate(step, {{{"f", gradients, kRows}}}));
  return stream.ReceiveUpdate().status();
}

}  // namespace emberd::testing
