#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "client/cpp/batch_codec.h"

namespace emberd::client {
namespace tensor_codec_test {

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
