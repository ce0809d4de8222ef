#include "config/fields.h"

#include <cmath>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/field_rules.h"
#include "emberd/v1/model.pb.h"
#include "google/protobuf/io/strtod.h"
#include "google/protobuf/stubs/strutil.h"
#include "google/protobuf/text_format.h"

namespace emberd::config {
namespace {

using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using google::protobuf::TextFormat;

constexpr size_t kMaxValueText = 80;

double NumberOf(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_FLOAT:
      return reflection.GetFloat(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection.GetDouble(message, &field);
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.GetInt32(message, &field);
    case FieldDescriptor::CPPTYPE_INT64:
      return static_cast<double>(reflection.GetInt64(message, &field));
    case FieldDescriptor::CPPTYPE_UINT64:
      return static_cast<double>(reflection.GetUInt64(message, &field));
    case FieldDescriptor::CPPTYPE_ENUM:
      return reflection.GetEnumValue(message, &field);
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.GetBool(message, &field);
    default:
      return 0;
  }
}

void SetNumber(Message* message, const FieldDescriptor& field, double value) {
  const Reflection& reflection = *message->GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_FLOAT:
      return reflection.SetFloat(message, &field, static_cast<float>(value));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection.SetDouble(message, &field, value);
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.SetInt32(message, &field, static_cast<int32_t>(value));
    case FieldDescriptor::CPPTYPE_INT64:
      return reflection.SetInt64(message, &field, static_cast<int64_t>(value));
    case FieldDescriptor::CPPTYPE_ENUM:
      return reflection.SetEnumValue(message, &field, static_cast<int>(value));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.SetBool(message, &field, value != 0);
    default:
      return;
  }
}

bool IsAbsent(const Message& message, const FieldDescriptor& field) {
  return field.has_presence() ? !message.GetReflection()->HasField(message, &field)
                              : NumberOf(message, field) == 0;
}

bool EnumAllows(const EnumDescriptor& type, const FieldRule& rule, int number) {
  return type.FindValueByNumber(number) != nullptr &&
         (number == 0 || rule.range.Contains(number)) &&
         !absl::c_linear_search(rule.excluded, number);
}

std::string AllowedEnumNames(const EnumDescriptor& type, const FieldRule& rule) {
  std::vector<std::string> names;
  for (int i = 0; i < type.value_count(); ++i) {
    const std::string& name = type.value(i)->name();
    const int number = type.value(i)->number();
    if (absl::EndsWith(name, "_UNSPECIFIED")) continue;
    if (EnumAllows(type, rule, number)) names.push_back(name);
  }
  return absl::StrCat("one of ", absl::StrJoin(names, ", "));
}

absl::Status CheckName(const Message& message, const FieldDescriptor& field,
                       const std::string& path) {
  const std::string name = message.GetReflection()->GetString(message, &field);
  const bool may_be_path = field.containing_type() == v1::FeatureConfig::descriptor();
  if (name.size() <= kMaxNameLength &&
      (may_be_path ? HasPathCharacters(name) : HasNameCharacters(name))) {
    return absl::OkStatus();
  }
  return NotAllowed(path, QuotedText(name),
                    may_be_path ? "1 to 128 characters of [A-Za-z0-9_.-], or parts of them with a "
                                  "'/' between two"
                                : "1 to 128 characters of [A-Za-z0-9_.-]");
}

// Runs `visit(child, path)` over the messages that `field` holds.
template <typename Visit>
absl::Status ForEachChild(const Message& message, const FieldDescriptor& field,
                          const std::string& path, Visit visit) {
  const Reflection& reflection = *message.GetReflection();
  if (!field.is_repeated()) {
    return reflection.HasField(message, &field)
               ? visit(reflection.GetMessage(message, &field), FieldPath(path, field.name()))
               : absl::OkStatus();
  }
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    absl::Status status =
        visit(reflection.GetRepeatedMessage(message, &field, i), FieldPath(path, field.name(), i));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Of a list of int64.
absl::Status CheckNumbers(const Message& message, const FieldDescriptor& field,
                          const FieldRule& rule, const std::string& path) {
  const Reflection& reflection = *message.GetReflection();
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    const int64_t value = reflection.GetRepeatedInt64(message, &field, i);
    if (rule.range.Contains(static_cast<double>(value))) continue;
    return NotAllowed(absl::StrCat(path, "[", i, "]"), absl::StrCat(value), rule.range.ToString());
  }
  return absl::OkStatus();
}

}  // namespace

std::string FieldPath(absl::string_view parent, absl::string_view field, int index) {
  std::string path = absl::StrCat(parent, parent.empty() ? "" : ".", field);
  if (index >= 0) absl::StrAppend(&path, "[", index, "]");
  return path;
}

std::string ValueText(const Message& message, const FieldDescriptor& field, int index) {
  TextFormat::Printer printer;
  printer.SetSingleLineMode(true);
  printer.SetUseUtf8StringEscaping(false);
  std::string text;
  printer.PrintFieldValueToString(message, &field, index, &text);
  absl::StripTrailingAsciiWhitespace(&text);
  if (text.size() > kMaxValueText) text = text.substr(0, kMaxValueText) + "...";
  return field.message_type() == nullptr ? text : absl::StrCat("{", text, "}");
}

std::string QuotedText(absl::string_view text) {
  return text.size() <= kMaxValueText
             ? absl::StrCat("\"", absl::CEscape(text), "\"")
             : absl::StrCat("\"", absl::CEscape(text.substr(0, kMaxValueText)), "...\"");
}

std::string NumberText(double value) { return google::protobuf::SimpleDtoa(value); }

absl::Status NotAllowed(absl::string_view path, absl::string_view value,
                        absl::string_view allowed) {
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", value, " is not allowed; it must be ", allowed));
}

absl::Status CheckField(const Message& message, const FieldDescriptor& field,
                        const std::string& path) {
  if (IsNameField(field)) return CheckName(message, field, path);
  const FieldRule* rule = FindFieldRule(field);
  if (rule == nullptr) return absl::OkStatus();
  if (field.is_repeated()) return CheckNumbers(message, field, *rule, path);
  if ((field.has_presence() || rule->default_value) && IsAbsent(message, field)) {
    return absl::OkStatus();
  }
  const double value = NumberOf(message, field);
  if (field.enum_type() != nullptr) {
    if (EnumAllows(*field.enum_type(), *rule, static_cast<int>(value))) return absl::OkStatus();
    return NotAllowed(path, ValueText(message, field), AllowedEnumNames(*field.enum_type(), *rule));
  }
  if (rule->range.Contains(value)) return absl::OkStatus();
  return NotAllowed(path, ValueText(message, field), rule->range.ToString());
}

absl::Status CheckFields(const Message& message, const std::string& path) {
  const auto& unknown = message.GetReflection()->GetUnknownFields(message);
  if (!unknown.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.empty() ? message.GetDescriptor()->name() : path, ": field number ",
                     unknown.field(0).number(), " is not known to this version of emberd"));
  }
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message.GetDescriptor()->field(i);
    const absl::Status status = field.message_type() != nullptr
                                    ? ForEachChild(message, field, path, CheckFields)
                                    : CheckField(message, field, FieldPath(path, field.name()));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void FillFields(Message* message) {
  const Reflection& reflection = *message->GetReflection();
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message->GetDescriptor()->field(i);
    if (field.message_type() != nullptr && field.is_repeated()) {
      for (int k = 0; k < reflection.FieldSize(*message, &field); ++k) {
        FillFields(reflection.MutableRepeatedMessage(message, &field, k));
      }
    } else if (field.message_type() != nullptr) {
      if (reflection.HasField(*message, &field)) {
        FillFields(reflection.MutableMessage(message, &field));
      }
    } else if (const FieldRule* rule = FindFieldRule(field);
               rule != nullptr && !field.is_repeated()) {
      if (rule->default_value && IsAbsent(*message, field)) {
        SetNumber(message, field, *rule->default_value);
      } else if (!(field.has_presence() && IsAbsent(*message, field)) &&
                 NumberOf(*message, field) == 0) {
        SetNumber(message, field, 0);
      }
    }
  }
}

std::optional<float> ToFloat(double value) {
  // What the parser of text proto does: FLT_MAX in 8 digits is a little more than FLT_MAX.
  const float rounded = google::protobuf::io::SafeDoubleToFloat(value);
  if (std::isfinite(value) && !std::isfinite(rounded)) return std::nullopt;
  return rounded == 0 ? 0 : rounded;
}

}  // namespace emberd::config
