// An update between its first part and its last: as soon as its batch is known, what comes is
// checked, and summed where the shards are to be sent sums.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "base/region_server.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/fanout.h"
#include "server/coordinator/gradient_reader.h"
#include "server/coordinator/gradients.h"
#include "server/coordinator/kept_batch.h"
#include "server/coordinator/row_gradients.h"
#include "server/rpc/wire.h"

namespace emberd::server {

// Not thread-safe. Must outlive the use of what Finish returns.
class IncomingUpdate {
 public:
  // `sum_rows`: sums are made while gradients come, as far as that is worth it. The update must
  // have no other rank then.
  explicit IncomingUpdate(bool sum_rows) : sum_rows_(sum_rows) {}

  // The next part; see GradientReader.
  void Add(std::shared_ptr<const v1::ApplyGradientsRequest> part,
           std::vector<rpc::SharedPieces> data, bool last);
  // The batch is there. Once; `regions` (null: there are none) and `fanout` must outlive it.
  void Begin(std::shared_ptr<const KeptBatch> batch, const RegionServer* regions, Fanout* fanout);
  bool begun() const { return reader_.has_value(); }

  // After Begin and the last part; once.
  absl::StatusOr<GradientInput> Finish();

 private:
  struct Part {
    std::shared_ptr<const v1::ApplyGradientsRequest> request;
    std::vector<rpc::SharedPieces> data;
  };

  const bool sum_rows_;
  std::deque<Part> parts_;  // all of them: gradients are read where they are
  std::shared_ptr<const KeptBatch> batch_;
  std::optional<GradientReader> reader_;
  std::vector<std::shared_ptr<RowSums>> sums_;  // by shard; empty: none are made
};

}  // namespace emberd::server
