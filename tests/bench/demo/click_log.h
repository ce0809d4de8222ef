// A generated click log in the shape of Criteo's: 13 numbers and 26 categorical columns, three of
// them with several values. The truth is planted: a label is drawn with a known probability, so the
// best reachable AUC is known too.
//
//   logit = bias + sum over numbers of slope * t + sum over columns of mean effect of the ids + one
//   interaction
//
// t = StandardizeCount(number). An id's effect is normal noise keyed by (seed, column, rank),
// fading with its rank: ids too rare to be learned weigh little, as in real logs. The interaction
// is a table of effects over the pairs of two small columns, which embeddings alone cannot express.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/demo/dataset.h"
#include "tests/bench/demo/random.h"

namespace emberd::demo {

inline constexpr int kCriteoNumbers = 13;
inline constexpr int kCriteoColumns = 26;

// One example before it is put into a batch or written as text.
struct ClickExample {
  int64_t counts[kCriteoNumbers];            // >= 0; -1: missing
  std::vector<int32_t> ids[kCriteoColumns];  // at least one each
  double probability = 0;                    // P(label = 1)
  int label = 0;
};

class ClickLog : public Dataset {
 public:
  // The same seed gives the same log. train_size is what one pass over it is taken to be.
  ClickLog(uint64_t seed, int64_t train_size, int64_t test_size);

  const DatasetInfo& info() const override { return info_; }
  int64_t train_size() const override { return train_size_; }
  int64_t test_size() const override { return test_size_; }
  absl::Status ReadTrain(int64_t first, int64_t count, Batch* batch) const override;
  absl::Status ReadTest(int64_t first, int64_t count, Batch* batch) const override;

  // Example `index` of the endless log, >= 0. Held-out examples begin at kFirstTestIndex.
  ClickExample Make(int64_t index) const;
  static constexpr int64_t kFirstTestIndex = int64_t{1} << 48;

  // The token that stands for an id in the text form: 8 hex digits, different for different
  // (column, id).
  static std::string Token(int column, int32_t id);

 private:
  double Effect(int column, int64_t rank) const;
  void MakeColumns(int64_t index, ClickExample* example, double* logit) const;
  void Read(int64_t first, int64_t count, Batch* batch) const;

  uint64_t seed_;
  int64_t train_size_, test_size_;
  DatasetInfo info_;
  std::vector<ZipfDistribution> ranks_;  // one per column
};

// What a count enters the model as: log(1 + count), shifted and scaled to about mean 0 and variance
// 1 over the generated log; a missing count gives 0.
float StandardizeCount(int64_t count);

// The text of one example in the layout of OpenCriteoFile, without the end of line.
std::string CriteoLine(const ClickExample& example);
// Writes examples 0 .. count-1 of a generated log, over whatever is in the file.
absl::Status WriteCriteoFile(const ClickLog& log, int64_t count, const std::string& path);

}  // namespace emberd::demo
