#include "base/safetensors.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kMetadata[] = "__metadata__";
// What readers of the format accept at most.
constexpr int64_t kMostHeaderBytes = 100'000'000;
constexpr int kMostDepth = 3;  // a header has no more; what lies deeper is passed over

struct Type {
  absl::string_view name;
  int64_t bytes;
};
constexpr Type kTypes[] = {{"BOOL", 1},    {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"I16", 2},
                           {"F8_E4M3", 1}, {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
                           {"U32", 4},     {"F32", 4}, {"F64", 8}, {"I64", 8},     {"U64", 8}};

absl::Status Bad(absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("its header is not a valid safetensors header: ", what));
}

absl::Status BadTensor(absl::string_view name, absl::string_view what) {
  return Bad(absl::StrCat("tensor \"", name, "\": ", what));
}

// The object that `text` is. A name that an object has twice is refused: readers differ in which
// one they take.
absl::StatusOr<Json> ParseObject(absl::string_view text) {
  std::vector<std::set<std::string>> names;  // by depth
  std::string twice;
  const auto look = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMostDepth) return false;
    if (event == Json::parse_event_t::object_start) {
      names.resize(std::max<size_t>(names.size(), depth + 2));
      names[depth + 1].clear();
    }
    if (event == Json::parse_event_t::key) {
      const auto name = parsed.get<std::string>();
      if (!names[depth].insert(name).second) twice = name;
    }
    return true;
  };
  Json object = Json::parse(text.begin(), text.end(), look, /*allow_exceptions=*/false);
  if (object.is_discarded() || !object.is_object()) return Bad("it is not a JSON object");
  if (!twice.empty()) return Bad(absl::StrCat("\"", twice, "\" occurs twice"));
  return object;
}

absl::StatusOr<std::map<std::string, std::string>> ReadMetadata(const Json& json) {
  if (!json.is_object()) return Bad("__metadata__ is not an object");
  std::map<std::string, std::string> metadata;
  for (const auto& [name, value] : json.items()) {
    if (!value.is_string()) return Bad("__metadata__ has a value that is not a string");
    metadata[name] = value.get<std::string>();
  }
  return metadata;
}

// Whole numbers from 0.
absl::StatusOr<std::vector<int64_t>> ReadNumbers(const std::string& tensor, const Json& json,
                                                 const char* field) {
  const auto found = json.find(field);
  if (found == json.end() || !found->is_array()) {
    return BadTensor(tensor, absl::StrCat("it has no list ", field));
  }
  std::vector<int64_t> numbers;
  for (const Json& number : *found) {
    if (!number.is_number_unsigned() || number.get<uint64_t>() >> 63 != 0) {
      return BadTensor(tensor, absl::StrCat(field, " holds a value that is not a size"));
    }
    numbers.push_back(number.get<int64_t>());
  }
  return numbers;
}

absl::StatusOr<SafetensorsTensor> ReadTensor(const std::string& name, const Json& json) {
  if (!json.is_object()) return BadTensor(name, "it is not an object");
  SafetensorsTensor tensor{.name = name};
  const auto dtype = json.find("dtype");
  if (dtype == json.end() || !dtype->is_string()) return BadTensor(name, "it has no dtype");
  tensor.dtype = dtype->get<std::string>();
  int64_t bytes = SafetensorsBytes(tensor.dtype);
  if (bytes == 0) return BadTensor(name, absl::StrCat("dtype \"", tensor.dtype, "\" is not known"));
  ASSIGN_OR_RETURN(tensor.shape, ReadNumbers(name, json, "shape"));
  for (const int64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      return BadTensor(name, "its shape is too large for any file");
    }
  }
  ASSIGN_OR_RETURN(const std::vector<int64_t> offsets, ReadNumbers(name, json, "data_offsets"));
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    return BadTensor(name, "data_offsets is not [begin, end]");
  }
  tensor.begin = offsets[0];
  tensor.end = offsets[1];
  if (tensor.end - tensor.begin != bytes) {
    return BadTensor(name, absl::StrCat("data_offsets give it ", tensor.end - tensor.begin,
                                        " bytes, but its shape needs ", bytes));
  }
  return tensor;
}

}  // namespace

int64_t SafetensorsBytes(absl::string_view dtype) {
  const auto* const found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                         [&](const Type& type) { return type.name == dtype; });
  return found == std::end(kTypes) ? 0 : found->bytes;
}

std::string EncodeSafetensorsHeader(const SafetensorsHeader& header, int64_t size) {
  Json json = Json::object();
  if (!header.metadata.empty()) json[kMetadata] = header.metadata;
  for (const SafetensorsTensor& tensor : header.tensors) {
    json[tensor.name] = {{"dtype", tensor.dtype},
                         {"shape", tensor.shape},
                         {"data_offsets", {tensor.begin, tensor.end}}};
  }
  // Text that is not UTF-8 must not throw.
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');
  if (size > kSafetensorsPrefix) {
    text.resize(std::max(text.size(), static_cast<size_t>(size - kSafetensorsPrefix)), ' ');
  }
  std::string encoded;
  for (int i = 0; i < kSafetensorsPrefix; ++i) {
    encoded.push_back(static_cast<char>(text.size() >> (8 * i) & 0xff));
  }
  return encoded + text;
}

absl::StatusOr<int64_t> SafetensorsHeaderSize(absl::string_view prefix, int64_t file_bytes) {
  if (prefix.size() != kSafetensorsPrefix) return Bad("the file is too short");
  uint64_t length = 0;
  for (int i = 0; i < kSafetensorsPrefix; ++i) {
    length |= uint64_t{static_cast<unsigned char>(prefix[i])} << (8 * i);
  }
  const int64_t most = std::min(kMostHeaderBytes, file_bytes - kSafetensorsPrefix);
  if (most < 2 || length < 2 || length > static_cast<uint64_t>(most)) {
    return Bad(absl::StrCat("its length ", length, " must be in [2, ", most, "]"));
  }
  return kSafetensorsPrefix + static_cast<int64_t>(length);
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view text,
                                                         int64_t data_bytes) {
  if (text.empty() || text[0] != '{') return Bad("it does not begin with {");
  ASSIGN_OR_RETURN(const Json object, ParseObject(text));
  SafetensorsHeader header;
  for (const auto& [name, value] : object.items()) {
    if (name == kMetadata) {
      ASSIGN_OR_RETURN(header.metadata, ReadMetadata(value));
      continue;
    }
    ASSIGN_OR_RETURN(SafetensorsTensor tensor, ReadTensor(name, value));
    header.tensors.push_back(std::move(tensor));
  }
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  int64_t end = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.begin != end) {
      return BadTensor(tensor.name, absl::StrCat("it begins at byte ", tensor.begin, ", not at ",
                                                 end, " where the one before ends"));
    }
    end = tensor.end;
  }
  if (end != data_bytes) {
    return Bad(
        absl::StrCat("its tensors need ", end, " bytes, but ", data_bytes, " follow the header"));
  }
  return header;
}

}  // namespace emberd
