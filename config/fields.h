// Walks over the fields of a config message: checks each by its rule, fills in each default, names
// each by its path, and says how its value is written and rounded.
#pragma once

#include <limits>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace emberd::config {

// "tables[2]" + "optimizer" -> "tables[2].optimizer". An index of -1 stands for "not an element of
// a list".
std::string FieldPath(absl::string_view parent, absl::string_view field, int index = -1);

// One field (element `index` of a repeated one) as text proto writes it, on one line, cut after 80
// characters.
std::string ValueText(const google::protobuf::Message& message,
                      const google::protobuf::FieldDescriptor& field, int index = -1);
// The same for a string that stands in no message.
std::string QuotedText(absl::string_view text);

// Short text that reads back as the same double: "0.5", "0.30000000000000004", "1e+300".
std::string NumberText(double value);

// INVALID_ARGUMENT "<path>: <value> is not allowed; it must be <allowed>".
absl::Status NotAllowed(absl::string_view path, absl::string_view value, absl::string_view allowed);

// Checks the range of every number, the characters of every name, and that there are no values of
// enums and no fields that this version does not know. Stops at the first fault, in the order of
// the .proto file.
absl::Status CheckFields(const google::protobuf::Message& message, const std::string& path = "");

// Writes the default of every absent field that has one, in `message` and all messages present in
// it, and turns -0 into 0 so that equal configs have equal bytes.
void FillFields(google::protobuf::Message* message);

// The float32 that a float field of a config would hold if `value` stood there: rounded, and 0 for
// -0. None if `value` is finite and too large for a float32; NaN and infinities stay what they are.
std::optional<float> ToFloat(double value);

// The allowed range and the default of every number, flag and enum of the configs, as data: one row
// per field. Comments in model.proto and cluster.proto say the same to users.

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

// True for 1 or more characters of [A-Za-z0-9_.-].
bool HasNameCharacters(absl::string_view name);
// The same for the name of a feature: parts of such characters, with a '/' between two of them.
bool HasPathCharacters(absl::string_view name);
inline constexpr int kMaxNameLength = 128;

}  // namespace emberd::config
