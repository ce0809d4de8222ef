#include "absl/strings/str_cat.h"
#include "base/testing/held_port.h"
#include "client/cpp/testing/fake_service.h"
#include "client/emberctl/output.h"
#include "client/emberctl/testing_emberctl.h"
#include "gmock/gmock.h"

namespace emberd::emberctl {
namespace operator_test {

using ::emberd::client::testing::FakeService;
using ::testing::HasSubstr;

TEST(StatsTest, ShowsTotals) {
  FakeService service;
  service.stats = {StatsAfter(10)};
  const Outcome stats = Emberctl({"stats", "-a", service.address(), "--hot-rows", "1"});
  ASSERT_EQ(stats.code, kOk) << stats.err;
  EXPECT_EQ(service.stats_requests().at(0).hot_rows(), 1);
  EXPECT_EQ(stats.out, absl::StrCat("coordinator ", service.address(),
                                    R"(, up 10s, in service
3 requests in progress (2.0 KiB of 4.0 GiB), 0 waiting; 2 training streams; 5 batches (3.0 MiB of 1.0 GiB)
model ads: 51.2k examples/s
shard 1 does not answer: connection refused

METHOD                     CALLS  ERRORS  P50     P99     IN         OUT
EmbeddingService/Lookup    1000   10      1.0 ms  9.8 ms  100.0 KiB  10.0 MiB
EmbeddingService/ReadRows  1      0       5.5 ms  9.9 ms  0 B        0 B

SHARD  ADDRESS         STATE  GATHERED  UPDATED  TABLES    BUDGET  RESIDENT   HUGE  QUEUE  BATCHES
0      127.0.0.1:7001  ok     20000     5000     96.0 MiB  96%     128.0 MiB  50%   4      5
1      127.0.0.1:7002  DOWN

MODEL  STACK  BATCHES  IDS    UNIQUE  MAX IDS / LIMIT  MAX UNIQUE / LIMIT  DROPPED
ads    wide   1000     10000  25%     80 / 64          20 / none           0

STAGE       TIMES  P50     P99     OF THE TIME
preprocess  1000   1.0 ms  9.8 ms  40%

MODEL  GROUP  UPDATES  WAITING  LAST RANK  FAILURES
ads    run-7  500      25%      1 (75%)    0

MODEL  TABLE  HOT ROW  LOOKUPS SO FAR  TOO HIGH UP TO  OF ITS SHARD
ads    users  42       ~900            10              90%
)"));
}

TEST(StatsTest, ShowsRates) {
  FakeService service;
  service.stats = {StatsAfter(10), StatsAfter(14)};
  const Outcome stats = Emberctl({"stats", "-a", service.address(), "--interval", "0.1"});
  ASSERT_EQ(stats.code, kOk) << stats.err;
  EXPECT_THAT(stats.out, HasSubstr("METHOD                     CALLS/S  ERRORS/S  P50     P99     "
                                   "IN/S      OUT/S\n"
                                   "EmbeddingService/Lookup    100      1.0       1.0 ms  9.8 ms  "
                                   "10.0 KiB  1.0 MiB\n"
                                   "EmbeddingService/ReadRows  0        0         -       -       "
                                   "0 B       0 B\n"));
  EXPECT_THAT(stats.out, HasSubstr("ads    run-7  50.0       25%      1 (75%)    0"));
}

TEST(StatsTest, WritesJson) {
  FakeService service;
  service.stats = {StatsAfter(10), StatsAfter(14)};
  const Outcome stats = Emberctl({"stats", "-a", service.address(), "--interval", "0.1", "--json"});
  ASSERT_EQ(stats.code, kOk) << stats.err;
  const Json json = Json::parse(stats.out);
  EXPECT_EQ(json["seconds"], 4.0f);
  EXPECT_EQ(json["methods"][0]["per_second"], 100.0f);
  EXPECT_EQ(json["methods"][0]["errors"], 4);
  EXPECT_EQ(json["shards"][0]["rows_gathered_per_second"], 2000.0f);
  EXPECT_EQ(json["shards"][0]["hot_rows"][0]["id"], 42);
  EXPECT_EQ(json["shards"][1]["error"], "connection refused");
  EXPECT_EQ(json["groups"][0]["last_rank"], "1");
  EXPECT_EQ(json["stacks"][0]["ids"], 4000);
}

// Would catch: fields that nobody has set, such as a shard that answers and is not "reachable".
TEST(MemoryTest, JsonHasTheMemoryOfEachShardAlone) {
  FakeService service;
  service.damage_status = [](v1::GetStatusResponse* status) {
    v1::ShardStatus* const shard = status->mutable_shards(0);
    shard->set_reachable(true);
    shard->mutable_memory()->set_free_bytes(7);
    shard->mutable_memory()->add_tables()->set_model("m");
  };
  const Outcome memory = Emberctl({"memory", "-a", service.address(), "--json"});
  ASSERT_EQ(memory.code, kOk) << memory.err;
  const Json json = Json::parse(memory.out);
  EXPECT_EQ(json.size(), 1);
  const Json& shard = json["shards"][0];
  EXPECT_EQ(shard.size(), 2);
  EXPECT_EQ(shard["index"], 1);
  EXPECT_EQ(shard["memory"]["free_bytes"], "7");
  EXPECT_EQ(shard["memory"]["tables"][0]["model"], "m");
}

TEST(StatsTest, ACoordinatorThatRestartedMeanwhileHasNoRates) {
  FakeService service;
  service.stats = {StatsAfter(10), StatsAfter(1)};
  const Outcome stats = Emberctl({"stats", "-a", service.address(), "--interval", "0.1"});
  EXPECT_EQ(stats.code, kUnreachable);
  EXPECT_THAT(stats.err, HasSubstr("in the meantime the coordinator was restarted"));
}

TEST(StatsTest, TurnsToACoordinatorThatAnswers) {
  const auto port = *HeldPort::Take();
  const std::string& gone = port->address();
  FakeService service;
  service.stats = {StatsAfter(10)};
  const Outcome stats = Emberctl({"stats", "-a", gone, "-a", service.address(), "--timeout", "60"});
  EXPECT_EQ(stats.code, kOk) << stats.err;
  EXPECT_THAT(stats.out, HasSubstr(absl::StrCat("coordinator ", service.address())));
}

v1::DrainResponse Left(int requests, int streams, int batches) {
  v1::DrainResponse response;
  response.set_draining(true);
  response.set_in_flight_requests(requests);
  response.set_train_streams(streams);
  response.set_batches(batches);
  return response;
}

TEST(DrainTest, ShowsProgressUntilNothingIsLeft) {
  FakeService service;
  service.drains = {Left(2, 1, 1), Left(0, 1, 1), Left(0, 1, 1), Left(0, 0, 0)};
  const Outcome drain = Emberctl({"drain", "-a", service.address(), "--wait", "60"});
  EXPECT_EQ(drain.code, kOk) << drain.err;
  EXPECT_EQ(drain.out,
            "draining; left: 2 requests, 1 training stream, 1 batch\n"
            "draining; left: 0 requests, 1 training stream, 1 batch\n"
            "draining; left: 0 requests, 0 training streams, 0 batches\n"
            "drained\n");
}

TEST(DrainTest, TellsByItsExitCodeThatSomethingIsLeft) {
  FakeService service;
  service.drains = {Left(0, 1, 0)};
  const Outcome waited = Emberctl({"drain", "-a", service.address(), "--wait", "0.3"});
  EXPECT_EQ(waited.code, kUnfinished);
  EXPECT_THAT(waited.err, HasSubstr("not drained within --wait 0.3 seconds; left: 0 requests, 1 "
                                    "training stream, 0 batches"));
  const Outcome told = Emberctl({"drain", "-a", service.address(), "--json"});
  EXPECT_EQ(told.code, kOk);  // nobody wanted to wait
  EXPECT_EQ(Json::parse(told.out)["train_streams"], 1);
}

TEST(DrainTest, Undoes) {
  FakeService service;
  service.drains = {v1::DrainResponse()};
  const Outcome undone = Emberctl({"drain", "-a", service.address(), "--undo"});
  EXPECT_EQ(undone.code, kOk) << undone.err;
  EXPECT_EQ(undone.out, "in service\n");
  EXPECT_TRUE(service.drain_requests().at(0).undo());
  EXPECT_EQ(Emberctl({"drain", "--undo", "--wait", "3"}).code, kUsage);
}

TEST(DrainTest, WillNotDrainSeveral) {
  FakeService one, other;
  const Outcome drain = Emberctl({"drain", "-a", one.address(), "-a", other.address()});
  EXPECT_EQ(drain.code, kUsage);
  EXPECT_THAT(drain.err, HasSubstr("--address: 2 are given"));
  EXPECT_TRUE(one.drain_requests().empty());
  EXPECT_TRUE(other.drain_requests().empty());
}

}  // namespace operator_test
}  // namespace emberd::emberctl
