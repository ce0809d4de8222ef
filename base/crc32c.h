// CRC-32C (Castagnoli), as iSCSI, ext4 and most file formats with checksums use it.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace emberd {

// The checksum of bytes whose checksum is `crc`, followed by `bytes`; that of nothing is 0.
uint32_t ExtendCrc32c(uint32_t crc, absl::Span<const char> bytes);

}  // namespace emberd
