// The gradients of an update in shared memory, while the stream that lent it ends.
#include "client/cpp/shared_memory.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "base/testing/region_ends.h"
#include "gtest/gtest.h"

namespace emberd::client {
namespace shared_memory_test {

constexpr int64_t kDim = 4;
constexpr int64_t kLarge = 1 << 18, kSmall = 2;  // samples

TEST(SharedGradientsTest, WhatIsPartedMeanwhileIsWrittenNowhere) {
  const auto server = region_ends::StartServer();
  SharedMemory memory(TransportKind::kShared, [&](absl::Time) { return server->Invite(); });
  const auto own = memory.Take(kLarge * kDim * sizeof(float), absl::InfiniteFuture());
  ASSERT_NE(own, nullptr);
  auto* const values = reinterpret_cast<float*>(own->data());
  std::fill_n(values, kLarge * kDim, 1.0f);
  const std::vector<float> few(kSmall * kDim, 2.0f);
  const std::vector<FeatureGradient> gradients = {
      {"a", absl::MakeConstSpan(values, kLarge * kDim), kLarge}, {"b", few, kSmall}};

  SharedGradients shared(&memory, {own});
  shared.Reserve(gradients, {kDim, kDim}, WireType::kFloat32, absl::InfiniteFuture());
  own->Lend();
  own->Part();
  v1::FeatureGradient first, second;
  ASSERT_TRUE(shared.Put(gradients[0], kDim, WireType::kFloat32, &first));
  ASSERT_TRUE(shared.Put(gradients[1], kDim, WireType::kFloat32, &second));
  EXPECT_EQ(first.shared().region(), own->region());
  EXPECT_EQ(first.shared().offset(), own->offset());
  EXPECT_EQ(second.shared().size(), kSmall * kDim * sizeof(float));
}

}  // namespace shared_memory_test
}  // namespace emberd::client
