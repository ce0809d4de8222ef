// Covers: server/coordinator/administration.cc, server/coordinator/step.cc
// Limits from a live cluster: what emberctl suggests must be what the batches needed, over all
// coordinators, and a batch must fit the written config without mini-batches.
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/paths.h"
#include "client/emberctl/emberctl.h"
#include "config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"

namespace emberd::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr char kModel[] = R"(name: "limited"
tables { name: "t" vocabulary_size: 4096 embedding_dim: 8
         max_ids_per_partition: 16 max_unique_ids_per_partition: 16 }
features { name: "x" table: "t" }
optimizer { sgd {} })";

struct Outcome {
  int code = -1;
  std::string out, err;
};

Outcome Emberctl(std::vector<std::string> arguments) {
  std::vector<const char*> argv = {"emberctl"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  std::ostringstream out, err;
  const int code = emberctl::Run(static_cast<int>(argv.size()), argv.data(), out, err);
  return {code, out.str(), err.str()};
}

// `count` samples of one id each, all from partition 0 of 4 and all in one source slot's half:
// ids 0, 4, 8, ... repeated from `distinct` on.
std::vector<int64_t> Ids(int count, int distinct) {
  std::vector<int64_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(4 * (i % distinct));
  return ids;
}

TEST(LimitsTest, SuggestsWhatBatchesNeeded) {
  absl::StatusOr<std::unique_ptr<Cluster>> cluster = Cluster::Start({.coordinators = 2});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const std::vector<std::string> addresses = {"-a", (*cluster)->address(0), "-a",
                                              (*cluster)->address(1)};
  const auto limits = [&addresses](std::vector<std::string> more) {
    more.insert(more.begin(), {"limits", "limited"});
    more.insert(more.end(), addresses.begin(), addresses.end());
    return Emberctl(more);
  };
  EXPECT_THAT(limits({}).err, HasSubstr("NOT_FOUND"));

  // Two slots: a batch of n samples sends n / 2 ids from each. Nine small batches to the first
  // coordinator, a large one to the second.
  for (int c = 0; c < 2; ++c) {
    client::ClientOptions options;
    options.addresses = {(*cluster)->address(c)};
    auto client = client::Client::Connect(options);
    ASSERT_TRUE(client.ok()) << client.status();
    absl::StatusOr<client::Model> model = (*client)->DeclareModel(kModel);
    ASSERT_TRUE(model.ok()) << model.status();
    for (int n = 0; n < (c == 0 ? 9 : 1); ++n) {
      const std::vector<int64_t> ids = c == 0 ? Ids(20, 1000) : Ids(200, 30);
      const auto found =
          (*client)->Lookup(*model, {{"x", client::DenseIds{ids}}}, {.inference = true});
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(found->statistics.num_minibatches > 1, c == 1);
    }
  }
  const std::string path = TempPath("limits_test.textproto");
  const Outcome shown = limits({"--headroom", "1.5", "--out", path});
  ASSERT_EQ(shown.code, emberctl::kOk) << shown.err;
  //                                            batches p50  p90  p99   max  now suggested
  EXPECT_THAT(shown.out, ContainsRegex("t +ids +10 +10 +10 +100 +100 +16 +152"));
  EXPECT_THAT(shown.out, ContainsRegex("t +unique ids +10 +10 +10 +30 +30 +16 +48"));
  EXPECT_THAT(limits({"--json"}).out, HasSubstr("\"suggested\": 120"));

  absl::StatusOr<v1::ModelConfig> written = config::LoadModel(path);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(written->tables(0).max_ids_per_partition(), 152);
  EXPECT_EQ(written->tables(0).max_unique_ids_per_partition(), 48);
  written->set_name("roomier");
  auto client = (*cluster)->Connect();
  ASSERT_NE(client, nullptr);
  absl::StatusOr<client::Model> model = client->DeclareModel(written->DebugString());
  ASSERT_TRUE(model.ok()) << model.status();
  const std::vector<int64_t> ids = Ids(200, 30);
  const auto found = client->Lookup(*model, {{"x", client::DenseIds{ids}}}, {.inference = true});
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->statistics.num_minibatches, 1);
}

}  // namespace
}  // namespace emberd::testing
