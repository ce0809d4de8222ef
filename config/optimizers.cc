#include "config/optimizers.h"

#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "config/field_rules.h"
#include "config/fields.h"
#include "config/numbers.h"
#include "config/optimizer_checks.h"

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

}  // namespace

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
  return slots;
}

bool OptimizerNeedsStep(const OptimizerConfig& optimizer) {
  switch (optimizer.kind_case()) {
    case OptimizerConfig::kAdam:
      return optimizer.adam().bias_correction();
    case OptimizerConfig::kAdamw:
    case OptimizerConfig::kLaprop:
    case OptimizerConfig::kF2A:
      return true;
    default:
      return false;
  }
}

absl::StatusOr<double> HyperparameterValue(const OptimizerConfig& optimizer, absl::string_view name,
                                           double value) {
  const FieldDescriptor* field = FindHyperparameter(optimizer, name);
  if (field == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("hyper-parameter ", QuotedText(name), ": ", OptimizerName(optimizer),
                     " has none of this name that can be set per step"));
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
  return held;
}

absl::Status SetHyperparameters(OptimizerConfig* optimizer,
                                const std::map<std::string, double>& values) {
  OptimizerConfig changed = *optimizer;
  for (const auto& [name, value] : values) {
    const absl::StatusOr<double> held = HyperparameterValue(changed, name, value);
    if (!held.ok()) return held.status();
    const FieldDescriptor* field = FindHyperparameter(changed, name);
    Message* target = field->containing_type() == changed.GetDescriptor()
                          ? &changed
                          : changed.GetReflection()->MutableMessage(&changed, KindField(changed));
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_FLOAT) {
      target->GetReflection()->SetFloat(target, field, static_cast<float>(*held));
    } else {
      target->GetReflection()->SetDouble(target, field, *held);
    }
  }
  if (absl::Status status = CheckOptimizer(changed, ""); !status.ok()) return status;
  *optimizer = std::move(changed);
  return absl::OkStatus();
}

}  // namespace emberd::config
