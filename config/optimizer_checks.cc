#include "config/optimizer_checks.h"

#include "absl/strings/str_cat.h"
#include "config/fields.h"

namespace emberd::config {
namespace {

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
    absl::Status status = CheckClip(optimizer, path, clip);
    if (!status.ok()) return status;
  }
  if (optimizer.adam().bias_correction() && optimizer.adam().sum_inside_sqrt()) {
    return NotAllowed(FieldPath(path, "adam.sum_inside_sqrt"), "true",
                      "false or absent with bias_correction");
  }
  return absl::OkStatus();
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

}  // namespace emberd::config
