#include "preprocess/plan/plan.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/shared_tables.h"
#include "preprocess/batch/csr.h"
#include "preprocess/plan/placement.h"
#include "preprocess/plan/stacking.h"

namespace emberd::preprocess {
namespace {

constexpr int64_t kMaxPartitions = int64_t{1} << 20;

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
    for (const StackDraft& draft : drafts_) {
      if (!names.insert(draft.name).second) {
        return absl::InvalidArgumentError(absl::StrCat("plan: two stacks are named '", draft.name,
                                                       "'; give one of them a name in groups"));
      }
      ASSIGN_OR_RETURN(StackPlan stack,
                       PlaceStack(draft, static_cast<int>(plan.stacks.size()), &plan));
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
    for (int t : by_appearance_) {
      if (taken_[t] || !config::IsShared(model_.tables(t))) continue;
      taken_[t] = true;
      drafts_.push_back({model_.tables(t).name(), {t}, /*sort_features=*/!TensorFlowRules()});
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
    int64_t samples = 0;
    for (int f : features_of_[t]) {
      const int64_t batch = model_.features(f).batch_size();
      samples += TensorFlowRules() ? batch : batch / partitions_;
    }
    candidate.samples_per_sparsecore =
        TensorFlowRules() ? samples / topology_.sparsecores_per_shard : samples;
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
  static int FoldLimit(int folded, int limit) {
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
      stack.max_ids_per_partition =
          FoldLimit(stack.max_ids_per_partition, config.max_ids_per_partition());
      stack.max_unique_ids_per_partition =
          FoldLimit(stack.max_unique_ids_per_partition, config.max_unique_ids_per_partition());
      plan->table_at[t] = {index, static_cast<int>(k)};
      for (int f : features_of_[t]) features.push_back({f, static_cast<int>(k)});
      stack.tables.push_back(std::move(table));
    }
    std::sort(features.begin(), features.end());
    if (draft.sort_features) {
      std::sort(features.begin(), features.end(), [this](const auto& a, const auto& b) {
        return model_.features(a.first).name() < model_.features(b.first).name();
      });
    }
    AddFeatures(features, index, &stack, plan);
    return stack;
  }

  void AddFeatures(const std::vector<std::pair<int, int>>& features, int stack_index,
                   StackPlan* stack, Plan* plan) const {
    int64_t row_offset = 0;
    for (const auto& [f, position] : features) {
      const TablePlan& table = stack->tables[position];
      FeaturePlan feature;
      feature.feature = f;
      feature.name = model_.features(f).name();
      feature.table_in_stack = position;
      feature.batch_size = model_.features(f).batch_size();
      feature.row_offset = row_offset;
      feature.col_offset = table.row_offset * partitions_;
      feature.col_shift = table.shard_rotation;
      row_offset += feature.batch_size;
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

}  // namespace

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

}  // namespace emberd::preprocess
