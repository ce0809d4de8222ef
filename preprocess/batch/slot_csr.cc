#include "preprocess/batch/slot_csr.h"

#include <limits>

namespace emberd::preprocess {

int64_t PadCells(SlotCsr* csr, int64_t cell) {
  const int64_t end = AlignCsr(cell);
  for (; cell < end; ++cell) {
    csr->embedding_ids.data()[cell] = kCsrPadId;
    csr->sample_ids.data()[cell] = kCsrPadId;
    csr->gains.data()[cell] = std::numeric_limits<float>::quiet_NaN();
  }
  return end;
}

}  // namespace emberd::preprocess
