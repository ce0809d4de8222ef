#include "preprocess/plan/stacking.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/sha256.h"

namespace emberd::preprocess {
namespace {

constexpr size_t kLongestName = 50;
constexpr size_t kHashDigits = 12;

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

}  // namespace emberd::preprocess
