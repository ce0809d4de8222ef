// Load on a running cluster, with the options of emberctl: see load_bench.cc.
#pragma once

#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/client.h"

namespace emberd::bench {

struct LoadShape {
  int64_t batch = 1024;        // samples of every feature
  int64_t ids_per_sample = 1;  // of every feature
  double zipf = 1.05;          // exponent of the ids' distribution; 0: uniform
};

// An id in [0, vocabulary), `uniform` in [0, 1): its rank follows Zipf's law (as a continuous
// distribution), and frequent ids lie scattered over the table.
int64_t DrawId(double uniform, int64_t vocabulary, double exponent);

// Random batches of a model, used in turn, so that drawing them costs no time while it counts.
class LoadBatches {
 public:
  LoadBatches(const client::Model& model, const LoadShape& shape, uint64_t seed);

  // The next one. Valid as long as this object.
  const std::vector<client::FeatureIds>& Next();
  // A small gradient for every activation.
  const std::vector<client::FeatureGradient>& gradients() const { return gradients_; }

 private:
  struct Batch {
    std::vector<std::vector<int64_t>> ids;  // by feature
    std::vector<client::FeatureIds> features;
  };
  std::vector<Batch> batches_;
  std::vector<float> gradient_;
  std::vector<client::FeatureGradient> gradients_;
  size_t next_ = 0;
};

// What one client, or all of them, saw. Latencies in seconds.
struct LoadResult {
  std::vector<float> lookups;
  std::vector<float> updates;             // empty if there were none
  std::vector<float> steps;               // both
  std::map<std::string, int64_t> errors;  // by code
  absl::Status first_error;

  void AddError(const absl::Status& status);
  void Add(const LoadResult& more);
  int64_t error_count() const;
};

// The smallest latency that at least `fraction` of them do not exceed; 0 without any. Reorders
// them.
float LatencyQuantile(std::vector<float>* latencies, double fraction);

// The whole program; `argv` as in main. Status 0: done; 1: a step failed, or the cluster refused;
// 2: wrong command line.
int RunLoad(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace emberd::bench
