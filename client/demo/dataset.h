// What a trainer reads: batches of examples, and the description of their features.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cpp/model.h"

namespace emberd::demo {

// One categorical feature. Each has an embedding table of its own, of the same name.
struct FeatureInfo {
  std::string name;
  int64_t vocabulary_size = 0;
  client::Combiner combiner = client::Combiner::kMean;
};

struct DatasetInfo {
  std::string name;         // of the model in emberd
  std::string description;  // one line for people
  int numeric_count = 0;
  std::vector<FeatureInfo> features;
};

// The ids of one feature for a batch.
struct FeatureColumn {
  std::vector<int32_t> ids;
  // Sample i has ids[row_splits[i] : row_splits[i + 1]]. Empty: every sample has exactly one id.
  std::vector<int32_t> row_splits;

  absl::Span<const int32_t> IdsOf(int64_t sample) const;
};

struct Batch {
  int64_t size = 0;
  std::vector<float> labels;   // 0 or 1
  std::vector<float> numeric;  // size x numeric_count, row-major, about mean 0 and variance 1
  std::vector<FeatureColumn> features;  // in the order of DatasetInfo
  // P(label = 1) by which the label was drawn; empty where nobody knows it.
  std::vector<float> true_probability;

  // Makes the batch empty, with room kept for the next one.
  void Clear(const DatasetInfo& info);
};

// Read-only once opened: every method may be called from any thread, and from several processes
// with equal results.
class Dataset {
 public:
  virtual ~Dataset() = default;

  virtual const DatasetInfo& info() const = 0;
  // Examples of one pass over the training part; an endless stream gives INT64_MAX.
  virtual int64_t train_size() const = 0;
  virtual int64_t test_size() const = 0;

  // Reads the training examples at positions [first, first + count) of the endless sequence of
  // passes: position p is the (p mod train_size)-th example of pass p / train_size. Replaces
  // *batch.
  virtual absl::Status ReadTrain(int64_t first, int64_t count, Batch* batch) const = 0;
  // Held-out examples, 0 <= first, first + count <= test_size.
  virtual absl::Status ReadTest(int64_t first, int64_t count, Batch* batch) const = 0;
};

}  // namespace emberd::demo
