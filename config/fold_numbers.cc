#include "config/fold_numbers.h"

#include <algorithm>
#include <string>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/text_format.h>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace emberd::config {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

bool IsKey(const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_STRING || field.name() == "index" ||
         field.name() == "upper";
}

std::string KeysOf(const Message& message) {
  std::string keys;
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = message.GetDescriptor()->field(i);
    if (field->is_repeated() || !IsKey(*field)) continue;
    std::string key;
    google::protobuf::TextFormat::PrintFieldValueToString(message, field, -1, &key);
    absl::StrAppend(&keys, key, "\n");  // texts are quoted
  }
  return keys;
}

template <typename Number>
Number Folded(const FieldDescriptor& field, Number from, Number to, Fold fold) {
  if (IsKey(field) || absl::StartsWith(field.name(), "max_")) return to;
  if (absl::StartsWith(field.name(), "largest_")) {
    return fold == Fold::kAdd ? std::max(from, to) : to;
  }
  if (fold == Fold::kAdd) return from + to;
  return to >= from ? to - from : to;  // counts only grow, except where their process has restarted
}

void FoldElements(const Message& from, const FieldDescriptor* field, Message* to, Fold fold) {
  const auto& reflection = *from.GetReflection();
  absl::flat_hash_map<std::string, int> places;
  for (int i = 0; i < reflection.FieldSize(*to, field); ++i) {
    places.emplace(KeysOf(reflection.GetRepeatedMessage(*to, field, i)), i);
  }
  for (int i = 0; i < reflection.FieldSize(from, field); ++i) {
    const Message& element = reflection.GetRepeatedMessage(from, field, i);
    const auto same = places.find(KeysOf(element));
    if (same != places.end()) {
      FoldNumbers(element, reflection.MutableRepeatedMessage(to, field, same->second), fold);
    } else if (fold == Fold::kAdd) {
      reflection.AddMessage(to, field)->CopyFrom(element);
    }
  }
}

}  // namespace

void FoldNumbers(const Message& from, Message* to, Fold fold) {
  const auto& reflection = *from.GetReflection();
  const FieldDescriptor* const count = from.GetDescriptor()->FindFieldByName("count");
  if (fold == Fold::kSubtract && count != nullptr &&
      reflection.GetInt64(from, count) > reflection.GetInt64(*to, count)) {
    return;  // its process has restarted
  }
  for (int i = 0; i < from.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = from.GetDescriptor()->field(i);
    const bool message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (field->is_repeated()) {
      if (message) FoldElements(from, field, to, fold);
    } else if (message) {
      if (!reflection.HasField(from, field)) continue;
      FoldNumbers(reflection.GetMessage(from, field), reflection.MutableMessage(to, field), fold);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_INT32) {
      reflection.SetInt32(
          to, field,
          Folded(*field, reflection.GetInt32(from, field), reflection.GetInt32(*to, field), fold));
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_INT64) {
      reflection.SetInt64(
          to, field,
          Folded(*field, reflection.GetInt64(from, field), reflection.GetInt64(*to, field), fold));
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) {
      reflection.SetDouble(to, field,
                           Folded(*field, reflection.GetDouble(from, field),
                                  reflection.GetDouble(*to, field), fold));
    }
  }
}

}  // namespace emberd::config
