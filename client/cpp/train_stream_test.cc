#include "client/cpp/train_stream.h"

#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/testing/train_stream_fixture.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::client {
namespace train_stream_test {

using ::testing::Each;
using ::testing::HasSubstr;
using testing::kDim;
using testing::kSamples;
using ::testing::SizeIs;
using testing::TrainStreamTest;

TEST_F(TrainStreamTest, StartsWithWhatItWasTold) {
  Open({.group = "g",
        .rank = 2,
        .size = 4,
        .consistency = Consistency::kBounded,
        .staleness_bound = 6,
        .first_step = 9,
        .step_timeout = absl::Milliseconds(1234)});
  EXPECT_EQ(stream_->next_step(), 7);
  EXPECT_EQ(stream_->generation(), 5u);
  EXPECT_EQ(stream_->made_generation(), 4u);
  const v1::TrainStart start = service_.train_requests()[0].start();
  EXPECT_EQ(start.model_id(), model_.id);
  EXPECT_EQ(start.group(), "g");
  EXPECT_EQ(start.rank(), 2);
  EXPECT_EQ(start.options().size(), 4);
  EXPECT_EQ(start.options().consistency(), v1::BOUNDED);
  EXPECT_EQ(start.options().staleness_bound(), 6);
  EXPECT_FALSE(start.options().pipelined());
  EXPECT_EQ(start.options().first_step(), 9);
  EXPECT_EQ(start.options().step_timeout_ms(), 1234);
}

TEST_F(TrainStreamTest, AStepInParts) {
  Open();
  ASSERT_TRUE(stream_->SendLookup(7, Features()).ok());
  absl::StatusOr<TrainLookupResult> found = stream_->ReceiveLookup();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->step, 7);
  ASSERT_THAT(found->activations, SizeIs(3));
  for (int i = 0; i < 3; ++i) {
    const Activation& activation = found->activations[i];
    EXPECT_EQ(activation.feature, model_.features[i].name);
    ASSERT_EQ(activation.samples, i == 2 ? 2 : kSamples);
    ASSERT_THAT(activation.values, SizeIs(activation.samples * kDim));
    for (int64_t s = 0; s < activation.samples; ++s) {
      ASSERT_THAT(activation.values.subspan(s * kDim, kDim), Each(7000 + 100 * i + s));
    }
  }
  EXPECT_EQ(found->statistics.num_minibatches, 3);
  EXPECT_EQ(found->times.shards, absl::Microseconds(40));
  EXPECT_EQ(found->times.slowest_rank, 1);

  const UpdateOptions options = {.hyperparameters = {{"a", {{"learning_rate", 0.5f}}}},
                                 .memory = gradient_};
  ASSERT_TRUE(stream_->SendUpdate(7, Gradients(), options).ok());
  absl::StatusOr<TrainUpdateResult> updated = stream_->ReceiveUpdate();
  ASSERT_TRUE(updated.ok()) << updated.status();
  EXPECT_EQ(updated->step, 7);
  EXPECT_EQ(updated->rows_updated, 3);
  EXPECT_TRUE(stream_->Finish().ok());
}

TEST_F(TrainStreamTest, AsksForACheckpointAndHearsOfItsEnd) {
  service_.damage_train = [](v1::TrainResponse* response) {
    if (response->update().step() != 8) return;
    response->mutable_update()->set_checkpoint("k7");
    response->mutable_update()->set_checkpoint_error("the disk is full");
    response->mutable_update()->set_checkpoint_step(7);
  };
  Open();
  ASSERT_TRUE(stream_->SendUpdate(7, Gradients(), {.checkpoint = "k7"}).ok());
  ASSERT_TRUE(stream_->SendUpdate(8, {}).ok());
  const absl::StatusOr<TrainUpdateResult> first = stream_->ReceiveUpdate();
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->checkpoint, "");
  const absl::StatusOr<TrainUpdateResult> second = stream_->ReceiveUpdate();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->checkpoint, "k7");
  EXPECT_EQ(second->checkpoint_error, "the disk is full");
  EXPECT_EQ(second->checkpoint_step, 7);
  const std::vector<v1::TrainRequest> requests = Requests();
  ASSERT_THAT(requests, SizeIs(3));
  EXPECT_EQ(requests[0].update().checkpoint(), "");  // a part of it: asked once, with its last
  EXPECT_EQ(requests[1].update().checkpoint(), "k7");
  EXPECT_EQ(requests[2].update().checkpoint(), "");
}

TEST_F(TrainStreamTest, SendsAheadAndReceivesEachKindInOrder) {
  Open();
  for (int64_t step = 7; step < 12; ++step) {
    ASSERT_TRUE(stream_->SendLookup(step, Features()).ok());
    if (step == 7) continue;
    ASSERT_TRUE(stream_->SendUpdate(step - 1, {}).ok());
  }
  for (int64_t step = 7; step < 11; ++step) EXPECT_EQ(stream_->ReceiveUpdate()->step, step);
  for (int64_t step = 7; step < 12; ++step) {
    absl::StatusOr<TrainLookupResult> found = stream_->ReceiveLookup();
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->step, step);
    EXPECT_EQ(found->activations[0].values[0], 1000 * step);
  }
  EXPECT_TRUE(stream_->Finish().ok());
}

// Answers come in the order of the requests: were all lookups on their way, each update's answer
// would wait for a lookup that needs the next update.
TEST_F(TrainStreamTest, LookupsFarAheadLeaveWhenTheirTurnComes) {
  const std::pair<bool, std::string> cases[] = {{false, "L7 L8 U7 L9 U8 L10 U9 U10 "},
                                                {true, "L7 L8 L9 U7 L10 U8 U9 U10 "}};
  std::string expected;
  for (const auto& [pipelined, requests] : cases) {
    expected += requests;
    Open({.group = "run", .pipelined = pipelined});
    for (int64_t step = 7; step < 11; ++step) {
      ASSERT_TRUE(stream_->SendLookup(step, {{"c", DenseIds{few_}}}).ok());
    }
    for (int64_t step = 7; step < 11; ++step) {
      ASSERT_TRUE(stream_->SendUpdate(step, {}).ok());
      EXPECT_EQ(stream_->ReceiveUpdate()->step, step);
      EXPECT_EQ(stream_->ReceiveLookup()->step, step);
    }
    ASSERT_TRUE(stream_->Finish().ok());
    std::string order;
    for (const v1::TrainRequest& request : service_.train_requests()) {
      if (request.has_lookup()) absl::StrAppend(&order, "L", request.lookup().step(), " ");
      if (request.has_update()) absl::StrAppend(&order, "U", request.update().step(), " ");
    }
    EXPECT_EQ(order, expected);
  }
}

// The server judges what is out of turn, and what is left when nothing follows.
TEST_F(TrainStreamTest, LookupsThatHaveNoTurnLeaveAtOnce) {
  Open();
  const std::vector<FeatureIds> features = {{"c", DenseIds{few_}}};
  ASSERT_TRUE(stream_->SendLookup(1000, features).ok());
  EXPECT_EQ(stream_->ReceiveLookup()->step, 1000);
  Open();
  for (int64_t step = 7; step < 12; ++step) ASSERT_TRUE(stream_->SendLookup(step, features).ok());
  ASSERT_TRUE(stream_->Finish().ok());
  for (int64_t step = 7; step < 12; ++step) EXPECT_EQ(stream_->ReceiveLookup()->step, step);
}

TEST_F(TrainStreamTest, ReceivesFeaturesSideBySide) {
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16}) {
    Connect(type);
    Open();
    const std::vector<int64_t> ids(3, 4);
    ASSERT_TRUE(
        stream_->SendLookup(0, {{"b", DenseIds{ids}}, {"a", DenseIds{ids}}}, {.concat = true})
            .ok());
    const absl::StatusOr<TrainLookupResult> found = stream_->ReceiveLookup();
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_THAT(found->concat, SizeIs(3 * 2 * kDim));
    for (int64_t sample = 0; sample < 3; ++sample) {
      const auto row = found->concat.subspan(sample * 2 * kDim, 2 * kDim);
      EXPECT_THAT(row.subspan(0, kDim), Each(sample));
      EXPECT_THAT(row.subspan(kDim), Each(100 + sample));
    }
    EXPECT_EQ(found->activations[1].values.data(), found->concat.data() + kDim);
    EXPECT_EQ(found->activations[1].row_stride, 2 * kDim);
    EXPECT_THAT(found->activations[1].values, SizeIs(2 * 2 * kDim + kDim));
    const absl::Status uneven =
        stream_->SendLookup(1, {{"b", DenseIds{ids}}, {"c", DenseIds{few_}}}, {.concat = true});
    EXPECT_EQ(uneven.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(uneven.message(), HasSubstr("\"b\" has 3 samples, and feature \"c\" has 2"));
  }
}

TEST_F(TrainStreamTest, OneThreadSendsWhileAnotherReceives) {
  Open();
  constexpr int64_t kSteps = 50;
  std::thread sender([&] {
    for (int64_t step = 0; step < kSteps; ++step) {
      EXPECT_TRUE(stream_->SendLookup(step, Features()).ok());
      EXPECT_TRUE(stream_->SendUpdate(step, Gradients(), {.memory = gradient_}).ok());
    }
  });
  for (int64_t step = 0; step < kSteps;) {
    absl::StatusOr<TrainLookupResult> found = stream_->ReceiveLookup();
    if (absl::IsFailedPrecondition(found.status())) continue;  // not sent yet
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->activations[2].values[0], 1000 * step + 200);
    ++step;
  }
  sender.join();
  EXPECT_TRUE(stream_->Finish().ok());
  for (int64_t step = 0; step < kSteps; ++step) EXPECT_EQ(stream_->ReceiveUpdate()->step, step);
}

TEST_F(TrainStreamTest, AnswersOutliveFinishAndResultsOutliveTheStream) {
  Open();
  ASSERT_TRUE(stream_->SendLookup(7, Features()).ok());
  ASSERT_TRUE(stream_->SendUpdate(7, {}).ok());
  ASSERT_TRUE(stream_->Finish().ok());
  EXPECT_EQ(stream_->SendLookup(8, Features()).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(stream_->ReceiveUpdate().ok());
  absl::StatusOr<TrainLookupResult> found = stream_->ReceiveLookup();
  stream_.reset();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->activations[0].values.back(), 7000 + kSamples - 1);
}

TEST_F(TrainStreamTest, NothingToReceiveIsAnError) {
  Open();
  EXPECT_EQ(stream_->ReceiveLookup().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(stream_->ReceiveUpdate().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(TrainStreamTest, TheServersErrorComesAfterTheAnswersBeforeIt) {
  service_.train_responses = 1 + 3 + 1;  // the start, a lookup, an update
  service_.train_status = grpc::Status(grpc::ABORTED, "rank 1 left: its stream ended");
  Open();
  for (int64_t step = 7; step < 9; ++step) {
    ASSERT_TRUE(stream_->SendLookup(step, Features()).ok());
    // The second one may find the stream ended already.
    (void)stream_->SendUpdate(step, {});
  }
  EXPECT_TRUE(stream_->ReceiveLookup().ok());
  EXPECT_TRUE(stream_->ReceiveUpdate().ok());
  const absl::Status expected = absl::AbortedError("rank 1 left: its stream ended");
  EXPECT_EQ(stream_->ReceiveLookup().status(), expected);
  EXPECT_EQ(stream_->ReceiveUpdate().status(), expected);
  EXPECT_EQ(stream_->SendLookup(9, Features()), expected);
  EXPECT_EQ(stream_->Finish(), expected);
}

TEST_F(TrainStreamTest, AnEndWithoutAnswersIsAnError) {
  service_.train_responses = 2;
  Open();
  ASSERT_TRUE(stream_->SendLookup(7, Features()).ok());
  EXPECT_EQ(stream_->ReceiveLookup().status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(stream_->Finish().code(), absl::StatusCode::kInternal);
}

TEST_F(TrainStreamTest, ARefusedStartIsTheErrorOfTrain) {
  service_.train_responses = 0;
  service_.train_status = grpc::Status(grpc::INVALID_ARGUMENT, "options.size is 0");
  EXPECT_EQ(client_->Train(model_, {.group = "g"}).status(),
            absl::InvalidArgumentError("options.size is 0"));
  const absl::Status status = client_->Train(model_, {.group = "g", .coordinator = 1}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("[0, 1)"));
}

// What this would catch: a time-out that becomes the server's default, or is over at once.
TEST_F(TrainStreamTest, ATimeoutThatIsNoNumberOfMillisecondsIsRefused) {
  for (const absl::Duration timeout :
       {absl::ZeroDuration(), absl::Microseconds(999), -absl::Hours(24),
        absl::Milliseconds(int64_t{1} << 31), absl::InfiniteDuration()}) {
    EXPECT_EQ(client_->Train(model_, {.group = "g", .step_timeout = timeout}).status(),
              absl::InvalidArgumentError(
                  absl::StrCat("step_timeout: ", absl::FormatDuration(timeout),
                               " is not allowed; it must be in [1ms, 2147483647ms]")));
  }
  EXPECT_THAT(service_.train_requests(), ::testing::IsEmpty());
}

TEST_F(TrainStreamTest, CancelCallsEndsStreamsToo) {
  Open();
  std::thread canceller([&] {
    absl::SleepFor(absl::Milliseconds(30));
    client_->CancelCalls();
  });
  absl::Status status;
  while (status.ok()) {
    status = stream_->SendLookup(7, Features());
    if (status.ok()) status = stream_->ReceiveLookup().status();
  }
  canceller.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

// Whatever is wrong with an answer, the caller gets INTERNAL and reads no byte that is not there.
TEST_F(TrainStreamTest, DoubtsWhatTheServerSends) {
  using Damage = std::function<void(v1::TrainLookupResult*)>;
  const std::vector<std::pair<Damage, std::string>> cases = {
      {[](auto* r) { r->set_step(8); }, "step: the server sent 8; 7"},
      {[](auto* r) { r->mutable_activations(0)->set_feature("q"); },
       "feature: the server sent \"q\""},
      {[](auto* r) { r->clear_activations(); }, "expected"},
      {[](auto* r) { r->set_continues(false); }, "activations: the server sent 1; 3"},
      {[](auto* r) { *r->add_activations() = r->activations(0); }, "feature"},
      {[](auto* r) {
         for (int i = 0; i < 3; ++i) *r->add_activations() = r->activations(0);
       },
       ""},
      {[](auto* r) { r->mutable_activations(0)->mutable_activation()->set_dtype(v1::BFLOAT16); },
       "dtype"},
      {[](auto* r) { r->mutable_activations(0)->mutable_activation()->set_shape(0, 1); }, "shape"},
      {[](auto* r) { *r->mutable_activations(0)->mutable_activation()->mutable_data() += '0'; },
       "data"},
      {[](auto* r) { r->mutable_activations(0)->mutable_activation()->clear_data(); },
       "data: the server sent 0 bytes"},
  };
  for (const auto& [damage, message] : cases) {
    SCOPED_TRACE(message);
    service_.damage_train = [damage = damage](v1::TrainResponse* response) {
      if (response->has_lookup()) damage(response->mutable_lookup());
    };
    Open();
    ASSERT_TRUE(stream_->SendLookup(7, Features()).ok());
    const absl::Status status = stream_->ReceiveLookup().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
    EXPECT_EQ(stream_->Finish(), status);
    stream_.reset();
  }
}

}  // namespace train_stream_test
}  // namespace emberd::client
