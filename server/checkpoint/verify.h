// Reading every byte of a checkpoint.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/checkpoint/partition_chain.h"

namespace emberd::server {

// Hears how many of all bytes are done; a status that is not OK ends the work with it.
using TransferProgress = absl::FunctionRef<absl::Status(int64_t bytes, int64_t total_bytes)>;

// DATA_LOSS that names each file that is missing, cut off, changed or another one, the first ten of
// them.
absl::Status VerifyChain(const CheckpointChain& chain, TransferProgress progress);

// Bytes of all files of a chain.
int64_t BytesOf(const CheckpointChain& chain);

}  // namespace emberd::server
