// The reference page of all metrics.
#pragma once

#include <string>

namespace emberd::ops {

// The catalogue in Markdown, group by group: what `emberd metrics` prints, and deploy/METRICS.md.
std::string MetricReference();

}  // namespace emberd::ops
