// Mistakes that servers are told to make, each with what finds it: a short run that goes wrong with
// the mistake and goes right without. README.md here lists them.
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/fault/counting_cluster.h"
#include "tests/testing/metrics.h"

namespace emberd {

static std::string own_mistake;  // of the client in this process

// Instead of that of base/failpoint.cc, which makes none.
bool Mistake(const char* name) { return own_mistake == name; }

namespace testing {
namespace planted_mistakes_test {

constexpr char kDiesBetweenWords[] = "update.word_is_said=die:300@1";

// DATA_LOSS unless each row was updated `times` times.
absl::Status ExpectCounts(CountingCluster& cluster, client::Client& client, float times) {
  const std::vector<float> counts = cluster.Counts(client);
  for (const float count : counts) {
    if (count == times) continue;
    return absl::DataLossError(absl::StrCat("rows were updated ", absl::StrJoin(counts, ", "),
                                            " times; each should have been ", times, " times"));
  }
  return absl::OkStatus();
}

// The answer to an update is lost, and the trainer sends the same number again, with another batch
// and through another coordinator, which has not seen it.
absl::Status RetryWithANewBatch(CountingCluster& cluster) {
  ASSIGN_OR_RETURN(const client::LookupResult found, cluster.Lookup(cluster.first()));
  ASSIGN_OR_RETURN(const client::LookupResult again, cluster.Lookup(cluster.other()));
  RETURN_IF_ERROR(cluster.Apply(cluster.first(), found.batch, 1).status());
  RETURN_IF_ERROR(cluster.Apply(cluster.other(), again.batch, 1).status());
  return ExpectCounts(cluster, cluster.first(), 1);
}

// The coordinator dies between its words, and the trainer goes on through the other one.
absl::Status LoseACoordinator(CountingCluster& cluster) {
  ASSIGN_OR_RETURN(const client::LookupResult found, cluster.Lookup(cluster.first()));
  if (cluster.Apply(cluster.first(), found.batch, 1).ok()) {
    return absl::InternalError("its coordinator should have died");
  }
  RETURN_IF_ERROR(cluster.Retry(found.batch, 1).status());
  return ExpectCounts(cluster, cluster.other(), 1);
}

// A shard stands still, so that not all vote. The trainer gives up.
absl::Status LoseAShardForAWhile(CountingCluster& cluster) {
  ASSIGN_OR_RETURN(const client::LookupResult found, cluster.Lookup(cluster.first()));
  cluster.cluster().SuspendShard(1);
  const absl::Status status =
      cluster.Apply(cluster.first(), found.batch, 1, absl::Seconds(5)).status();
  // A shard that wakes before the coordinator has given up may still take part.
  const auto at_rest = [&] {
    const std::string page = FetchMetrics(cluster.cluster().http_address(0));
    return !page.empty() && MetricSum(page, "emberd_in_flight_requests") == 0;
  };
  if (!status.ok() && !Eventually(at_rest)) return absl::InternalError("the update does not end");
  cluster.cluster().ResumeShard(1);
  if (status.ok()) return absl::DataLossError("the update is said to be made, without shard 1");
  return ExpectCounts(cluster, cluster.first(), 0);
}

// A coordinator dies between its words about a step of a group, whose ranks take their time.
absl::Status LoseACoordinatorOfAGroup(CountingCluster& cluster) {
  const absl::Duration step_timeout = absl::Seconds(4);
  RETURN_IF_ERROR(cluster.Join({0, 0}, step_timeout).status());
  if (cluster.Step(0).ok()) return absl::InternalError("the coordinator should have died");
  absl::SleepFor(3 * step_timeout);  // more than twice, and more than batch_ttl_ms
  ASSIGN_OR_RETURN(const int64_t next, cluster.Join({1, 1}, step_timeout));
  RETURN_IF_ERROR(cluster.Step(next));
  return ExpectCounts(cluster, cluster.other(), static_cast<float>(2 * (next + 1)));
}

// A rank dies when the other one's part of the step is on the shards.
absl::Status LoseARank(CountingCluster& cluster) {
  RETURN_IF_ERROR(cluster.Join({0, 1}).status());
  RETURN_IF_ERROR(cluster.Step(0));
  if (cluster.Step(1, /*dying=*/1).ok()) return absl::InternalError("a rank should have died");
  ASSIGN_OR_RETURN(const int64_t next, cluster.Join({0, 1}));
  for (int64_t step = next; step < 3; ++step) RETURN_IF_ERROR(cluster.Step(step));
  return ExpectCounts(cluster, cluster.first(), 6);
}

struct Planted {
  const char* name;  // see Mistake in base/failpoint.h
  // Who makes it: "shard", "coordinator" or "trainer".
  const char* who;
  absl::Status (*run)(CountingCluster& cluster);
  // Other failpoints, by who has them.
  std::map<std::string, std::string> faults = {};
  const char* timeouts = "shard_call_ms: 10000";
};

void PrintTo(const Planted& planted, std::ostream* out) { *out << planted.name; }

const Planted kPlanted[] = {
    {"record.not_asked", "shard", RetryWithANewBatch},
    {"record.after_reply", "shard", RetryWithANewBatch, {{"shard", "record.is_next=wait:600000"}}},
    {"retry.new_number", "trainer", RetryWithANewBatch},
    {"vote.goes_with_stream", "shard", LoseACoordinator, {{"coordinator", kDiesBetweenWords}}},
    {"commit.before_all_votes", "coordinator", LoseAShardForAWhile},
    {"step.expires_whole",
     "shard",
     LoseACoordinatorOfAGroup,
     {{"coordinator", "update.votes_are_in=wait:2000@2,update.word_is_said=die:300@1"}},
     "shard_call_ms: 10000 batch_ttl_ms: 8000"},
    {"generation.reused", "shard", LoseARank},
    {"part.applied_twice", "shard", LoseARank},
};

class PlantedMistakesTest : public ::testing::TestWithParam<Planted> {
 protected:
  ~PlantedMistakesTest() override { own_mistake.clear(); }

  // What a run finds to be wrong.
  absl::Status Run(bool mistaken) {
    const Planted& planted = GetParam();
    std::map<std::string, std::string> faults = planted.faults;
    if (mistaken) {
      std::string& of_one = faults[planted.who];
      absl::StrAppend(&of_one, of_one.empty() ? "" : ",", planted.name, "=mistake");
      if (std::string(planted.who) == "trainer") own_mistake = planted.name;
    }
    ASSIGN_OR_RETURN(const auto cluster,
                     CountingCluster::Start({{"coordinator-0", faults["coordinator"]},
                                             {"shard-0", faults["shard"]},
                                             {"shard-1", faults["shard"]}},
                                            planted.timeouts));
    return planted.run(*cluster);
  }
};

INSTANTIATE_TEST_SUITE_P(Mistakes, PlantedMistakesTest, ::testing::ValuesIn(kPlanted),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           for (char& c : name) c = c == '.' ? '_' : c;
                           return name;
                         });

TEST_P(PlantedMistakesTest, IsFound) {
  const absl::Status status = Run(/*mistaken=*/true);
  EXPECT_FALSE(status.ok()) << "nothing has noticed it";
  RecordProperty("found", status.ToString());
}

TEST_P(PlantedMistakesTest, AndNothingElseIs) {
  const absl::Status status = Run(/*mistaken=*/false);
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace planted_mistakes_test
}  // namespace testing
}  // namespace emberd
