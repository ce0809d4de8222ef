// How weights are stored.
#pragma once

#include <cstdint>

#include "emberd/v1/types.pb.h"

namespace emberd::config {

// Bytes of one weight. `dtype` is one that TableConfig.storage_dtype allows.
inline int64_t WeightBytes(v1::DataType dtype) { return dtype == v1::FLOAT32 ? 4 : 2; }

}  // namespace emberd::config
