// Reading /metrics of a process of the cluster.
#pragma once

#include <string>

namespace emberd::testing {

// The page of "host:port", empty if nobody answers. `token`: see ClusterOptions; empty: none.
std::string FetchMetrics(const std::string& http_address, const std::string& token = "");

// The sum over all series of a metric whose labels hold all of `labels` ("server=\"shard-0\"", or
// empty); 0 if there is none.
double MetricSum(const std::string& page, const std::string& name, const std::string& labels = "");

}  // namespace emberd::testing
