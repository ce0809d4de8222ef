// Reading /metrics of a process of the cluster.
#pragma once

#include <string>

namespace emberd::testing {

// The page of "host:port", empty if nobody answers.
std::string FetchMetrics(const std::string& http_address);

// The sum over all series of a metric whose labels hold all of `labels` ("server=\"shard-0\"", or
// empty); 0 if there is none.
double MetricSum(const std::string& page, const std::string& name, const std::string& labels = "");

}  // namespace emberd::testing
