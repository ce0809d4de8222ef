// A table in RecBole's text layout: tab-separated, the first line naming and typing the columns
// ("user_id:token").
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/demo/text_lines.h"

namespace emberd::demo {

// Immutable. What Row returns is valid while any copy of the sheet lives.
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
