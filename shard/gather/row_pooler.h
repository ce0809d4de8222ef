// The other half of a gather that returns unique rows: whoever has the batch makes of the rows the
// partial sums that the shard would have made, by the same kernel, and so with the same bits.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "preprocess/batch/csr.h"
#include "shard/types.h"

namespace emberd::shard {

// Thread-safe. Its results outlive it.
class RowPooler {
 public:
  // Besides the callers'; >= 1.
  static std::unique_ptr<RowPooler> Create(int threads);
  virtual ~RowPooler() = default;

  // `view`: what the shard was asked to gather, of one stack; `spec`: that stack; `partitions`: of
  // the shard. `rows`: the shard's answer, StackRows.rows.
  // INVALID_ARGUMENT if `rows` has not the bytes of all distinct rows of `view`.
  virtual absl::StatusOr<StackSums> Pool(const preprocess::StackBatchView& view,
                                         const StackSpec& spec, int partitions,
                                         absl::Span<const char> rows) = 0;
};

}  // namespace emberd::shard
