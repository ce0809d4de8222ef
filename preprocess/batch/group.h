// Sorted occurrences to the CSR of one mini-batch: duplicates merge, partitions are padded and
// counted.
#pragma once

#include <cstdint>

#include "preprocess/batch/extract.h"
#include "preprocess/batch/slot_csr.h"

namespace emberd::preprocess {

// `sorted` are the keys of `occurrences` in ascending order. Fills `csr` with a single mini-batch.
// Gains of equal (row, sample) pairs are added in order of position. `multiplicity`, unless null,
// gets the number of occurrences of each cell.
void GroupSorted(const StackShape& shape, const Occurrences& occurrences, const uint64_t* sorted,
                 Buffer<int32_t>* multiplicity, SlotCsr* csr);

}  // namespace emberd::preprocess
