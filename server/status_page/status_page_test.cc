// What this would catch: a file that the page needs and the binary lacks, figures that are no JSON
// or lose digits, and a page that asks the cluster more often the more people look at it.
#include "server/status_page/status_page.h"

#include <atomic>
#include <limits>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "base/testing/await.h"

namespace emberd::status_page {
namespace status_page_test {

using ::testing::HasSubstr;

// What a file of the page loads or links to, without links within the page.
std::vector<std::string> References(const std::string& content) {
  std::vector<std::string> references;
  for (const std::string before : {"src=\"", "href=\"", "from '"}) {
    for (size_t at = content.find(before); at != content.npos; at = content.find(before, at)) {
      at += before.size();
      const std::string target = content.substr(at, content.find(before.back(), at) - at);
      if (target.find('#') == target.npos) references.push_back(target);
    }
  }
  return references;
}

class StatusPageTest : public ::testing::Test {
 protected:
  StatusPageTest() {
    stats_.set_time_ms((int64_t{1} << 53) + 1);
    v1::StackStats* stack = stats_.add_stacks();
    stack->set_model("m");
    stack->set_stack("s");
    v1::Distribution* seconds = stats_.add_methods()->mutable_seconds();
    seconds->add_buckets()->set_upper(std::numeric_limits<double>::infinity());
    for (const ops::HttpRoute& route : Routes({.name = "coordinator-\"7\"",
                                       .stats = [this](const auto&) { return Stats(); },
                                       .model = [this](const auto& r) { return Model(r); }})) {
      routes_[route.path] = route;
    }
  }

  absl::StatusOr<v1::GetStatsResponse> Stats() {
    ++asked_;
    if (failing_) return absl::UnavailableError("nobody there");
    return stats_;
  }
  absl::StatusOr<v1::DescribeModelResponse> Model(const v1::DescribeModelRequest& request) {
    if (request.name() == "broken") return absl::InternalError("no");
    EXPECT_EQ(request.name(), "m");
    v1::DescribeModelResponse response;
    response.set_model_id(~uint64_t{0});
    response.mutable_config()->set_name(request.name());
    response.mutable_plan()->set_partitions(8);
    return response;
  }
  nlohmann::json Json(const std::string& path) {
    const ops::HttpAnswer answer = routes_.at(path).answer();
    EXPECT_EQ(answer.status, 200) << answer.body;
    return nlohmann::json::parse(answer.body, nullptr, /*allow_exceptions=*/false);
  }

  v1::GetStatsResponse stats_;
  std::atomic<bool> failing_ = false;
  std::atomic<int> asked_ = 0;
  std::map<std::string, ops::HttpRoute> routes_;
};

TEST_F(StatusPageTest, StatusHasEveryFieldAndEveryDigit) {
  const nlohmann::json status = Json("/status.json");
  ASSERT_TRUE(status.is_object());
  EXPECT_EQ(status["name"], "coordinator-\"7\"");
  EXPECT_EQ(status["version"], EMBERD_VERSION);
  EXPECT_EQ(status["models"][0]["name"], "m");
  EXPECT_EQ(status["models"][0]["model_id"], "ffffffffffffffff");
  EXPECT_EQ(status["stats"]["time_ms"], "9007199254740993");
  EXPECT_EQ(status["stats"]["draining"], false);
  EXPECT_EQ(status["stats"]["shards"], nlohmann::json::array());
  EXPECT_EQ(status["stats"]["methods"][0]["seconds"]["buckets"][0]["upper"], "Infinity");
  EXPECT_EQ(status["coordinators"].size(), 1u);
}

// As where a shard is silent, and the coordinator has not met the models yet: whoever looks at the
// page keeps a thread of the web server, and all who come after that wait, too.
TEST_F(StatusPageTest, DoesNotWaitForEachModel) {
  for (const char* model : {"a", "b", "c"}) stats_.add_stacks()->set_model(model);
  std::atomic<int> described = 0;
  const auto slow = [&](const auto& request) -> absl::StatusOr<v1::DescribeModelResponse> {
    if (request.name() == "m") return Model(request);  // one of its own
    ++described;
    absl::SleepFor(Peers::kPatience);
    return absl::DeadlineExceededError("shard 0 is silent");
  };
  for (const ops::HttpRoute& route :
       Routes({.name = "c", .stats = [this](const auto&) { return Stats(); }, .model = slow})) {
    routes_[route.path] = route;
  }
  const nlohmann::json status = Json("/status.json");
  EXPECT_EQ(status["stats"]["stacks"].size(), 4u);
  EXPECT_EQ(status["models"][0]["name"], "m");
  EXPECT_EQ(described, 1);
}

TEST_F(StatusPageTest, ShowsTheOtherCoordinatorsAndWhoDoesNotAnswer) {
  Source source = {.name = "coordinator-0",
                   .address = "a:1",
                   .http_address = "a:2",
                   .stats = [this](const auto&) { return Stats(); },
                   .model = [this](const auto& r) { return Model(r); }};
  source.others = [] {
    ClusterFigures others(2);
    others[0] = {.name = "coordinator-1", .address = "b:1", .http_address = "b:2"};
    others[0].stats.set_train_streams(3);
    others[1] = {.name = "coordinator-2", .address = "c:1", .status = absl::UnavailableError("no")};
    return others;
  };
  for (const ops::HttpRoute& route : Routes(source)) routes_[route.path] = route;
  const nlohmann::json status = Json("/status.json");
  ASSERT_EQ(status["coordinators"].size(), 3u);
  EXPECT_EQ(status["coordinators"][0]["self"], true);
  EXPECT_EQ(status["coordinators"][1]["self"], false);
  EXPECT_EQ(status["coordinators"][1]["http_address"], "b:2");
  EXPECT_EQ(status["coordinators"][1]["stats"]["train_streams"], 3);
  EXPECT_EQ(status["coordinators"][2]["reachable"], false);
  EXPECT_EQ(status["coordinators"][2]["error"], "no");
  EXPECT_EQ(status["stats"]["train_streams"], 3);
}

TEST_F(StatusPageTest, ModelsHaveTheirConfigAndPlan) {
  const nlohmann::json models = Json("/models.json")["models"];
  ASSERT_EQ(models.size(), 1u);
  EXPECT_EQ(models[0]["config"]["name"], "m");
  EXPECT_EQ(models[0]["model_id"], "ffffffffffffffff");
  EXPECT_EQ(models[0]["plan"]["partitions"], 8);
}

TEST_F(StatusPageTest, AModelThatCannotBeDescribedDoesNotHideTheRest) {
  stats_.add_stacks()->set_model("broken");
  for (const char* path : {"/status.json", "/models.json"}) {
    EXPECT_EQ(Json(path)["models"].size(), 1u) << path;
  }
}

TEST_F(StatusPageTest, WhatCannotBeAskedIsUnavailableWithTheReason) {
  failing_ = true;
  // What was asked before counts until it is old, and may still be on its way.
  const ops::HttpAnswer answer =
      Await([&] { return routes_.at("/status.json").answer(); },
            [](const ops::HttpAnswer& given) { return given.status != 200; });
  EXPECT_EQ(answer.status, 503);
  EXPECT_THAT(answer.body, HasSubstr("nobody there"));
}

TEST_F(StatusPageTest, ManyWhoLookAskTheClusterOnce) {
  const absl::Time start = absl::Now();
  std::vector<std::thread> lookers;
  for (int i = 0; i < 8; ++i) {
    lookers.emplace_back([this] {
      for (int j = 0; j < 20; ++j) EXPECT_EQ(routes_.at("/status.json").answer().status, 200);
    });
  }
  for (std::thread& looker : lookers) looker.join();
  EXPECT_LE(asked_, 1 + (absl::Now() - start) / kMaxAge);
}

// Figures are for whom HttpOptions.admit lets pass; the files of the page say nothing.
TEST_F(StatusPageTest, FiguresAreNotOpenButThePageIs) {
  for (const auto& [path, route] : routes_) {
    const bool figures = path == "/status.json" || path == "/models.json";
    EXPECT_EQ(route.open, !figures) << path;
  }
}

TEST_F(StatusPageTest, EveryFileThatThePageAsksForIsThereAndNothingFromElsewhere) {
  int found = 0;
  for (const PageFile& file : PageFiles()) {
    for (std::string target : References(std::string(file.content))) {
      if (target.starts_with("./")) target = target.substr(1);
      if (target == "/metrics" || target == "/healthz") continue;
      EXPECT_EQ(routes_.count(target), 1u) << file.name << " asks for " << target;
      ++found;
    }
  }
  EXPECT_GT(found, 10);
}

TEST_F(StatusPageTest, TypesAreThoseOfTheFiles) {
  EXPECT_EQ(routes_.at("/").content_type, "text/html; charset=utf-8");
  EXPECT_EQ(routes_.at("/page.css").content_type, "text/css; charset=utf-8");
  EXPECT_EQ(routes_.at("/main.js").content_type, "text/javascript; charset=utf-8");
  EXPECT_EQ(routes_.at("/icon.svg").content_type, "image/svg+xml");
  EXPECT_EQ(routes_.at("/status.json").content_type, "application/json");
  EXPECT_THAT(routes_.at("/").answer().body, HasSubstr("<!doctype html>"));
  for (const PageFile& file : PageFiles()) EXPECT_FALSE(file.content.empty()) << file.name;
}

}  // namespace status_page_test
}  // namespace emberd::status_page
