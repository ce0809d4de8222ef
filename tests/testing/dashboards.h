// The dashboards of deploy/grafana as tests read them.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace emberd::testing {

struct DashboardQuery {
  std::string where;       // file and panel, or file and variable
  std::string expression;  // with variables, as Grafana has it
};
struct Dashboard {
  std::string file;
  std::vector<DashboardQuery> panels;     // every query of every panel
  std::vector<DashboardQuery> variables;  // label_values(...)
  std::vector<std::string> faults;        // what no panel may lack, or have twice
};

// All of a folder, by name.
absl::StatusOr<std::vector<Dashboard>> ReadDashboards(const std::string& folder);

// An expression as Grafana would send it with "All" chosen everywhere.
std::string Substituted(std::string expression);

// The metrics of emberd that an expression names, histograms without _bucket, _sum and _count
// unless a metric of the catalogue is called so.
std::set<std::string> MetricsIn(const std::string& expression);

}  // namespace emberd::testing
