// Checks of who may connect to a cluster.
#pragma once

#include "absl/status/status.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::config {

// Checks `security` of a cluster whose addresses have been checked. The files that it names are not
// opened.
absl::Status CheckSecurity(const v1::ClusterConfig& cluster);

}  // namespace emberd::config
