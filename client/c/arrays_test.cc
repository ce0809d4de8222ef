// What Python reads and writes for many arrays at once.
// Covers: handles.cc
#include <array>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/c/emberd.h"
#include "client/c/handles.h"
#include "gtest/gtest.h"

namespace arrays_test {

// What this would catch: activations that are read beside where they lie.
TEST(BlockTest, ActivationsAtEvenDistances) {
  const std::vector<float> memory(64);
  struct Piece {
    int64_t begin;
    int64_t samples;
    int64_t dim;
  };
  const auto block_of = [&](const std::vector<Piece>& pieces) -> std::array<int64_t, 5> {
    emberd_lookup lookup;
    for (const auto& [begin, samples, dim] : pieces) {
      lookup.activations.push_back(
          {"f", samples, dim, absl::MakeConstSpan(memory).subspan(begin, samples * dim), 0});
    }
    emberd_block block;
    if (emberd_lookup_block(&lookup, &block) == 0) return {};
    return {block.values - memory.data(), block.features, block.samples, block.dim, block.distance};
  };
  constexpr std::array<int64_t, 5> kNone = {};
  EXPECT_EQ(block_of({{4, 3, 2}, {12, 3, 2}, {20, 3, 2}}), (std::array<int64_t, 5>{4, 3, 3, 2, 8}));
  EXPECT_EQ(block_of({{0, 3, 2}, {6, 3, 2}}), (std::array<int64_t, 5>{0, 2, 3, 2, 6}));
  EXPECT_EQ(block_of({{5, 3, 2}}), (std::array<int64_t, 5>{5, 1, 3, 2, 6}));
  EXPECT_EQ(block_of({}), kNone);
  EXPECT_EQ(block_of({{4, 0, 2}, {12, 0, 2}}), kNone);
  EXPECT_EQ(block_of({{4, 3, 2}, {12, 3, 2}, {21, 3, 2}}), kNone);
  EXPECT_EQ(block_of({{4, 3, 2}, {12, 3, 2}, {20, 2, 3}}), kNone);
  EXPECT_EQ(block_of({{4, 3, 2}, {12, 2, 2}}), kNone);
  EXPECT_EQ(block_of({{4, 3, 2}, {9, 3, 2}}), kNone);  // one over the other
  EXPECT_EQ(block_of({{20, 3, 2}, {12, 3, 2}}), kNone);
}

// What this would catch: an array of another kind whose bytes are sent as ids.
TEST(NumpyTest, AddressesOfArraysOfTheirKind) {
  struct Array {  // as in CPython
    int64_t references = 1;
    const void* type;
    void* data;
    int32_t dims;
    const int64_t* shape;
    const void* strides_and_base[2] = {};
    const void* dtype;
    int32_t flags = 0x501;
  };
  const int type = 0, other_type = 0, dtype = 0, other_dtype = 0;
  int32_t values[16] = {};
  const int64_t shape[] = {4, 2}, wide[] = {4, 3};
  const auto written = [&](const Array& second) {
    const Array first = {.type = &type, .data = values, .dims = 2, .shape = shape, .dtype = &dtype};
    const void* const arrays[] = {&first, &second};
    const emberd_numpy_kind kind = {&type, &dtype, 2, {4, 2}, sizeof(int32_t)};
    const emberd_numpy_kind kinds[] = {kind, kind};
    std::array<const void*, 6> records = {};
    if (emberd_numpy_addresses(arrays, kinds, 2, records.data(), 24, 8) == 0) return false;
    EXPECT_EQ(records,
              (std::array<const void*, 6>{nullptr, values, nullptr, nullptr, second.data}));
    return true;
  };
  const Array right = {
      .type = &type, .data = values + 8, .dims = 2, .shape = shape, .dtype = &dtype};
  EXPECT_TRUE(written(right));
  const auto wrong = [&](auto change) {
    Array array = right;
    change(array);
    return !written(array);
  };
  EXPECT_TRUE(wrong([&](Array& array) { array.type = &other_type; }));
  EXPECT_TRUE(wrong([&](Array& array) { array.dtype = &other_dtype; }));
  EXPECT_TRUE(wrong([&](Array& array) { array.dims = 1; }));
  EXPECT_TRUE(wrong([&](Array& array) { array.shape = wide; }));
  EXPECT_TRUE(wrong([&](Array& array) { array.flags = 0x502; }));
  EXPECT_TRUE(wrong([&](Array& array) { array.data = reinterpret_cast<char*>(values) + 2; }));
}

}  // namespace arrays_test
