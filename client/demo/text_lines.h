// A text file as lines: mapped into memory, with the offsets of some lines remembered, so that any
// range of lines of a file of many gigabytes can be read.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace emberd::demo {

// Immutable, so any thread may use it. The file must not shrink meanwhile.
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

}  // namespace emberd::demo
