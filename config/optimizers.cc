#include "config/optimizers.h"

#include <cfloat>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/fields.h"
#include "config/rule_program.h"

namespace emberd::config {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using v1::OptimizerConfig;

// A slot of an optimizer kind. `initial_field` is the field of the kind that holds the initial
// value; empty: it is 0.
struct SlotRow {
  OptimizerConfig::KindCase kind;
  absl::string_view name;
  absl::string_view initial_field = "";
  bool one_per_row = false;
};

constexpr SlotRow kSlots[] = {
    {OptimizerConfig::kAdagrad, "accumulator", "initial_accumulator"},
    {OptimizerConfig::kRowwiseAdagrad, "accumulator", "initial_accumulator", true},
    {OptimizerConfig::kMomentum, "momentum"},
    {OptimizerConfig::kAdagradMomentum, "accumulator", "initial_accumulator"},
    {OptimizerConfig::kAdagradMomentum, "momentum", "initial_momentum"},
    {OptimizerConfig::kAdam, "momentum"},
    {OptimizerConfig::kAdam, "velocity"},
    {OptimizerConfig::kAdamw, "momentum"},
    {OptimizerConfig::kAdamw, "velocity"},
    {OptimizerConfig::kFtrl, "accumulator", "initial_accumulator"},
    {OptimizerConfig::kFtrl, "linear", "initial_linear"},
    {OptimizerConfig::kLaprop, "mu"},
    {OptimizerConfig::kLaprop, "nu"},
    {OptimizerConfig::kF2A, "accumulator", "initial_accumulator"},
    // Counts the updates of the row: the same for all of its columns.
    {OptimizerConfig::kF2A, "local_step", "", true},
    {OptimizerConfig::kRmsprop, "velocity"},
    {OptimizerConfig::kRmsprop, "momentum"},
};

// Averages and sums of gradients. Every other slot is a sum of squares or a count.
constexpr absl::string_view kSigned[] = {"linear", "momentum", "mu"};

// Field of OptimizerConfig that holds the kind; null if none is set.
const FieldDescriptor* KindField(const OptimizerConfig& optimizer) {
  return optimizer.GetReflection()->GetOneofFieldDescriptor(
      optimizer, OptimizerConfig::descriptor()->FindOneofByName("kind"));
}

bool IsHyperparameter(const FieldDescriptor* field) {
  return field != nullptr &&
         (field->cpp_type() == FieldDescriptor::CPPTYPE_FLOAT ||
          field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) &&
         !absl::StartsWith(field->name(), "initial_");
}

// The field `name` of the optimizer or of its kind if it can be set per step, else null.
const FieldDescriptor* FindHyperparameter(const OptimizerConfig& optimizer,
                                          absl::string_view name) {
  const FieldDescriptor* field = OptimizerConfig::descriptor()->FindFieldByName(std::string(name));
  if (IsHyperparameter(field)) return field;
  const FieldDescriptor* kind = KindField(optimizer);
  if (kind == nullptr) return nullptr;
  field = kind->message_type()->FindFieldByName(std::string(name));
  return IsHyperparameter(field) ? field : nullptr;
}

std::vector<std::string> HyperparameterNames(const OptimizerConfig& optimizer) {
  std::vector<std::string> names;
  const auto add = [&](const google::protobuf::Descriptor& type) {
    for (int i = 0; i < type.field_count(); ++i) {
      if (IsHyperparameter(type.field(i))) names.push_back(type.field(i)->name());
    }
  };
  add(*OptimizerConfig::descriptor());
  if (const FieldDescriptor* kind = KindField(optimizer)) add(*kind->message_type());
  for (const v1::HyperParameter& one : optimizer.custom().hyper_parameters()) {
    names.push_back(one.name());
  }
  return names;
}

// Bounds `<name>_min` and `<name>_max`, either of which may be absent.
absl::Status CheckClip(const v1::OptimizerConfig& optimizer, const std::string& path,
                       const std::string& name) {
  const auto* min = optimizer.GetDescriptor()->FindFieldByName(name + "_min");
  const auto* max = optimizer.GetDescriptor()->FindFieldByName(name + "_max");
  const google::protobuf::Reflection& reflection = *optimizer.GetReflection();
  if (!reflection.HasField(optimizer, min) || !reflection.HasField(optimizer, max) ||
      reflection.GetFloat(optimizer, min) <= reflection.GetFloat(optimizer, max)) {
    return absl::OkStatus();
  }
  return NotAllowed(FieldPath(path, min->name()), ValueText(optimizer, *min),
                    absl::StrCat("<= ", max->name(), " = ", ValueText(optimizer, *max)));
}

}  // namespace

absl::Status CheckOptimizer(const v1::OptimizerConfig& optimizer, const std::string& path) {
  for (const char* clip : {"clip_gradient", "clip_weight"}) {
    RETURN_IF_ERROR(CheckClip(optimizer, path, clip));
  }
  if (optimizer.adam().bias_correction() && optimizer.adam().sum_inside_sqrt()) {
    return NotAllowed(FieldPath(path, "adam.sum_inside_sqrt"), "true",
                      "false or absent with bias_correction");
  }
  // An update takes the difference of two such powers: of infinities, it is NaN. (Rounded up.)
  const double initial = optimizer.ftrl().initial_accumulator();
  const double power = optimizer.ftrl().learning_rate_power();
  const float least = std::ceil(-1000 * std::log(double{FLT_MAX}) / std::log(initial)) / 1000;
  if (initial > 1 && power < least) {
    return NotAllowed(FieldPath(path, "ftrl.learning_rate_power"), absl::StrCat(power),
                      absl::StrCat("at least ", least, " with initial_accumulator ", initial));
  }
  return optimizer.has_custom() ? CheckCustom(optimizer.custom(), FieldPath(path, "custom"))
                                : absl::OkStatus();
}

void CompleteOptimizer(v1::OptimizerConfig* optimizer) {
  if (optimizer->kind_case() == v1::OptimizerConfig::KIND_NOT_SET) optimizer->mutable_adagrad();
  if (optimizer->has_adam()) {
    v1::AdamConfig& adam = *optimizer->mutable_adam();
    if (!adam.has_epsilon()) adam.set_epsilon(adam.bias_correction() ? 1e-8f : 1e-7f);
    if (!adam.has_sum_inside_sqrt()) adam.set_sum_inside_sqrt(!adam.bias_correction());
  }
  FillFields(optimizer);
}

std::string OptimizerName(const OptimizerConfig& optimizer) {
  const FieldDescriptor* kind = KindField(optimizer);
  return kind == nullptr ? "" : kind->name();
}

std::vector<SlotInfo> OptimizerSlots(const OptimizerConfig& optimizer) {
  std::vector<SlotInfo> slots;
  for (const SlotRow& row : kSlots) {
    if (row.kind != optimizer.kind_case()) continue;
    SlotInfo slot{.name = std::string(row.name), .one_per_row = row.one_per_row};
    if (!row.initial_field.empty()) {
      const Message& kind = optimizer.GetReflection()->GetMessage(optimizer, KindField(optimizer));
      slot.initial_value = kind.GetReflection()->GetFloat(
          kind, kind.GetDescriptor()->FindFieldByName(std::string(row.initial_field)));
    }
    slots.push_back(std::move(slot));
  }
  for (const v1::CustomSlot& slot : optimizer.custom().slots()) {
    slots.push_back({.name = slot.name(), .initial_value = slot.initial_value()});
  }
  return slots;
}

absl::Status CheckSlotValues(const OptimizerConfig& optimizer, const std::string& table,
                             const std::string& slot, absl::Span<const int64_t> ids,
                             absl::Span<const float> values) {
  const bool any = slot.empty() || optimizer.has_custom() || absl::c_linear_search(kSigned, slot);
  if (any) return absl::OkStatus();
  const auto bad = absl::c_find_if(values, [](float value) { return value < 0; });
  if (bad == values.end()) return absl::OkStatus();
  const size_t columns = values.size() / ids.size();
  const size_t place = bad - values.begin();
  return absl::InvalidArgumentError(absl::StrCat(
      "slot '", slot, "' of table '", table, "' would be ", *bad, " for id ", ids[place / columns],
      ", column ", place % columns, "; its values must be at least 0"));
}

bool OptimizerNeedsStep(const OptimizerConfig& optimizer) {
  switch (optimizer.kind_case()) {
    case OptimizerConfig::kAdam:
      return optimizer.adam().bias_correction();
    case OptimizerConfig::kAdamw:
    case OptimizerConfig::kLaprop:
    case OptimizerConfig::kF2A:
      return true;
    case OptimizerConfig::kCustom:
      return RuleUsesStep(optimizer.custom());
    default:
      return false;
  }
}

absl::StatusOr<double> SetHyperparameter(OptimizerConfig* optimizer, absl::string_view name,
                                         double value) {
  const FieldDescriptor* field = FindHyperparameter(*optimizer, name);
  Message* target = optimizer;
  if (field == nullptr && optimizer->has_custom()) {
    for (v1::HyperParameter& one : *optimizer->mutable_custom()->mutable_hyper_parameters()) {
      if (one.name() == name) target = &one, field = one.GetDescriptor()->FindFieldByName("value");
    }
  } else if (field != nullptr && field->containing_type() != optimizer->GetDescriptor()) {
    target = optimizer->GetReflection()->MutableMessage(optimizer, KindField(*optimizer));
  }
  if (field == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("hyper-parameter ", QuotedText(name), ": ", OptimizerName(*optimizer),
                     " has no hyper-parameter of this name that can be set per step; ",
                     KnownNames("hyper-parameters", name, HyperparameterNames(*optimizer))));
  }
  double held = value == 0 ? 0 : value;  // -0 is written as 0, as FillFields does
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_FLOAT) {
    const std::optional<float> rounded = ToFloat(value);
    if (!rounded) return NotAllowed(name, NumberText(value), "a float32");
    held = *rounded;
  }
  const FieldRule* rule = FindFieldRule(*field);
  if (rule != nullptr && !rule->range.Contains(held)) {
    return NotAllowed(name, NumberText(value), rule->range.ToString());
  }
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_FLOAT) {
    target->GetReflection()->SetFloat(target, field, static_cast<float>(held));
  } else {
    target->GetReflection()->SetDouble(target, field, held);
  }
  return held;
}

absl::Status SetHyperparameters(OptimizerConfig* optimizer,
                                const std::map<std::string, double>& values) {
  OptimizerConfig changed = *optimizer;
  for (const auto& [name, value] : values) {
    RETURN_IF_ERROR(SetHyperparameter(&changed, name, value).status());
  }
  RETURN_IF_ERROR(CheckOptimizer(changed, ""));
  *optimizer = std::move(changed);
  return absl::OkStatus();
}

}  // namespace emberd::config
