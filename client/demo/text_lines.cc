#include "client/demo/text_lines.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace emberd::demo {

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

}  // namespace emberd::demo
