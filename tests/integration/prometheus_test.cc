// A dashboard that shows nothing looks like a cluster that does nothing, and an alert over a metric
// that does not exist never fires. So a real Prometheus scrapes a real cluster that does everything
// there is to count, and every expression of every panel and alert is put to it. What alerts say
// about numbers is in deploy/alerts_test.yml.
#include "tests/testing/prometheus.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "base/testing/paths.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/ops/catalogue.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/dashboards.h"
#include "tests/testing/group_training.h"
#include "tests/testing/metrics.h"

namespace emberd::testing {
namespace prometheus_test {

using ::testing::PrintToString;
using ::testing::SizeIs;

constexpr int kShards = 4;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Limits that 100 ids on a partition exceed.
std::string TightModel(const std::string& name, const std::string& more) {
  return absl::StrCat("name: '", name, R"('
    tables { name: "t" vocabulary_size: 4096 embedding_dim: 8
             max_ids_per_partition: 16 max_unique_ids_per_partition: 16 )",
                      more, R"( }
    features { name: "x" table: "t" }
    optimizer { sgd {} learning_rate: 0.1 })",
                      name == "dropping" ? " plan { allow_id_dropping: true }" : "");
}

// As the panel sends it, but without the zero that it shows where there is nothing.
std::string Bare(const DashboardQuery& query) {
  return absl::StrReplaceAll(Substituted(query.expression), {{" or vector(0)", ""}});
}

// What trainers do, well and badly.
class Load {
 public:
  explicit Load(const Cluster& cluster) : cluster_(cluster), client_(cluster.Connect()) {
    for (const char* name : {"tight", "dropping", "skipping"}) {
      Declare(TightModel(
          name, absl::StrContains(name, "skipping") ? "on_nonfinite_gradient: SKIP_ROW" : ""));
    }
    auto group = client_->DeclareModel(GroupModel("group", 4));
    EXPECT_TRUE(group.ok()) << group.status();
    if (group.ok()) models_["group"] = *std::move(group);
  }

  void Round(int round) {
    // Cut into mini-batches: 200 different ids of one partition.
    client::BatchHandle batch = Lookup("tight", 8, 200, absl::StatusCode::kOk);
    Apply("tight", batch, 200, 1, absl::StatusCode::kOk);
    const uint64_t again = client_->NextSequence();
    batch = Lookup("tight", 8, 200, absl::StatusCode::kOk);
    Apply("tight", batch, 200, 1, absl::StatusCode::kOk, again);
    Apply("tight", batch, 200, 1, absl::StatusCode::kOk, again);  // from the record
    // One id 200 times cannot be cut: refused, or dropped where that is allowed.
    Lookup("tight", 0, 200, absl::StatusCode::kResourceExhausted);
    batch = Lookup("dropping", 0, 200, absl::StatusCode::kOk);
    Apply("dropping", batch, 200, 1, absl::StatusCode::kOk);
    // Gradients that are not finite: skipped, or refused by the shards.
    batch = Lookup("skipping", 1, 200, absl::StatusCode::kOk);
    Apply("skipping", batch, 200, kNan, absl::StatusCode::kOk);
    batch = Lookup("tight", 1, 20, absl::StatusCode::kOk);
    Apply("tight", batch, 20, kNan, absl::StatusCode::kInvalidArgument);  // and it expires
    batch = Lookup("tight", 8, 20, absl::StatusCode::kOk);
    ApplyNothing("tight", batch);
    TrainAGroup(round);
  }

  // An id that no shard but `shard` has.
  absl::Status LookupOn(int shard) {
    const std::vector<int64_t> ids = {2 * shard};
    return client_->Lookup(models_["tight"], {{"x", client::DenseIds{ids}}}, {.inference = true})
        .status();
  }

 private:
  void Declare(const std::string& config) {
    auto model = client_->DeclareModel(config);
    ASSERT_TRUE(model.ok()) << model.status();
    const std::string name = model->name;
    models_[name] = *std::move(model);
  }

  // Ids 0, `step`, 2 * `step`, ...
  client::BatchHandle Lookup(const std::string& model, int64_t step, int samples,
                             absl::StatusCode expected) {
    std::vector<int64_t> ids;
    for (int i = 0; i < samples; ++i) ids.push_back(step * i);
    auto found = client_->Lookup(models_[model], {{"x", client::DenseIds{ids}}});
    EXPECT_EQ(found.status().code(), expected) << model << ": " << found.status();
    return found.ok() ? found->batch : client::BatchHandle();
  }

  void Apply(const std::string& model, const client::BatchHandle& batch, int samples, float value,
             absl::StatusCode expected, uint64_t sequence = 0) {
    const std::vector<float> gradients(samples * 8, value);
    client::ApplyOptions options;
    options.sequence = sequence;
    const auto applied = client_->ApplyGradients(
        models_[model], batch, {{"x", gradients, static_cast<int64_t>(samples)}}, options);
    EXPECT_EQ(applied.status().code(), expected) << model << ": " << applied.status();
  }

  // The only feature has no gradient.
  void ApplyNothing(const std::string& model, const client::BatchHandle& batch) {
    const auto applied = client_->ApplyGradients(models_[model], batch, {}, {});
    EXPECT_TRUE(applied.ok()) << model << ": " << applied.status();
  }

  void TrainAGroup(int round) {
    client::TrainOptions options;
    options.group = absl::StrCat("run-", round % 3);
    options.size = 2;
    const absl::Status trained = TrainGroup(cluster_, models_["group"], options, 1, 5);
    EXPECT_TRUE(trained.ok()) << trained;
    options.size = 1;
    options.group = "broken";
    auto stream = client_->Train(models_["group"], options);
    ASSERT_TRUE(stream.ok()) << stream.status();
    Share share = MakeShare((*stream)->next_step(), 0, 1);
    share.ids[0][0] = -1;
    EXPECT_TRUE((*stream)->SendLookup((*stream)->next_step(), share.Features()).ok());
    EXPECT_EQ((*stream)->ReceiveLookup().status().code(), absl::StatusCode::kOutOfRange);
  }

  const Cluster& cluster_;
  const std::unique_ptr<client::Client> client_;
  std::map<std::string, client::Model> models_;
};

class PrometheusTest : public ::testing::Test {
 protected:
  static std::string Deploy(const std::string& path) { return SourcePath("deploy/" + path); }

  void SetUp() override {
    if (!Prometheus::Installed()) {
      GTEST_SKIP() << "there is no /usr/bin/prometheus: apt-get install prometheus";
    }
    auto cluster =
        Cluster::Start({.shards = kShards, .config = "timeouts { batch_ttl_ms: 15000 }"});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    std::vector<Prometheus::Target> targets = {{"coordinator-0", cluster_->http_address()}};
    for (int i = 0; i < kShards; ++i) {
      targets.push_back({absl::StrCat("shard-", i), cluster_->shard_http_address(i)});
    }
    auto prometheus = Prometheus::Start(targets, Deploy("alerts.yml"));
    ASSERT_TRUE(prometheus.ok()) << prometheus.status();
    prometheus_ = *std::move(prometheus);
  }

  // Whether the expression gives at least one number.
  bool HasData(const std::string& expression) {
    const auto samples = prometheus_->Query(expression);
    EXPECT_TRUE(samples.ok()) << samples.status();
    if (!samples.ok()) return true;  // reported
    return std::any_of(samples->begin(), samples->end(),
                       [](const auto& sample) { return !std::isnan(sample.value); });
  }
  std::set<std::string> ProcessesWhere(const std::string& expression) {
    std::set<std::string> processes;
    const auto samples = prometheus_->Query(expression);
    EXPECT_TRUE(samples.ok()) << samples.status();
    if (!samples.ok()) return processes;
    for (const Prometheus::Sample& sample : *samples) {
      processes.insert(sample.labels.at("process"));
    }
    return processes;
  }
  std::string AlertQuery(const std::string& name) {
    const auto rules = prometheus_->Rules();
    EXPECT_TRUE(rules.ok()) << rules.status();
    if (!rules.ok()) return "";
    for (const Prometheus::Rule& rule : *rules) {
      if (rule.alert == name) return rule.query;
    }
    ADD_FAILURE() << "there is no alert " << name;
    return "";
  }
  // Ids lie on partition id mod P in a model of one table, and every shard has its K of these.
  void ExpectHotRowsOnTheirShards() {
    const Api api(cluster_->address());
    v1::GetStatsRequest request;
    request.set_hot_rows(100);
    v1::GetStatsResponse stats;
    grpc::ClientContext context;
    const grpc::Status status = api.admin->GetStats(&context, request, &stats);
    ASSERT_TRUE(status.ok()) << status.error_message();
    int found = 0;
    for (const v1::ShardStatus& shard : stats.shards()) {
      EXPECT_THAT(shard.partitions(), SizeIs(2));
      EXPECT_GT(shard.table_budget_bytes(), shard.table_bytes());
      EXPECT_GT(shard.resident_bytes(), 0);
      for (const v1::HotRow& row : shard.hot_rows()) {
        EXPECT_GT(row.lookups(), 0);
        EXPECT_LE(row.lookups(), row.table_lookups());
        if (row.model() == "group") continue;
        ++found;
        EXPECT_EQ(row.id() % (2 * kShards) / 2, shard.index()) << row.model() << " " << row.id();
      }
    }
    EXPECT_GT(found, 0);
  }
  // Waits until the expression gives exactly these; scrapes may come late on a busy machine.
  void ExpectProcesses(const std::string& expression, const std::set<std::string>& expected) {
    std::set<std::string> found;
    EXPECT_TRUE(Eventually([&] { return (found = ProcessesWhere(expression)) == expected; }))
        << expression << " gives " << PrintToString(found);
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Prometheus> prometheus_;
};

TEST_F(PrometheusTest, EveryPanelShowsDataEveryMetricIsEmittedAndADeadShardIsSeen) {
  auto dashboards = ReadDashboards(Deploy("grafana/dashboards"));
  ASSERT_TRUE(dashboards.ok()) << dashboards.status();
  std::vector<DashboardQuery> waiting;
  for (const Dashboard& dashboard : *dashboards) {
    waiting.insert(waiting.end(), dashboard.panels.begin(), dashboard.panels.end());
  }
  ASSERT_GT(waiting.size(), 50u);
  // As long as all shards are there, no call to them fails, and none is out of reach.
  std::vector<DashboardQuery> of_dead_shards;
  std::erase_if(waiting, [&](const DashboardQuery& query) {
    const bool failed_calls = absl::StrContains(query.expression, "emberd_shard_calls_total") &&
                              absl::StrContains(query.expression, "code!=\"OK\"");
    const bool out_of_reach = absl::StrContains(query.expression, "emberd_shard_reachable == 0");
    if (failed_calls || out_of_reach) of_dead_shards.push_back(query);
    return failed_calls || out_of_reach;
  });
  ASSERT_THAT(of_dead_shards, SizeIs(2));

  Load load(*cluster_);
  ASSERT_FALSE(HasFailure());
  const absl::Time deadline = absl::Now() + kPatience;
  for (int round = 0; !waiting.empty() && absl::Now() < deadline; ++round) {
    load.Round(round);
    ASSERT_FALSE(HasFailure());
    std::erase_if(waiting, [&](const DashboardQuery& query) { return HasData(Bare(query)); });
    absl::SleepFor(absl::Milliseconds(200));
  }
  for (const DashboardQuery& query : waiting) {
    ADD_FAILURE() << query.where << " shows nothing: " << query.expression;
  }
  ExpectProcesses("up == 1", {"coordinator-0", "shard-0", "shard-1", "shard-2", "shard-3"});

  std::string pages = FetchMetrics(cluster_->http_address());
  for (int i = 0; i < kShards; ++i) pages += FetchMetrics(cluster_->shard_http_address(i));
  for (const ops::MetricInfo& metric : ops::MetricCatalogue()) {
    const std::string sample = absl::StrCat(
        "\n", std::string(metric.name), metric.type == ops::MetricType::kHistogram ? "_count" : "",
        metric.LabelNames().empty() ? " " : "{");
    EXPECT_TRUE(absl::StrContains(pages, sample)) << metric.name << " is emitted by no process";
  }
  // These count something here, and are not just there.
  for (const char* name :
       {"emberd_dropped_ids_total", "emberd_batches_refused_total", "emberd_replays_total",
        "emberd_rows_skipped_total", "emberd_group_failures_total", "emberd_examples_total",
        "emberd_missing_gradients_total", "emberd_partition_rows_gathered_total",
        "emberd_partition_rows_updated_total"}) {
    EXPECT_GT(MetricSum(pages, name), 0) << name;
  }
  EXPECT_TRUE(Eventually([&] {
    return HasData("sum(emberd_batches_expired_total{server=~\"coordinator-.*\"}) > 0");
  }));
  EXPECT_TRUE(Eventually(
      [&] { return HasData("emberd_stack_max_unique_ids_per_partition{model=\"tight\"} == 16"); }));
  EXPECT_TRUE(Eventually([&] { return HasData("emberd_hot_rows_share{model=\"tight\"} > 0"); }));

  // All alerts could be evaluated; limits are exceeded here, and nothing is down.
  ASSERT_TRUE(Eventually([&] {
    const auto rules = prometheus_->Rules();
    return rules.ok() && !rules->empty() &&
           std::none_of(rules->begin(), rules->end(),
                        [](const Prometheus::Rule& rule) { return rule.health == "unknown"; });
  }));
  const auto rules = prometheus_->Rules();
  ASSERT_TRUE(rules.ok()) << rules.status();
  for (const Prometheus::Rule& rule : *rules) {
    EXPECT_EQ(rule.health, "ok") << rule.alert << ": " << rule.error;
    EXPECT_TRUE(prometheus_->Query(rule.query).ok()) << rule.alert;
  }
  for (const char* alert :
       {"BatchesCutOften", "BatchesRefused", "IdsDropped", "GradientsNotFinite"}) {
    const std::string query = AlertQuery(alert);
    EXPECT_TRUE(Eventually([&] { return HasData(query); })) << alert;
  }
  const std::string down = AlertQuery("ShardDown");
  const std::string unreachable = AlertQuery("ShardUnreachable");
  ExpectProcesses(down, {});
  ExpectProcesses(unreachable, {});

  ExpectHotRowsOnTheirShards();

  cluster_->KillShard(2);
  ExpectProcesses(down, {"shard-2"});
  EXPECT_EQ(load.LookupOn(2).code(), absl::StatusCode::kUnavailable);
  ExpectProcesses(unreachable, {"coordinator-0"});
  ExpectProcesses(AlertQuery("CoordinatorDown"), {});
  for (const DashboardQuery& query : of_dead_shards) {
    EXPECT_TRUE(Eventually([&] {
      EXPECT_EQ(load.LookupOn(2).code(), absl::StatusCode::kUnavailable);
      return HasData(Bare(query));
    })) << query.where;
  }

  ASSERT_TRUE(cluster_->RestartShard(2).ok());
  ExpectProcesses(down, {});
}

}  // namespace prometheus_test
}  // namespace emberd::testing
