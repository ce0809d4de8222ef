#include "config/fields.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "emberd/v1/cluster.pb.h"
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
                    absl::StrCat("1 to 128 characters of [A-Za-z0-9_.-]",
                                 may_be_path ? ", or parts of them with a '/' between two" : ""));
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
    RETURN_IF_ERROR(
        visit(reflection.GetRepeatedMessage(message, &field, i), FieldPath(path, field.name(), i)));
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

std::string KeyOf(const google::protobuf::FieldDescriptor& field) {
  return absl::StrCat(field.containing_type()->name(), ".", field.name());
}

// True for fields that hold the name of a model, table, feature or token.
bool IsNameField(const google::protobuf::FieldDescriptor& field) {
  static constexpr absl::string_view kNameFields[] = {"ModelConfig.name",      "TableConfig.name",
                                                      "TableResource.name",    "FeatureConfig.name",
                                                      "TableConfig.seed_name", "Token.name"};
  return absl::c_linear_search(kNameFields, KeyOf(field));
}

// `path` is that of the field.
absl::Status CheckField(const Message& message, const FieldDescriptor& field,
                        const std::string& path) {
  if (IsNameField(field)) {
    const bool left_out = field.has_presence() && IsAbsent(message, field);
    return left_out ? absl::OkStatus() : CheckName(message, field, path);
  }
  const FieldRule* rule = FindFieldRule(field);
  if (rule == nullptr && field.type() == FieldDescriptor::TYPE_STRING && !field.is_repeated() &&
      absl::StrContains(message.GetReflection()->GetString(message, &field), '\0')) {
    return NotAllowed(path, ValueText(message, field), "a text without NUL bytes");
  }
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

constexpr Range kFinite = {};
constexpr Range kFraction = {.min = 0, .max = 1, .max_excluded = true};  // [0, 1)
constexpr Range AtLeast(double min) { return {.min = min}; }
constexpr Range AtMost(double max) { return {.max = max}; }
constexpr Range Above(double min) { return {.min = min, .min_excluded = true}; }
constexpr Range Between(double min, double max) { return {.min = min, .max = max}; }

constexpr double kMaxInt32 = 2147483647;
constexpr double kMiB = 1 << 20;
constexpr double kGiB = 1 << 30;
constexpr Range kBytes = Between(1, kMiB* kGiB);  // to 1 PiB: sums of budgets do not overflow
constexpr Range kShareOfMemory = Between(0, kMiB* kGiB);  // 0: another rule decides
constexpr Range kMilliseconds = Between(1, kMaxInt32);
constexpr Range kThreads = Between(0, 1024);
constexpr Range kIdsPerSample = Between(0, 65536);
constexpr Range kMinibatches = Between(0, 64);

constexpr int kIntegers[] = {v1::INT32, v1::INT64};

constexpr FieldRule kRules[] = {
    {"ModelConfig.seed", kFinite},

    {"TableConfig.vocabulary_size", Between(1, 1024 * kGiB)},
    {"TableConfig.embedding_dim", Between(1, 8192)},
    {"TableConfig.combiner", kFinite, v1::MEAN},
    {"TableConfig.max_ids_per_partition", AtLeast(0)},
    {"TableConfig.max_unique_ids_per_partition", AtLeast(0)},
    {"TableConfig.storage_dtype", kFinite, v1::FLOAT32, kIntegers},
    {"TableConfig.update_rounding", kFinite, v1::NEAREST},
    {"TableConfig.on_nonfinite_gradient", kFinite, v1::REJECT},
    {"TableConfig.result_mode", kFinite, v1::AUTO},
    {"TableConfig.residency", kFinite},

    // Samples are numbered by int32 everywhere.
    {"FeatureConfig.batch_size", Between(1, kMaxInt32), 1},
    {"FeatureConfig.output_shape", Between(1, kMaxInt32)},

    {"QuantizationConfig.lower", kFinite},
    {"QuantizationConfig.upper", kFinite},
    {"QuantizationConfig.num_buckets", AtLeast(2)},

    {"ConstantInitializer.value", kFinite},
    {"UniformInitializer.lower", kFinite},
    {"UniformInitializer.upper", kFinite},
    {"NormalInitializer.mean", kFinite},
    {"NormalInitializer.stddev", AtLeast(0)},

    {"OptimizerConfig.learning_rate", AtLeast(0), 0.01},
    {"OptimizerConfig.clip_gradient_min", kFinite},
    {"OptimizerConfig.clip_gradient_max", kFinite},
    {"OptimizerConfig.weight_decay_factor", AtLeast(0), 0},
    {"OptimizerConfig.multiply_weight_decay_factor_by_learning_rate", kFinite, false},
    {"OptimizerConfig.clip_weight_min", kFinite},
    {"OptimizerConfig.clip_weight_max", kFinite},

    {"AdagradConfig.initial_accumulator", Above(0), 0.1},
    {"RowwiseAdagradConfig.initial_accumulator", AtLeast(0), 0},
    {"RowwiseAdagradConfig.epsilon", AtLeast(0), 1e-8},
    {"MomentumConfig.momentum", kFraction, 0.9},
    {"AdagradMomentumConfig.momentum", kFraction, 0.9},
    {"AdagradMomentumConfig.beta2", {.min = 0, .max = 1, .min_excluded = true}, 1},
    {"AdagradMomentumConfig.epsilon", Above(0), 1e-10},
    {"AdagradMomentumConfig.exponent", Above(0), 2},
    {"AdagradMomentumConfig.initial_accumulator", AtLeast(0), 0.1},
    {"AdagradMomentumConfig.initial_momentum", kFinite, 0},
    {"AdamConfig.beta1", kFraction, 0.9},
    {"AdamConfig.beta2", kFraction, 0.999},
    {"AdamConfig.epsilon", Above(0)},
    {"AdamConfig.sum_inside_sqrt", kFinite},
    {"AdamWConfig.beta1", kFraction, 0.9},
    {"AdamWConfig.beta2", kFraction, 0.999},
    {"AdamWConfig.epsilon", Above(0), 1e-8},
    {"AdamWConfig.weight_decay", AtLeast(0), 0.01},
    {"FtrlConfig.learning_rate_power", AtMost(0), -0.5},
    {"FtrlConfig.l1", AtLeast(0), 0},
    {"FtrlConfig.l2", AtLeast(0), 0},
    {"FtrlConfig.beta", AtLeast(0), 0},
    {"FtrlConfig.initial_accumulator", Above(0), 0.1},
    {"FtrlConfig.initial_linear", kFinite, 0},
    {"LaPropConfig.beta1", kFraction, 0.9},
    {"LaPropConfig.beta2", kFraction, 0.95},
    {"LaPropConfig.epsilon", AtLeast(0), 1e-30},
    {"F2aConfig.rho", AtLeast(0), 0.5},
    {"F2aConfig.initial_accumulator", Above(0), 0.1},
    {"F2aConfig.l1", AtLeast(0), 0},
    {"F2aConfig.l2", AtLeast(0), 0},
    {"F2aConfig.max_lr_multiplier", Above(0), 1e6},
    {"RmsPropConfig.decay", kFraction, 0.9},
    {"RmsPropConfig.momentum", kFraction, 0},
    {"RmsPropConfig.epsilon", Above(0), 1e-7},
    {"CustomSlot.initial_value", kFinite},
    {"HyperParameter.value", kFinite},

    {"PlanConfig.rules", kFinite, v1::JAX},
    {"PlanConfig.sample_layout", kFinite, v1::SPLIT_THEN_STACK},
    {"PlanConfig.bucket_hash", kFinite, v1::HIGHWAY_HASH},
    {"PlanConfig.auto_stack", kFinite, true},
    {"PlanConfig.rotation", Between(0, 1023)},
    {"PlanConfig.activation_bytes_limit", AtLeast(0), 2 * kMiB},
    {"PlanConfig.shard_bytes_limit", AtLeast(0), 2 * kGiB},
    {"PlanConfig.short_stack_names", kFinite, true},
    {"PlanConfig.max_ids_per_chip_per_sample", kIdsPerSample},
    {"PlanConfig.max_minibatches_per_sparsecore", kMinibatches},

    {"StackLimit.max_ids_per_partition", AtLeast(0)},
    {"StackLimit.max_unique_ids_per_partition", AtLeast(0)},
    {"StackLimit.max_ids_per_chip_per_sample", kIdsPerSample},
    {"StackLimit.max_minibatches_per_sparsecore", kMinibatches},

    {"ClusterConfig.sparsecores_per_shard", Between(1, 64), 2},
    {"ClusterConfig.shard_threads", kThreads},
    {"ClusterConfig.coordinator_threads", kThreads},
    {"ClusterConfig.transport", kFinite, v1::ClusterConfig::AUTO},
    {"BudgetConfig.bytes_per_sparsecore", kShareOfMemory},
    {"BudgetConfig.batch_bytes", kShareOfMemory},
    {"BudgetConfig.max_batches", AtLeast(1), 1024},
    {"BudgetConfig.max_message_bytes", Between(1, kMaxInt32), kGiB},
    {"BudgetConfig.in_flight_bytes", kShareOfMemory},
    {"BudgetConfig.max_train_streams", Between(1, 16384), 512},
    {"BudgetConfig.client_requests", AtLeast(1), 256},
    {"BudgetConfig.client_in_flight_bytes", kBytes, 4 * kGiB},
    {"BudgetConfig.connection_calls", AtLeast(1), 1024},
    {"BudgetConfig.max_waiting_requests", AtLeast(1), 1024},
    {"BudgetConfig.shared_memory_bytes", kShareOfMemory},
    {"TimeoutConfig.batch_ttl_ms", kMilliseconds, 120000},
    {"TimeoutConfig.shard_call_ms", kMilliseconds, 30000},
    {"TimeoutConfig.drain_ms", kMilliseconds, 10000},
    {"TimeoutConfig.silent_stream_ms", kMilliseconds, 1800000},
    {"LoggingConfig.format", kFinite, v1::LoggingConfig::TEXT},
    {"LoggingConfig.level", kFinite, v1::LoggingConfig::INFO},
    {"LoggingConfig.slow_step_ms", kMilliseconds, 1000},
    {"StorageConfig.durability", kFinite, v1::StorageConfig::MEMORY},
    {"StorageConfig.every_seconds", Between(1, kMaxInt32), 600},
    {"StorageConfig.every_steps", AtLeast(0)},
    {"StorageConfig.keep", AtLeast(1), 3},
    {"StorageConfig.max_chain", Between(-1, 1000), 8},
    {"StorageConfig.copy_bytes", kShareOfMemory},
    {"StorageConfig.fsync", kFinite, v1::StorageConfig::INTERVAL},
    {"StorageConfig.fsync_interval_ms", Between(1, 60000), 1000},
    {"StorageConfig.log_bytes", Between(kMiB, kMiB* kGiB), 4 * kGiB},
    {"EvictionConfig.host_bytes_per_sparsecore", kShareOfMemory},
    {"EvictionConfig.spill_bytes", kShareOfMemory},

    {"Token.role", kFinite},
};

// Whole numbers are written out: 1099511627776, not 1.09951e+12.
std::string BoundText(double bound) {
  return bound == std::floor(bound) && std::abs(bound) < 0x1p53
             ? absl::StrCat(static_cast<int64_t>(bound))
             : absl::StrCat(bound);
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

absl::Status CheckFields(const Message& message, const std::string& path) {
  const auto& unknown = message.GetReflection()->GetUnknownFields(message);
  if (!unknown.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.empty() ? message.GetDescriptor()->name() : path, ": field number ",
                     unknown.field(0).number(), " is not known to this version of emberd"));
  }
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message.GetDescriptor()->field(i);
    RETURN_IF_ERROR(field.message_type() != nullptr
                        ? ForEachChild(message, field, path, CheckFields)
                        : CheckField(message, field, FieldPath(path, field.name())));
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

bool Range::Contains(double value) const {
  if (!std::isfinite(value)) return false;
  return (min_excluded ? value > min : value >= min) && (max_excluded ? value < max : value <= max);
}

std::string Range::ToString() const {
  const bool has_min = std::isfinite(min);
  const bool has_max = std::isfinite(max);
  if (has_min && has_max) {
    return absl::StrCat("in ", min_excluded ? "(" : "[", BoundText(min), ", ", BoundText(max),
                        max_excluded ? ")" : "]");
  }
  if (has_min) return absl::StrCat(min_excluded ? "> " : ">= ", BoundText(min));
  if (has_max) return absl::StrCat(max_excluded ? "< " : "<= ", BoundText(max));
  return "finite";
}

absl::Span<const FieldRule> FieldRules() { return kRules; }

const FieldRule* FindFieldRule(const google::protobuf::FieldDescriptor& field) {
  static const auto* const rules = [] {
    auto* map = new absl::flat_hash_map<std::string, const FieldRule*>;
    for (const FieldRule& rule : kRules) map->emplace(std::string(rule.field), &rule);
    return map;
  }();
  const auto found = rules->find(KeyOf(field));
  return found == rules->end() ? nullptr : found->second;
}

bool HasNameCharacters(absl::string_view name) {
  return !name.empty() && absl::c_all_of(name, [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-';
  });
}

bool HasPathCharacters(absl::string_view name) {
  return absl::c_all_of(absl::StrSplit(name, '/'), HasNameCharacters);
}

}  // namespace emberd::config
