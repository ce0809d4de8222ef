// The metrics page is read by dashboards and alerts that nobody compiles: these tests catch a
// metric that was declared but never reaches the page, one exposed under another name or with other
// labels than the catalogue says, and label sets that grow without bound.
#include "server/ops/metrics.h"

#include <cctype>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include "base/testing/paths.h"
#include "server/ops/catalogue.h"

namespace emberd::ops {
namespace metrics_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<prometheus::MetricFamily> Collect(const Metrics& metrics) {
  std::vector<prometheus::MetricFamily> all;
  for (const auto& collectable : metrics.collectables()) {
    for (auto& family : collectable.lock()->Collect()) {
      if (!family.metric.empty()) all.push_back(std::move(family));
    }
  }
  return all;
}

std::string Page(const Metrics& metrics) {
  return prometheus::TextSerializer().Serialize(Collect(metrics));
}

v1::BatchStatistics TwoStacks() {
  v1::BatchStatistics statistics;
  statistics.set_num_minibatches(3);
  for (int64_t ids : {100, 7}) {
    v1::StackStatistics* stack = statistics.add_stacks();
    stack->set_ids(ids);
    stack->set_unique_ids(ids / 2);
    stack->set_duplicate_ids(1);
    stack->set_dropped_ids(2);
    stack->set_max_ids_per_partition(ids / 4);
    stack->set_max_unique_ids_per_partition(ids / 5);
    stack->set_required_buffer_size(ids + 8);
    stack->set_imbalance(1.5);
  }
  return statistics;
}

void UseEverything(Metrics* metrics) {
  ServerMetrics* server = metrics->Server("coordinator", 0);
  server->Set(MetricId::kModels, 1);
  server->Set(MetricId::kQueuedRequests, 7);
  server->SetTotal(MetricId::kEvictions, 2);
  server->SetTotal(MetricId::kEvictions, 3);
  v1::BudgetConfig budgets;
  budgets.set_max_batches(1024);
  server->SetBudgets(budgets);
  server->Add(MetricId::kBatchesExpired, 3);
  server->Add(MetricId::kReplays);
  RpcTimer(server, Rpc::kLookup, 10).Finish(absl::StatusCode::kOk);
  { const StageTimer timer(metrics, Stage::kCombine); }
  ModelMetrics* model = metrics->Model("ctr", {"a", "b"});
  model->ObserveBatch(TwoStacks());
  model->Add(MetricId::kExamples, 16);
  model->Add(MetricId::kBatchesRefused);
  model->SetLimits(1, 64, 32);
  ShardModelMetrics& shard = *metrics->ShardModel(1, "ctr", {"a", "b"});
  shard[0].Add(MetricId::kShardReceivedBytes, 12);
  shard[1].Add(MetricId::kRowsGathered, 5);
  shard[1].sent_sums->Increment(640);
  shard[1].sent_rows->Increment(64);
  shard[0].Add(MetricId::kRowsUpdated, 4);
  shard[0].Add(MetricId::kRowsSkipped, 3);
  metrics->Partition(1, 5).SetTotal(MetricId::kPartitionRowsGathered, 5);
  metrics->SetHotRowShares(1, "ctr", "clicks", {{1, 0.25}, {10, 0.5}});
  metrics->ShardLink(1)->Observe(Rpc::kShardGather, absl::StatusCode::kOk, 0.01);
  GroupMetrics* group = metrics->Group("ctr", "run");
  v1::StepTimes times;
  times.set_wait_for_ranks_us(2000);
  times.set_slowest_rank(3);
  group->ObserveLookup(times);
  group->ObserveUpdate(times);
  group->AddDropped(3, TwoStacks());
  group->AddFailure(absl::StatusCode::kAborted);
}

TEST(MetricsTest, EveryCatalogueEntryIsExposedWithItsTypeAndLabelsAndNothingElseIs) {
  Metrics metrics("up");
  UseEverything(&metrics);
  std::map<std::string, prometheus::MetricFamily> exposed;
  for (auto& family : Collect(metrics)) exposed[family.name] = family;

  for (const MetricInfo& info : MetricCatalogue()) {
    const std::string name(info.name);
    ASSERT_EQ(exposed.count(name), 1u) << name << " is in the catalogue but not on the page";
    const prometheus::MetricFamily& family = exposed[name];
    EXPECT_EQ(family.help, info.help);
    EXPECT_EQ(family.type, info.type == MetricType::kCounter ? prometheus::MetricType::Counter
                           : info.type == MetricType::kGauge ? prometheus::MetricType::Gauge
                                                             : prometheus::MetricType::Histogram)
        << name;
    std::set<std::string> labels;
    for (const auto& label : family.metric[0].label) labels.insert(label.name);
    const std::vector<std::string> expected = info.LabelNames();
    EXPECT_EQ(labels, std::set<std::string>(expected.begin(), expected.end())) << name;
    exposed.erase(name);
  }
  for (const auto& [name, family] : exposed) ADD_FAILURE() << name << " is not in the catalogue";
}

// What this would catch: an alert that overlooks the first failure, for there was no series before.
TEST(MetricsTest, FailuresOfAGroupAreThereFromTheBegin) {
  Metrics metrics("up");
  metrics.Group("m", "g");
  const std::string series = "emberd_group_failures_total{code=\"";
  for (const char* code : {"CANCELLED", "ABORTED", "UNAUTHENTICATED"}) {
    EXPECT_THAT(Page(metrics), HasSubstr(series + code + "\",group=\"g\",model=\"m\"} 0"));
  }
  EXPECT_THAT(Page(metrics), Not(HasSubstr(series + "OK\"")));
}

TEST(MetricsTest, GroupsAndRanksShareALabelBeyondAFixedNumber) {
  Metrics metrics("up");
  EXPECT_EQ(metrics.Group("m", "g"), metrics.Group("m", "g"));
  for (int i = 0; i < 1000; ++i) metrics.Group("m", std::to_string(i));
  EXPECT_EQ(metrics.Group("m", "998"), metrics.Group("m", "999"));
  v1::StepTimes times;
  for (int rank = 0; rank < 1000; ++rank) {
    times.set_slowest_rank(rank);
    metrics.Group("m", "g")->ObserveUpdate(times);
  }
  for (const prometheus::MetricFamily& family : Collect(metrics)) {
    if (family.name == "emberd_group_steps_total") {
      EXPECT_LE(family.metric.size(), Metrics::kMaxGroupLabels + 1);
    }
    if (family.name == "emberd_group_last_arrivals_total") {
      EXPECT_EQ(family.metric.size(), size_t{GroupMetrics::kMaxRankLabels} + 1);
    }
  }
}

TEST(MetricsTest, NamesAndLabelsFollowTheConventions) {
  std::set<std::string_view> names;
  for (const MetricInfo& info : MetricCatalogue()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name << " appears twice";
    EXPECT_TRUE(info.name.starts_with("emberd_") || info.name.starts_with("process_")) << info.name;
    EXPECT_EQ(info.type == MetricType::kCounter, info.name.ends_with("_total")) << info.name;
    EXPECT_TRUE(info.unit == "1" || info.unit == "seconds" || info.unit == "bytes" ||
                info.unit == "ratio")
        << info.name;
    if (info.unit != "1") {
      EXPECT_THAT(std::string(info.name), HasSubstr(std::string(info.unit)));
    }
    EXPECT_FALSE(info.help.empty()) << info.name;
    for (const std::string& label : info.LabelNames()) {
      for (char c : label) EXPECT_TRUE(std::islower(c) || c == '_') << info.name << " " << label;
    }
  }
}

TEST(MetricsTest, TheReferenceNamesEveryMetricUnderAGroup) {
  const std::string page = MetricReference();
  for (const MetricInfo& info : MetricCatalogue()) {
    EXPECT_THAT(page, HasSubstr("| `" + std::string(info.name) + "` |"));
  }
  for (const char* group : {"Requests", "Batches", "Training groups", "Shards", "Processes"}) {
    EXPECT_THAT(page, HasSubstr(std::string("\n## ") + group + "\n"));
  }
}

// Catches a page that nobody made anew after the catalogue changed.
TEST(MetricsTest, TheReferenceInDeployIsWhatTheBinaryPrints) {
  std::ifstream file(SourcePath("deploy/METRICS.md"));
  std::stringstream content;
  content << file.rdbuf();
  EXPECT_EQ(content.str(), MetricReference())
      << "make it anew: ./run build && build/bin/emberd metrics > deploy/METRICS.md";
}

TEST(RpcTimerTest, CountsOnceWithCodeAndBytesAndIsInFlightMeanwhile) {
  Metrics metrics("coordinator");
  ServerMetrics* server = metrics.Server("coordinator", 0);
  {
    RpcTimer timer(server, Rpc::kLookup, 100);
    timer.AddRequestBytes(50);
    EXPECT_THAT(Page(metrics), HasSubstr("emberd_in_flight_requests{server=\"coordinator-0\"} 1"));
    timer.AddResponseBytes(7);
    timer.Finish(absl::StatusCode::kOutOfRange);
    timer.Finish(absl::StatusCode::kOk);
  }
  { RpcTimer abandoned(server, Rpc::kLookup); }
  const std::string page = Page(metrics);
  const std::string method = "method=\"EmbeddingService/Lookup\"";
  EXPECT_THAT(page, HasSubstr("emberd_rpcs_total{code=\"OUT_OF_RANGE\"," + method + "} 1"));
  EXPECT_THAT(page, HasSubstr("emberd_rpcs_total{code=\"CANCELLED\"," + method + "} 1"));
  EXPECT_THAT(page, Not(HasSubstr("code=\"OK\"")));
  EXPECT_THAT(page, HasSubstr("emberd_rpc_duration_seconds_count{" + method + "} 2"));
  EXPECT_THAT(page, HasSubstr("emberd_rpc_request_bytes_total{" + method + "} 150"));
  EXPECT_THAT(page, HasSubstr("emberd_rpc_response_bytes_total{" + method + "} 7"));
  EXPECT_THAT(page, HasSubstr("emberd_in_flight_requests{server=\"coordinator-0\"} 0"));
}

// A training stream lasts for days: its bytes must show while it goes on.
TEST(RpcTimerTest, AStreamCountsItsBytesAsTheyCome) {
  Metrics metrics("coordinator");
  ServerMetrics* server = metrics.Server("coordinator", 0);
  const std::string method = "{method=\"EmbeddingService/Train\"}";
  RpcTimer timer(server, Rpc::kTrain);
  timer.AddRequestBytes(100);
  timer.AddRequestBytes(30);
  timer.AddResponseBytes(7);
  const std::string page = Page(metrics);
  EXPECT_THAT(page, HasSubstr("emberd_rpc_request_bytes_total" + method + " 130"));
  EXPECT_THAT(page, HasSubstr("emberd_rpc_response_bytes_total" + method + " 7"));
}

TEST(MetricsTest, AnUnknownCodeCountsAsUnknown) {
  Metrics metrics("shard");
  metrics.ObserveRpc(Rpc::kShardGather, static_cast<absl::StatusCode>(99), 0.1);
  EXPECT_THAT(Page(metrics), HasSubstr("code=\"UNKNOWN\",method=\"ShardService/Gather\"} 1"));
}

TEST(MetricsTest, BatchStatisticsBecomeHistogramsByStack) {
  Metrics metrics("coordinator");
  ModelMetrics* model = metrics.Model("ctr", {"users", "items"});
  model->ObserveBatch(TwoStacks());
  model->ObserveBatch(TwoStacks());
  const std::string page = Page(metrics);
  EXPECT_THAT(page, HasSubstr("emberd_batch_minibatches_sum{model=\"ctr\"} 6"));
  EXPECT_THAT(page, HasSubstr("emberd_batch_ids_sum{model=\"ctr\",stack=\"users\"} 200"));
  EXPECT_THAT(page, HasSubstr("emberd_batch_ids_sum{model=\"ctr\",stack=\"items\"} 14"));
  EXPECT_THAT(page, HasSubstr("emberd_dropped_ids_total{model=\"ctr\",stack=\"items\"} 4"));
  const std::string users = "_sum{model=\"ctr\",stack=\"users\"} ";
  EXPECT_THAT(page, HasSubstr("emberd_batch_max_ids_per_partition" + users + "50"));
  EXPECT_THAT(page, HasSubstr("emberd_batch_max_unique_ids_per_partition" + users + "40"));
  EXPECT_THAT(page, HasSubstr("emberd_batch_required_buffer_size" + users + "216"));
}

TEST(MetricsTest, StatisticsWithOtherStacksThanDeclaredDoNoHarm) {
  Metrics metrics("coordinator");
  metrics.Model("ctr", {"only"})->ObserveBatch(TwoStacks());
  EXPECT_THAT(Page(metrics), HasSubstr("emberd_batch_ids_count{model=\"ctr\",stack=\"only\"} 1"));
}

TEST(MetricsTest, ShardLinkFollowsReachability) {
  Metrics metrics("coordinator");
  ShardLinkMetrics* link = metrics.ShardLink(3);
  const std::string gauge = "emberd_shard_reachable{shard=\"3\"} ";
  link->Observe(Rpc::kShardGather, absl::StatusCode::kInvalidArgument, 0.1);
  EXPECT_THAT(Page(metrics), HasSubstr(gauge + "1"));
  link->Observe(Rpc::kShardApply, absl::StatusCode::kUnavailable, 0.1);
  EXPECT_THAT(Page(metrics), HasSubstr(gauge + "0"));
  link->SetReachable(true);
  EXPECT_THAT(Page(metrics), HasSubstr(gauge + "1"));
}

TEST(MetricsTest, HandlesAreTheSameForTheSameName) {
  Metrics metrics("up");
  EXPECT_EQ(metrics.Server("shard", 1), metrics.Server("shard", 1));
  EXPECT_NE(metrics.Server("shard", 1), metrics.Server("shard", 2));
  EXPECT_EQ(metrics.ShardLink(1), metrics.ShardLink(1));
  // Of a model that is made again and again, while it is filled.
  EXPECT_EQ(metrics.Model("m", {"s"}), metrics.Model("m", {"s"}));
  EXPECT_NE(metrics.Model("m", {"s"}), metrics.Model("m", {"s", "t"}));
  EXPECT_EQ(metrics.ShardModel(1, "m", {"s"}), metrics.ShardModel(1, "m", {"s"}));
  EXPECT_NE(metrics.ShardModel(1, "m", {"s"}), metrics.ShardModel(2, "m", {"s"}));
}

TEST(MetricsTest, LabelsStayBoundedWhateverIsDeclared) {
  Metrics metrics("coordinator");
  for (int i = 0; i < 2000; ++i) metrics.Model("model" + std::to_string(i), {"a", "b"});
  size_t series = 0;
  for (const auto& family : Collect(metrics)) {
    if (family.name == "emberd_batch_ids") series = family.metric.size();
  }
  EXPECT_GT(series, 100u);
  EXPECT_LE(series, Metrics::kMaxStackLabels + 1);
  EXPECT_THAT(Page(metrics), HasSubstr("emberd_batch_ids_count{model=\"other\",stack=\"other\"}"));
  EXPECT_EQ(metrics.Model("model1998", {"a", "b"}), metrics.Model("model1999", {"a", "b"}));
  EXPECT_EQ(metrics.ShardModel(0, "model1998", {"a"}), metrics.ShardModel(0, "model1999", {"a"}));
  // A name that was seen keeps its own series.
  metrics.Model("model0", {"a", "b"})->ObserveBatch(TwoStacks());
  EXPECT_THAT(Page(metrics), HasSubstr("emberd_batch_ids_count{model=\"model0\",stack=\"a\"} 1"));
}

TEST(MetricsTest, LimitsAreShownUnlessStacksShareALabel) {
  Metrics metrics("coordinator");
  metrics.Model("ctr", {"users", "items"})->SetLimits(1, 64, 32);
  const std::string items = "{model=\"ctr\",stack=\"items\"} ";
  EXPECT_THAT(Page(metrics), HasSubstr("emberd_stack_max_ids_per_partition" + items + "64"));
  EXPECT_THAT(Page(metrics), HasSubstr("emberd_stack_max_unique_ids_per_partition" + items + "32"));
  for (int i = 0; i < 300; ++i) {
    metrics.Model("model" + std::to_string(i), {"a"})->SetLimits(0, 77, 77);
  }
  EXPECT_THAT(Page(metrics), Not(HasSubstr("emberd_stack_max_ids_per_partition{model=\"other\"")));
}

TEST(MetricsTest, HotRowsOfTablesStayBounded) {
  Metrics metrics("shard");
  for (int i = 0; i < 1000; ++i) {
    metrics.SetHotRowShares(0, "m", "table" + std::to_string(i), {{1, 0.5}});
  }
  metrics.SetHotRowShares(0, "m", "table0", {{1, 0.75}});
  for (const auto& family : Collect(metrics)) {
    if (family.name == "emberd_hot_rows_share") {
      EXPECT_EQ(family.metric.size(), Metrics::kMaxTableLabels);
    }
  }
  EXPECT_THAT(Page(metrics), HasSubstr("emberd_hot_rows_share{model=\"m\",shard=\"0\",table="
                                       "\"table0\",top=\"1\"} 0.75"));
}

TEST(ProcessMetricsTest, HugePagesAreAPartOfTheMemoryInRam) {
  const std::optional<int64_t> resident = ResidentBytes();
  const std::optional<int64_t> huge = HugePageBytes();
  ASSERT_TRUE(resident.has_value() && huge.has_value());
  EXPECT_GT(*resident, 0);
  EXPECT_GE(*huge, 0);
  EXPECT_EQ(*huge % (1 << 20), 0) << "not in whole pages";
}

TEST(MetricsTest, HostileLabelValuesAreEscaped) {
  Metrics metrics("coordinator");
  metrics.Model("a\"b\\c\nd", {"s"});
  EXPECT_THAT(Page(metrics), HasSubstr("model=\"a\\\"b\\\\c\\nd\""));
}

// Catches children that two threads create at once and that then lose one thread's counts.
TEST(MetricsTest, ConcurrentFirstUseLosesNothing) {
  Metrics metrics("up");
  ServerMetrics* server = metrics.Server("coordinator", 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        RpcTimer(server, Rpc::kApplyGradients, 1).Finish(absl::StatusCode::kOk);
        metrics.ShardLink(i % 4)->Observe(Rpc::kShardApply, absl::StatusCode::kOk, 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string page = Page(metrics);
  EXPECT_THAT(page, HasSubstr("emberd_rpc_request_bytes_total{method="
                              "\"EmbeddingService/ApplyGradients\"} 4000"));
  EXPECT_THAT(page, HasSubstr("emberd_shard_call_duration_seconds_count{method="
                              "\"ShardService/Apply\",shard=\"2\"} 1000"));
}

std::vector<std::vector<std::string>> LabelsOf(const std::vector<MetricSnapshot::Series>& all) {
  std::vector<std::vector<std::string>> labels;
  for (const auto& series : all) labels.push_back(series.labels);
  return labels;
}

TEST(MetricSnapshotTest, HasEveryTypeByItsLabels) {
  Metrics metrics("coordinator");
  ServerMetrics* server = metrics.Server("coordinator", 3);
  server->Set(MetricId::kModels, 7);
  metrics.ObserveRpc(Rpc::kLookup, absl::StatusCode::kOk, 0.25);
  metrics.AddRpcBytes(Rpc::kLookup, 100, 1000);
  metrics.ObserveRpc(Rpc::kLookup, absl::StatusCode::kOk, 0.5);
  metrics.AddRpcBytes(Rpc::kLookup, 100, 1000);
  metrics.ObserveRpc(Rpc::kLookup, absl::StatusCode::kUnavailable, 0.5);
  metrics.AddRpcBytes(Rpc::kLookup, 1, 0);
  metrics.ObserveRpc(Rpc::kDrain, absl::StatusCode::kOk, 0.5);
  metrics.AddRpcBytes(Rpc::kDrain, 1, 0);

  const MetricSnapshot snapshot(metrics.collectables());
  const std::string lookup = "EmbeddingService/Lookup";
  EXPECT_EQ(snapshot.Value(MetricId::kModels, {"coordinator-3"}), 7);
  EXPECT_EQ(snapshot.Value(MetricId::kRpcs, {lookup, "OK"}), 2);
  EXPECT_EQ(snapshot.Value(MetricId::kRpcRequestBytes, {lookup}), 201);
  const MetricSnapshot::Series* seconds = snapshot.Find(MetricId::kRpcSeconds, {lookup});
  ASSERT_NE(seconds, nullptr);
  EXPECT_EQ(seconds->histogram.sample_count, 3u);
  EXPECT_DOUBLE_EQ(seconds->histogram.sample_sum, 1.25);
  ASSERT_FALSE(seconds->histogram.bucket.empty());
  EXPECT_EQ(seconds->histogram.bucket.back().cumulative_count, 3u);
  EXPECT_THAT(LabelsOf(snapshot.All(MetricId::kRpcs)),
              ElementsAre(ElementsAre("AdminService/Drain", "OK"), ElementsAre(lookup, "OK"),
                          ElementsAre(lookup, "UNAVAILABLE")));
}

TEST(MetricSnapshotTest, WhatHasNotHappenedIsMissing) {
  const Metrics metrics("coordinator");
  const MetricSnapshot snapshot(metrics.collectables());
  EXPECT_EQ(snapshot.Find(MetricId::kRpcSeconds, {"EmbeddingService/Lookup"}), nullptr);
  EXPECT_EQ(snapshot.Value(MetricId::kRpcs, {"EmbeddingService/Lookup", "OK"}), 0);
  EXPECT_TRUE(snapshot.All(MetricId::kGroupSteps).empty());
}

}  // namespace metrics_test
}  // namespace emberd::ops
