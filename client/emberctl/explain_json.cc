#include <cmath>
#include <sstream>

#include <google/protobuf/util/json_util.h>

#include "absl/strings/str_format.h"
#include "client/emberctl/explanation.h"
#include "client/emberctl/output.h"
#include "preprocess/batch/cuts.h"

namespace emberd::emberctl {
namespace {

using preprocess::CsrSegmentView;
using preprocess::StackBatchView;
using preprocess::StackCost;

Json MessageJson(const google::protobuf::Message& message) {
  std::ostringstream text;
  PrintJson(message, text);
  return Json::parse(text.str());
}

Json Gains(absl::Span<const float> gains) {
  Json list = Json::array();
  for (const float gain : gains) list.push_back(std::isnan(gain) ? Json("NaN") : Json(gain));
  return list;
}

Json Ints(absl::Span<const int32_t> values) {
  return std::vector<int32_t>(values.begin(), values.end());
}

Json SegmentJson(int shard, int slot, int minibatch, const CsrSegmentView& segment) {
  std::vector<int32_t> row_pointers;
  for (const int32_t end : segment.row_ends) row_pointers.push_back(end - segment.base);
  return {{"shard", shard},
          {"slot", slot},
          {"minibatch", minibatch},
          {"row_pointers", row_pointers},
          {"embedding_ids", Ints(segment.embedding_ids)},
          {"sample_ids", Ints(segment.sample_ids)},
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
  const int slots = explanation.plan.topology.sparsecores_per_shard;
  std::vector<std::vector<int64_t>> ids(slots), unique(slots);
  for (const preprocess::PairCost& pair : cost.pairs) {
    ids[pair.slot].push_back(pair.ids);
    unique[pair.slot].push_back(pair.unique);
  }
  return {{"stack", explanation.plan.stacks[stack].name},
          {"samples", cost.samples},
          {"ids", cost.ids},
          {"duplicate_ids", cost.duplicate_ids},
          {"dropped_ids", cost.dropped_ids},
          {"rows_touched", cost.rows_touched},
          {"buffer_cells", cost.buffer_cells},
          {"pad_cells", cost.pad_cells},
          {"activation_bytes_per_sparsecore", cost.activation_bytes_per_sparsecore},
          {"bytes_gathered", cost.bytes_gathered},
          {"imbalance", static_cast<float>(cost.imbalance)},
          {"ids_per_partition", ids},
          {"unique_ids_per_partition", unique},
          {"minibatches", MinibatchesJson(cost)},
          {"segments", SegmentsJson(explanation, stack)}};
}

}  // namespace

void PrintExplanationJson(const Explanation& explanation, std::ostream& out) {
  Json stacks = Json::array();
  for (int k = 0; k < static_cast<int>(explanation.costs.size()); ++k) {
    stacks.push_back(StackJson(explanation, k));
  }
  std::vector<int> minibatch_of;
  for (int b = 0; b < preprocess::kBuckets; ++b) {
    minibatch_of.push_back(preprocess::MinibatchOf(explanation.cuts, b));
  }
  const Json all = {
      {"model", explanation.model.name()},
      {"plan", MessageJson(preprocess::PlanToProto(explanation.model, explanation.plan))},
      {"statistics", MessageJson(explanation.batch.statistics())},
      {"num_minibatches", explanation.batch.statistics().num_minibatches()},
      {"split_mask", absl::StrFormat("0x%016x", preprocess::JaxMask(explanation.cuts))},
      {"bucket_to_minibatch", minibatch_of},
      {"stacks", std::move(stacks)}};
  out << all.dump() << "\n";
}

}  // namespace emberd::emberctl
