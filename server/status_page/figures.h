// What the coordinators of a cluster say of themselves.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "emberd/v1/admin_service.pb.h"

namespace emberd::status_page {

// One coordinator. The one that serves the page comes first, and it alone tells about shards.
struct CoordinatorFigures {
  std::string name;                 // "coordinator-0"
  std::string address = {};         // of gRPC
  std::string http_address = {};    // of its own page; empty: none
  absl::Status status = {};         // why it does not answer
  v1::GetStatsResponse stats = {};  // if it does
};
using ClusterFigures = std::vector<CoordinatorFigures>;

// The sum over all coordinators that answer; times, shards and whether it is draining are those of
// the first.
v1::GetStatsResponse Merge(const ClusterFigures& figures);

}  // namespace emberd::status_page
