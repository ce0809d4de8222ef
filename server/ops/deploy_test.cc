// Dashboards and scrape configurations rot in silence: catches a target that no process of the
// sample cluster listens on, and a query over a metric that does not exist.
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_split.h"
#include "base/testing/paths.h"
#include "config/config.h"
#include "server/ops/catalogue.h"

namespace emberd::ops {
namespace deploy_test {

std::string Read(const std::string& path) {
  std::ifstream file(SourcePath(path));
  EXPECT_TRUE(file) << path;
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

TEST(DeployTest, PrometheusScrapesExactlyTheSampleCluster) {
  const auto cluster = config::LoadCluster(SourcePath("config/samples/cluster_local.textproto"));
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::set<std::string> expected;
  for (const auto& shard : cluster->shards()) expected.insert(shard.http_address());
  for (const auto& one : cluster->coordinators()) expected.insert(one.http_address());

  // Each target stands in double quotes, and nothing else does.
  const std::vector<std::string> parts = absl::StrSplit(Read("deploy/prometheus.yml"), '"');
  std::set<std::string> targets;
  for (size_t i = 1; i < parts.size(); i += 2) targets.insert(parts[i]);
  EXPECT_EQ(targets, expected);
}

TEST(DeployTest, DocumentedMetricsExist) {
  std::set<std::string> names;
  for (const MetricInfo& metric : MetricCatalogue()) {
    names.insert(std::string(metric.name));
    if (metric.type != MetricType::kHistogram) continue;
    for (const char* part : {"_bucket", "_sum", "_count"}) {
      names.insert(std::string(metric.name) + part);
    }
  }
  const std::string text = Read("deploy/README.md");
  const char* const name_characters = "abcdefghijklmnopqrstuvwxyz_";
  int found = 0;
  for (size_t at = 0; (at = text.find("emberd_", at)) != std::string::npos; ++found) {
    const size_t end = text.find_first_not_of(name_characters, at);
    const std::string name = text.substr(at, end - at);
    EXPECT_EQ(names.count(name), 1u) << name;
    at = end;
  }
  EXPECT_GT(found, 5);
}

}  // namespace deploy_test
}  // namespace emberd::ops
