#include "client/demo/sheet.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace emberd::demo {

namespace {

absl::StatusOr<std::string> FindFile(const std::string& directory, const std::string& extension) {
  std::error_code error;
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    if (entry.path().extension() == extension) found.push_back(entry.path().string());
  }
  if (error) return absl::NotFoundError(absl::StrCat(directory, ": ", error.message()));
  if (found.size() == 1) return found[0];
  return absl::NotFoundError(absl::StrCat(directory, ": ", found.size(), " files named *",
                                          extension, "; there must be one"));
}

}  // namespace

absl::StatusOr<Sheet> Sheet::Open(const std::string& directory, const std::string& extension,
                                  const std::vector<std::string>& columns) {
  absl::StatusOr<std::string> path = FindFile(directory, extension);
  if (!path.ok()) return path.status();
  absl::StatusOr<std::unique_ptr<TextLines>> lines = TextLines::Open(*path);
  if (!lines.ok()) return lines.status();
  Sheet sheet;
  sheet.path_ = *path;
  sheet.lines_ = std::move(*lines);
  if (sheet.lines_->size() == 0)
    return absl::InvalidArgumentError(absl::StrCat(*path, " is empty"));
  const std::vector<std::string_view> names = SplitFields(sheet.lines_->Read(0, 1)[0], '\t');
  sheet.width_ = names.size();
  for (const std::string& column : columns) {
    size_t position = 0;
    while (position < names.size() && SplitFields(names[position], ':')[0] != column) ++position;
    if (position == names.size()) return sheet.Error(-1, absl::StrCat("no column ", column));
    sheet.positions_.push_back(position);
  }
  return sheet;
}

absl::StatusOr<std::vector<std::string_view>> Sheet::Row(int64_t row) const {
  const std::vector<std::string_view> fields = SplitFields(lines_->Read(row + 1, 1)[0], '\t');
  if (fields.size() != width_) {
    return Error(row, absl::StrCat(fields.size(), " columns; the first line has ", width_));
  }
  std::vector<std::string_view> chosen;
  for (size_t position : positions_) chosen.push_back(fields[position]);
  return chosen;
}

absl::StatusOr<double> Sheet::Number(int64_t row, std::string_view field) const {
  double value;
  if (absl::SimpleAtod(absl::string_view(field.data(), field.size()), &value)) return value;
  return Error(row, absl::StrCat("\"", std::string(field), "\" is not a number"));
}

absl::Status Sheet::Error(int64_t row, const std::string& message) const {
  return absl::InvalidArgumentError(absl::StrCat(path_, " line ", row + 2, ": ", message));
}

}  // namespace emberd::demo
