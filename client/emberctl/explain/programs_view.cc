#include "client/emberctl/explain/programs_view.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/emberctl/plan_view.h"
#include "preprocess/batch/program_buffers.h"

namespace emberd::emberctl {
namespace {

using preprocess::ProgramBuffers;

ProgramBuffers BuffersOf(const Explanation& e, size_t stack) {
  return preprocess::SizeProgramBuffers(e.plan, e.plan.stacks[stack], e.batch.feature_samples(),
                                        preprocess::kDefaultIdsPerSample,
                                        preprocess::kMaxProgramMinibatches);
}

// Of the activations of all features, and of their gradients.
int64_t ActivationBytes(const Explanation& e) {
  int64_t bytes = 0;
  for (int f = 0; f < e.model.features_size(); ++f) {
    const auto [stack, position] = e.plan.feature_at[f];
    const preprocess::StackPlan& in = e.plan.stacks[stack];
    bytes += e.batch.feature_samples()[f] *
             in.tables[in.features[position].table_in_stack].embedding_dim *
             static_cast<int64_t>(sizeof(float));
  }
  return bytes;
}

// An operation of the chain update(k), lookup(k + 1).
struct ChainedStep {
  const char* is;
  std::vector<int> inputs;
  std::string makes;
  int64_t bytes = 0;  // that it holds on the coordinator
  std::string released;
};

std::vector<ChainedStep> ChainOf(const Explanation& e) {
  const int64_t activations = ActivationBytes(e);
  const std::string tuple = absl::StrCat("tuple of ", e.model.features_size());
  return {{"handle of lookup(k)", {}, "batch k", 0, "kept: the caller's handle"},
          {"literal: gradients", {}, tuple, activations, "op 2"},
          {"UPDATE", {0, 1}, "nothing", 0, ""},
          {"literal: features of k + 1", {}, "batch k + 1", e.batch.bytes(), "op 4"},
          {"LOOKUP", {3}, tuple, activations, "kept: the answer"}};
}

}  // namespace

void PrintPrograms(const Explanation& e, std::ostream& out) {
  out << "\ncompiled as a LOOKUP with " << preprocess::kDefaultIdsPerSample
      << " ids for each sample and up to " << preprocess::kMaxProgramMinibatches
      << " mini-batches:\n";
  std::vector<std::vector<std::string>> lines = {{"STACK", "SAMPLES", "ID CAPACITY", "CELLS NEEDED",
                                                  "ROW POINTERS", "ACTIVATION ROWS/SPARSECORE",
                                                  "BUFFERS/SPARSECORE"}};
  int64_t bytes = 0;
  for (size_t k = 0; k < e.costs.size(); ++k) {
    const ProgramBuffers buffers = BuffersOf(e, k);
    bytes += buffers.bytes_per_sparsecore;
    lines.push_back({e.plan.stacks[k].name, absl::StrCat(buffers.samples),
                     absl::StrCat(buffers.id_capacity),
                     absl::StrCat(e.costs[k].buffer_cells,
                                  e.costs[k].buffer_cells > buffers.id_capacity ? " !" : ""),
                     absl::StrCat(buffers.row_pointers), absl::StrCat(buffers.activation_rows),
                     Bytes(buffers.bytes_per_sparsecore)});
  }
  PrintColumns(lines, out);
  out << "Together " << Bytes(bytes)
      << " on each SparseCore; !: more cells than the capacity, which PrepareBatch would refuse.\n"
      << "\nupdate(k) and lookup(k + 1) as a chain, 1 call in place of 2:\n";
  lines = {{"OP", "IS", "INPUTS", "MAKES", "HOLDS", "RELEASED AFTER"}};
  int position = 0;
  for (const ChainedStep& step : ChainOf(e)) {
    lines.push_back({absl::StrCat(position++), step.is, absl::StrJoin(step.inputs, ", "),
                     step.makes, step.bytes == 0 ? "" : Bytes(step.bytes), step.released});
  }
  PrintColumns(lines, out);
}

Json ProgramsJson(const Explanation& e) {
  Json stacks = Json::array();
  int64_t bytes = 0;
  for (size_t k = 0; k < e.costs.size(); ++k) {
    const ProgramBuffers buffers = BuffersOf(e, k);
    bytes += buffers.bytes_per_sparsecore;
    stacks.push_back({{"stack", e.plan.stacks[k].name},
                      {"samples", buffers.samples},
                      {"id_capacity", buffers.id_capacity},
                      {"cells_needed", e.costs[k].buffer_cells},
                      {"fits", e.costs[k].buffer_cells <= buffers.id_capacity},
                      {"row_pointers", buffers.row_pointers},
                      {"activation_rows_per_sparsecore", buffers.activation_rows},
                      {"bytes_per_sparsecore", buffers.bytes_per_sparsecore}});
  }
  Json chain = Json::array();
  for (const ChainedStep& step : ChainOf(e)) {
    chain.push_back({{"op", chain.size()},
                     {"is", step.is},
                     {"inputs", step.inputs},
                     {"makes", step.makes},
                     {"bytes", step.bytes},
                     {"released_after", step.released}});
  }
  return {
      {"stacks", std::move(stacks)}, {"bytes_per_sparsecore", bytes}, {"chain", std::move(chain)}};
}

}  // namespace emberd::emberctl
