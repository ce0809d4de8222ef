#include "shard/batch/run_table.h"

#include "absl/strings/str_cat.h"

namespace emberd::shard {
namespace {

using preprocess::AlignCsr;
using preprocess::CsrSegmentView;
using preprocess::StackBatchView;

constexpr int kMostSlots = 1 << 16;

}  // namespace

absl::Status InvalidBatch(const StackBatchView& view, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("batch, stack ", view.stack, ": ", what));
}

absl::StatusOr<RunTable> RunTable::Make(const StackBatchView& view, int partitions) {
  RunTable table(view.slots, partitions, view.minibatches);
  if (view.slots < 1 || view.minibatches < 1 || view.slots > kMostSlots ||
      static_cast<int64_t>(view.segments.size()) != int64_t{view.slots} * view.minibatches) {
    return InvalidBatch(view, absl::StrCat(view.segments.size(), " segments for ", view.slots,
                                           " slots x ", view.minibatches, " mini-batches"));
  }
  table.runs_.resize(view.segments.size() * partitions);
  for (size_t s = 0; s < view.segments.size(); ++s) {
    if (absl::Status status = table.AddSegment(view, s); !status.ok()) return status;
  }
  return table;
}

absl::Status RunTable::AddSegment(const StackBatchView& view, size_t s) {
  const CsrSegmentView& segment = view.segments[s];
  const int64_t cells = segment.embedding_ids.size();
  if (segment.base < 0 || static_cast<int64_t>(segment.row_ends.size()) != partitions_ ||
      static_cast<int64_t>(segment.sample_ids.size()) != cells ||
      static_cast<int64_t>(segment.gains.size()) != cells) {
    return InvalidBatch(
        view, absl::StrCat("segment ", s, ": base ", segment.base, " must be >= 0, row_ends ",
                           segment.row_ends.size(), " must be ", partitions_,
                           ", and embedding_ids, sample_ids, gains of one size, not ", cells, ", ",
                           segment.sample_ids.size(), ", ", segment.gains.size()));
  }
  int64_t begin = segment.base;
  for (int k = 0; k < partitions_; ++k) {
    const int64_t end = segment.row_ends[k];
    if (end < begin || end - segment.base > cells) {
      return InvalidBatch(
          view, absl::StrCat("segment ", s, ": row_ends[", k, "] = ", end, " must be in [", begin,
                             ", ", segment.base + cells, "]"));
    }
    const int64_t offset = begin - segment.base;
    const int slot = static_cast<int>(s) / minibatches_;
    const int minibatch = static_cast<int>(s) % minibatches_;
    runs_[index(slot, k, minibatch)] =
        begin == end
            ? Run{nullptr, nullptr, nullptr, 0}
            : Run{segment.embedding_ids.data() + offset, segment.sample_ids.data() + offset,
                  segment.gains.data() + offset, end - begin};
    partition_entries_[k] += end - begin;
    begin = AlignCsr(end);
  }
  return absl::OkStatus();
}

}  // namespace emberd::shard
