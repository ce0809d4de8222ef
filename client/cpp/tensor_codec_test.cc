#include "client/cpp/tensor_codec.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace emberd::client {
namespace tensor_codec_test {

TEST(TensorCodecTest, Bfloat16BytesAreLittleEndianAtAnyAlignment) {
  const std::vector<float> values = {1.0f, -2.5f, 3.140625f};
  std::string bytes(1 + 2 * values.size(), '\0');
  ToBfloat16Bytes(values, bytes.data() + 1);
  EXPECT_EQ(bytes.substr(1), std::string("\x80\x3f\x20\xc0\x49\x40", 6));
  std::vector<float> back(values.size());
  FromBfloat16Bytes(bytes.data() + 1, absl::MakeSpan(back));
  EXPECT_EQ(back, values);
}

TEST(TensorCodecTest, FloatsAreUsedAgainAndOutliveTheirPool) {
  std::optional<BufferPool> pool(std::in_place);
  const float* first = TakeFloats(&*pool, 100).get();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
  const std::shared_ptr<float> again = TakeFloats(&*pool, 100);
  EXPECT_EQ(again.get(), first);
  EXPECT_NE(TakeFloats(&*pool, 100).get(), first);
  pool.reset();
  std::fill_n(again.get(), 100, 1.0f);
}

}  // namespace tensor_codec_test
}  // namespace emberd::client
