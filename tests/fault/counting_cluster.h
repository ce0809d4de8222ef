// Two coordinators and two shards, a model whose rows count their updates, and a trainer that goes
// on through the second coordinator when the first is gone: alone, or as a SYNC group. A lost,
// doubled or half-made update shows in the rows.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "tests/testing/cluster.h"

namespace emberd::testing {

class CountingCluster {
 public:
  static constexpr int64_t kRows = 16;  // on both shards
  static constexpr int kRanks = 2;      // of the group
  static constexpr char kTable[] = "t";

  // `failpoints`: by name of a process, see ClusterOptions. `timeouts`: fields of TimeoutConfig.
  // `config`: more fields of ClusterConfig. `power`: as in ClusterOptions.
  static absl::StatusOr<std::unique_ptr<CountingCluster>> Start(
      const std::map<std::string, std::string>& failpoints,
      const std::string& timeouts = "shard_call_ms: 10000", const std::string& config = "",
      const std::string& power = "");

  // The same trainer, through the first coordinator and through the other one.
  client::Client& first() { return *first_; }
  client::Client& other() { return *other_; }
  Cluster& cluster() { return *cluster_; }
  const client::Model& model() const { return model_; }
  const std::vector<int64_t>& ids() const { return ids_; }

  absl::StatusOr<client::LookupResult> Lookup(client::Client& client) const;
  // Every row gains 1. Without a deadline: the client's.
  absl::StatusOr<client::ApplyResult> Apply(client::Client& client, client::BatchHandle batch,
                                            uint64_t sequence, absl::Duration deadline = {}) const;
  // What README tells a trainer to do whose coordinator went away: the same request again through
  // the other, and with a new batch if the old one is gone.
  absl::StatusOr<client::ApplyResult> Retry(client::BatchHandle batch, uint64_t sequence) const;
  // How often each row was updated; empty after an error.
  std::vector<float> Counts(client::Client& client) const;

  // The group: rank r joins through coordinator coordinators[r]. The step that it is at.
  absl::StatusOr<int64_t> Join(const std::vector<int>& coordinators,
                               absl::Duration step_timeout = absl::Seconds(60));
  void Leave();  // all ranks, without a word
  // One step of all ranks; every row gains 1 for each of them. The first error. Rank `dying`,
  // if any, ends its stream after its lookup. `skip`: no row gains anything.
  absl::Status Step(int64_t step, int dying = -1, bool skip = false);

 private:
  struct Rank {
    std::unique_ptr<client::Client> client;
    std::unique_ptr<client::TrainStream> stream;
  };

  absl::StatusOr<std::unique_ptr<client::Client>> ConnectTo(int coordinator) const;
  absl::Status StepOf(int rank, int64_t step, bool dies, bool skip);
  template <typename Work>
  static absl::Status OnAllRanks(const Work& work);

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> first_, other_;
  client::Model model_;
  std::vector<int64_t> ids_;
  std::vector<Rank> ranks_;
};

}  // namespace emberd::testing
