// Would catch: an allocation that crept into the path of a batch. Memory that grows and shrinks
// with every request is what makes large messages slow and latencies uneven.
#include <atomic>
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "tests/testing/random_case.h"

namespace {
std::atomic<int64_t> allocations{0};

void* Allocate(size_t bytes, size_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  if (void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded))
    return memory;
  throw std::bad_alloc();
}

// Inlined, g++ 12 takes it for a mistake to free what `new` gave.
[[gnu::noinline]] void Free(void* memory) { std::free(memory); }
}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes, 16); }
void* operator new[](size_t bytes) { return Allocate(bytes, 16); }
void* operator new(size_t bytes, std::align_val_t a) {
  return Allocate(bytes, static_cast<size_t>(a));
}
void* operator new[](size_t bytes, std::align_val_t a) {
  return Allocate(bytes, static_cast<size_t>(a));
}
void operator delete(void* memory) noexcept { Free(memory); }
void operator delete[](void* memory) noexcept { Free(memory); }
void operator delete(void* memory, size_t) noexcept { Free(memory); }
void operator delete[](void* memory, size_t) noexcept { Free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { Free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { Free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { Free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { Free(memory); }

namespace emberd::preprocess {
namespace {

void ExpectNoOtherAllocation(bool limits) {
  Random random(TestSeed(1));
  int checked = 0;
  for (int n = 0; n < 200; ++n) {
    const RandomCase c = MakeRandomCase(random, limits);
    const auto plan = MakePlan(c.model, c.topology);
    ASSERT_TRUE(plan.ok());
    Preprocessor preprocessor(&c.model, &*plan, nullptr);
    const std::vector<FeatureInput> inputs = c.inputs();
    bool ok = true;
    // Scratch grows to the largest slot, and a cut slot trades its buffers with scratch, so a few
    // rounds pass before all buffers have their final size.
    for (int warm = 0; warm < 12 && ok; ++warm) ok = preprocessor.Run(inputs).ok();
    if (!ok) continue;  // an error is allowed to make a message
    const int64_t before = allocations.load();
    preprocessor.Run(inputs).IgnoreError();
    // That of the pointer that shares the batch.
    ASSERT_EQ(allocations.load(), before + 1) << "case " << n;
    ++checked;
  }
  EXPECT_GT(checked, 50);
}

// Would catch: memory of the largest batch ever that stays for good.
TEST(AllocationTest, LargeObjectsAreNotKept) {
  struct Object {
    int64_t size = 0;
    int64_t bytes() const { return size; }
  };
  Recycler<Object> recycler(2);
  for (const int64_t size : {int64_t{1} << 20, int64_t{100} << 20}) {
    std::unique_ptr<Object> object = recycler.Take();
    object->size = size;
    recycler.Give(std::move(object));
  }
  EXPECT_EQ(recycler.Take()->size, 0);
}

TEST(AllocationTest, AWarmBatchAllocatesNothingElse) { ExpectNoOtherAllocation(/*limits=*/false); }
TEST(AllocationTest, AWarmCutBatchAllocatesNothingElse) {
  ExpectNoOtherAllocation(/*limits=*/true);
}

}  // namespace
}  // namespace emberd::preprocess
