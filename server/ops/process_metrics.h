// CPU, memory, descriptors and start time of this process, read from /proc whenever they are
// scraped.
#pragma once

#include <memory>

#include <prometheus/collectable.h>

namespace emberd::ops {

// Thread-safe. What cannot be read is left out.
std::shared_ptr<prometheus::Collectable> MakeProcessMetrics();

}  // namespace emberd::ops
