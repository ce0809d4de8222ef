// Click logs as text in Criteo's layout: one example a line, tab-separated: label (0 or 1), 13
// integers, 26 categorical columns of tokens (8 hex digits in Criteo's files; any text here). Every
// column but the label may be empty: missing. One extension: a categorical column may hold several
// tokens, separated by commas; their rows are averaged.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/demo/click_log.h"
#include "client/demo/dataset.h"
#include "client/demo/text_lines.h"

namespace emberd::demo {

// The text of one example, without the end of line.
std::string CriteoLine(const ClickExample& example);
// Writes examples 0 .. count-1 of a generated log, over whatever is in the file.
absl::Status WriteCriteoFile(const ClickLog& log, int64_t count, const std::string& path);

// A file of such lines. The last tenth of them, at most `max_test`, is held out: logs are in the
// order of time.
//
// Numbers become log(1 + x), shifted and scaled to mean 0 and variance 1 over the first training
// lines; negative ones count as 0, missing ones enter as 0 after scaling. A token's id is a stable
// hash of it modulo the vocabulary size, which is 8 times the number of distinct tokens in the
// first training lines (16 to 1,000,000): collisions are rare, not excluded.
class CriteoFile : public Dataset {
 public:
  // max_train: 0 for all lines before the held-out ones. INVALID_ARGUMENT names the line that
  // cannot be read.
  static absl::StatusOr<std::unique_ptr<CriteoFile>> Open(const std::string& path,
                                                          int64_t max_train, int64_t max_test);

  const DatasetInfo& info() const override { return info_; }
  int64_t train_size() const override { return train_size_; }
  int64_t test_size() const override { return test_size_; }
  absl::Status ReadTrain(int64_t first, int64_t count, Batch* batch) const override;
  absl::Status ReadTest(int64_t first, int64_t count, Batch* batch) const override;

 private:
  CriteoFile() = default;
  absl::Status Sample(int64_t lines);
  absl::Status Append(int64_t first_line, int64_t count, Batch* batch) const;

  std::string path_;
  std::unique_ptr<const TextLines> lines_;
  int64_t train_size_ = 0, test_size_ = 0;
  DatasetInfo info_;
  float mean_[kCriteoNumbers] = {}, scale_[kCriteoNumbers] = {};
};

// The id of a token among `vocabulary_size`: equal on every machine, for ever.
int32_t TokenId(std::string_view token, int64_t vocabulary_size);

}  // namespace emberd::demo
