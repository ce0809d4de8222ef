// One source slot from features to CSR: extract, sort, group.
#pragma once

#include "preprocess/batch/extract.h"
#include "preprocess/batch/slot_csr.h"

namespace emberd::preprocess {

// Working memory of one task; keeps its size from task to task.
struct SlotScratch {
  Occurrences occurrences;
  Buffer<uint64_t> spare_keys;
  SlotCsr csr;                // a slot that is being cut
  Buffer<int32_t> positions;  // while it is
};

// Fills `csr` with the slot's entries as one mini-batch. `multiplicity`: see GroupSorted.
void SortSlot(const StackShape& shape, StackInputs inputs, const SlotLayout& slot, GainKind kind,
              SlotScratch* scratch, Buffer<int32_t>* multiplicity, SlotCsr* csr);

}  // namespace emberd::preprocess
