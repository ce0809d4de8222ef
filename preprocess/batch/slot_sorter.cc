#include "preprocess/batch/slot_sorter.h"

#include "preprocess/batch/group.h"
#include "preprocess/batch/radix_sort.h"

namespace emberd::preprocess {

void SortSlot(const StackShape& shape, StackInputs inputs, const SlotLayout& slot, GainKind kind,
              SlotScratch* scratch, Buffer<int32_t>* multiplicity, SlotCsr* csr) {
  Occurrences& occurrences = scratch->occurrences;
  ExtractSlot(shape, inputs, slot, kind, &occurrences);
  const uint64_t* sorted =
      SortKeys(occurrences.keys.data(), scratch->spare_keys.Reserve(occurrences.count),
               occurrences.count, shape.partition_bits() + shape.row_bits());
  GroupSorted(shape, occurrences, sorted, multiplicity, csr);
}

}  // namespace emberd::preprocess
