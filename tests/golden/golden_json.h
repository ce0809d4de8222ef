// Comparing JSON results with golden ones: integers and texts equal, floats within 1 ulp of
// float32.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace emberd::preprocess {

// True if a and b are the same or neighbouring float32 numbers.
inline bool WithinOneUlp(double a, double b) {
  const auto x = static_cast<float>(a);
  const auto y = static_cast<float>(b);
  const float infinity = std::numeric_limits<float>::infinity();
  return x == y || std::nextafter(x, infinity) == y || std::nextafter(x, -infinity) == y;
}

// The first place where `got` differs from `expected`, or an empty text. Fields that `expected`
// does not have are not looked at, nor are those named in `ignored`. A null in `expected` stands
// for whatever value.
inline std::string FirstDifferenceFrom(const nlohmann::json& expected, const nlohmann::json& got,
                                       const std::vector<std::string>& ignored,
                                       const std::string& path = "") {
  if (expected.is_null()) return "";
  if (expected.is_object() && got.is_object()) {
    for (const auto& [key, value] : expected.items()) {
      bool skip = false;
      for (const std::string& name : ignored) skip = skip || name == key;
      if (skip) continue;
      if (!got.contains(key)) return absl::StrCat(path, ".", key, ": missing");
      std::string difference = FirstDifferenceFrom(value, got.at(key), ignored, path + "." + key);
      if (!difference.empty()) return difference;
    }
    return "";
  }
  if (expected.is_array() && got.is_array()) {
    if (expected.size() != got.size()) {
      return absl::StrCat(path, ": ", got.size(), " elements instead of ", expected.size());
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      std::string difference =
          FirstDifferenceFrom(expected[i], got[i], ignored, absl::StrCat(path, "[", i, "]"));
      if (!difference.empty()) return difference;
    }
    return "";
  }
  if (expected.is_number() && got.is_number() &&
      (expected.is_number_float() || got.is_number_float())) {
    if (WithinOneUlp(expected.get<double>(), got.get<double>())) return "";
  } else if (expected == got) {
    return "";
  }
  return absl::StrCat(path, ": ", got.dump(), " instead of ", expected.dump());
}

}  // namespace emberd::preprocess
