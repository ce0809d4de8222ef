// What a step of a stream puts into shared memory, and what it says of that.
#include "client/cpp/shared_memory.h"

#include <algorithm>
#include <memory>
#include <vector>

#include <grpcpp/support/proto_buffer_reader.h>

#include "base/testing/region_ends.h"
#include "client/cpp/batch_codec.h"
#include "client/cpp/model.h"
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

// The fault this would catch: only the ids that the first message names are found in the block, and
// the coordinator refuses every lookup of a model with thousands of features.
TEST(SharedIdsTest, TheFirstOfSeveralMessagesNamesTheIdsOfAll) {
  const auto server = region_ends::StartServer();
  SharedMemory memory(TransportKind::kShared, [&](absl::Time) { return server->Invite(); });
  const std::vector<int64_t> ids = {1, 2, 3};
  Model model;
  for (const char letter : {'a', 'b', 'c'}) {
    model.features.push_back({std::string(kTrainMessageBytes * 2 / 3, letter), "t", kDim});
  }
  std::vector<FeatureIds> features;
  for (const FeatureInfo& one : model.features) features.push_back({one.name, DenseIds{ids}});

  ExpectedLookup expected;
  auto messages = EncodeTrainLookup(model, /*step=*/0, features, WireType::kFloat32,
                                    /*concat=*/false, &expected, &memory);
  ASSERT_TRUE(messages.ok()) << messages.status();
  ASSERT_EQ(messages->size(), features.size());
  ASSERT_NE(expected.ids, nullptr);
  grpc::ProtoBufferReader reader(&messages->front());
  v1::TrainRequest first;
  ASSERT_TRUE(first.ParseFromZeroCopyStream(&reader));
  EXPECT_EQ(first.lookup().shared().ids().offset(), expected.ids->offset());
  EXPECT_EQ(first.lookup().shared().ids().size(), features.size() * kTensorAlignment);
}

}  // namespace shared_memory_test
}  // namespace emberd::client
