// What people see while a shard reads its log (storage.durability LOG): that it is recovering, and
// how far it is, on the command line, on the status page, in metrics and in errors; and that it is
// back afterwards. A failpoint holds the recovery half-way.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "base/testing/http_get.h"
#include "client/emberctl/emberctl.h"
#include "client/emberctl/output.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/metrics.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace recovery_view_test {

using emberctl::Json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class RecoveryViewTest : public ClusterFixture {
 protected:
  struct Outcome {
    int code = -1;
    std::string out, err;
  };
  Outcome Status(const std::vector<const char*>& more = {}) const {
    std::vector<const char*> argv = {"emberctl", "status", "-a", cluster_->address().c_str()};
    argv.insert(argv.end(), more.begin(), more.end());
    std::ostringstream out, err;
    const int code = emberctl::Run(static_cast<int>(argv.size()), argv.data(), out, err);
    return {code, out.str(), err.str()};
  }
  // What the page says of shard 1's log; null: the page is not there.
  Json PageLog() const {
    int port = 0;
    const std::vector<std::string> parts = absl::StrSplit(cluster_->http_address(), ':');
    EXPECT_TRUE(absl::SimpleAtoi(parts.back(), &port));
    const std::string answer = HttpGet(port, "/status.json");
    const std::pair<std::string, std::string> halves =
        absl::StrSplit(answer, absl::MaxSplits("\r\n\r\n", 1));
    const Json page = Json::parse(halves.second, nullptr, false);
    if (!page.is_object()) return Json();
    return page["stats"]["shards"][1]["log"];
  }
  // Until `seen` is true of what it finds.
  template <typename Look, typename Seen>
  static auto Await(const Look& look, const Seen& seen) {
    auto found = emberd::Await(look, seen);
    EXPECT_TRUE(seen(found));
    return found;
  }

  const TempDir storage_ = *TempDir::Create();
};

int64_t Number(const Json& value) {
  int64_t number = -1;
  return value.is_string() && absl::SimpleAtoi(value.get<std::string>(), &number) ? number : -1;
}

bool Recovers(const Json& log, bool whether) {
  return log.is_object() && log.value("recovering", !whether) == whether;
}

TEST_F(RecoveryViewTest, AShardSaysHowFarItIs) {
  const std::string hold = absl::StrCat(storage_.path(), "/hold");
  std::ofstream(hold).close();
  setenv("EMBERD_HOLD", hold.c_str(), /*overwrite=*/1);
  absl::Cleanup release = [&] {
    unsetenv("EMBERD_HOLD");
    std::filesystem::remove(hold);
  };
  StartCluster(
      {.config = absl::StrCat("storage { directory: \"", storage_.path(), "\" durability: LOG }"),
       .failpoints = {{"shard-1", "every life: recovery.record_is_next=hold@40"}}},
      MixedModel("mixed"));
  // It comes by itself, and the log begins anew with it: not in the middle of what follows.
  Await(
      [&] {
        const auto list = client_->ListCheckpoints("mixed");
        return list.ok() && !list->checkpoints.empty();
      },
      [](bool saved) { return saved; });
  for (int step = 0; step < 25; ++step) {
    ASSERT_TRUE(TrainStep(*client_, model_, step, /*samples=*/64).ok());
  }
  const std::string before = TableDigest();
  cluster_->KillShard(1);
  ASSERT_TRUE(cluster_->RestartShard(1).ok());

  const Outcome status =
      Await([&] { return Status(); },
            [](const Outcome& seen) {
              return absl::StrContains(seen.out, "%") && !absl::StrContains(seen.out, " 0%");
            });
  EXPECT_EQ(status.code, emberctl::kUnreachable);
  EXPECT_THAT(status.out, ContainsRegex("1 +127.0.0.1:[0-9]+ +RECOVERING [1-9][0-9]?%"));
  EXPECT_THAT(status.out, ContainsRegex("0 +127.0.0.1:[0-9]+ +ok"));
  EXPECT_THAT(status.err, AllOf(HasSubstr("shard 1"), ContainsRegex("log: [1-9][0-9]?%")));

  const Json shard = Json::parse(Status({"--json"}).out, nullptr, false)["shards"][1];
  EXPECT_EQ(shard["log"]["recovering"], true) << shard.dump();

  const Json log =
      Await([&] { return PageLog(); }, [](const Json& seen) { return Recovers(seen, true); });
  EXPECT_GT(Number(log["recovered_bytes"]), 0) << log.dump();
  EXPECT_GT(Number(log["recovery_bytes"]), Number(log["recovered_bytes"])) << log.dump();

  const auto metric = [&] {
    return MetricSum(FetchMetrics(cluster_->shard_http_address(1)), "emberd_recovering");
  };
  Await(metric, [](double seen) { return seen == 1; });
  client::ClientOptions impatient = cluster_->client_options();
  impatient.max_attempts = 1;
  const auto client = client::Client::Connect(impatient);
  ASSERT_TRUE(client.ok()) << client.status();
  const absl::Status refused = TrainStep(**client, model_, 25, 64);
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  EXPECT_THAT(
      std::string(refused.message()),
      ContainsRegex("shard 1 .*recovering, [1-9][0-9]? % of [0-9.]+ GiB, about [0-9]+ s left"));

  std::move(release).Invoke();
  const Outcome back = Await([&] { return Status(); },
                             [](const Outcome& seen) { return seen.code == emberctl::kOk; });
  EXPECT_THAT(back.out, ContainsRegex("1 +127.0.0.1:[0-9]+ +ok"));
  Await([&] { return PageLog(); }, [](const Json& seen) { return Recovers(seen, false); });
  Await(metric, [](double seen) { return seen == 0; });
  EXPECT_EQ(TableDigest(), before);
}

}  // namespace recovery_view_test
}  // namespace emberd::testing
