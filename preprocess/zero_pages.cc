#include "preprocess/zero_pages.h"

#include <sys/mman.h>

#include "preprocess/rounding.h"

namespace emberd::preprocess {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

ZeroPages::ZeroPages(size_t bytes) {
  if (bytes == 0) return;
  // One page more than needed, so that the part in use can begin at a huge page.
  mapped_bytes_ = RoundUp(static_cast<int64_t>(bytes), kHugePage) + kHugePage;
  void* mapping = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return;
  mapping_ = mapping;
  const auto address = reinterpret_cast<intptr_t>(mapping);
  data_ = reinterpret_cast<uint8_t*>(RoundUp(address, kHugePage));
  // Refusal costs speed alone.
  (void)madvise(data_, mapped_bytes_ - kHugePage, MADV_HUGEPAGE);
}

ZeroPages::~ZeroPages() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
}

}  // namespace emberd::preprocess
