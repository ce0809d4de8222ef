#include <algorithm>
#include <charconv>
#include <cmath>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tests/bench/demo/click_log.h"
#include "tests/bench/demo/dataset.h"
#include "tests/bench/demo/random.h"

namespace emberd::demo {
namespace {

constexpr int kFields = 1 + kCriteoNumbers + kCriteoColumns;
constexpr int64_t kSampleLines = 50'000;
constexpr int64_t kIdsPerToken = 8, kMinVocabulary = 16, kMaxVocabulary = 1'000'000;

struct Line {
  float label;
  bool present[kCriteoNumbers];
  float logs[kCriteoNumbers];  // log(1 + number)
  std::string_view columns[kCriteoColumns];
};

absl::Status ParseLine(std::string_view text, Line* line) {
  const std::vector<std::string_view> fields = SplitFields(text, '\t');
  if (fields.size() != kFields) {
    return absl::InvalidArgumentError(
        absl::StrCat(fields.size(), " columns; there must be ", kFields));
  }
  if (fields[0] != "0" && fields[0] != "1") {
    return absl::InvalidArgumentError(
        absl::StrCat("label \"", std::string(fields[0]), "\"; allowed are 0 and 1"));
  }
  line->label = fields[0] == "1" ? 1.0f : 0.0f;
  for (int i = 0; i < kCriteoNumbers; ++i) {
    const std::string_view field = fields[1 + i];
    line->present[i] = !field.empty();
    int64_t value = 0;
    const auto parsed = std::from_chars(field.data(), field.data() + field.size(), value);
    if (!field.empty() && (parsed.ec != std::errc() || parsed.ptr != field.data() + field.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("column ", 1 + i, ": \"", std::string(field), "\" is not an integer"));
    }
    line->logs[i] =
        static_cast<float>(std::log1p(static_cast<double>(std::max<int64_t>(value, 0))));
  }
  std::copy(fields.begin() + 1 + kCriteoNumbers, fields.end(), line->columns);
  return absl::OkStatus();
}

class CriteoFile : public Dataset {
 public:
  absl::Status Open(const std::string& path, int64_t max_train, int64_t max_test);

  const DatasetInfo& info() const override { return info_; }
  int64_t train_size() const override { return train_size_; }
  int64_t test_size() const override { return test_size_; }
  absl::Status ReadTrain(int64_t first, int64_t count, Batch* batch) const override;
  absl::Status ReadTest(int64_t first, int64_t count, Batch* batch) const override;

 private:
  // Sets vocabulary sizes and scales from the first lines.
  absl::Status Sample(int64_t lines);
  absl::Status Append(int64_t first_line, int64_t count, Batch* batch) const;

  std::string path_;
  std::unique_ptr<const TextLines> lines_;
  int64_t train_size_ = 0, test_size_ = 0;
  DatasetInfo info_;
  float mean_[kCriteoNumbers] = {}, scale_[kCriteoNumbers] = {};
};

}  // namespace

// 64-bit FNV-1a, whose low bits Mix improves.
int32_t TokenId(std::string_view token, int64_t vocabulary_size) {
  uint64_t hash = 0xcbf29ce484222325;
  for (char c : token) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return static_cast<int32_t>(Mix(hash) % static_cast<uint64_t>(vocabulary_size));
}

absl::StatusOr<std::unique_ptr<Dataset>> OpenCriteoFile(const std::string& path, int64_t max_train,
                                                        int64_t max_test) {
  auto file = std::make_unique<CriteoFile>();
  RETURN_IF_ERROR(file->Open(path, max_train, max_test));
  return file;
}

absl::Status CriteoFile::Open(const std::string& path, int64_t max_train, int64_t max_test) {
  path_ = path;
  ASSIGN_OR_RETURN(lines_, TextLines::Open(path));
  const int64_t size = lines_->size();
  test_size_ = std::min(size / 10, max_test);
  train_size_ = size - test_size_;
  if (max_train > 0) train_size_ = std::min(train_size_, max_train);
  if (test_size_ == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", size, " lines; at least 10 are needed"));
  }
  info_.description =
      absl::StrCat(path, ": ", train_size_, " lines to train on, ", test_size_, " held out");
  return Sample(std::min(train_size_, kSampleLines));
}

absl::Status CriteoFile::Sample(int64_t lines) {
  std::unordered_set<std::string_view> tokens[kCriteoColumns];
  double sum[kCriteoNumbers] = {}, squares[kCriteoNumbers] = {}, count[kCriteoNumbers] = {};
  int64_t number = 0;
  for (std::string_view text : lines_->Read(0, lines)) {
    Line line;
    ++number;
    RETURN_IF_ERROR(Annotate(ParseLine(text, &line), absl::StrCat(path_, " line ", number)));
    for (int i = 0; i < kCriteoNumbers; ++i) {
      if (!line.present[i]) continue;
      sum[i] += line.logs[i];
      squares[i] += static_cast<double>(line.logs[i]) * line.logs[i];
      ++count[i];
    }
    for (int i = 0; i < kCriteoColumns; ++i) {
      for (std::string_view token : SplitFields(line.columns[i], ',')) tokens[i].insert(token);
    }
  }
  for (int i = 0; i < kCriteoNumbers; ++i) {
    if (count[i] == 0) continue;
    mean_[i] = static_cast<float>(sum[i] / count[i]);
    const double variance = squares[i] / count[i] - std::pow(sum[i] / count[i], 2);
    scale_[i] = variance > 1e-6 ? static_cast<float>(1 / std::sqrt(variance)) : 0.0f;
  }
  info_.name = "criteo";
  info_.numeric_count = kCriteoNumbers;
  for (int i = 0; i < kCriteoColumns; ++i) {
    const int64_t distinct = static_cast<int64_t>(tokens[i].size());
    info_.features.push_back(
        {.name = absl::StrCat("C", i + 1),
         .vocabulary_size = std::clamp(kIdsPerToken * distinct, kMinVocabulary, kMaxVocabulary)});
  }
  return absl::OkStatus();
}

absl::Status CriteoFile::Append(int64_t first_line, int64_t count, Batch* batch) const {
  int64_t number = first_line;
  for (std::string_view text : lines_->Read(first_line, count)) {
    Line line;
    ++number;
    RETURN_IF_ERROR(Annotate(ParseLine(text, &line), absl::StrCat(path_, " line ", number)));
    batch->labels.push_back(line.label);
    for (int i = 0; i < kCriteoNumbers; ++i) {
      batch->numeric.push_back(line.present[i] ? (line.logs[i] - mean_[i]) * scale_[i] : 0.0f);
    }
    for (int i = 0; i < kCriteoColumns; ++i) {
      FeatureColumn& column = batch->features[i];
      if (column.row_splits.empty()) column.EndSample();  // the first begins at 0
      for (std::string_view token : SplitFields(line.columns[i], ',')) {
        if (!token.empty()) column.ids.push_back(TokenId(token, info_.features[i].vocabulary_size));
      }
      column.EndSample();
    }
    ++batch->size;
  }
  return absl::OkStatus();
}

absl::Status CriteoFile::ReadTrain(int64_t first, int64_t count, Batch* batch) const {
  batch->Clear(info_);
  while (count > 0) {
    const int64_t begin = first % train_size_;
    const int64_t part = std::min(count, train_size_ - begin);
    RETURN_IF_ERROR(Append(begin, part, batch));
    first += part;
    count -= part;
  }
  return absl::OkStatus();
}

absl::Status CriteoFile::ReadTest(int64_t first, int64_t count, Batch* batch) const {
  RETURN_IF_ERROR(CheckTestRange(first, count));
  batch->Clear(info_);
  return Append(lines_->size() - test_size_ + first, count, batch);
}

}  // namespace emberd::demo
