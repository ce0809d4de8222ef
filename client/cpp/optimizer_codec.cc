#include "client/cpp/optimizer_codec.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "config/fields.h"

namespace emberd::client {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

bool IsParameter(const FieldDescriptor* field) {
  return field != nullptr && field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE;
}

std::string ParameterNames(const Descriptor& common, const Descriptor& kind) {
  std::string names;
  for (const Descriptor* descriptor : {&common, &kind}) {
    for (int i = 0; i < descriptor->field_count(); ++i) {
      if (!IsParameter(descriptor->field(i))) continue;
      absl::StrAppend(&names, names.empty() ? "" : ", ", descriptor->field(i)->name());
    }
  }
  return names;
}

std::string KindNames(const Descriptor& descriptor) {
  std::string names;
  const auto* kind = descriptor.FindOneofByName("kind");
  for (int i = 0; i < kind->field_count(); ++i) {
    absl::StrAppend(&names, i == 0 ? "" : ", ", kind->field(i)->name());
  }
  return names;
}

absl::Status SetParameter(const std::string& path, const FieldDescriptor* field, double value,
                          Message* message) {
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_FLOAT) {
    const std::optional<float> rounded = config::ToFloat(value);
    if (!rounded) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", config::NumberText(value),
                                                     " is not allowed; it must be a float32"));
    }
    message->GetReflection()->SetFloat(message, field, *rounded);
    return absl::OkStatus();
  }
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) {
    message->GetReflection()->SetDouble(message, field, value);
    return absl::OkStatus();
  }
  if (value != 0 && value != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", value, " is not allowed; a flag is 0 or 1"));
  }
  message->GetReflection()->SetBool(message, field, value == 1);
  return absl::OkStatus();
}

}  // namespace

absl::Status EncodeOptimizer(const Optimizer& optimizer, const std::string& path,
                             v1::OptimizerConfig* config) {
  const Descriptor& common = *v1::OptimizerConfig::descriptor();
  const FieldDescriptor* kind = common.FindFieldByName(optimizer.name);
  if (kind == nullptr || IsParameter(kind)) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": there is no optimizer \"", optimizer.name, "\"; there are: ", KindNames(common)));
  }
  Message* details = config->GetReflection()->MutableMessage(config, kind);
  for (const auto& [name, value] : optimizer.parameters) {
    const FieldDescriptor* shared = common.FindFieldByName(name);
    const FieldDescriptor* own = kind->message_type()->FindFieldByName(name);
    const bool is_shared = IsParameter(shared);
    if (!is_shared && !IsParameter(own)) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ".", name, ": ", optimizer.name,
          " has no such parameter; it has: ", ParameterNames(common, *kind->message_type())));
    }
    absl::Status status = SetParameter(absl::StrCat(path, ".", name), is_shared ? shared : own,
                                       value, is_shared ? config : details);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace emberd::client
