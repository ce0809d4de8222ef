// What a trainer reads: batches of examples, and the description of their features; and the files
// that they come from.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
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
  // Ends the next sample: it has the ids that were added since the sample before.
  void EndSample() { row_splits.push_back(static_cast<int32_t>(ids.size())); }
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

 protected:
  absl::Status CheckTestRange(int64_t first, int64_t count) const;
};

// A click log as text in Criteo's layout: one example a line, tab-separated: label (0 or 1), 13
// integers, 26 categorical columns of tokens (8 hex digits in Criteo's files; any text here). Every
// column but the label may be empty: missing. One extension: a categorical column may hold several
// tokens, separated by commas; their rows are averaged. The last tenth of the lines, at most
// `max_test`, is held out: logs are in the order of time. max_train: 0 for all lines before those.
//
// Numbers become log(1 + x), shifted and scaled to mean 0 and variance 1 over the first training
// lines; negative ones count as 0, missing ones enter as 0 after scaling. A token's id is a stable
// hash of it modulo the vocabulary size, which is 8 times the number of distinct tokens in the
// first training lines (16 to 1,000,000): collisions are rare, not excluded.
//
// INVALID_ARGUMENT names the line that cannot be read.
absl::StatusOr<std::unique_ptr<Dataset>> OpenCriteoFile(const std::string& path, int64_t max_train,
                                                        int64_t max_test);
// The id there of a token among `vocabulary_size`: equal on every machine, for ever.
int32_t TokenId(std::string_view token, int64_t vocabulary_size);

// MovieLens in RecBole's layout (see Sheet): `directory` holds one file of each kind, NAME.inter
// (ratings), NAME.user and NAME.item.
//
// Label: rating >= 4. Features: user, item, age (in steps of 5 years), gender, occupation, genres
// (several, mean), words of the title (several, sqrtn). Vocabularies are built from the files. A
// fifth of the ratings, chosen by the seed, is held out; each pass over the others has an order of
// its own. INVALID_ARGUMENT names file and line of what cannot be read.
absl::StatusOr<std::unique_ptr<Dataset>> OpenMovieLens(const std::string& directory, uint64_t seed);

// A text file as lines: mapped into memory, with the offsets of some lines remembered, so that any
// range of lines of a file of many gigabytes can be read. Immutable, so any thread may use it. The
// file must not shrink meanwhile.
class TextLines {
 public:
  // NOT_FOUND or the system's error, with the path. Reads the file once, to find its lines.
  static absl::StatusOr<std::unique_ptr<TextLines>> Open(const std::string& path);
  ~TextLines();
  TextLines(const TextLines&) = delete;
  TextLines& operator=(const TextLines&) = delete;

  // Lines, without an empty one behind the last end of line.
  int64_t size() const { return size_; }
  // Lines [first, first + count), cut off at the end of the file, without their ends ("\n" or
  // "\r\n"). Valid while *this is.
  std::vector<std::string_view> Read(int64_t first, int64_t count) const;

 private:
  explicit TextLines(std::string_view text);

  std::string_view text_;  // the mapped file
  int64_t size_ = 0;
  std::vector<int64_t> offsets_;  // of every kStride-th line
};

// Pieces between separators: "a\t\tb" has three, the empty text one.
std::vector<std::string_view> SplitFields(std::string_view line, char separator);

// A table in RecBole's text layout: tab-separated, the first line naming and typing the columns
// ("user_id:token"). Immutable. What Row returns is valid while any copy of the sheet lives.
class Sheet {
 public:
  // The one file of `directory` whose name ends in `extension` (".inter"), and which of its columns
  // are wanted.
  static absl::StatusOr<Sheet> Open(const std::string& directory, const std::string& extension,
                                    const std::vector<std::string>& columns);

  int64_t rows() const { return lines_->size() - 1; }
  // The fields of one row, in the order of the wanted columns.
  absl::StatusOr<std::vector<std::string_view>> Row(int64_t row) const;
  absl::StatusOr<double> Number(int64_t row, std::string_view field) const;
  // INVALID_ARGUMENT with the file and the line of a row.
  absl::Status Error(int64_t row, const std::string& message) const;

 private:
  std::string path_;
  std::shared_ptr<const TextLines> lines_;
  size_t width_ = 0;
  std::vector<size_t> positions_;
};

}  // namespace emberd::demo
