#include "tests/bench/load.h"

#include <algorithm>
#include <map>

#include "client/cpp/testing/fake_service.h"
#include "client/emberctl/output.h"
#include "client/emberctl/testing_emberctl.h"
#include "gmock/gmock.h"

namespace emberd::bench {
namespace load_test {

using emberctl::Emberctl;
using emberctl::Json;
using emberctl::Outcome;
using emberctl::WriteTestFile;
using ::emberd::client::testing::FakeService;
using ::testing::HasSubstr;

Outcome Load(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"load"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  std::ostringstream out, err;
  const int code = RunLoad(static_cast<int>(argv.size()), argv.data(), out, err);
  return {code, out.str(), err.str()};
}

constexpr char kModel[] = R"(name: "bench_m"
tables { name: "t" vocabulary_size: 100 embedding_dim: 2 }
features { name: "x" table: "t" }
features { name: "y" table: "t" })";

TEST(DrawIdTest, StaysInsideTheTable) {
  for (const double exponent : {0.0, 0.5, 1.0, 1.05, 3.0}) {
    for (const int64_t vocabulary : {int64_t{1}, int64_t{7}, int64_t{1} << 40}) {
      for (const double uniform : {0.0, 0.5, 1 - 1e-16}) {
        const int64_t id = DrawId(uniform, vocabulary, exponent);
        EXPECT_GE(id, 0);
        EXPECT_LT(id, vocabulary);
      }
    }
  }
}

TEST(DrawIdTest, TheExponentMakesSomeIdsFrequent) {
  const auto most_frequent = [](double exponent) {
    std::map<int64_t, int> counts;
    for (int i = 0; i < 10'000; ++i) ++counts[DrawId(i / 10'000.0, 1000, exponent)];
    int most = 0;
    for (const auto& [id, count] : counts) most = std::max(most, count);
    return most;
  };
  EXPECT_EQ(most_frequent(0), 10);
  EXPECT_NEAR(most_frequent(1), 1003, 5);  // log(2) / log(1001) of all
  EXPECT_GT(most_frequent(2), 4900);
}

TEST(LatencyQuantileTest, IsOneOfThem) {
  std::vector<float> none, latencies = {5, 1, 4, 2, 3};
  EXPECT_EQ(LatencyQuantile(&none, 0.5), 0);
  EXPECT_EQ(LatencyQuantile(&latencies, 0), 1);
  EXPECT_EQ(LatencyQuantile(&latencies, 0.5), 3);
  EXPECT_EQ(LatencyQuantile(&latencies, 0.99), 5);
  EXPECT_EQ(LatencyQuantile(&latencies, 1), 5);
}

TEST(LoadTest, LooksUpWithoutChangingAnything) {
  FakeService service;
  const std::string model = WriteTestFile("model", kModel);
  ASSERT_EQ(Emberctl({"declare", model, "-a", service.address()}).code, 0);
  const Outcome load =
      Load({"--model", "bench_m", "-a", service.address(), "--batch", "3", "--ids-per-sample", "2",
            "--clients", "2", "--seconds", "0.3", "--json"});
  ASSERT_EQ(load.code, 0) << load.err;
  const Json json = Json::parse(load.out);
  EXPECT_GT(json["steps"], 0);
  EXPECT_GT(json["examples_per_second"], 0);
  EXPECT_GT(json["received_bytes_per_second"], 0);
  EXPECT_GE(json["lookup_seconds"]["max"], json["lookup_seconds"]["p50"]);
  EXPECT_FALSE(json.contains("update_seconds"));
  EXPECT_TRUE(json["errors"].empty());
  const auto lookups = service.lookups();
  // And the first step of each client, which does not count.
  EXPECT_EQ(static_cast<int64_t>(lookups.size()), json["steps"].get<int64_t>() + 2);
  for (const v1::LookupRequest& lookup : lookups) {
    ASSERT_TRUE(lookup.inference());
    ASSERT_EQ(lookup.features_size(), 2);
    ASSERT_EQ(lookup.features(0).dense().ids().shape(0), 3);
    ASSERT_EQ(lookup.features(0).dense().ids().shape(1), 2);
  }
  EXPECT_TRUE(service.applies().empty());
}

TEST(LoadTest, UpdatesAModelOfItsOwn) {
  FakeService service;
  const std::string model = WriteTestFile("model", kModel);
  const Outcome load = Load(
      {"--config", model, "--update", "-a", service.address(), "--batch", "3", "--seconds", "0.2"});
  ASSERT_EQ(load.code, 0) << load.err;
  EXPECT_THAT(load.out, HasSubstr("bench_m: complete steps of 3 samples x 2 features x 1 id,"));
  for (const char* word : {"EXAMPLES/S", "P99", "lookup", "update", "step"}) {
    EXPECT_THAT(load.out, HasSubstr(word));
  }
  const auto applies = service.applies();
  ASSERT_GT(applies.size(), 1u);
  EXPECT_EQ(applies.size(), service.lookups().size());
  EXPECT_EQ(applies[1].gradients_size(), 2);
  EXPECT_EQ(applies[1].step(), 1);
}

TEST(LoadTest, WillNotUpdateWhatMayBeSomebodysModel) {
  FakeService service;
  std::string config = kModel;
  config.replace(config.find("bench_m"), 7, "precious");
  const std::string model = WriteTestFile("model", config);
  const Outcome load = Load({"--config", model, "--update", "-a", service.address()});
  EXPECT_EQ(load.code, 1);
  EXPECT_THAT(load.err, HasSubstr("not allowed for model \"precious\""));
  EXPECT_TRUE(service.declares().empty());
}

TEST(LoadTest, RefusesWrongCommandLines) {
  for (const std::vector<std::string>& wrong :
       std::vector<std::vector<std::string>>{{},
                                             {"--model", "m", "--update"},
                                             {"--model", "m", "--clients", "0"},
                                             {"--model", "m", "--batch", "0"}}) {
    EXPECT_EQ(Load(wrong).code, 2) << ::testing::PrintToString(wrong);
  }
}

TEST(LoadTest, CountsErrorsByCode) {
  FakeService service;
  const std::string model = WriteTestFile("model", kModel);
  ASSERT_EQ(Emberctl({"declare", model, "-a", service.address()}).code, 0);
  service.AddFault({});  // the question for the model
  service.AddFault({});  // the first step
  for (int i = 0; i < 3; ++i) {
    service.AddFault({.status = grpc::Status(grpc::RESOURCE_EXHAUSTED, "too much")});
  }
  const Outcome load = Load({"--model", "bench_m", "-a", service.address(), "--seconds", "0.4"});
  EXPECT_EQ(load.code, 1);
  EXPECT_THAT(load.out, HasSubstr("\nRESOURCE_EXHAUSTED: 3\n"));
  EXPECT_THAT(load.err, HasSubstr("steps failed; the first: too much"));
}

}  // namespace load_test
}  // namespace emberd::bench
