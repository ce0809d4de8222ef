// The allowed range and the default of every number, flag and enum of the configs, as data: one row
// per field. Comments in model.proto and cluster.proto say the same to users.
#pragma once

#include <limits>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "google/protobuf/descriptor.h"

namespace emberd::config {

// An interval of numbers. NaN and infinities are outside of every range.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool min_excluded = false;
  bool max_excluded = false;

  bool Contains(double value) const;
  // As it ends the sentence "it must be ...": "> 0", "in [0, 1)", "finite".
  std::string ToString() const;
};

struct FieldRule {
  absl::string_view field;  // message and field, e.g. "AdamConfig.beta1"
  Range range = {};         // of an enum: its allowed numbers; 0 is always allowed
  // What an absent field is filled with; a field without presence counts as absent when it is 0.
  // Enums: the number. None: the field stays as it is, or its default depends on other fields.
  std::optional<double> default_value = std::nullopt;
  // Numbers of an enum that the range has and the field does not allow.
  absl::Span<const int> excluded = {};
};

// Every row, in the order of the .proto files.
absl::Span<const FieldRule> FieldRules();
// The row of a field; null if it has none (strings, messages, plain flags).
const FieldRule* FindFieldRule(const google::protobuf::FieldDescriptor& field);

// True for fields that hold the name of a model, table, feature or token.
bool IsNameField(const google::protobuf::FieldDescriptor& field);
// True for 1 or more characters of [A-Za-z0-9_.-].
bool HasNameCharacters(absl::string_view name);
// The same for the name of a feature: parts of such characters, with a '/' between two of them.
bool HasPathCharacters(absl::string_view name);
inline constexpr int kMaxNameLength = 128;

}  // namespace emberd::config
