#include "client/cpp/tensor_codec.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace emberd::client {
namespace {

TEST(TensorCodecTest, Bfloat16BytesAreLittleEndianAtAnyAlignment) {
  const std::vector<float> values = {1.0f, -2.5f, 3.140625f};
  std::string bytes(1 + 2 * values.size(), '\0');
  ToBfloat16Bytes(values, bytes.data() + 1);
  EXPECT_EQ(bytes.substr(1), std::string("\x80\x3f\x20\xc0\x49\x40", 6));
  std::vector<float> back(values.size());
  FromBfloat16Bytes(bytes.data() + 1, absl::MakeSpan(back));
  EXPECT_EQ(back, values);
}

}  // namespace
}  // namespace emberd::client
