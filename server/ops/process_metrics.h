// CPU, memory, descriptors and start time of this process, read from /proc whenever they are
// scraped.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <prometheus/collectable.h>

namespace emberd::ops {

// Thread-safe. What cannot be read is left out.
std::shared_ptr<prometheus::Collectable> MakeProcessMetrics();

// Bytes of this process in RAM, and of these in huge pages. To learn the latter, the kernel walks
// all page tables of the process: tens of milliseconds for many GiB in small pages.
std::optional<int64_t> ResidentBytes();
std::optional<int64_t> HugePageBytes();

}  // namespace emberd::ops
