#include "client/demo/criteo.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/demo/random.h"

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

// On failure *error says what is wrong.
bool ParseLine(std::string_view text, Line* line, std::string* error) {
  const std::vector<std::string_view> fields = SplitFields(text, '\t');
  if (fields.size() != kFields) {
    *error = absl::StrCat(fields.size(), " columns; there must be ", kFields);
    return false;
  }
  if (fields[0] != "0" && fields[0] != "1") {
    *error = absl::StrCat("label \"", std::string(fields[0]), "\"; allowed are 0 and 1");
    return false;
  }
  line->label = fields[0] == "1" ? 1.0f : 0.0f;
  for (int i = 0; i < kCriteoNumbers; ++i) {
    const std::string_view field = fields[1 + i];
    line->present[i] = !field.empty();
    int64_t value = 0;
    const auto parsed = std::from_chars(field.data(), field.data() + field.size(), value);
    if (!field.empty() && (parsed.ec != std::errc() || parsed.ptr != field.data() + field.size())) {
      *error = absl::StrCat("column ", 1 + i, ": \"", std::string(field), "\" is not an integer");
      return false;
    }
    line->logs[i] =
        static_cast<float>(std::log1p(static_cast<double>(std::max<int64_t>(value, 0))));
  }
  std::copy(fields.begin() + 1 + kCriteoNumbers, fields.end(), line->columns);
  return true;
}

}  // namespace

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

// 64-bit FNV-1a, whose low bits Mix improves.
int32_t TokenId(std::string_view token, int64_t vocabulary_size) {
  uint64_t hash = 0xcbf29ce484222325;
  for (char c : token) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return static_cast<int32_t>(Mix(hash) % static_cast<uint64_t>(vocabulary_size));
}

absl::StatusOr<std::unique_ptr<CriteoFile>> CriteoFile::Open(const std::string& path,
                                                             int64_t max_train, int64_t max_test) {
  absl::StatusOr<std::unique_ptr<TextLines>> lines = TextLines::Open(path);
  if (!lines.ok()) return lines.status();
  std::unique_ptr<CriteoFile> file(new CriteoFile);
  file->path_ = path;
  file->lines_ = std::move(*lines);
  const int64_t size = file->lines_->size();
  file->test_size_ = std::min(size / 10, max_test);
  file->train_size_ = size - file->test_size_;
  if (max_train > 0) file->train_size_ = std::min(file->train_size_, max_train);
  if (file->test_size_ == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", size, " lines; at least 10 are needed"));
  }
  if (auto s = file->Sample(std::min(file->train_size_, kSampleLines)); !s.ok()) return s;
  file->info_.description = absl::StrCat(path, ": ", file->train_size_, " lines to train on, ",
                                         file->test_size_, " held out");
  return file;
}

// Sets vocabulary sizes and scales from the first lines.
absl::Status CriteoFile::Sample(int64_t lines) {
  std::unordered_set<std::string_view> tokens[kCriteoColumns];
  double sum[kCriteoNumbers] = {}, squares[kCriteoNumbers] = {}, count[kCriteoNumbers] = {};
  int64_t number = 0;
  for (std::string_view text : lines_->Read(0, lines)) {
    Line line;
    std::string error;
    ++number;
    if (!ParseLine(text, &line, &error)) {
      return absl::InvalidArgumentError(absl::StrCat(path_, " line ", number, ": ", error));
    }
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
    std::string error;
    ++number;
    if (!ParseLine(text, &line, &error)) {
      return absl::InvalidArgumentError(absl::StrCat(path_, " line ", number, ": ", error));
    }
    batch->labels.push_back(line.label);
    for (int i = 0; i < kCriteoNumbers; ++i) {
      batch->numeric.push_back(line.present[i] ? (line.logs[i] - mean_[i]) * scale_[i] : 0.0f);
    }
    for (int i = 0; i < kCriteoColumns; ++i) {
      FeatureColumn& column = batch->features[i];
      if (column.row_splits.empty()) column.row_splits.push_back(0);
      for (std::string_view token : SplitFields(line.columns[i], ',')) {
        if (!token.empty()) column.ids.push_back(TokenId(token, info_.features[i].vocabulary_size));
      }
      column.row_splits.push_back(static_cast<int32_t>(column.ids.size()));
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
    if (auto s = Append(begin, part, batch); !s.ok()) return s;
    first += part;
    count -= part;
  }
  return absl::OkStatus();
}

absl::Status CriteoFile::ReadTest(int64_t first, int64_t count, Batch* batch) const {
  if (first < 0 || count < 0 || first + count > test_size_) {
    return absl::OutOfRangeError(absl::StrCat("held-out examples [", first, ", ", first + count,
                                              "): there are ", test_size_));
  }
  batch->Clear(info_);
  return Append(lines_->size() - test_size_ + first, count, batch);
}

}  // namespace emberd::demo
