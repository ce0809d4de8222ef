// Sums of rows that a trainer has sent, passed on to a shard as they came.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "server/coordinator/gradients.h"
#include "server/coordinator/kept_batch.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

// Of one stack and one shard. They can be passed on where they are all that the shard needs of the
// stack, of its padded width, and stay in memory as long as the shard's call may need them. Those
// in halves only where the shard takes them, and they are fewer bytes than floats.
class PassedSums {
 public:
  // `halves`: the shard takes them.
  PassedSums(const KeptBatch& batch, int shard, int stack, bool halves);

  // Whether nothing that has come of the stack's gradients stands in the way. What does will not
  // go away as more comes.
  bool MayPass(const GradientInput& input) const;
  // All gradients have come. Nothing if they cannot be passed on.
  std::optional<SumPieces> Pass(const GradientInput& input) const;

 private:
  // Rows of a feature's tensor that are rows [begin, end) of the stack.
  struct Range {
    int feature = 0;
    int64_t first = 0;  // in the tensor
    int64_t begin = 0;
    int64_t end = 0;
  };
  // Appends those of the range's rows.
  void PassLowerHalves(const FeatureGradientView& view, const Range& range, SumPieces* sums) const;

  const int stack_;
  const int64_t width_;
  const bool halves_;
  // They have all rows of the stack, each once, in order. Empty: no ranges do.
  std::vector<Range> ranges_;
};

}  // namespace emberd::server
