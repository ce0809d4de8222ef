#include "tests/bench/demo/click_log.h"

#include <cmath>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "tests/bench/demo/random.h"

namespace emberd::demo {
namespace {

struct ColumnShape {
  int32_t vocabulary_size;
  double zipf_exponent;
  double effect;     // standard deviation of the effect of the commonest ids
  double half_rank;  // rank at which the effect has halved
  int max_values;    // more than 1: each example has 1 to max_values ids
};

// In the order of the file. As in Criteo's log a few columns hold nearly all of the vocabulary.
constexpr ColumnShape kColumns[kCriteoColumns] = {
    {1'000'000, 1.05, 0.60, 40, 1}, {500, 1.10, 0.35, 50, 1},   {1'000'000, 1.05, 0.60, 40, 1},
    {250'000, 1.05, 0.45, 40, 1},   {300, 1.20, 0.35, 40, 1},   {24, 1.10, 0.40, 24, 1},
    {12'000, 1.10, 0.35, 40, 1},    {600, 1.20, 0.30, 40, 1},   {3, 1.10, 0.35, 10, 1},
    {40'000, 1.10, 0.35, 40, 1},    {5'000, 1.10, 0.30, 40, 1}, {100'000, 1.05, 0.35, 40, 1},
    {3'000, 1.10, 0.30, 40, 1},     {26, 1.10, 0.35, 26, 1},    {10'000, 1.05, 0.80, 50, 6},
    {100'000, 1.05, 0.30, 40, 1},   {10, 1.10, 0.35, 10, 1},    {4'000, 1.10, 0.30, 40, 1},
    {2'000, 1.05, 0.70, 50, 4},     {4, 1.10, 0.35, 10, 1},     {50'000, 1.05, 0.30, 40, 1},
    {16, 1.10, 0.35, 16, 1},        {15, 1.10, 0.35, 15, 1},    {20'000, 1.05, 0.60, 40, 3},
    {80, 1.20, 0.35, 40, 1},        {7'000, 1.10, 0.30, 40, 1},
};
constexpr double kSlopes[kCriteoNumbers] = {0.30, -0.20, 0.10,  0.00, -0.25, 0.15, 0.05,
                                            0.00, 0.20,  -0.10, 0.30, 0.00,  -0.15};
constexpr double kBias = -1.5;
constexpr double kInteraction = 0.25;  // standard deviation over the pairs of these two columns
constexpr int kInteracting[2] = {16, 8};

// Counts are floor(exp(mean + deviation * normal)).
constexpr double kCountMean = 1.5, kCountDeviation = 1.0;
constexpr double kMissingCounts = 0.05;

// Streams of one example's draws beyond those of the columns.
constexpr int kNumberStream = kCriteoColumns, kLabelStream = kCriteoColumns + 1;

// Scatters ranks over ids, as a hashed vocabulary does: a prime above every size is coprime to all
// of them.
int32_t IdOfRank(int column, int64_t rank) {
  const uint64_t size = kColumns[column].vocabulary_size;
  return static_cast<int32_t>((static_cast<uint64_t>(rank) * 2654435761u + column) % size);
}

double NoiseOf(uint64_t seed, uint64_t kind, uint64_t key) {
  return Draws(seed ^ 0x706c616e74656421, kind, key).Normal();
}

}  // namespace

float StandardizeCount(int64_t count) {
  if (count < 0) return 0.0f;
  return static_cast<float>((std::log1p(static_cast<double>(count)) - 1.6) / 0.85);
}

ClickLog::ClickLog(uint64_t seed, int64_t train_size, int64_t test_size)
    : seed_(seed), train_size_(train_size), test_size_(test_size) {
  info_.name = "click_log";
  info_.description = absl::StrCat("generated click log (seed ", seed, ")");
  info_.numeric_count = kCriteoNumbers;
  for (int column = 0; column < kCriteoColumns; ++column) {
    const ColumnShape& shape = kColumns[column];
    info_.features.push_back(
        {.name = absl::StrCat("C", column + 1), .vocabulary_size = shape.vocabulary_size});
    ranks_.emplace_back(shape.vocabulary_size, shape.zipf_exponent);
  }
}

double ClickLog::Effect(int column, int64_t rank) const {
  const ColumnShape& shape = kColumns[column];
  return shape.effect * NoiseOf(seed_, column, rank) * shape.half_rank /
         (shape.half_rank + rank - 1);
}

void ClickLog::MakeColumns(int64_t index, ClickExample* example, double* logit) const {
  for (int column = 0; column < kCriteoColumns; ++column) {
    Draws draws(seed_, index, column);
    const int max_values = kColumns[column].max_values;
    const int64_t values = max_values == 1 ? 1 : 1 + draws.Below(max_values);
    double effect = 0;
    for (int64_t i = 0; i < values; ++i) {
      const int64_t rank = ranks_[column].Sample(&draws);
      example->ids[column].push_back(IdOfRank(column, rank));
      effect += Effect(column, rank);
    }
    *logit += effect / static_cast<double>(values);
  }
  const uint64_t first = example->ids[kInteracting[0]][0],
                 second = example->ids[kInteracting[1]][0];
  *logit += kInteraction * NoiseOf(seed_, kCriteoColumns, first << 32 | second);
}

ClickExample ClickLog::Make(int64_t index) const {
  ClickExample example;
  double logit = kBias;
  Draws draws(seed_, index, kNumberStream);
  for (int i = 0; i < kCriteoNumbers; ++i) {
    const double value = std::exp(kCountMean + kCountDeviation * draws.Normal());
    example.counts[i] = draws.Uniform() < kMissingCounts ? -1 : static_cast<int64_t>(value);
    logit += kSlopes[i] * StandardizeCount(example.counts[i]);
  }
  MakeColumns(index, &example, &logit);
  example.probability = 1.0 / (1.0 + std::exp(-logit));
  example.label = Draws(seed_, index, kLabelStream).Uniform() < example.probability;
  return example;
}

void ClickLog::Read(int64_t first, int64_t count, Batch* batch) const {
  batch->Clear(info_);
  for (int column = 0; column < kCriteoColumns; ++column) {
    if (kColumns[column].max_values > 1) batch->features[column].EndSample();  // begins at 0
  }
  for (int64_t index = first; index < first + count; ++index) {
    const ClickExample example = Make(index);
    batch->labels.push_back(static_cast<float>(example.label));
    batch->true_probability.push_back(static_cast<float>(example.probability));
    for (int64_t value : example.counts) batch->numeric.push_back(StandardizeCount(value));
    for (int column = 0; column < kCriteoColumns; ++column) {
      FeatureColumn& feature = batch->features[column];
      feature.ids.insert(feature.ids.end(), example.ids[column].begin(), example.ids[column].end());
      if (kColumns[column].max_values > 1) feature.EndSample();
    }
  }
  batch->size = count;
}

absl::Status ClickLog::ReadTrain(int64_t first, int64_t count, Batch* batch) const {
  Read(first, count, batch);
  return absl::OkStatus();
}

absl::Status ClickLog::ReadTest(int64_t first, int64_t count, Batch* batch) const {
  RETURN_IF_ERROR(CheckTestRange(first, count));
  Read(kFirstTestIndex + first, count, batch);
  return absl::OkStatus();
}

// Multiplying by an odd number and folding the upper half down are bijections of 32 bits; 5 bits of
// column and 27 of id fit.
std::string ClickLog::Token(int column, int32_t id) {
  uint32_t x = static_cast<uint32_t>(column) << 27 | static_cast<uint32_t>(id);
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return absl::StrFormat("%08x", x ^ (x >> 16));
}

std::string CriteoLine(const ClickExample& example) {
  std::string line = absl::StrCat(example.label);
  for (int64_t count : example.counts) {
    absl::StrAppend(&line, "\t");
    if (count >= 0) absl::StrAppend(&line, count);
  }
  for (int column = 0; column < kCriteoColumns; ++column) {
    absl::StrAppend(&line, "\t",
                    absl::StrJoin(example.ids[column], ",", [column](std::string* out, int32_t id) {
                      out->append(ClickLog::Token(column, id));
                    }));
  }
  return line;
}

absl::Status WriteCriteoFile(const ClickLog& log, int64_t count, const std::string& path) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  for (int64_t i = 0; i < count && file; ++i) file << CriteoLine(log.Make(i)) << '\n';
  file.close();
  if (file) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(path, ": cannot be written"));
}

}  // namespace emberd::demo
