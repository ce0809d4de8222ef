#include "preprocess/batch/overflow_error.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace emberd::preprocess {
namespace {

// The table that holds most of the entries of the overfull bucket.
const TablePlan& MainTable(const StackPlan& stack, const SlotCsr& csr, const SlotBuckets& buckets,
                           const Overflow& overflow) {
  std::vector<int64_t> entries(stack.tables.size());
  for (int64_t cell = csr.Begin(0, overflow.partition); cell < csr.End(0, overflow.partition);
       ++cell) {
    if (buckets.bucket.data()[cell] != overflow.bucket) continue;
    size_t table = stack.tables.size() - 1;
    while (csr.embedding_ids.data()[cell] < stack.tables[table].row_offset) --table;
    ++entries[table];
  }
  return stack.tables[std::max_element(entries.begin(), entries.end()) - entries.begin()];
}

std::string Comparison(const char* what, const char* field, int64_t count, int64_t limit) {
  if (limit == 0 || count <= limit) return "";
  return absl::StrCat(" ", count, " ", what, " (", field, " is ", limit, ")");
}

}  // namespace

absl::Status OverflowError(const StackPlan& stack, int slot, const SlotCsr& csr,
                           const SlotBuckets& buckets, const Overflow& overflow) {
  const std::string ids =
      Comparison("ids", "max_ids_per_partition", overflow.ids, stack.max_ids_per_partition);
  const std::string unique = Comparison("unique ids", "max_unique_ids_per_partition",
                                        overflow.unique, stack.max_unique_ids_per_partition);
  return absl::ResourceExhaustedError(
      absl::StrCat("table '", MainTable(stack, csr, buckets, overflow).name, "' (stack '",
                   stack.name, "'): partition ", overflow.partition, " gets", ids,
                   ids.empty() || unique.empty() ? "" : " and", unique, " from source slot ", slot,
                   " in the smallest mini-batch that the vocabulary can be cut into",
                   "; raise the limit to at least the count, send fewer samples per request, use "
                   "more SparseCores per "
                   "shard, or set plan.allow_id_dropping"));
}

}  // namespace emberd::preprocess
