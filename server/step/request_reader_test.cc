#include "server/step/request_reader.h"

#include <gtest/gtest.h>

namespace emberd::step {
namespace request_reader_test {

v1::Tensor Make(v1::DataType dtype, const std::vector<int64_t>& shape, size_t bytes) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  for (const int64_t extent : shape) tensor.add_shape(extent);
  tensor.set_data(std::string(bytes, '\1'));
  return tensor;
}

TEST(TensorViewTest, GivesTypedSpansOverTheBytes) {
  const v1::Tensor ints = Make(v1::INT32, {3}, 12);
  auto view = IntsOf(ints, "x");
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(IntCount(*view), 3);
  EXPECT_EQ(IntAt(*view, 2), 0x01010101);
  EXPECT_EQ(reinterpret_cast<const char*>(std::get<0>(*view).data()), ints.data().data())
      << "it was copied";
  EXPECT_EQ(IntCount(*IntsOf(Make(v1::INT64, {2, 2}, 32), "x")), 4);
  EXPECT_EQ(FloatsOf(Make(v1::FLOAT32, {0, 7}, 0), "x")->size(), 0u);
}

struct BadTensor {
  v1::Tensor tensor;
  std::string message;
};
class BadTensorTest : public testing::TestWithParam<BadTensor> {};

TEST_P(BadTensorTest, IsRefusedWithTheReason) {
  const auto status = IntsOf(GetParam().tensor, "x").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    All, BadTensorTest,
    testing::Values(
        BadTensor{Make(v1::FLOAT32, {1}, 4), "x.dtype is FLOAT32; it must be INT32 or INT64"},
        BadTensor{Make(static_cast<v1::DataType>(77), {1}, 4),
                  "x.dtype is 77; it must be INT32 or INT64"},
        BadTensor{Make(v1::INT32, {2}, 4), "x.data has 4 bytes; shape [2] of INT32 needs 8"},
        BadTensor{Make(v1::INT32, {2}, 9), "x.data has 9 bytes; shape [2] of INT32 needs 8"},
        BadTensor{Make(v1::INT64, {-1}, 8), "x.shape[0] is -1; it must be >= 0"},
        BadTensor{Make(v1::INT64, {4, -2}, 8), "x.shape[1] is -2; it must be >= 0"},
        // A product that wraps around to the right number of bytes must not pass.
        BadTensor{Make(v1::INT64, {int64_t{1} << 62, 8}, 0),
                  "x.data has 0 bytes; shape [4611686018427387904, 8] of INT64 needs more than "
                  "9223372036854775807"},
        // Nor one that is zero at last: whoever multiplies in another order would overflow.
        BadTensor{Make(v1::INT64, {int64_t{1} << 62, 8, 0}, 0),
                  "x.data has 0 bytes; shape [4611686018427387904, 8, 0] of INT64 needs more than "
                  "9223372036854775807"},
        BadTensor{Make(v1::INT64, {(int64_t{1} << 61) + 1}, 8),
                  "x.data has 8 bytes; shape [2305843009213693953] of INT64 needs more than "
                  "2305843009213693953"}));

}  // namespace request_reader_test
}  // namespace emberd::step
