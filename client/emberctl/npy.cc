#include "client/emberctl/npy.h"

#include <bit>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace emberd::emberctl {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr absl::string_view kMagic = "\x93NUMPY";
constexpr size_t kMaxDimensions = 8;

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("not a usable .npy file: ", what));
}

// Cuts the header, a Python dictionary as text, off the front of `*content`.
absl::StatusOr<absl::string_view> TakeHeader(absl::string_view* content) {
  if (!absl::ConsumePrefix(content, kMagic)) return Malformed("it does not begin with \\x93NUMPY");
  if (content->size() < 2) return Malformed("it ends in its header");
  const int version = static_cast<unsigned char>((*content)[0]);
  if (version < 1 || version > 3) {
    return Malformed(absl::StrCat("its format version is ", version, "; it must be 1 to 3"));
  }
  content->remove_prefix(2);
  const size_t width = version == 1 ? 2 : 4;
  if (content->size() < width) return Malformed("it ends in its header");
  uint32_t length = 0;
  std::memcpy(&length, content->data(), width);
  content->remove_prefix(width);
  if (content->size() < length) return Malformed("it ends in its header");
  const absl::string_view header = content->substr(0, length);
  content->remove_prefix(length);
  return header;
}

// What stands after 'key': in the header.
absl::string_view After(absl::string_view header, absl::string_view key) {
  const size_t at = header.find(absl::StrCat("'", key, "':"));
  if (at == absl::string_view::npos) return "";
  return absl::StripLeadingAsciiWhitespace(header.substr(at + key.size() + 3));
}

absl::StatusOr<std::vector<int64_t>> ParseShape(absl::string_view header) {
  absl::string_view text = After(header, "shape");
  const size_t end = text.find(')');
  if (!absl::ConsumePrefix(&text, "(") || end == absl::string_view::npos) {
    return Malformed("it has no shape");
  }
  std::vector<int64_t> shape;
  for (absl::string_view size : absl::StrSplit(text.substr(0, end - 1), ',')) {
    size = absl::StripAsciiWhitespace(size);
    if (size.empty()) continue;  // after the last comma
    int64_t value = 0;
    if (!absl::SimpleAtoi(size, &value) || value < 0 || shape.size() == kMaxDimensions) {
      return Malformed(absl::StrCat("its shape is (", text.substr(0, end - 1), ")"));
    }
    shape.push_back(value);
  }
  return shape;
}

template <typename T>
absl::StatusOr<Array> Read(absl::string_view data, std::vector<int64_t> shape) {
  int64_t left = static_cast<int64_t>(data.size() / sizeof(T));
  int64_t count = 1;
  for (const int64_t size : shape) {
    if (size > 0 && count > left / size) return Malformed("it is shorter than its shape says");
    count *= size;
  }
  if (count * sizeof(T) != data.size()) {
    return Malformed(
        absl::StrCat("it has ", data.size(), " bytes of data instead of ", count * sizeof(T)));
  }
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), data.data(), data.size());
  return Array{std::move(shape), std::move(values)};
}

}  // namespace

absl::StatusOr<Array> ParseNpy(absl::string_view content) {
  const absl::StatusOr<absl::string_view> header = TakeHeader(&content);
  if (!header.ok()) return header.status();
  absl::StatusOr<std::vector<int64_t>> shape = ParseShape(*header);
  if (!shape.ok()) return shape.status();
  if (!absl::StartsWith(After(*header, "fortran_order"), "False")) {
    return Malformed("it is in Fortran order");
  }
  const absl::string_view type = After(*header, "descr").substr(0, 5);
  if (type == "'<i4'") return Read<int32_t>(content, *std::move(shape));
  if (type == "'<i8'") return Read<int64_t>(content, *std::move(shape));
  if (type == "'<f4'") return Read<float>(content, *std::move(shape));
  return Malformed(absl::StrCat("its type is ", type, "; it must be '<i4', '<i8' or '<f4'"));
}

}  // namespace emberd::emberctl
