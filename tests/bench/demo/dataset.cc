#include "tests/bench/demo/dataset.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::demo {

absl::Span<const int32_t> FeatureColumn::IdsOf(int64_t sample) const {
  if (row_splits.empty()) return absl::MakeConstSpan(ids).subspan(sample, 1);
  return absl::MakeConstSpan(ids).subspan(row_splits[sample],
                                          row_splits[sample + 1] - row_splits[sample]);
}

absl::Status Dataset::CheckTestRange(int64_t first, int64_t count) const {
  if (first >= 0 && count >= 0 && first + count <= test_size()) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat("held-out examples [", first, ", ", first + count,
                                            "): there are ", test_size()));
}

void Batch::Clear(const DatasetInfo& info) {
  size = 0;
  labels.clear();
  numeric.clear();
  true_probability.clear();
  features.resize(info.features.size());
  for (FeatureColumn& feature : features) {
    feature.ids.clear();
    feature.row_splits.clear();
  }
}

namespace {

constexpr int64_t kStride = 64;  // lines between two remembered offsets

absl::Status SystemError(const std::string& path) {
  const std::string message = absl::StrCat(path, ": ", std::strerror(errno));
  return errno == ENOENT ? absl::NotFoundError(message) : absl::FailedPreconditionError(message);
}

// Takes the next line off the front of *text.
std::string_view TakeLine(std::string_view* text) {
  const size_t end = text->find('\n');
  std::string_view line = text->substr(0, end);
  text->remove_prefix(end == std::string_view::npos ? text->size() : end + 1);
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  return line;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TextLines>> TextLines::Open(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return SystemError(path);
  struct stat info;
  void* memory = nullptr;
  bool ok = fstat(file, &info) == 0;
  if (ok && S_ISDIR(info.st_mode)) {
    errno = EISDIR;
    ok = false;
  }
  if (ok && info.st_size > 0) {
    memory = mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    ok = memory != MAP_FAILED;
  }
  const absl::Status status = ok ? absl::OkStatus() : SystemError(path);
  close(file);
  if (!ok) return status;
  return std::unique_ptr<TextLines>(new TextLines(
      memory == nullptr ? std::string_view()
                        : std::string_view(static_cast<const char*>(memory), info.st_size)));
}

TextLines::TextLines(std::string_view text) : text_(text) {
  while (!text.empty()) {
    if (size_ % kStride == 0) offsets_.push_back(static_cast<int64_t>(text_.size() - text.size()));
    TakeLine(&text);
    ++size_;
  }
}

TextLines::~TextLines() {
  if (!text_.empty()) munmap(const_cast<char*>(text_.data()), text_.size());
}

std::vector<std::string_view> TextLines::Read(int64_t first, int64_t count) const {
  std::vector<std::string_view> lines;
  if (first < 0 || first >= size_ || count <= 0) return lines;
  std::string_view text = text_.substr(offsets_[first / kStride]);
  for (int64_t line = first - first % kStride; line < first; ++line) TakeLine(&text);
  while (count-- > 0 && !text.empty()) lines.push_back(TakeLine(&text));
  return lines;
}

std::vector<std::string_view> SplitFields(std::string_view line, char separator) {
  std::vector<std::string_view> fields;
  while (true) {
    const size_t end = line.find(separator);
    fields.push_back(line.substr(0, end));
    if (end == std::string_view::npos) return fields;
    line.remove_prefix(end + 1);
  }
}

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
  ASSIGN_OR_RETURN(std::string path, FindFile(directory, extension));
  ASSIGN_OR_RETURN(std::unique_ptr<TextLines> lines, TextLines::Open(path));
  Sheet sheet;
  sheet.path_ = path;
  sheet.lines_ = std::move(lines);
  if (sheet.lines_->size() == 0) return absl::InvalidArgumentError(absl::StrCat(path, " is empty"));
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
