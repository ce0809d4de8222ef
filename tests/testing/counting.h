// A model whose rows count their updates, and trainers of every kind that train it at full speed: a
// cut through half an update shows as rows of a table that differ, and one that is lost or made
// twice as a sum that does not fit.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "tests/testing/cluster.h"

namespace emberd::testing {

// A table for each trainer, with rows on every partition. Rows begin with zeros; an update adds 1
// to each of its table.
client::ModelDescription CountingModel(const std::string& name);

// By table, how many updates its rows have seen. DATA_LOSS: they do not agree on it.
using Counts = std::map<std::string, int64_t>;
absl::StatusOr<Counts> ReadCounts(client::Client& client, const client::Model& model);
int64_t SumOf(const Counts& counts);

// Whether these counts are one moment between two updates: that of a checkpoint whose `info` says
// how many updates and which steps of groups it has seen. An error says what does not fit.
absl::Status CheckMoment(const Counts& counts, const client::CheckpointInfo& info);

// Two that make unary calls, one that assigns, and the ranks of a SYNC and of a BOUNDED group.
// Begins with what the tables have counted, and goes on until Stop.
class CountingTrainers {
 public:
  // All of them on one coordinator. `name`: of their clients. `pause`: of each between two updates;
  // updates meet every step of a checkpoint all the same, and others have the processors.
  CountingTrainers(const Cluster& cluster, int coordinator, client::Model model,
                   const Counts& begin, const std::string& name,
                   absl::Duration pause = absl::Milliseconds(20));
  ~CountingTrainers();
  CountingTrainers(const CountingTrainers&) = delete;
  CountingTrainers& operator=(const CountingTrainers&) = delete;

  // Returns when each has made `updates` more, or one has failed. False: it took too long.
  bool Await(int64_t updates);
  // Ends what is under way, and returns the first error.
  absl::Status Stop();
  // What they were told to have been made; exact after an orderly Stop.
  Counts made() const;

 private:
  struct Group;
  struct Trainer {
    std::string table;
    std::atomic<int64_t> made{0};
    std::thread thread;
  };

  template <typename Work>  // absl::Status (client::Client&, Trainer&)
  void Start(const std::string& table, const std::string& client_id, const Work& work);
  absl::Status TrainUnary(client::Client& client, Trainer& trainer);
  absl::Status Assign(client::Client& client, Trainer& trainer);
  absl::Status TrainRank(client::Client& client, Trainer& trainer, Group& group, int rank);

  const client::Model model_;
  const client::ClientOptions client_options_;
  const absl::Duration pause_;
  std::atomic<bool> stopping_{false};
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::unique_ptr<Trainer>> trainers_;
  mutable absl::Mutex mutex_;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::testing
