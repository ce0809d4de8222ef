// What a stream sends. Catches: bytes that are lost or doubled where requests are cut, requests
// that mix with one another, memory that is held for ever.
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "base/rpc/wire.h"
#include "base/testing/await.h"
#include "client/cpp/batch_codec.h"
#include "client/cpp/testing/train_stream_fixture.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::client {
namespace train_request_test {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kDim;
using testing::kSamples;
using ::testing::SizeIs;
using TrainRequestTest = testing::TrainStreamTest;

// The server must get every byte and every field once, in messages that no budget of 4 MiB refuses.
TEST_F(TrainRequestTest, CutsLongRequestsIntoMessages) {
  Open();
  ASSERT_TRUE(stream_->SendLookup(7, {{"a", DenseIds{ids_}}}).ok());
  ASSERT_TRUE(
      stream_->SendUpdate(7, Gradients(), {.hyperparameters = {{"", {{"learning_rate", 2}}}}})
          .ok());
  ASSERT_TRUE(stream_->Finish().ok());
  const std::vector<v1::TrainRequest> requests = Requests();
  ASSERT_THAT(requests, SizeIs(3));
  EXPECT_FALSE(requests[0].lookup().continues());
  v1::TrainUpdate whole;
  for (const v1::TrainRequest& request : {requests[1], requests[2]}) {
    EXPECT_LT(request.ByteSizeLong(), kSamples * kDim * 4 + 10'000);
    EXPECT_EQ(request.update().step(), 7);
    EXPECT_EQ(request.update().continues(), whole.gradients().empty());
    whole.MergeFrom(request.update());
  }
  ASSERT_THAT(whole.gradients(), SizeIs(3));
  for (int i = 0; i < 3; ++i) {
    const v1::FeatureGradient& gradient = whole.gradients(i);
    EXPECT_EQ(gradient.feature(), Gradients()[i].feature);
    EXPECT_EQ(gradient.gradient().dtype(), v1::FLOAT32);
    EXPECT_THAT(gradient.gradient().shape(), ElementsAre(i == 1 ? 2 : kSamples, kDim));
    const auto values = Gradients()[i].values;
    EXPECT_EQ(gradient.gradient().data(),
              std::string(reinterpret_cast<const char*>(values.data()), 4 * values.size()));
  }
  ASSERT_THAT(whole.hyperparameters(), SizeIs(1));
  EXPECT_EQ(whole.hyperparameters(0).values().at("learning_rate"), 2);
}

// A kind of consistency that goes out as another one trains, but not as it was asked to.
TEST_F(TrainRequestTest, StartsWithTheConsistencyThatWasAskedFor) {
  const std::pair<Consistency, v1::Consistency> kinds[] = {{Consistency::kSync, v1::SYNC},
                                                           {Consistency::kAsync, v1::ASYNC},
                                                           {Consistency::kBounded, v1::BOUNDED}};
  for (const auto& [asked, sent] : kinds) {
    v1::TrainRequest request;
    ASSERT_TRUE(rpc::DecodeMessage(EncodeTrainStart(model_, {.group = "run", .consistency = asked}),
                                   &request)
                    .ok());
    EXPECT_EQ(request.start().options().consistency(), sent);
  }
}

TEST_F(TrainRequestTest, SkipsAStep) {
  Open();
  const absl::Status refused = stream_->SendUpdate(7, Gradients(), {.skip = true});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("step 7, but 3 gradients are given"));
  ASSERT_TRUE(stream_->SendUpdate(7, {}, {.checkpoint = "k7", .skip = true}).ok());
  ASSERT_TRUE(stream_->SendUpdate(8, {}).ok());
  EXPECT_EQ(stream_->ReceiveUpdate()->step, 7);
  ASSERT_TRUE(stream_->ReceiveUpdate().ok());
  const std::vector<v1::TrainRequest> requests = Requests();
  ASSERT_THAT(requests, SizeIs(2));
  EXPECT_TRUE(requests[0].update().skip());
  EXPECT_EQ(requests[0].update().checkpoint(), "k7");
  EXPECT_FALSE(requests[1].update().skip());
}

TEST_F(TrainRequestTest, CutsLongLookupsIntoMessages) {
  const std::vector<int64_t> many(100'000, 3);  // 0.8 MB
  Open();
  ASSERT_TRUE(
      stream_
          ->SendLookup(
              7, {{"a", DenseIds{many, 50}}, {"b", DenseIds{few_}}, {"c", DenseIds{many, 50}}})
          .ok());
  EXPECT_TRUE(stream_->ReceiveLookup().ok());
  const std::vector<v1::TrainRequest> requests = Requests();
  ASSERT_THAT(requests, SizeIs(2));
  EXPECT_THAT(requests[0].lookup().features(), SizeIs(2));
  EXPECT_TRUE(requests[0].lookup().continues());
  EXPECT_THAT(requests[1].lookup().features(), SizeIs(1));
  EXPECT_FALSE(requests[1].lookup().continues());
  EXPECT_EQ(requests[1].lookup().step(), 7);
}

TEST_F(TrainRequestTest, Bfloat16HalvesTheBytes) {
  Connect(WireType::kBfloat16);
  Open();
  ASSERT_TRUE(stream_->SendLookup(0, Features()).ok());
  absl::StatusOr<TrainLookupResult> found = stream_->ReceiveLookup();
  ASSERT_TRUE(found.ok()) << found.status();
  // Sample 200 of feature 1 is 300; larger odd numbers are not exact.
  EXPECT_THAT(found->activations[1].values.subspan(156 * kDim, kDim), Each(256));
  ASSERT_TRUE(stream_->SendUpdate(0, Gradients(), {.memory = gradient_}).ok());
  ASSERT_TRUE(stream_->Finish().ok());
  const v1::TrainUpdate update = Requests().back().update();
  EXPECT_EQ(update.gradients(0).gradient().dtype(), v1::BFLOAT16);
  EXPECT_THAT(update.gradients(0).gradient().data(), SizeIs(kSamples * kDim * 2));
  EXPECT_EQ(update.gradients(0).gradient().data().substr(0, 2), std::string("\0\x3f", 2));
}

// Parts are sent while others are converted: one that another thread sends must not fall between
// them.
TEST_F(TrainRequestTest, PartsOfARequestFollowOneAnother) {
  Connect(WireType::kBfloat16);
  Open();
  ASSERT_TRUE(stream_->SendLookup(7, Features()).ok());
  ASSERT_TRUE(stream_->ReceiveLookup().ok());
  // Long enough that its first part is there before its last is converted. This service does not
  // mind that a feature is repeated.
  const std::vector<FeatureGradient> many(300, Gradients()[0]);
  std::thread update(
      [&] { EXPECT_TRUE(stream_->SendUpdate(7, many, {.memory = gradient_}).ok()); });
  while (!Requests().back().has_update()) absl::SleepFor(absl::Microseconds(100));
  EXPECT_TRUE(stream_->SendLookup(8, Features()).ok());
  update.join();
  EXPECT_TRUE(stream_->Finish().ok());
  const std::vector<v1::TrainRequest> requests = Requests();
  ASSERT_GT(requests.size(), 100u);
  EXPECT_TRUE(requests.front().has_lookup());
  for (size_t i = 1; i + 1 < requests.size(); ++i) {
    ASSERT_TRUE(requests[i].has_update()) << "part " << i;
    EXPECT_EQ(requests[i].update().continues(), i + 2 < requests.size());
  }
  EXPECT_TRUE(requests.back().has_lookup());
}

TEST_F(TrainRequestTest, SendsGradientsWithGapsBetweenTheirRows) {
  std::vector<float> both(2 * 2 * kDim, 9.0f);  // rows of a feature beside those of another
  std::fill_n(both.begin(), kDim, 1.0f);
  std::fill_n(both.begin() + 2 * kDim, kDim, 2.0f);
  const auto left = absl::MakeConstSpan(both).subspan(0, 3 * kDim);
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16}) {
    Connect(type);
    Open();
    ASSERT_TRUE(stream_->SendUpdate(7, {{"a", left, 2, 2 * kDim}}, {.memory = gradient_}).ok());
    ASSERT_TRUE(stream_->ReceiveUpdate().ok());
    const v1::Tensor sent = service_.train_requests().back().update().gradients(0).gradient();
    EXPECT_THAT(sent.shape(), ElementsAre(2, kDim));
    std::vector<float> expected(2 * kDim, 1.0f);
    std::fill_n(expected.begin() + kDim, kDim, 2.0f);
    v1::Tensor encoded;
    EncodeFloats(expected, {2, kDim}, type, &encoded);
    EXPECT_EQ(sent.data(), encoded.data());
    for (const FeatureGradient& wrong :
         {FeatureGradient{"a", left, 2, kDim - 1}, FeatureGradient{"a", left, 3, 2 * kDim},
          FeatureGradient{"a", {}, 1, 2 * kDim}, FeatureGradient{"a", left, 0, 2 * kDim}}) {
      EXPECT_EQ(stream_->SendUpdate(8, {wrong}).code(), absl::StatusCode::kInvalidArgument);
    }
  }
}

// What cannot be sent leaves the stream as it was.
TEST_F(TrainRequestTest, RefusesWhatMakesNoRequest) {
  Open();
  const absl::Status unknown = stream_->SendLookup(7, {{"z", DenseIds{ids_}}});
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("\"z\""));
  const absl::Status odd = stream_->SendUpdate(7, {{"a", *gradient_, 5}});
  EXPECT_EQ(odd.code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(stream_->SendLookup(7, Features()).ok());
  EXPECT_TRUE(stream_->ReceiveLookup().ok());
  EXPECT_THAT(Requests(), SizeIs(1));  // of the one good lookup
}

// A stream that breaks in the middle of an update lets go of the gradients' memory.
TEST_F(TrainRequestTest, LetsGoOfGradientsAtTheEnd) {
  service_.train_responses = 1;
  Open();
  for (int i = 0; i < 20; ++i) (void)stream_->SendUpdate(i, Gradients(), {.memory = gradient_});
  stream_.reset();
  client_.reset();
  EXPECT_TRUE(Eventually([&] { return gradient_.use_count() == 1; }));
}

}  // namespace train_request_test
}  // namespace emberd::client
