// Dashboards and alerts rot in silence: catches a panel that says nothing about itself, a query
// over a metric that does not exist, and an alert without a severity, a section of the runbook, or
// a test. That queries return data is prometheus_test's business.
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/testing/paths.h"
#include "server/ops/catalogue.h"
#include "tests/testing/dashboards.h"
#include "tests/testing/process.h"

namespace emberd::testing {
namespace deploy_files_test {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Deploy(const std::string& path) { return SourcePath("deploy/" + path); }

std::set<std::string> Catalogue() {
  std::set<std::string> names;
  for (const ops::MetricInfo& metric : ops::MetricCatalogue()) names.emplace(metric.name);
  return names;
}

TEST(DashboardsTest, PanelsExplainThemselvesAndNameMetricsThatExist) {
  const auto dashboards = ReadDashboards(Deploy("grafana/dashboards"));
  ASSERT_TRUE(dashboards.ok()) << dashboards.status();
  std::vector<std::string> files;
  for (const Dashboard& dashboard : *dashboards) {
    files.push_back(dashboard.file);
    EXPECT_THAT(dashboard.faults, IsEmpty());
    EXPECT_GT(dashboard.panels.size(), 8u) << dashboard.file;
    for (const auto* queries : {&dashboard.panels, &dashboard.variables}) {
      for (const DashboardQuery& query : *queries) {
        for (const std::string& metric : MetricsIn(query.expression)) {
          EXPECT_THAT(Catalogue(), Contains(metric)) << query.where;
        }
      }
    }
  }
  EXPECT_THAT(files, ElementsAre("overview.json", "preprocessing.json", "shard.json",
                                 "trainer_group.json"));
}

// Would catch: a panel that also shows the processes of others, whose metrics have these names.
TEST(DashboardsTest, OnlyOurProcessesAreShown) {
  const auto dashboards = ReadDashboards(Deploy("grafana/dashboards"));
  ASSERT_TRUE(dashboards.ok()) << dashboards.status();
  int found = 0;
  for (const Dashboard& dashboard : *dashboards) {
    for (const DashboardQuery& panel : dashboard.panels) {
      for (const std::string& metric : MetricsIn(panel.expression)) {
        if (!absl::StartsWith(metric, "process_")) continue;
        ++found;
        EXPECT_THAT(panel.expression, AnyOf(HasSubstr(absl::StrCat(metric, "{process!=")),
                                            HasSubstr(absl::StrCat(metric, "{process=~"))))
            << panel.where;
      }
    }
  }
  EXPECT_GT(found, 0);
}

// Once each, however many coordinators do not reach one: what alerts_test.yml says about the
// panel's expression.
TEST(DashboardsTest, ShardsOutOfReachAreCountedAsInTheTestOfAlerts) {
  const auto dashboards = ReadDashboards(Deploy("grafana/dashboards"));
  ASSERT_TRUE(dashboards.ok()) << dashboards.status();
  const std::string tests = ReadFile(Deploy("alerts_test.yml"));
  int found = 0;
  for (const Dashboard& dashboard : *dashboards) {
    for (const DashboardQuery& panel : dashboard.panels) {
      if (!absl::StrContains(panel.expression, "emberd_shard_reachable == 0")) continue;
      ++found;
      EXPECT_THAT(tests, HasSubstr(absl::StrCat("- expr: ", panel.expression, "\n")))
          << panel.where;
    }
  }
  EXPECT_EQ(found, 1);
}

TEST(DashboardsTest, MetricsAreFoundInExpressions) {
  EXPECT_THAT(MetricsIn("rate(emberd_batch_ids_sum{model=\"process\"}[5m]) / emberd_batches"),
              ElementsAre("emberd_batch_ids", "emberd_batches"));
  EXPECT_THAT(MetricsIn("up{process=\"x\"}"), IsEmpty());
  EXPECT_EQ(Substituted("rate(a{shard=~\"$shard\"}[$__rate_interval])"),
            "rate(a{shard=~\".*\"}[20s])");
}

struct Alert {
  std::string name;
  std::string text;  // of its whole entry
};
std::vector<Alert> Alerts() {
  const std::vector<std::string> parts =
      absl::StrSplit(ReadFile(Deploy("alerts.yml")), "- alert: ");
  std::vector<Alert> alerts;
  for (size_t i = 1; i < parts.size(); ++i) {
    alerts.push_back({parts[i].substr(0, parts[i].find('\n')), parts[i]});
  }
  return alerts;
}

TEST(AlertsTest, EachHasASeverityARunbookSectionAndATest) {
  const std::string runbook = ReadFile(Deploy("RUNBOOK.md"));
  const std::string tests = ReadFile(Deploy("alerts_test.yml"));
  const std::vector<Alert> alerts = Alerts();
  EXPECT_GT(alerts.size(), 10u);
  for (const Alert& alert : alerts) {
    EXPECT_TRUE(absl::StrContains(alert.text, "severity: warning") ||
                absl::StrContains(alert.text, "severity: critical"))
        << alert.name;
    for (const char* annotation : {"summary: ", "description: "}) {
      EXPECT_THAT(alert.text, HasSubstr(annotation)) << alert.name;
    }
    EXPECT_THAT(alert.text, HasSubstr(absl::StrCat("runbook: deploy/RUNBOOK.md#",
                                                   absl::AsciiStrToLower(alert.name), "\n")));
    EXPECT_THAT(runbook, HasSubstr(absl::StrCat("\n## ", alert.name, "\n")));
    EXPECT_THAT(tests, HasSubstr(absl::StrCat("ALERTS{alertname=\"", alert.name, "\"")));
    for (const std::string& metric : MetricsIn(alert.text)) {
      EXPECT_THAT(Catalogue(), Contains(metric)) << alert.name;
    }
  }
}

}  // namespace deploy_files_test
}  // namespace emberd::testing
