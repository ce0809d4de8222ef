// A real Prometheus that scrapes the processes of a test every second, and its HTTP API.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/temp_dir.h"
#include "tests/testing/process.h"

namespace emberd::testing {

// Not thread-safe. Belongs to the main thread (see ChildProcess). Keeps its data in a directory of
// its own, which goes with it.
class Prometheus {
 public:
  struct Target {
    std::string process;  // the label
    std::string address;  // "host:port" of /metrics
  };
  struct Sample {
    std::map<std::string, std::string> labels;
    double value = 0;
  };
  struct Rule {
    std::string alert;
    std::string query;
    std::string state;   // "inactive", "pending" or "firing"
    std::string health;  // "ok", "err", or "unknown" before it was evaluated first
    std::string error;
  };

  // Whether the Debian package is there.
  static bool Installed();
  // Returns when it answers queries. `rule_file` is a path; empty: none.
  static absl::StatusOr<std::unique_ptr<Prometheus>> Start(const std::vector<Target>& targets,
                                                           const std::string& rule_file);

  // What an expression says now. INVALID_ARGUMENT with Prometheus' own words if it does not parse.
  absl::StatusOr<std::vector<Sample>> Query(const std::string& expression) const;
  absl::StatusOr<std::vector<Rule>> Rules() const;

 private:
  explicit Prometheus(TempDir directory) : directory_(std::move(directory)) {}
  absl::StatusOr<std::string> Get(const std::string& path) const;

  const TempDir directory_;
  std::unique_ptr<ChildProcess> process_;
  int port_ = 0;
};

}  // namespace emberd::testing
