// What an operator types at a live cluster. A failure here means that the server and emberctl do
// not mean the same by a figure, or that a command cannot be used while the cluster works.
#include <algorithm>
#include <atomic>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/testing/await.h"
#include "base/testing/paths.h"
#include "client/emberctl/emberctl.h"
#include "client/emberctl/output.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/bench/load.h"
#include "tests/testing/cluster.h"
#include "tests/testing/process.h"

namespace emberd::testing {
namespace operator_test {

using emberctl::Json;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

constexpr char kModel[] = R"(name: "bench_operator"
tables { name: "users" vocabulary_size: 5000 embedding_dim: 16 }
tables { name: "items" vocabulary_size: 3000 embedding_dim: 8 }
features { name: "u" table: "users" batch_size: 64 }
features { name: "i" table: "items" batch_size: 64 }
optimizer { adagrad {} })";

class OperatorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto cluster = Cluster::Start({.shards = 2, .coordinators = 2});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    model_ = TempPath("model.textproto");
    WriteFile(model_, kModel);
  }

  struct Outcome {
    int code = -1;
    std::string out, err;
  };
  template <typename Program>
  Outcome Run(const Program& program, std::vector<std::string> arguments) const {
    arguments.insert(arguments.end(), {"-a", cluster_->address()});
    std::vector<const char*> argv = {"program"};
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    std::ostringstream out, err;
    const int code = program(static_cast<int>(argv.size()), argv.data(), out, err);
    return {code, out.str(), err.str()};
  }
  Outcome Emberctl(std::vector<std::string> arguments) const {
    return Run(emberctl::Run, std::move(arguments));
  }
  Outcome Load(std::vector<std::string> arguments) const {
    return Run(bench::RunLoad, std::move(arguments));
  }
  // Of `emberctl status`: a shard that is silent for a second, as on a busy machine, is not
  // reached.
  int AwaitStatus() const {
    return Await([&] { return Emberctl({"status"}).code; },
                 [](int code) { return code == emberctl::kOk; });
  }
  Json EmberctlJson(std::vector<std::string> arguments) const {
    arguments.push_back("--json");
    const Outcome outcome = Emberctl(std::move(arguments));
    EXPECT_EQ(outcome.code, emberctl::kOk) << outcome.err;
    return Json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
  }

  std::unique_ptr<Cluster> cluster_;
  std::string model_;
};

// The entry of a list of objects whose `key` is `value`.
Json Find(const Json& list, const char* key, const std::string& value) {
  for (const Json& entry : list) {
    if (entry[key] == value) return entry;
  }
  return Json();
}

TEST_F(OperatorTest, BenchedAndWatched) {
  const Outcome load = Load({"--config", model_, "--update", "--batch", "64", "--ids-per-sample",
                             "3", "--clients", "2", "--seconds", "1", "--json"});
  ASSERT_EQ(load.code, 0) << load.err;
  const Json bench = Json::parse(load.out, nullptr, /*allow_exceptions=*/false);
  const auto steps = bench["steps"].get<int64_t>();
  ASSERT_GT(steps, 0);
  EXPECT_TRUE(bench["errors"].empty()) << bench.dump();

  // Every step is one lookup and one update, and each client made one before the time began.
  // A shard that is too busy to answer the coordinator in a second is not reachable.
  const Json stats = Await(
      [&] {
        return EmberctlJson({"stats", "--hot-rows", "2"});
      },
      [](const Json& seen) {
        return std::all_of(seen["shards"].begin(), seen["shards"].end(),
                           [](const Json& shard) { return shard["reachable"] == true; });
      });
  for (const char* method : {"EmbeddingService/Lookup", "EmbeddingService/ApplyGradients"}) {
    const Json found = Find(stats["methods"], "method", method);
    EXPECT_EQ(found["count"], steps + 2) << method;
    EXPECT_EQ(found["errors"], 0) << method;
    EXPECT_GT(found["p99_seconds"].get<float>(), 0) << method;
  }
  ASSERT_THAT(stats["stacks"], SizeIs(2));
  for (const Json& stack : stats["stacks"]) {
    EXPECT_EQ(stack["batches"], steps + 2);
    EXPECT_LE(stack["ids"], (steps + 2) * 64 * 3);
    EXPECT_GT(stack["ids"], (steps + 2) * 64);
    EXPECT_GT(stack["largest_ids_per_partition"], 0);
  }
  ASSERT_THAT(stats["shards"], SizeIs(2));
  for (const Json& shard : stats["shards"]) {
    EXPECT_EQ(shard["reachable"], true);
    EXPECT_GT(shard["rows_gathered"], 0);
    EXPECT_GT(shard["rows_updated"], 0);
    EXPECT_GT(shard["table_bytes"], 0);
    EXPECT_GT(shard["table_budget_bytes"], shard["table_bytes"]);
    EXPECT_GT(shard["resident_bytes"], 0);
    EXPECT_FALSE(shard["hot_rows"].empty());
  }
  EXPECT_EQ(stats["draining"], false);
  EXPECT_EQ(stats["batches"], 0);
  const Outcome text = Emberctl({"stats"});
  EXPECT_EQ(text.code, emberctl::kOk) << text.err;
  EXPECT_THAT(text.out, HasSubstr("bench_operator"));

  const Json plan = EmberctlJson({"plan", "bench_operator"});
  const Json offline =
      EmberctlJson({"plan", "--model", model_, "--shards", "2", "--sparsecores", "2"});
  EXPECT_EQ(plan["plan"], offline["plan"]);
  EXPECT_EQ(plan["memory"], offline["memory"]);
  EXPECT_EQ(plan["memory"]["shard_bytes"], stats["shards"][0]["table_bytes"]);
}

TEST_F(OperatorTest, TopShowsWhatHappensNow) {
  ASSERT_EQ(Emberctl({"declare", model_}).code, emberctl::kOk);
  Outcome bench;
  std::atomic<bool> seen = false;
  std::thread load([&] {
    do {
      bench = Load({"--model", "bench_operator", "--batch", "64", "--seconds", "1"});
    } while (bench.code == emberctl::kOk && !seen);
  });
  float lookups = 0;
  const auto look = [&] {
    const Outcome top = Emberctl({"top", "--interval", "0.5", "--count", "3", "--json"});
    ASSERT_EQ(top.code, emberctl::kOk) << top.err;
    const std::vector<std::string> lines = absl::StrSplit(top.out, '\n', absl::SkipEmpty());
    ASSERT_THAT(lines, SizeIs(3));
    for (const std::string& line : lines) {
      const Json frame = Json::parse(line, nullptr, /*allow_exceptions=*/false);
      const Json method = Find(frame["methods"], "method", "EmbeddingService/Lookup");
      if (!method.is_null()) lookups += method["per_second"].get<float>();
      EXPECT_GE(frame["seconds"].get<float>(), 0.4f);
    }
  };
  EXPECT_TRUE(Eventually([&] {
    look();
    return lookups > 0 || HasFailure();
  }));
  seen = true;
  load.join();
  EXPECT_EQ(bench.code, emberctl::kOk) << bench.err;
  const Outcome idle = Emberctl({"top", "--interval", "0.2", "--count", "1"});
  EXPECT_EQ(idle.code, emberctl::kOk) << idle.err;
  EXPECT_THAT(idle.out, HasSubstr("AdminService/GetStats"));
  EXPECT_THAT(idle.out, Not(HasSubstr("EmbeddingService/Lookup"))) << "idle methods are not shown";
}

TEST_F(OperatorTest, DrainsWaitsAndComesBack) {
  ASSERT_EQ(Emberctl({"declare", model_}).code, emberctl::kOk);
  auto client = cluster_->Connect();
  ASSERT_NE(client, nullptr);
  auto model = client->DescribeModel("bench_operator");
  ASSERT_TRUE(model.ok()) << model.status();
  const std::vector<int64_t> ids = {1, 2, 3};
  const auto kept =
      client->Lookup(*model, {{"u", client::DenseIds{ids}}, {"i", client::DenseIds{ids}}});
  ASSERT_TRUE(kept.ok()) << kept.status();

  Outcome drain = Emberctl({"drain", "--wait", "3"});
  EXPECT_EQ(drain.code, emberctl::kUnfinished);
  EXPECT_THAT(drain.out, HasSubstr("draining; left: 0 requests, 0 training streams, 1 batch"));
  EXPECT_THAT(drain.err, HasSubstr("not drained within --wait 3 seconds"));
  EXPECT_EQ(EmberctlJson({"stats"})["draining"], true);
  EXPECT_EQ(EmberctlJson({"status"})["draining"], true);
  EXPECT_THAT(Emberctl({"status"}).out, HasSubstr(", DRAINING, 1 batch"));
  const Outcome refused = Emberctl({"tables", "bench_operator", "--timeout", "10", "--json"});
  EXPECT_EQ(refused.code, emberctl::kUnreachable);
  EXPECT_THAT(refused.err, HasSubstr("coordinator is draining"));

  std::thread finish([&] { EXPECT_TRUE(client->ReleaseBatch(*model, kept->batch).ok()); });
  drain = Emberctl({"drain", "--wait", "60"});
  finish.join();
  EXPECT_EQ(drain.code, emberctl::kOk) << drain.err;
  EXPECT_THAT(drain.out, HasSubstr("drained\n"));
  EXPECT_EQ(Emberctl({"drain", "--undo"}).out, "in service\n");
  EXPECT_EQ(EmberctlJson({"status"})["draining"], false);
  EXPECT_EQ(Emberctl({"tables", "bench_operator"}).code, emberctl::kOk);
}

TEST_F(OperatorTest, ModelsAreResetAndDropped) {
  ASSERT_EQ(Emberctl({"declare", model_}).code, emberctl::kOk);
  cluster_->KillShard(1);
  ASSERT_TRUE(cluster_->RestartShard(1).ok());
  const Outcome status =
      Await([&] { return Emberctl({"status"}); },
            [](const Outcome& seen) { return seen.out.find("LOST") != std::string::npos; });
  EXPECT_THAT(status.out, HasSubstr("LOST: model 'bench_operator' is lost: shard 1 "));
  EXPECT_EQ(status.code, emberctl::kRefused);
  EXPECT_THAT(status.err, HasSubstr("emberctl model reset bench_operator"));
  const Outcome reset = Emberctl({"model", "reset", "bench_operator"});
  EXPECT_EQ(reset.code, emberctl::kOk) << reset.err;
  EXPECT_THAT(reset.out, HasSubstr("has initial rows again on all shards"));
  EXPECT_EQ(AwaitStatus(), emberctl::kOk);
  EXPECT_EQ(Emberctl({"model", "drop", "bench_operator"}).out, "model 'bench_operator' dropped\n");
  EXPECT_EQ(Emberctl({"model", "drop", "bench_operator"}).out,
            "model 'bench_operator' is not declared: nothing to drop\n");
  EXPECT_EQ(Emberctl({"model", "reset", "bench_operator"}).code, emberctl::kRefused);
}

}  // namespace operator_test
}  // namespace emberd::testing
