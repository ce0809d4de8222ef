// emberctl explain: what it finds out about a batch, and how that is shown.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "client/emberctl/explain/batch_file.h"
#include "client/emberctl/output.h"
#include "client/emberctl/plan_view.h"
#include "client/emberctl/verbs/verb.h"
#include "config/config.h"
#include "preprocess/batch/chip_cost.h"
#include "preprocess/batch/cuts.h"
#include "preprocess/batch/preprocessor.h"

namespace emberd::emberctl {
namespace {

using preprocess::CsrSegmentView;
using preprocess::PairCost;
using preprocess::PartitionLimits;
using preprocess::ProgramBuffers;
using preprocess::StackBatchView;
using preprocess::StackCost;
using preprocess::StackPlan;

// Refers to model, plan and batch, which must outlive it.
struct Explanation {
  const v1::ModelConfig& model;
  const preprocess::Plan& plan;
  const preprocess::PreprocessedBatch& batch;
  uint64_t cuts = 0;  // preprocess::CutSet
  std::vector<StackCost> costs;
};

// ---- Programs: the buffers of a lookup.

ProgramBuffers BuffersOf(const Explanation& e, size_t stack) {
  return preprocess::SizeProgramBuffers(
      e.plan, e.plan.stacks[stack], e.model.plan().sample_layout(), e.batch.feature_samples(),
      preprocess::kDefaultIdsPerSample, preprocess::kDefaultMinibatches);
}

void PrintPrograms(const Explanation& e, std::ostream& out) {
  out << "\ncompiled as a LOOKUP with " << preprocess::kDefaultIdsPerSample
      << " ids for each sample and up to " << preprocess::kDefaultMinibatches << " mini-batches:\n";
  Table lines = {{"STACK", "SAMPLES", "ID CAPACITY", "CELLS NEEDED", "ROW POINTERS",
                  "ACTIVATION ROWS/SPARSECORE", "BUFFERS/SPARSECORE"}};
  int64_t bytes = 0;
  for (size_t k = 0; k < e.costs.size(); ++k) {
    const ProgramBuffers buffers = BuffersOf(e, k);
    bytes += buffers.bytes_per_sparsecore;
    const int64_t needed = e.costs[k].statistics.required_buffer_size();
    lines.push_back({e.plan.stacks[k].name, buffers.samples, buffers.id_capacity,
                     absl::StrCat(needed, needed > buffers.id_capacity ? " !" : ""),
                     buffers.row_pointers, buffers.activation_rows,
                     Bytes(buffers.bytes_per_sparsecore)});
  }
  PrintColumns(lines, out);
  out << "Together " << Bytes(bytes)
      << " on each SparseCore; !: more cells than the capacity, which PrepareBatch would refuse.\n";
}

// {"stacks": [{stack, samples, id_capacity, cells_needed, fits, row_pointers,
// activation_rows_per_sparsecore, bytes_per_sparsecore}], "bytes_per_sparsecore"}
Json ProgramsJson(const Explanation& e) {
  Json stacks = Json::array();
  int64_t bytes = 0;
  for (size_t k = 0; k < e.costs.size(); ++k) {
    const ProgramBuffers buffers = BuffersOf(e, k);
    bytes += buffers.bytes_per_sparsecore;
    const int64_t needed = e.costs[k].statistics.required_buffer_size();
    stacks.push_back({{"stack", e.plan.stacks[k].name},
                      {"samples", buffers.samples},
                      {"id_capacity", buffers.id_capacity},
                      {"cells_needed", needed},
                      {"fits", needed <= buffers.id_capacity},
                      {"row_pointers", buffers.row_pointers},
                      {"activation_rows_per_sparsecore", buffers.activation_rows},
                      {"bytes_per_sparsecore", buffers.bytes_per_sparsecore}});
  }
  return {{"stacks", std::move(stacks)}, {"bytes_per_sparsecore", bytes}};
}

// ---- The report, for people, and JSON.

// Matrices of pairs are printed up to this many partitions; beyond, the fullest pairs are.
constexpr int kMaxMatrixPartitions = 16;
constexpr size_t kFullestPairs = 8;

// "12 of 8", or "12" without a limit.
std::string OfLimit(int64_t count, int64_t limit) {
  return limit == 0 ? absl::StrCat(count) : absl::StrCat(count, " of ", limit);
}

void PrintHead(const Explanation& e, std::ostream& out) {
  const v1::ModelPlan plan = preprocess::PlanToProto(e.model, e.plan);
  out << "model \"" << e.model.name() << "\": " << Counted(e.model.tables_size(), "table")
      << " and " << Counted(e.model.features_size(), "feature") << " in "
      << Counted(plan.stacks_size(), "stack") << ", on " << SizeText(plan) << "\n"
      << v1::PlanRules_Name(e.model.plan().rules()) << " rules, "
      << v1::SampleLayout_Name(e.model.plan().sample_layout()) << ", buckets by "
      << v1::BucketHash_Name(e.model.plan().bucket_hash()) << "\n\n";
  PrintStacks(plan, out);
  out << "\n";
  PrintFeatures(plan, out);
  out << "\n";
}

void PrintTotals(const Explanation& e, std::ostream& out) {
  Table lines = {{"STACK", "SAMPLES", "IDS", "DUPLICATES", "DROPPED", "ROWS TOUCHED",
                  "BUFFER CELLS", "PADDING", "ACTIVATIONS/SPARSECORE", "GATHERED", "IMBALANCE"}};
  for (size_t k = 0; k < e.costs.size(); ++k) {
    const StackCost& cost = e.costs[k];
    const v1::StackStatistics& batch = cost.statistics;
    const auto cells = batch.required_buffer_size();
    const double padding = cells == 0 ? 0 : 100.0 * batch.pad_cells() / cells;
    lines.push_back({e.plan.stacks[k].name, cost.samples, batch.ids(), batch.duplicate_ids(),
                     batch.dropped_ids(), cost.rows_touched, cells,
                     absl::StrFormat("%.0f%%", padding),
                     Bytes(batch.activation_bytes_per_sparsecore()), Bytes(batch.bytes_gathered()),
                     absl::StrFormat("%.2f", batch.imbalance())});
  }
  PrintColumns(lines, out);
  out << "Imbalance: ids of the fullest partition over the mean.\n\n";
}

std::string PairText(const PairCost& pair, const PartitionLimits& limits) {
  return absl::StrCat(pair.ids, "/", pair.unique,
                      limits.Exceeded(pair.ids, pair.unique) ? " !" : "");
}

void PrintMatrix(const StackCost& cost, const PartitionLimits& limits, int partitions,
                 std::ostream& out) {
  Table lines = {{"SLOT"}};
  for (int p = 0; p < partitions; ++p) lines[0].push_back(absl::StrCat("P", p));
  for (const PairCost& pair : cost.pairs) {
    if (pair.partition == 0) lines.push_back({pair.slot});
    lines.back().push_back(PairText(pair, limits));
  }
  PrintColumns(lines, out);
}

void PrintFullest(const StackCost& cost, const PartitionLimits& limits, std::ostream& out) {
  std::vector<PairCost> pairs = cost.pairs;
  const size_t shown = std::min(pairs.size(), kFullestPairs);
  std::partial_sort(pairs.begin(), pairs.begin() + shown, pairs.end(),
                    [](const PairCost& a, const PairCost& b) { return a.ids > b.ids; });
  Table lines = {{"SLOT", "PARTITION", "IDS/UNIQUE"}};
  for (size_t i = 0; i < shown; ++i) {
    lines.push_back({pairs[i].slot, pairs[i].partition, PairText(pairs[i], limits)});
  }
  out << "the " << shown << " fullest of " << pairs.size() << " pairs:\n";
  PrintColumns(lines, out);
}

void PrintPairs(const Explanation& e, std::ostream& out) {
  out << "ids/unique ids from each source slot to each partition (!: over a limit)\n";
  for (size_t k = 0; k < e.costs.size(); ++k) {
    const StackPlan& stack = e.plan.stacks[k];
    out << "stack \"" << stack.name << "\", limits " << Limit(stack.limits.ids) << "/"
        << Limit(stack.limits.unique) << ":\n";
    if (e.plan.topology.partitions() <= kMaxMatrixPartitions) {
      PrintMatrix(e.costs[k], stack.limits, e.plan.topology.partitions(), out);
    } else {
      PrintFullest(e.costs[k], stack.limits, out);
    }
  }
  out << "\n";
}

// Why a stack needs cuts: the pairs over its limits, and the worst of them. False: it needs none.
bool PrintReason(const StackPlan& stack, const StackCost& cost, std::ostream& out) {
  const PartitionLimits limits = stack.limits;
  const PairCost* worst = nullptr;
  int over = 0;
  for (const PairCost& pair : cost.pairs) {
    if (!limits.Exceeded(pair.ids, pair.unique)) continue;
    ++over;
    if (worst == nullptr || pair.ids > worst->ids) worst = &pair;
  }
  if (worst == nullptr) return false;
  out << "  stack \"" << stack.name << "\": " << over << " of " << cost.pairs.size()
      << " pairs are over a limit; slot " << worst->slot << " sends partition " << worst->partition
      << " " << OfLimit(worst->ids, limits.ids) << " ids, " << OfLimit(worst->unique, limits.unique)
      << " unique ids\n";
  return true;
}

// "8-15": the buckets of a mini-batch.
std::string BucketsOf(uint64_t cuts, int minibatch) {
  int first = 0;
  while (preprocess::MinibatchOf(cuts, first) < minibatch) ++first;
  int last = first;
  while (last + 1 < preprocess::kBuckets && preprocess::MinibatchOf(cuts, last + 1) == minibatch) {
    ++last;
  }
  return absl::StrCat(first, "-", last);
}

void PrintMinibatches(const Explanation& e, std::ostream& out) {
  const int count = e.batch.statistics().num_minibatches();
  if (count == 1) {
    const bool dropped = std::any_of(e.costs.begin(), e.costs.end(), [](const StackCost& cost) {
      return cost.statistics.dropped_ids() > 0;
    });
    out << "1 mini-batch: every pair is within its limits" << (dropped ? " after dropping" : "")
        << "\n";
    return;
  }
  out << count << " mini-batches, the same cuts of the vocabulary for all stacks, because\n";
  bool mine = false;
  for (size_t k = 0; k < e.costs.size(); ++k) {
    mine = PrintReason(e.plan.stacks[k], e.costs[k], out) || mine;
  }
  if (!mine) out << "  the batch of another replica needs them\n";
  Table lines = {{"MINI-BATCH", "BUCKETS", "STACK", "IDS", "MAX IDS", "MAX UNIQUE IDS"}};
  for (int m = 0; m < count; ++m) {
    for (size_t k = 0; k < e.costs.size(); ++k) {
      const preprocess::MinibatchCost& minibatch = e.costs[k].minibatches[m];
      const PartitionLimits limits = e.plan.stacks[k].limits;
      lines.push_back({m, BucketsOf(e.cuts, m), e.plan.stacks[k].name, minibatch.ids,
                       OfLimit(minibatch.max_ids, limits.ids),
                       OfLimit(minibatch.max_unique_ids, limits.unique)});
    }
  }
  PrintColumns(lines, out);
}

Json Gains(absl::Span<const float> gains) {
  Json list = Json::array();
  for (const float gain : gains) list.push_back(std::isnan(gain) ? Json("NaN") : Json(gain));
  return list;
}

Json SegmentJson(int shard, int slot, int minibatch, const CsrSegmentView& segment) {
  std::vector<int32_t> row_pointers;
  for (const int32_t end : segment.row_ends) row_pointers.push_back(end - segment.base);
  return {{"shard", shard},
          {"slot", slot},
          {"minibatch", minibatch},
          {"row_pointers", row_pointers},
          {"embedding_ids", segment.embedding_ids},
          {"sample_ids", segment.sample_ids},
          {"gains", Gains(segment.gains)}};
}

Json SegmentsJson(const Explanation& explanation, int stack) {
  Json segments = Json::array();
  for (int shard = 0; shard < explanation.plan.topology.shards; ++shard) {
    const StackBatchView view = explanation.batch.ShardView(shard)[stack];
    for (int i = 0; i < static_cast<int>(view.segments.size()); ++i) {
      segments.push_back(
          SegmentJson(shard, i / view.minibatches, i % view.minibatches, view.segments[i]));
    }
  }
  return segments;
}

Json MinibatchesJson(const StackCost& cost) {
  Json minibatches = Json::array();
  for (const preprocess::MinibatchCost& minibatch : cost.minibatches) {
    minibatches.push_back({{"ids", minibatch.ids},
                           {"max_ids_per_partition", minibatch.max_ids},
                           {"max_unique_ids_per_partition", minibatch.max_unique_ids}});
  }
  return minibatches;
}

Json StackJson(const Explanation& explanation, int stack) {
  const StackCost& cost = explanation.costs[stack];
  const v1::StackStatistics& batch = cost.statistics;
  const int slots = explanation.plan.topology.sparsecores_per_shard;
  std::vector<std::vector<int64_t>> ids(slots), unique(slots);
  for (const preprocess::PairCost& pair : cost.pairs) {
    ids[pair.slot].push_back(pair.ids);
    unique[pair.slot].push_back(pair.unique);
  }
  return {{"stack", explanation.plan.stacks[stack].name},
          {"samples", cost.samples},
          {"ids", batch.ids()},
          {"duplicate_ids", batch.duplicate_ids()},
          {"dropped_ids", batch.dropped_ids()},
          {"rows_touched", cost.rows_touched},
          {"buffer_cells", batch.required_buffer_size()},
          {"pad_cells", batch.pad_cells()},
          {"activation_bytes_per_sparsecore", batch.activation_bytes_per_sparsecore()},
          {"bytes_gathered", batch.bytes_gathered()},
          {"imbalance", static_cast<float>(batch.imbalance())},
          {"ids_per_partition", ids},
          {"unique_ids_per_partition", unique},
          {"minibatches", MinibatchesJson(cost)},
          {"segments", SegmentsJson(explanation, stack)}};
}

void PrintReport(const Explanation& explanation, bool fits, std::ostream& out) {
  PrintHead(explanation, out);
  PrintTotals(explanation, out);
  PrintPairs(explanation, out);
  if (fits) PrintMinibatches(explanation, out);  // else the error says why there are none
  PrintPrograms(explanation, out);
}

// For programs: an object with
//   model, plan (as DescribeModel answers), statistics (as Lookup answers),
//   num_minibatches, split_mask (in JAX's numbering of the nodes) and bucket_to_minibatch,
//   stacks: one object each, with the counts of the report, ids_per_partition and
//     unique_ids_per_partition [slot][partition], and segments: all buffers, one object per (shard,
//     slot, mini-batch) with row_pointers (exact ends of the shard's partitions), embedding_ids,
//     sample_ids and gains. Pads are 2147483647, 2147483647 and "NaN",
//   programs (see ProgramsJson).
// Where the batch does not fit, what tells of mini-batches is null, and the buffers are those of
// the batch without cuts.
void PrintExplanationJson(const Explanation& explanation, bool fits, std::ostream& out) {
  Json stacks = Json::array();
  for (int k = 0; k < static_cast<int>(explanation.costs.size()); ++k) {
    stacks.push_back(StackJson(explanation, k));
  }
  std::vector<int> minibatch_of;
  for (int b = 0; b < preprocess::kBuckets; ++b) {
    minibatch_of.push_back(preprocess::MinibatchOf(explanation.cuts, b));
  }
  Json all = {{"model", explanation.model.name()},
              {"plan", MessageJson(preprocess::PlanToProto(explanation.model, explanation.plan))},
              {"statistics", MessageJson(explanation.batch.statistics())},
              {"num_minibatches", explanation.batch.statistics().num_minibatches()},
              {"split_mask", absl::StrFormat("0x%016x", preprocess::JaxMask(explanation.cuts))},
              {"bucket_to_minibatch", minibatch_of},
              {"stacks", std::move(stacks)},
              {"programs", ProgramsJson(explanation)}};
  if (!fits) {
    for (const char* name : {"num_minibatches", "split_mask", "bucket_to_minibatch"}) {
      all[name] = nullptr;
    }
    all["statistics"]["num_minibatches"] = nullptr;
  }
  out << Dump(all) << "\n";
}

using ChipBatches = absl::Span<const std::shared_ptr<const preprocess::PreprocessedBatch>>;

// For programs that compare with TensorFlow: an object with splits (its mask of the cuts), and
// chips, a list with an object for each batch (that of a replica): by stack the fields of a
// PartitionedCsrFormatTensor, with row_pointers_unpadded_size and ids_unpadded_size, the lengths of
// its arrays.
void PrintTensorFlowJson(const preprocess::Plan& plan, ChipBatches chips, std::ostream& out) {
  const uint64_t cuts = chips.front()->cuts();
  Json all = {{"splits", absl::StrFormat("0x%016x", preprocess::TensorFlowMask(cuts))}};
  for (const auto& batch : chips) {
    Json stacks = Json::object();
    for (int k = 0; k < static_cast<int>(plan.stacks.size()); ++k) {
      const preprocess::ChipCsr csr = preprocess::MakeChipCsr(batch->slots(k));
      stacks[plan.stacks[k].name] = {
          {"row_pointers", csr.row_pointers},
          {"sorted_sample_ids", csr.sample_ids},
          {"sorted_token_ids", csr.token_ids},
          {"sorted_gains", csr.gains},
          {"sample_count", batch->stack_samples(k)},
          {"num_minibatches_per_physical_sparse_core", preprocess::MinibatchCount(cuts)},
          {"row_pointers_unpadded_size", csr.row_pointers.size()},
          {"ids_unpadded_size", csr.token_ids.size()}};
    }
    all["chips"].push_back(std::move(stacks));
  }
  out << Dump(all) << "\n";
}

constexpr char kExample[] =
    R"(emberctl explain --model model.textproto --batch batch.json --shards 4 --sparsecores 2

BATCH is one of
  a JSON file: {"FEATURE": {"ids": [[1, 2], [], 3], "weights": [[0.5, 1], [], 2]}, ...}, one element
    per sample, a list of ids or a single id, in lists as output_shape has them; weights may be absent
  a directory of .npy files (little-endian int32, int64 and float32, C order), or single ones:
    FEATURE.ids.npy [samples], [samples, ids per sample] or as output_shape says, or FEATURE.values.npy with
    FEATURE.row_splits.npy [samples + 1]; and FEATURE.weights.npy where there are weights)";

struct ExplainOptions {
  std::string model;                 // a ModelConfig
  std::vector<std::string> batches;  // see batch_file.h
  std::vector<std::string> others;   // the same, one for each other replica
  std::string format;                // "tensorflow", or empty
  ClusterShape cluster;
};

// Cuts the batches, one for each replica, into mini-batches as `limits` says, which is `shown`, or
// the same without its limits, and prints the first with those of `shown`: a report or, with
// session.json, everything down to the buffers; or all of them for TensorFlow.
absl::Status Explain(Session& session, absl::Span<const BatchFile> files, bool tensorflow,
                     const v1::ModelConfig& limits, const v1::ModelConfig& shown,
                     const preprocess::Topology& topology) {
  ASSIGN_OR_RETURN(const preprocess::Plan plan, preprocess::MakePlan(limits, topology));
  ASSIGN_OR_RETURN(const preprocess::Plan shown_plan, preprocess::MakePlan(shown, topology));
  preprocess::Preprocessor preprocessor(&limits, &plan, nullptr);
  std::vector<std::unique_ptr<preprocess::SortedBatch>> sorted(files.size());
  bool cut = false;
  for (size_t r = 0; r < files.size(); ++r) {
    auto one = preprocessor.Sort(files[r].inputs);
    if (!one.ok() && r > 0) return Annotate(one.status(), absl::StrCat("--other ", r));
    ASSIGN_OR_RETURN(sorted[r], std::move(one));
    cut = cut || sorted[r]->needs_minibatches();
  }
  uint64_t cuts = 0;
  for (const auto& one : sorted) {
    if (!cut) break;
    ASSIGN_OR_RETURN(const uint64_t more, preprocessor.FindCuts(one.get()));
    cuts |= more;
  }
  std::vector<std::shared_ptr<const preprocess::PreprocessedBatch>> batches(files.size());
  for (size_t r = 0; r < files.size(); ++r) {
    ASSIGN_OR_RETURN(batches[r], preprocessor.Finish(sorted[r].get(), cuts));
  }
  const Explanation explanation = {shown, shown_plan, *batches[0], cuts,
                                   preprocess::BatchCost(shown_plan, *batches[0])};
  const bool fits = &limits == &shown;
  if (tensorflow) {
    PrintTensorFlowJson(plan, batches, session.out);
  } else if (session.json) {
    PrintExplanationJson(explanation, fits, session.out);
  } else {
    PrintReport(explanation, fits, session.out);
  }
  return absl::OkStatus();
}

absl::Status ExplainBatch(Session& session, const ExplainOptions& options) {
  ASSIGN_OR_RETURN(const v1::ModelConfig model, config::LoadModel(options.model));
  ASSIGN_OR_RETURN(const v1::ClusterConfig cluster, ClusterOf(options.cluster));
  const preprocess::Topology topology = {cluster.shards_size(), cluster.sparsecores_per_shard()};
  std::vector<BatchFile> files;
  ASSIGN_OR_RETURN(BatchFile first, BatchFile::Load(options.batches, model));
  files.push_back(std::move(first));
  for (const std::string& other : options.others) {
    ASSIGN_OR_RETURN(BatchFile file, BatchFile::Load({other}, model));
    files.push_back(std::move(file));
  }
  const bool tensorflow = !options.format.empty();
  absl::Status status = Explain(session, files, tensorflow, model, model, topology);
  if (!absl::IsResourceExhausted(status) || tensorflow) return status;
  // What is over the limits is best seen in the counts.
  v1::ModelConfig unlimited = model;
  for (v1::TableConfig& table : *unlimited.mutable_tables()) {
    table.set_max_ids_per_partition(0);
    table.set_max_unique_ids_per_partition(0);
  }
  unlimited.mutable_plan()->set_max_ids_per_chip_per_sample(0);
  unlimited.mutable_plan()->set_max_minibatches_per_sparsecore(0);
  RETURN_IF_ERROR(Explain(session, files, tensorflow, unlimited, model, topology));
  return status;
}

}  // namespace

void AddExplain(CLI::App& app, Session& session) {
  auto [explain, options] = AddVerb(
      app, session, "explain",
      "Show how a batch is stacked, placed and cut into mini-batches, and what it costs; --json "
      "adds all buffers. Needs no server",
      kExample, ExplainBatch);
  CLI::Option* model =
      explain->add_option("--model", options->model, "ModelConfig as text proto or JSON");
  model->required();
  explain->add_option("--batch", options->batches, "BATCH; may be given several times")->required();
  explain->add_option(
      "--other", options->others,
      "BATCH of another replica of the step: all are cut alike. May be given several "
      "times");
  explain
      ->add_option("--format", options->format,
                   "tensorflow: of each replica's chip, the CSR-wrapped COO of each stack in "
                   "TensorFlow's layout, as JSON")
      ->check(CLI::IsMember({"tensorflow"}));
  AddClusterShapeOptions(explain, model, &options->cluster);
}

}  // namespace emberd::emberctl
