// CompleteModel: the checks that involve more than one field, and the defaults that depend on other
// fields. ModelFingerprint and FirstDifference: whether two complete configs are the same, and
// where they are not.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/config.h"
#include "config/fields.h"
#include "config/optimizers.h"
#include "config/shared_tables.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/util/message_differencer.h"

namespace emberd::config {
namespace {

using google::protobuf::Message;
using google::protobuf::util::MessageDifferencer;

constexpr int kMaxOutputRank = 8;

// Names of tables or features: unique. `what` is the field of ModelConfig.
template <typename Items>
absl::Status CheckList(const Items& items, absl::string_view what) {
  if (items.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": empty; at least one is needed"));
  }
  absl::flat_hash_map<std::string, int> first;
  for (int i = 0; i < items.size(); ++i) {
    const auto [entry, inserted] = first.emplace(items[i].name(), i);
    if (inserted) continue;
    return NotAllowed(
        FieldPath(FieldPath("", what, i), "name"), QuotedText(items[i].name()),
        absl::StrCat("unique; it is also the name of ", FieldPath("", what, entry->second)));
  }
  return absl::OkStatus();
}

// lower and upper bound of a message that has both. The difference must be a finite float: formulas
// divide by it.
template <typename Bounds>
absl::Status CheckBounds(const Bounds& bounds, const std::string& path, bool may_be_equal) {
  if (bounds.lower() > bounds.upper() || (bounds.lower() == bounds.upper() && !may_be_equal)) {
    return NotAllowed(FieldPath(path, "lower"), absl::StrCat(bounds.lower()),
                      absl::StrCat(may_be_equal ? "<=" : "<", " upper = ", bounds.upper()));
  }
  if (std::isfinite(bounds.upper() - bounds.lower())) return absl::OkStatus();
  return NotAllowed(FieldPath(path, "upper"), absl::StrCat(bounds.upper()),
                    "less than 3.4e38 above lower");
}

// A lookup divides by the distance of two buckets, as a product with 1 / distance.
absl::Status CheckQuantization(const v1::QuantizationConfig& range, const std::string& path) {
  RETURN_IF_ERROR(CheckBounds(range, path, false));
  const auto steps = static_cast<float>(range.num_buckets() - 1);
  if (std::isfinite(steps / (range.upper() - range.lower()))) return absl::OkStatus();
  return NotAllowed(FieldPath(path, "upper"), absl::StrCat(range.upper()),
                    absl::StrCat("more than ", steps / std::numeric_limits<float>::max(),
                                 " above lower, with ", range.num_buckets(), " buckets"));
}

// Values lie up to `deviations` from the mean, and are float32.
absl::Status CheckNormal(const v1::NormalInitializer& normal, const std::string& path,
                         double deviations) {
  const double room = std::numeric_limits<float>::max() - std::abs(double{normal.mean()});
  if (normal.stddev() * deviations <= room) return absl::OkStatus();
  return NotAllowed(FieldPath(path, "stddev"), absl::StrCat(normal.stddev()),
                    absl::StrCat("at most ", room / deviations, " with mean ", normal.mean(),
                                 ", so that all values are finite"));
}

absl::Status CheckTable(const v1::TableConfig& table, const std::string& path) {
  RETURN_IF_ERROR(CheckOptimizer(table.optimizer(), FieldPath(path, "optimizer")));
  if (table.has_quantization()) {
    RETURN_IF_ERROR(CheckQuantization(table.quantization(), FieldPath(path, "quantization")));
  }
  if (table.update_rounding() == v1::STOCHASTIC && table.storage_dtype() != v1::BFLOAT16 &&
      table.storage_dtype() != v1::FLOAT16) {
    return NotAllowed(FieldPath(path, "update_rounding"), "STOCHASTIC",
                      "NEAREST for a storage_dtype of FLOAT32");
  }
  const v1::InitializerConfig& initial = table.initializer();  // a kind that is not set has zeros
  const std::string place = FieldPath(path, "initializer");
  // A normal value is the quantile of a word of 52 bits: none is beyond 8.21 deviations.
  RETURN_IF_ERROR(CheckNormal(initial.normal(), FieldPath(place, "normal"), 8.21));
  RETURN_IF_ERROR(CheckNormal(initial.truncated_normal(), FieldPath(place, "truncated_normal"), 2));
  return CheckBounds(initial.uniform(), FieldPath(place, "uniform"), true);
}

template <typename List>
std::vector<std::string> NamesOf(const List& list) {
  std::vector<std::string> names;
  for (const auto& element : list) names.push_back(element.name());
  return names;
}

// Every feature names a table that exists, and every table is named by a feature.
absl::Status CheckReferences(const v1::ModelConfig& model) {
  absl::flat_hash_set<std::string> tables;
  for (const v1::TableConfig& table : model.tables()) tables.insert(table.name());
  absl::flat_hash_set<std::string> used;
  for (int i = 0; i < model.features_size(); ++i) {
    const std::string& table = model.features(i).table();
    if (!tables.contains(table)) {
      return NotAllowed(
          FieldPath(FieldPath("", "features", i), "table"), QuotedText(table),
          absl::StrCat("the name of a table; ", KnownNames("tables", table, TableNames(model))));
    }
    used.insert(table);
  }
  for (int i = 0; i < model.tables_size(); ++i) {
    if (used.contains(model.tables(i).name())) continue;
    return NotAllowed(FieldPath(FieldPath("", "tables", i), "name"),
                      QuotedText(model.tables(i).name()), "used by at least one feature");
  }
  return absl::OkStatus();
}

// The samples that an output_shape stands for, which a batch_size must not contradict.
absl::Status CheckOutputShape(const v1::FeatureConfig& feature, const std::string& path) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const std::string shape_path = FieldPath(path, "output_shape");
  const std::string text = absl::StrCat("[", absl::StrJoin(feature.output_shape(), ", "), "]");
  if (feature.output_shape_size() > kMaxOutputRank) {
    return NotAllowed(shape_path, text,
                      absl::StrCat("a list of at most ", kMaxOutputRank, " dimensions"));
  }
  int64_t samples = 1;
  for (const int64_t extent : feature.output_shape()) {
    samples *= extent;
    if (samples > kMax) {
      return NotAllowed(shape_path, text, absl::StrCat("of at most ", kMax, " samples in all"));
    }
  }
  if (feature.output_shape().empty() || feature.batch_size() == 0 ||
      feature.batch_size() == samples) {
    return absl::OkStatus();
  }
  return NotAllowed(FieldPath(path, "batch_size"), absl::StrCat(feature.batch_size()),
                    absl::StrCat("absent, or ", samples, ", the product of output_shape ", text));
}

absl::Status CheckModel(const v1::ModelConfig& model) {
  RETURN_IF_ERROR(CheckFields(model));
  RETURN_IF_ERROR(CheckList(model.tables(), "tables"));
  RETURN_IF_ERROR(CheckList(model.features(), "features"));
  for (int i = 0; i < model.features_size(); ++i) {
    RETURN_IF_ERROR(CheckOutputShape(model.features(i), FieldPath("", "features", i)));
  }
  for (int i = 0; i < model.tables_size(); ++i) {
    RETURN_IF_ERROR(CheckTable(model.tables(i), FieldPath("", "tables", i)));
  }
  RETURN_IF_ERROR(CheckReferences(model));
  RETURN_IF_ERROR(CheckResources(model));
  return CheckOptimizer(model.optimizer(), "optimizer");
}

// A step updates all tables of a model or none of them.
absl::Status CheckAllOrNone(const v1::ModelConfig& complete) {
  for (int i = 1; i < complete.tables_size(); ++i) {
    if (complete.tables(i).optimizer().has_none() == !CanTrain(complete)) continue;
    const std::string first = OptimizerName(complete.tables(0).optimizer());
    return NotAllowed(FieldPath(FieldPath("", "tables", i), "optimizer"),
                      OptimizerName(complete.tables(i).optimizer()),
                      absl::StrCat("none for all tables of a model, or for no table; tables[0] "
                                   "has ",
                                   first));
  }
  return absl::OkStatus();
}

void CompleteTable(const v1::OptimizerConfig& model_optimizer, v1::TableConfig* table) {
  if (!table->has_optimizer()) *table->mutable_optimizer() = model_optimizer;
  CompleteOptimizer(table->mutable_optimizer());
  v1::InitializerConfig& initializer = *table->mutable_initializer();
  if (initializer.kind_case() == v1::InitializerConfig::KIND_NOT_SET) {
    initializer.mutable_truncated_normal()->set_stddev(
        static_cast<float>(1 / std::sqrt(static_cast<double>(table->embedding_dim()))));
  }
}

std::string GroupPath(int group) { return FieldPath("plan", "groups", group); }
std::string MemberPath(int group, int member) {
  return FieldPath(GroupPath(group), "tables", member);
}

// What tables of a stack must share: the stack's rows are stored, looked up and updated by one set
// of settings.
absl::Status CheckStackable(const v1::TableConfig& first, const v1::TableConfig& table,
                            const std::string& path) {
  const char* unequal =
      !MessageDifferencer::Equals(first.optimizer(), table.optimizer()) ? "optimizer"
      : first.has_quantization() != table.has_quantization() ||
              !MessageDifferencer::Equals(first.quantization(), table.quantization())
          ? "quantization"
      : first.storage_dtype() != table.storage_dtype()                 ? "storage_dtype"
      : first.update_rounding() != table.update_rounding()             ? "update_rounding"
      : first.on_nonfinite_gradient() != table.on_nonfinite_gradient() ? "on_nonfinite_gradient"
      : first.result_mode() != table.result_mode()                     ? "result_mode"
                                                                       : nullptr;
  if (unequal == nullptr) return absl::OkStatus();
  return NotAllowed(path, QuotedText(table.name()),
                    absl::StrCat("a table with the same ", unequal, " as ",
                                 QuotedText(first.name()), ", the first of the group"));
}

class GroupChecker {
 public:
  explicit GroupChecker(const v1::ModelConfig& model) {
    for (const v1::TableConfig& table : model.tables()) tables_.emplace(table.name(), &table);
  }

  absl::Status CheckTables(const v1::StackGroup& group, int index) {
    if (group.tables().empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(GroupPath(index), ".tables: empty; at least one is needed"));
    }
    for (int i = 0; i < group.tables_size(); ++i) {
      const std::string path = MemberPath(index, i);
      const std::string quoted = QuotedText(group.tables(i));
      const auto table = tables_.find(group.tables(i));
      if (table == tables_.end()) return NotAllowed(path, quoted, "the name of a table");
      const auto [earlier, inserted] = places_.emplace(group.tables(i), path);
      if (!inserted) {
        return NotAllowed(path, quoted,
                          absl::StrCat("in one group only, once; it is also ", earlier->second));
      }
      RETURN_IF_ERROR(CheckStackable(*tables_.at(group.tables(0)), *table->second, path));
    }
    return absl::OkStatus();
  }

  absl::Status CheckName(const v1::StackGroup& group, int index) {
    const std::string path = FieldPath(GroupPath(index), "name");
    if (!HasNameCharacters(group.name())) {
      return NotAllowed(path, QuotedText(group.name()), "characters of [A-Za-z0-9_.-]");
    }
    const auto [earlier, inserted] = names_.emplace(group.name(), index);
    if (inserted) return absl::OkStatus();
    return NotAllowed(path, QuotedText(group.name()),
                      absl::StrCat("unique; it is also the name of ", GroupPath(earlier->second)));
  }

 private:
  absl::flat_hash_map<std::string, const v1::TableConfig*> tables_;
  absl::flat_hash_map<std::string, std::string> places_;  // table -> where it stands in a group
  absl::flat_hash_map<std::string, int> names_;           // group name -> group
};

// Checks the groups of a model whose tables are checked and complete, and names those without a
// name. `model` may be half named on failure.
absl::Status CompleteGroups(v1::ModelConfig* model) {
  GroupChecker checker(*model);
  for (int i = 0; i < model->plan().groups_size(); ++i) {
    v1::StackGroup& group = *model->mutable_plan()->mutable_groups(i);
    RETURN_IF_ERROR(checker.CheckTables(group, i));
    if (group.name().empty()) group.set_name(absl::StrJoin(group.tables(), "_"));
    RETURN_IF_ERROR(checker.CheckName(group, i));
  }
  return absl::OkStatus();
}

// What TensorFlow does where the two systems differ; a field that is given stays.
void CompleteTensorFlowPlan(v1::PlanConfig* plan) {
  if (plan->sample_layout() == v1::SAMPLE_LAYOUT_UNSPECIFIED) {
    plan->set_sample_layout(v1::STACK_THEN_SPLIT);
  }
  if (plan->bucket_hash() == v1::BUCKET_HASH_UNSPECIFIED) plan->set_bucket_hash(v1::ID_RANGE);
  if (!plan->has_short_stack_names()) plan->set_short_stack_names(false);
}

// Keeps the first difference that is reported. Message 1 is the declared model, message 2 the
// requested one.
class FirstDifferenceReporter : public MessageDifferencer::Reporter {
 public:
  using Path = std::vector<MessageDifferencer::SpecificField>;

  FirstDifferenceReporter(absl::string_view first, absl::string_view second)
      : one_(first), other_(second) {}

  void ReportAdded(const Message& declared, const Message& requested, const Path& path) override {
    Report(path, ValueOrAbsent(declared, path), Value(requested, path, path.back().new_index));
  }
  void ReportDeleted(const Message& declared, const Message& requested, const Path& path) override {
    Report(path, Value(declared, path, path.back().index), ValueOrAbsent(requested, path));
  }
  void ReportModified(const Message& declared, const Message& requested,
                      const Path& path) override {
    Report(path, Value(declared, path, path.back().index),
           Value(requested, path, path.back().new_index));
  }

  const std::string& first() const { return first_; }

 private:
  // `message` is the one that holds the last field of `path`.
  static std::string Value(const Message& message, const Path& path, int index) {
    return ValueText(message, *path.back().field, index);
  }
  // For the side on which a field is not set: plain proto3 fields have a value all the same.
  static std::string ValueOrAbsent(const Message& message, const Path& path) {
    const auto& field = *path.back().field;
    return field.is_repeated() || field.has_presence() ? "absent" : Value(message, path, -1);
  }

  void Report(const Path& path, const std::string& declared, const std::string& requested) {
    if (!first_.empty()) return;
    std::string name;
    for (const auto& step : path) name = FieldPath(name, step.field->name(), step.index);
    first_ = absl::StrCat(name, ": ", declared, " ", one_, ", ", requested, " ", other_);
  }

  const absl::string_view one_, other_;
  std::string first_;
};

}  // namespace

std::vector<std::string> TableNames(const v1::ModelConfig& model) {
  return NamesOf(model.tables());
}

bool HasAssignedTable(const v1::ModelConfig& model) {
  return std::any_of(model.tables().begin(), model.tables().end(),
                     [](const auto& table) { return table.initializer().has_assigned(); });
}

std::vector<std::string> FeatureNames(const v1::ModelConfig& model) {
  return NamesOf(model.features());
}

absl::StatusOr<DenseShape> SamplesOf(absl::Span<const int64_t> ids,
                                     absl::Span<const int64_t> output_shape) {
  const size_t rank = std::max<size_t>(1, output_shape.size());
  const absl::Span<const int64_t> inner =
      output_shape.empty() ? output_shape : output_shape.subspan(1);
  const bool fits = ids.size() == rank || ids.size() == rank + 1;
  if (ids.size() == 1 || (fits && ids.subspan(1, rank - 1) == inner)) {
    DenseShape read{1, ids.size() > rank ? ids.back() : 1};
    for (const int64_t extent : ids.subspan(0, rank)) {
      if (__builtin_mul_overflow(read.samples, extent, &read.samples)) {
        read.samples = std::numeric_limits<int64_t>::max();
      }
    }
    return read;
  }
  const std::string any = absl::StrCat("[any, ", absl::StrJoin(inner, ", "));
  return absl::InvalidArgumentError(absl::StrCat(
      "shape is [", absl::StrJoin(ids, ", "), "]; it must be [samples]",
      rank == 1
          ? " or [samples, ids_per_sample]"
          : absl::StrCat(", ", any, "] or ", any, ", ids_per_sample], because output_shape is [",
                         absl::StrJoin(output_shape, ", "), "]")));
}

int64_t SampleBlock(const v1::FeatureConfig& feature) {
  int64_t block = 1;
  for (int d = 1; d < feature.output_shape_size(); ++d) block *= feature.output_shape(d);
  return block;
}

absl::Status CheckSamples(const v1::FeatureConfig& feature, int64_t samples) {
  const int64_t block = SampleBlock(feature);
  if (samples % block == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("feature '", feature.name(), "' has ", samples, " samples; its output_shape [",
                   absl::StrJoin(feature.output_shape(), ", "), "] needs a multiple of ", block));
}

absl::Status CompleteModel(v1::ModelConfig* model) {
  RETURN_IF_ERROR(CheckModel(*model));
  v1::ModelConfig complete = *model;
  CompleteOptimizer(complete.mutable_optimizer());
  for (v1::TableConfig& table : *complete.mutable_tables()) {
    CompleteTable(complete.optimizer(), &table);
    if (!complete.enable_variable_deduplication()) table.clear_resource();
  }
  RETURN_IF_ERROR(CheckAllOrNone(complete));
  for (v1::FeatureConfig& feature : *complete.mutable_features()) {
    if (feature.output_shape().empty()) continue;
    feature.set_batch_size(feature.output_shape(0) * SampleBlock(feature));
  }
  v1::PlanConfig* plan = complete.mutable_plan();
  if (plan->rules() == v1::TENSORFLOW) CompleteTensorFlowPlan(plan);
  FillFields(&complete);
  RETURN_IF_ERROR(CheckViews(complete));
  // Groups compare complete optimizers, so that a default and the same value written out are equal.
  RETURN_IF_ERROR(CompleteGroups(&complete));
  *model = std::move(complete);
  return absl::OkStatus();
}

uint64_t ModelFingerprint(const v1::ModelConfig& model) {
  // Complete configs have no maps and no unknown fields, so their deterministic serialization is
  // canonical.
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    model.SerializeToCodedStream(&coded);
  }
  return std::max<uint64_t>(Sha256Prefix(bytes), 1);
}

std::string FirstDifference(const v1::ModelConfig& declared, const v1::ModelConfig& requested,
                            absl::string_view first, absl::string_view second) {
  FirstDifferenceReporter reporter(first, second);
  MessageDifferencer differencer;
  differencer.ReportDifferencesTo(&reporter);
  differencer.Compare(declared, requested);
  return reporter.first();
}

bool DifferInSamplesAlone(const v1::ModelConfig& declared, v1::ModelConfig requested) {
  AdoptSeedNames(declared, &requested);
  for (int f = 0; f < std::min(declared.features_size(), requested.features_size()); ++f) {
    const v1::FeatureConfig& from = declared.features(f);
    v1::FeatureConfig& to = *requested.mutable_features(f);
    to.set_batch_size(from.batch_size());
    if (from.output_shape().empty() || to.output_shape().empty()) continue;
    to.set_output_shape(0, from.output_shape(0));
  }
  return ModelFingerprint(declared) == ModelFingerprint(requested);
}

}  // namespace emberd::config
