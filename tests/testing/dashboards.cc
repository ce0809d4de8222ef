#include "tests/testing/dashboards.h"

#include <algorithm>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/ops/catalogue.h"
#include "tests/testing/process.h"

namespace emberd::testing {
namespace {

using nlohmann::json;

bool InCatalogue(const std::string& name) {
  const auto catalogue = ops::MetricCatalogue();
  return std::any_of(catalogue.begin(), catalogue.end(),
                     [&](const ops::MetricInfo& metric) { return metric.name == name; });
}

void ReadPanel(const json& panel, std::set<int>* ids, Dashboard* dashboard) {
  const int id = panel.value("id", 0);
  const std::string title = panel.value("title", "");
  const std::string where = absl::StrCat(dashboard->file, ", panel ", id, " '", title, "'");
  const auto fault = [&](const char* text) {
    dashboard->faults.push_back(absl::StrCat(where, ": ", text));
  };
  if (id <= 0 || !ids->insert(id).second) fault("its id is not positive and unique");
  if (title.empty()) fault("no title");
  if (panel.value("type", "") == "row") return;
  if (panel.value("description", "").size() < 10) fault("no description");
  if (panel.value(json::json_pointer("/fieldConfig/defaults/unit"), "").empty()) fault("no unit");
  if (panel.value(json::json_pointer("/datasource/uid"), "") != "prometheus") {
    fault("another data source than prometheus");
  }
  if (!panel.contains("targets") || panel["targets"].empty()) return fault("no query");
  for (const json& target : panel["targets"]) {
    dashboard->panels.push_back({where, target.value("expr", "")});
  }
}

}  // namespace

absl::StatusOr<std::vector<Dashboard>> ReadDashboards(const std::string& folder) {
  std::vector<Dashboard> dashboards;
  std::set<std::string> uids;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    Dashboard& dashboard = dashboards.emplace_back();
    dashboard.file = entry.path().filename().string();
    const json root = json::parse(ReadFile(entry.path().string()), nullptr, false);
    if (!root.is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(dashboard.file, " is not JSON"));
    }
    if (!uids.insert(root.value("uid", "")).second || root.value("title", "").empty()) {
      dashboard.faults.push_back(dashboard.file + ": no title, or the uid of another dashboard");
    }
    if (root.value("schemaVersion", 0) < 38) {
      dashboard.faults.push_back(dashboard.file + ": schemaVersion below 38");
    }
    std::set<int> ids;
    for (const json& panel : root.value("panels", json::array())) {
      ReadPanel(panel, &ids, &dashboard);
    }
    for (const json& variable : root["templating"]["list"]) {
      dashboard.variables.push_back(
          {absl::StrCat(dashboard.file, ", variable ", variable.value("name", "")),
           variable.value("definition", "")});
    }
  }
  if (error) return absl::NotFoundError(absl::StrCat(folder, ": ", error.message()));
  std::sort(dashboards.begin(), dashboards.end(),
            [](const Dashboard& a, const Dashboard& b) { return a.file < b.file; });
  return dashboards;
}

std::string Substituted(std::string expression) {
  return absl::StrReplaceAll(expression, {{"$__rate_interval", "20s"},
                                          {"$shard", ".*"},
                                          {"$model", ".*"},
                                          {"$stack", ".*"},
                                          {"$group", ".*"}});
}

std::set<std::string> MetricsIn(const std::string& expression) {
  const auto between_names = [](char c) { return c != '_' && !absl::ascii_isalnum(c); };
  std::string words = expression;
  std::replace_if(words.begin(), words.end(), between_names, ' ');
  std::set<std::string> names;
  for (std::string name : std::vector<std::string>(absl::StrSplit(words, ' '))) {
    if (!absl::StartsWith(name, "emberd_") && !absl::StartsWith(name, "process_")) continue;
    for (const char* suffix : {"_bucket", "_sum", "_count"}) {
      if (!InCatalogue(name)) name = std::string(absl::StripSuffix(name, suffix));
    }
    names.insert(name);
  }
  return names;
}

}  // namespace emberd::testing
