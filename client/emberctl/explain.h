// `emberctl explain`: what preprocessing makes of a batch, without a server.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/emberctl/cluster_shape.h"
#include "client/emberctl/session.h"

namespace emberd::emberctl {

// Runs a recorded case of jax-tpu-embedding's behaviour and prints, as JSON, what its `expected`
// holds. Where that system aborts, {"error": {"code", "message"}} is printed and the error
// returned. `zero_gains`: weights that sum to zero give gains of 0, not NaN or infinity.
absl::Status ExplainCase(Session& session, const std::string& path, bool zero_gains);

struct ExplainOptions {
  std::string model;                 // a ModelConfig
  std::vector<std::string> batches;  // see batch_file.h
  ClusterShape cluster;
};
// Stacks and places the model, cuts the batch into mini-batches, and prints a report or, with
// session.json, everything down to the buffers.
absl::Status ExplainBatch(Session& session, const ExplainOptions& options);

}  // namespace emberd::emberctl
