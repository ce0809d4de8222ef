// A trainer's steps on a Train stream, over the end of streams: what has not been applied yet is
// kept, and sent again on the next stream.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/demo/dataset.h"
#include "client/demo/dense_model.h"
#include "client/demo/embeddings.h"

namespace emberd::demo {

// Not thread-safe.
class Steps {
 public:
  Steps(Embeddings* embeddings, client::TrainOptions options)
      : embeddings_(embeddings), options_(std::move(options)) {}

  // The update of a step, to be sent; without gradients they are all zero.
  void Add(int64_t step, std::shared_ptr<const Batch> batch,
           std::shared_ptr<const DenseStep> gradients);

  // Joins the group and sends again what has not been applied. `next`: the first step whose update
  // has not been added. OUT_OF_RANGE if the group stands at a step that this trainer cannot go on
  // from.
  absl::Status Join(int64_t next);
  void Leave() { stream_.reset(); }
  // Of the group, as far as the generations of its ranks depend on each other; 0 otherwise.
  uint64_t generation() const;
  bool joined() const { return stream_ != nullptr; }

  // Sends the lookup of a step, unless that has been done on this stream.
  absl::Status SendLookup(int64_t step, const Batch& batch);
  absl::StatusOr<client::TrainLookupResult> ReceiveLookup();
  // Sends the updates that have been added.
  absl::Status SendUpdates();
  // Waits until no more than `most` updates are not known to be applied. The results of those that
  // have come meanwhile.
  absl::StatusOr<std::vector<client::TrainUpdateResult>> AwaitUpdates(size_t most);
  // No more lookups and updates: lets a pipelined group apply the last update.
  absl::Status Finish() { return stream_->Finish(); }

 private:
  struct Pending {
    int64_t step;
    std::shared_ptr<const Batch> batch;
    std::shared_ptr<const DenseStep> gradients;
  };

  Embeddings* embeddings_;
  client::TrainOptions options_;
  std::deque<Pending> pending_;  // not known to be applied
  std::unique_ptr<client::TrainStream> stream_;
  // Of this stream.
  int64_t next_lookup_ = 0;
  int64_t next_update_ = 0;
  int unwanted_lookups_ = 0;  // of steps that were sent again
};

}  // namespace emberd::demo
