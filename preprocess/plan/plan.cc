#include "preprocess/plan/plan.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/sha256.h"
#include "base/status.h"
#include "config/optimizers.h"
#include "config/shared_tables.h"
#include "preprocess/batch/csr.h"

namespace emberd::preprocess {
namespace {

constexpr size_t kLongestName = 50;
constexpr size_t kHashDigits = 12;
constexpr double kMostBytes = 9e18;  // so that sums of them are numbers of 64 bits

struct OpenStack {
  std::vector<int> tables;
  int64_t activation_bytes = 0;
  int64_t shard_bytes = 0;
  int64_t rows = 0;
};

int64_t ActivationBytes(const StackCandidate& table) {
  return 4 * table.width * table.samples_per_sparsecore;
}

int64_t ShardBytes(const StackCandidate& table, const StackingLimits& limits) {
  return 4 * table.width * table.padded_rows / limits.shards;
}

void Add(const StackCandidate& table, int index, const StackingLimits& limits, OpenStack* stack) {
  stack->tables.push_back(index);
  stack->activation_bytes += ActivationBytes(table);
  stack->shard_bytes += ShardBytes(table, limits);
  stack->rows += table.padded_rows;
}

// Puts each table into the first stack that `fits` accepts, else into a new one.
template <typename Fits>
std::vector<std::vector<int>> FirstFit(absl::Span<const StackCandidate> tables,
                                       const StackingLimits& limits, Fits fits) {
  std::vector<OpenStack> stacks;
  for (size_t t = 0; t < tables.size(); ++t) {
    OpenStack* home = nullptr;
    for (OpenStack& stack : stacks) {
      const StackCandidate& first = tables[stack.tables.front()];
      if (first.group != tables[t].group || first.width != tables[t].width) continue;
      if (fits(stack, tables[t])) {
        home = &stack;
        break;
      }
    }
    if (home == nullptr) home = &stacks.emplace_back();
    Add(tables[t], static_cast<int>(t), limits, home);
  }
  std::vector<std::vector<int>> result;
  for (OpenStack& stack : stacks) result.push_back(std::move(stack.tables));
  return result;
}

constexpr int64_t kMaxPartitions = int64_t{1} << 20;

uint64_t PlanFingerprint(const Plan& plan) {
  // Names go last in their line and are made of a closed alphabet, so no two plans share a text.
  std::string text = absl::StrCat("plan 1\n", plan.topology.shards, " ",
                                  plan.topology.sparsecores_per_shard, "\n");
  for (const StackPlan& stack : plan.stacks) {
    absl::StrAppend(&text, "stack ", stack.embedding_dim, " ", stack.rows_per_partition, " ",
                    stack.limits.ids, " ", stack.limits.unique, " ", stack.name, "\n");
    for (const TablePlan& table : stack.tables) {
      absl::StrAppend(&text, "table ", table.table, " ", table.vocabulary_size, " ");
      absl::StrAppend(&text, table.padded_vocabulary_size, " ", table.embedding_dim, " ");
      absl::StrAppend(&text, table.row_offset, " ", table.shard_rotation, " ", table.name, "\n");
    }
    for (const FeaturePlan& feature : stack.features) {
      absl::StrAppend(&text, "feature ", feature.feature, " ", feature.table_in_stack, " ");
      absl::StrAppend(&text, feature.batch_size, " ", feature.row_offset, " ", feature.name, "\n");
    }
  }
  return std::max<uint64_t>(Sha256Prefix(text), 1);
}

// What one SparseCore looks up of these features: of the samples of all replicas, or with the rules
// of TensorFlow, of those of one, whose SparseCores are those of a shard.
int64_t SamplesPerSparsecore(const v1::ModelConfig& model, const Topology& topology,
                             absl::Span<const int> features) {
  const bool of_one = model.plan().rules() == v1::TENSORFLOW;
  int64_t samples = 0;
  for (const int f : features) {
    const int64_t batch = model.features(f).batch_size();
    samples += of_one ? batch : batch / topology.partitions();
  }
  return of_one ? samples / topology.sparsecores_per_shard : samples;
}

// Bytes of weights and slots of one row.
int64_t RowBytes(const StackPlan& stack, const v1::TableConfig& table) {
  int64_t bytes = config::WeightBytes(table.storage_dtype()) * stack.embedding_dim;
  for (const config::SlotInfo& slot : config::OptimizerSlots(table.optimizer())) {
    bytes += 4 * (slot.one_per_row ? 1 : stack.embedding_dim);
  }
  return bytes;
}

// A stack before its offsets are known.
struct StackDraft {
  std::string name;
  std::vector<int> tables;  // indices in ModelConfig.tables, in stack order
  bool sort_features = false;
};

class Planner {
 public:
  Planner(const v1::ModelConfig& model, const Topology& topology)
      : model_(model), topology_(topology), partitions_(topology.partitions()) {}

  absl::StatusOr<Plan> Make() {
    RETURN_IF_ERROR(IndexTables());
    RETURN_IF_ERROR(DraftGroups());
    DraftShared();
    DraftRest();
    Plan plan;
    plan.topology = topology_;
    plan.table_at.resize(model_.tables_size());
    plan.feature_at.resize(model_.features_size());
    absl::flat_hash_set<std::string> names;
    double bytes = 0;
    for (const StackDraft& draft : drafts_) {
      if (!names.insert(draft.name).second) {
        return absl::InvalidArgumentError(absl::StrCat("plan: two stacks are named '", draft.name,
                                                       "'; give one of them a name in groups"));
      }
      ASSIGN_OR_RETURN(StackPlan stack,
                       PlaceStack(draft, static_cast<int>(plan.stacks.size()), &plan));
      const int64_t row_bytes = RowBytes(stack, model_.tables(draft.tables.front()));
      bytes += static_cast<double>(stack.rows_per_partition * row_bytes) * partitions_;
      if (bytes > kMostBytes) {
        return absl::InvalidArgumentError(absl::StrCat(
            "tables: up to stack '", stack.name, "' they take ", bytes, " bytes; they may take ",
            kMostBytes, " with their slots. Declare fewer rows or columns"));
      }
      plan.stacks.push_back(std::move(stack));
    }
    plan.fingerprint = PlanFingerprint(plan);
    return plan;
  }

 private:
  absl::Status IndexTables() {
    for (int t = 0; t < model_.tables_size(); ++t) table_index_[model_.tables(t).name()] = t;
    features_of_.resize(model_.tables_size());
    for (int f = 0; f < model_.features_size(); ++f) {
      const auto found = table_index_.find(model_.features(f).table());
      if (found == table_index_.end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "features[", f, "].table: there is no table '", model_.features(f).table(), "'"));
      }
      if (features_of_[found->second].empty()) by_appearance_.push_back(found->second);
      features_of_[found->second].push_back(f);
    }
    // A table without a feature is refused by config; it would still get a place of its own here.
    for (int t = 0; t < model_.tables_size(); ++t) {
      if (features_of_[t].empty()) by_appearance_.push_back(t);
    }
    taken_.resize(model_.tables_size());
    return absl::OkStatus();
  }

  bool ShortNames() const {
    const v1::PlanConfig& plan = model_.plan();
    return plan.has_short_stack_names() ? plan.short_stack_names() : !TensorFlowRules();
  }
  bool TensorFlowRules() const { return model_.plan().rules() == v1::TENSORFLOW; }

  // TensorFlow lets the next table begin on the next chip, which is a shard here.
  int64_t Rotation() const {
    if (model_.plan().has_rotation()) return model_.plan().rotation();
    return TensorFlowRules() ? topology_.sparsecores_per_shard : DefaultRotation(partitions_);
  }

  // What the tables of any stack must have in common, besides their width.
  static std::string KernelKey(const v1::TableConfig& table) {
    return absl::StrCat(table.optimizer().SerializeAsString(), "|",
                        table.quantization().SerializeAsString(), "|", table.has_quantization(),
                        "|", table.storage_dtype(), "|", table.update_rounding(), "|",
                        table.on_nonfinite_gradient(), "|", table.result_mode());
  }

  std::vector<std::string> NamesOf(const std::vector<int>& tables) const {
    std::vector<std::string> names;
    for (int t : tables) names.push_back(model_.tables(t).name());
    return names;
  }

  absl::Status DraftGroups() {
    for (int g = 0; g < model_.plan().groups_size(); ++g) {
      const v1::StackGroup& group = model_.plan().groups(g);
      const std::string path = absl::StrCat("plan.groups[", g, "]");
      StackDraft draft;
      for (const std::string& name : group.tables()) {
        const auto found = table_index_.find(name);
        if (found == table_index_.end()) {
          return absl::InvalidArgumentError(
              absl::StrCat(path, ".tables: there is no table '", name, "'"));
        }
        const int t = found->second;
        if (taken_[t]) {
          return absl::InvalidArgumentError(
              absl::StrCat(path, ".tables: table '", name, "' is already in a group"));
        }
        taken_[t] = true;
        if (!draft.tables.empty()) {
          const v1::TableConfig& first = model_.tables(draft.tables.front());
          if (KernelKey(first) != KernelKey(model_.tables(t))) {
            return absl::InvalidArgumentError(absl::StrCat(
                path, ".tables: '", first.name(), "' and '", name,
                "' differ in optimizer, quantization, storage_dtype, update_rounding, "
                "on_nonfinite_gradient or result_mode; these must be equal in a stack"));
          }
        }
        draft.tables.push_back(t);
      }
      if (draft.tables.empty()) {
        return absl::InvalidArgumentError(
            absl::StrCat(path, ".tables: empty; it needs at least one"));
      }
      draft.name =
          group.name().empty() ? StackName(NamesOf(draft.tables), ShortNames()) : group.name();
      drafts_.push_back(std::move(draft));
    }
    return absl::OkStatus();
  }

  // Where the rows of a shared table lie must not depend on what else its models have: alone in a
  // stack, it has no rotation and no offset.
  void DraftShared() {
    absl::flat_hash_map<std::string, std::vector<int>> views;  // by resource; the first is stored
    for (int t = 0; t < model_.tables_size(); ++t) {
      const v1::TableConfig& table = model_.tables(t);
      if (config::IsShared(table)) views[config::ResourceText(table.resource())].push_back(t);
    }
    for (int t : by_appearance_) {
      if (taken_[t] || !config::IsShared(model_.tables(t))) continue;
      const std::vector<int>& tables = views.at(config::ResourceText(model_.tables(t).resource()));
      for (int view : tables) taken_[view] = true;
      drafts_.push_back({model_.tables(tables.front()).name(), tables,
                         /*sort_features=*/!TensorFlowRules()});
    }
  }

  StackCandidate Candidate(int t) const {
    const v1::TableConfig& table = model_.tables(t);
    StackCandidate candidate;
    candidate.name = table.name();
    candidate.group = KernelKey(table);
    if (!TensorFlowRules()) absl::StrAppend(&candidate.group, "|", table.combiner());
    candidate.width = PaddedWidth(table.embedding_dim());
    candidate.padded_rows = PaddedRows(table.vocabulary_size(), partitions_);
    candidate.samples_per_sparsecore = SamplesPerSparsecore(model_, topology_, features_of_[t]);
    return candidate;
  }

  // The tables that stand in no group.
  void DraftRest() {
    std::vector<int> rest;
    for (int t : by_appearance_) {
      if (!taken_[t]) rest.push_back(t);
    }
    const bool automatic = !model_.plan().has_auto_stack() || model_.plan().auto_stack();
    if (!automatic) {
      for (int t : rest) {
        drafts_.push_back({model_.tables(t).name(), {t}, /*sort_features=*/!TensorFlowRules()});
      }
      return;
    }
    if (TensorFlowRules()) {
      std::sort(rest.begin(), rest.end(),
                [this](int a, int b) { return model_.tables(a).name() < model_.tables(b).name(); });
    }
    std::vector<StackCandidate> candidates;
    for (int t : rest) candidates.push_back(Candidate(t));
    StackingLimits limits;
    if (model_.plan().has_activation_bytes_limit()) {
      limits.activation_bytes = model_.plan().activation_bytes_limit();
    }
    if (model_.plan().has_shard_bytes_limit())
      limits.shard_bytes = model_.plan().shard_bytes_limit();
    limits.shards = topology_.shards;
    const auto stacks = TensorFlowRules() ? StackLikeTensorFlow(candidates, limits)
                                          : StackLikeJax(candidates, limits);
    for (const std::vector<int>& stack : stacks) {
      StackDraft draft;
      for (int i : stack) draft.tables.push_back(rest[i]);
      draft.name = StackName(NamesOf(draft.tables), ShortNames());
      drafts_.push_back(std::move(draft));
    }
  }

  // The tightest limit of the tables; 0 if none has one.
  static int64_t FoldLimit(int64_t folded, int64_t limit) {
    if (folded == 0 || limit == 0) return std::max(folded, limit);
    return std::min(folded, limit);
  }

  absl::Status CheckRows(int table, const std::string& stack, int64_t rows_per_partition) const {
    const int on_shard = topology_.sparsecores_per_shard;
    const int64_t most = MaxRowsPerPartition(on_shard);
    if (rows_per_partition <= most) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "tables[", table, "].vocabulary_size: ", model_.tables(table).vocabulary_size(),
        " makes stack '", stack, "' ", rows_per_partition, " rows long in each of ", partitions_,
        " partitions; with ", on_shard, " SparseCores per shard a partition holds at most ", most,
        " rows of a stack. Use more shards, or put the tables into several groups"));
  }

  absl::StatusOr<StackPlan> PlaceStack(const StackDraft& draft, int index, Plan* plan) const {
    StackPlan stack;
    stack.name = draft.name;
    const int64_t rotation = Rotation();
    std::vector<std::pair<int, int>> features;  // (index in the config, position of the table)
    for (size_t k = 0; k < draft.tables.size(); ++k) {
      const int t = draft.tables[k];
      const v1::TableConfig& config = model_.tables(t);
      stack.limits.ids = FoldLimit(stack.limits.ids, config.max_ids_per_partition());
      stack.limits.unique = FoldLimit(stack.limits.unique, config.max_unique_ids_per_partition());
      // Further tables of a resource are views of the first.
      const int position = config.has_resource() ? 0 : static_cast<int>(k);
      plan->table_at[t] = {index, position};
      for (int f : features_of_[t]) features.push_back({f, position});
      if (config.has_resource() && k > 0) continue;
      TablePlan table;
      table.table = t;
      table.name = config.name();
      table.vocabulary_size = config.vocabulary_size();
      table.padded_vocabulary_size = PaddedRows(config.vocabulary_size(), partitions_);
      table.embedding_dim = config.embedding_dim();
      table.row_offset = stack.rows_per_partition;
      const int64_t shift = static_cast<int64_t>(k) * rotation % partitions_;
      table.shard_rotation = static_cast<int>((shift + partitions_) % partitions_);
      stack.rows_per_partition += table.padded_vocabulary_size / partitions_;
      RETURN_IF_ERROR(CheckRows(t, draft.name, stack.rows_per_partition));
      stack.embedding_dim =
          std::max(stack.embedding_dim, static_cast<int>(PaddedWidth(config.embedding_dim())));
      stack.tables.push_back(std::move(table));
    }
    std::sort(features.begin(), features.end());
    if (draft.sort_features) {
      std::sort(features.begin(), features.end(), [this](const auto& a, const auto& b) {
        return model_.features(a.first).name() < model_.features(b.first).name();
      });
    }
    AddFeatures(features, index, &stack, plan);
    const v1::PlanConfig& given = model_.plan();
    stack.limits.ids_per_sample = given.has_max_ids_per_chip_per_sample()
                                      ? given.max_ids_per_chip_per_sample()
                                      : TensorFlowRules() * kDefaultIdsPerSample;
    stack.limits.minibatches = given.has_max_minibatches_per_sparsecore()
                                   ? given.max_minibatches_per_sparsecore()
                                   : TensorFlowRules() * kDefaultMinibatches;
    return stack;
  }

  void AddFeatures(const std::vector<std::pair<int, int>>& features, int stack_index,
                   StackPlan* stack, Plan* plan) const {
    for (const auto& [f, position] : features) {
      const TablePlan& table = stack->tables[position];
      FeaturePlan feature;
      feature.feature = f;
      feature.name = model_.features(f).name();
      feature.table_in_stack = position;
      feature.combiner = model_.tables(table_index_.at(model_.features(f).table())).combiner();
      feature.batch_size = model_.features(f).batch_size();
      feature.row_offset = stack->samples;
      feature.col_offset = table.row_offset * partitions_;
      feature.col_shift = table.shard_rotation;
      stack->samples += feature.batch_size;
      plan->feature_at[f] = {stack_index, static_cast<int>(stack->features.size())};
      stack->features.push_back(std::move(feature));
    }
  }

  const v1::ModelConfig& model_;
  const Topology topology_;
  const int64_t partitions_;
  absl::flat_hash_map<std::string, int> table_index_;
  std::vector<std::vector<int>> features_of_;  // by table, in config order
  std::vector<int> by_appearance_;             // tables in order of their first feature
  std::vector<bool> taken_;                    // tables that a group holds
  std::vector<StackDraft> drafts_;
};

// Empty if less than twice of what was declared is stored.
std::string RoundingWarning(const StackPlan& stack, const TablePlan& table, int64_t partitions) {
  const int64_t rows = table.vocabulary_size, stored = table.padded_vocabulary_size;
  if (stored * stack.embedding_dim < 2 * rows * table.embedding_dim) return "";
  const bool small = rows < kTableAlignment * partitions;
  return absl::StrCat(
      small ? "SMALL TABLE: " : "", "'", table.name, "' of ", rows, " x ", table.embedding_dim,
      " is stored as ", stored, " x ", stack.embedding_dim, "; ",
      small ? absl::StrCat("it has less than 8 rows for each of ", partitions, " partitions")
            : "rows of a partition and columns come in eights");
}

void WriteTable(const TablePlan& table, v1::TablePlan* out) {
  out->set_name(table.name);
  out->set_vocabulary_size(table.vocabulary_size);
  out->set_padded_vocabulary_size(table.padded_vocabulary_size);
  out->set_embedding_dim(table.embedding_dim);
  out->set_row_offset(table.row_offset);
  out->set_shard_rotation(table.shard_rotation);
}

void WriteFeature(const FeaturePlan& feature, const StackPlan& stack, v1::FeaturePlan* out) {
  out->set_name(feature.name);
  out->set_table(stack.tables[feature.table_in_stack].name);
  out->set_batch_size(feature.batch_size);
  out->set_row_offset(feature.row_offset);
  out->set_col_offset(feature.col_offset);
  out->set_col_shift(feature.col_shift);
}

}  // namespace

std::vector<std::vector<int>> StackLikeJax(absl::Span<const StackCandidate> tables,
                                           const StackingLimits& limits) {
  return FirstFit(tables, limits, [&](const OpenStack& stack, const StackCandidate& table) {
    const int64_t bytes = stack.activation_bytes + ActivationBytes(table);
    return (limits.activation_bytes == 0 || bytes <= limits.activation_bytes) &&
           (limits.rows == 0 || stack.rows + table.padded_rows < limits.rows);
  });
}

std::vector<std::vector<int>> StackLikeTensorFlow(absl::Span<const StackCandidate> tables,
                                                  const StackingLimits& limits) {
  const auto below = [](int64_t value, int64_t limit) { return limit == 0 || value < limit; };
  return FirstFit(tables, limits, [&](const OpenStack& stack, const StackCandidate& table) {
    return below(static_cast<int64_t>(stack.tables.size()), limits.tables) &&
           below(stack.activation_bytes + ActivationBytes(table), limits.activation_bytes) &&
           below(stack.shard_bytes + ShardBytes(table, limits), limits.shard_bytes) &&
           below(stack.rows + table.padded_rows, limits.rows);
  });
}

std::string StackName(absl::Span<const std::string> table_names, bool shorten) {
  const std::string name = absl::StrJoin(table_names, "_");
  if (!shorten || name.size() <= kLongestName) return name;
  return absl::StrCat(name.substr(0, kLongestName), "...", Sha256Hex(name).substr(0, kHashDigits));
}

absl::StatusOr<Plan> MakePlan(const v1::ModelConfig& model, const Topology& topology) {
  if (!IsPowerOfTwo(topology.shards) || !IsPowerOfTwo(topology.sparsecores_per_shard)) {
    return absl::InvalidArgumentError(
        absl::StrCat("topology: ", topology.shards, " shards of ", topology.sparsecores_per_shard,
                     " SparseCores is not allowed; both must be powers of two"));
  }
  if (int64_t{topology.shards} * topology.sparsecores_per_shard > kMaxPartitions) {
    return absl::InvalidArgumentError(
        absl::StrCat("topology: ", topology.shards, " shards of ", topology.sparsecores_per_shard,
                     " SparseCores is not allowed; there may be at most ", kMaxPartitions,
                     " SparseCores in all"));
  }
  return Planner(model, topology).Make();
}

v1::ModelPlan PlanToProto(const v1::ModelConfig& model, const Plan& plan) {
  const int64_t partitions = plan.topology.partitions();
  v1::ModelPlan out;
  out.set_shards(plan.topology.shards);
  out.set_sparsecores_per_shard(plan.topology.sparsecores_per_shard);
  out.set_partitions(static_cast<int32_t>(partitions));
  int64_t table_bytes = 0;
  for (const StackPlan& stack : plan.stacks) {
    v1::StackPlan* stack_out = out.add_stacks();
    stack_out->set_name(stack.name);
    stack_out->set_embedding_dim(stack.embedding_dim);
    stack_out->set_vocabulary_size(stack.rows_per_partition * partitions);
    stack_out->set_rows_per_partition(stack.rows_per_partition);
    for (const TablePlan& table : stack.tables) {
      WriteTable(table, stack_out->add_tables());
      std::string warning = RoundingWarning(stack, table, partitions);
      if (!warning.empty()) out.add_warnings(std::move(warning));
    }
    std::vector<int> features;
    for (const FeaturePlan& feature : stack.features) {
      WriteFeature(feature, stack, stack_out->add_features());
      features.push_back(feature.feature);
    }
    stack_out->set_activation_bytes(4 * int64_t{stack.embedding_dim} *
                                    SamplesPerSparsecore(model, plan.topology, features));
    WriteLimits(stack.limits, stack_out);
    const v1::TableConfig& first = model.tables(stack.tables.front().table);
    stack_out->set_optimizer(config::OptimizerName(first.optimizer()));
    for (const config::SlotInfo& slot : config::OptimizerSlots(first.optimizer())) {
      stack_out->add_slots(slot.name);
    }
    const int64_t bytes = stack.rows_per_partition * RowBytes(stack, first);
    stack_out->set_bytes_per_partition(bytes);
    table_bytes += bytes * partitions;
  }
  if (plan.topology.assumed) {
    out.add_warnings(absl::StrCat(
        "the cluster's sparsecores_per_shard is not given: ", plan.topology.sparsecores_per_shard,
        " are assumed, and where rows lie rests on it"));
  }
  out.set_fingerprint(plan.fingerprint);
  out.set_table_bytes(table_bytes);
  return out;
}

}  // namespace emberd::preprocess
