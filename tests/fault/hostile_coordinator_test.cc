// A caller that shares memory with a shard as a coordinator does, and does not mean well: it names
// places that are not there, and changes what it has sent. The shard must answer each call, and
// coordinators may not notice.
#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include <google/protobuf/unknown_field_set.h>

#include "absl/cleanup/cleanup.h"
#include "base/regions.h"
#include "base/testing/await.h"
#include "base/testing/seed.h"
#include "emberd/internal/v1/shard_service.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/shared_place.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace hostile_coordinator_test {

using internal::v1::MessagePart;
using internal::v1::ShardService;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr size_t kBytes = 1 << 20;

class HostileCoordinatorTest : public ClusterFixture {
 protected:
  void SetUp() override {
    StartCluster({.shards = 1}, MixedModel("model"));
    stub_ = ShardService::NewStub(Api(cluster_->shard_address(0)).channel);
    grpc::ClientContext context;
    Prepare(&context);
    v1::ShareMemoryResponse invitation;
    const grpc::Status status = stub_->ShareMemory(&context, {}, &invitation);
    ASSERT_TRUE(status.ok()) << status.error_message();
    auto arena = SharedArena::Connect(invitation.socket(), invitation.ticket(),
                                      absl::InfiniteFuture(), emberd::kPatience);
    ASSERT_TRUE(arena.ok()) << arena.status();
    block_ = (*arena)->Take(kBytes);
    ASSERT_NE(block_, nullptr);
  }
  // As the cluster's own coordinator does.
  static void Prepare(grpc::ClientContext* context) {
    internal::v1::ShardPlace place;
    place.set_shards(1);
    place.set_sparsecores_per_shard(2);
    context->AddMetadata("emberd-shard-place-bin", place.SerializeAsString());
    context->set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
  }

  v1::SharedBlock Place(uint64_t offset, uint64_t size) const {
    return PlaceIn(*block_, offset, size);
  }
  template <typename Method, typename Header>
  grpc::Status Send(Method method, const Header& header) {
    grpc::ClientContext context;
    Prepare(&context);
    const auto stream = (stub_.get()->*method)(&context);
    MessagePart part;
    part.set_header(header.SerializeAsString());
    // payload_size 0, which the message itself would leave out.
    part.GetReflection()->MutableUnknownFields(&part)->AddVarint(2, 0);
    stream->Write(part);
    stream->WritesDone();
    while (stream->Read(&part)) {
    }
    return stream->Finish();
  }
  grpc::Status Gather(const internal::v1::GatherHeader& header) {
    return Send(static_cast<GatherMethod>(&ShardService::Stub::Gather), header);
  }
  grpc::Status Apply(const internal::v1::ApplyHeader& header) {
    return Send(static_cast<GatherMethod>(&ShardService::Stub::Apply), header);
  }
  // Of a batch of the model with nothing in it, and one for which the payload is too large.
  internal::v1::GatherHeader GatherOf(const v1::SharedBlock& payload) const {
    internal::v1::GatherHeader header;
    header.set_model_id(model_.id);
    *header.mutable_payload() = payload;
    return header;
  }
  internal::v1::ApplyHeader ApplyOf(const v1::SharedBlock& payload) const {
    internal::v1::ApplyHeader header;
    header.set_model_id(model_.id);
    header.set_client_id("hostile");
    header.set_sequence(1);
    header.set_attempt(1);
    header.add_stacks()->set_floats(16);
    *header.mutable_payload() = payload;
    return header;
  }
  // Rows of a feature somewhere, mostly in the region.
  void FillRows(std::mt19937_64& random, uint64_t offset, internal::v1::FeatureRows* rows) const {
    rows->set_region(random() % 16 == 0 ? random() : block_->region());
    rows->set_offset(offset);
    rows->set_width(static_cast<int32_t>(random() % 32));
    rows->set_stride(static_cast<int32_t>(random() % 8 == 0 ? random() : random() % 64));
    rows->set_first_sample(static_cast<int32_t>(random() % 8 == 0 ? random() : 0));
    rows->set_samples(static_cast<int32_t>(random() % 8 == 0 ? random() : random() % 5000));
  }
  void ExpectAllIsWell() {
    EXPECT_TRUE(cluster_->shard_process(0)->Running());
    const absl::Status trained = TrainStep(*client_, model_, 1, 4000);
    EXPECT_TRUE(trained.ok()) << trained;
  }

  using GatherMethod = std::unique_ptr<grpc::ClientReaderWriter<MessagePart, MessagePart>> (
      ShardService::Stub::*)(grpc::ClientContext*);

  std::unique_ptr<ShardService::Stub> stub_;
  std::shared_ptr<SharedBlock> block_;
};

TEST_F(HostileCoordinatorTest, PlacesThatAreNotThereAreRefused) {
  for (const v1::SharedBlock& place :
       {Place(1, 64), Place(uint64_t{64} << 20, 64), Place(0, uint64_t{1} << 40)}) {
    EXPECT_EQ(Gather(GatherOf(place)).error_code(), grpc::INVALID_ARGUMENT);
    EXPECT_EQ(Apply(ApplyOf(place)).error_code(), grpc::INVALID_ARGUMENT);
    internal::v1::GatherHeader answer;
    *answer.mutable_answer() = place;
    EXPECT_EQ(Gather(answer).error_code(), grpc::INVALID_ARGUMENT);
  }
  v1::SharedBlock unknown = Place(0, 64);
  unknown.set_region(77);
  EXPECT_EQ(Gather(GatherOf(unknown)).error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(Apply(ApplyOf(unknown)).error_message(), HasSubstr("there is no shared region"));
  ExpectAllIsWell();
}

TEST_F(HostileCoordinatorTest, RandomPlacesThatChangeMeanwhileBreakNothing) {
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    std::mt19937_64 random(TestSeed() + 1);
    auto* const words = reinterpret_cast<volatile uint64_t*>(block_->data());
    while (!stop) words[random() % (kBytes / sizeof(uint64_t))] = random();
  });
  const absl::Cleanup join = [&] {
    stop = true;
    writer.join();
  };
  std::mt19937_64 random(TestSeed());
  const auto number = [&]() -> uint64_t {
    switch (random() % 4) {
      case 0:
        return random();
      case 1:
        return (uint64_t{64} << 20) - random() % 8192;
      default:
        return random() % 16384 * 64;
    }
  };
  std::map<std::string, int> seen;
  for (int i = 0; i < 1500; ++i) {
    internal::v1::GatherHeader gather = GatherOf(Place(number(), number()));
    *gather.mutable_answer() = Place(number(), number());
    for (int stack = static_cast<int>(random() % 4); stack > 0; --stack) {
      internal::v1::StackBatchHeader* const batch = gather.add_stacks();
      batch->set_stack(stack - 1);
      batch->set_slots(2);
      batch->set_minibatches(1);
      for (int segment = 0; segment < 2; ++segment) {
        batch->add_segments()->set_entries(static_cast<int32_t>(random() % 4096));
      }
      if (random() % 2 == 0) FillRows(random, number(), batch->add_places());
      batch->set_passes_over(random() % 4 == 0);
    }
    const grpc::Status gathered = Gather(gather);
    EXPECT_THAT(gathered.error_code(),
                AnyOf(grpc::OK, grpc::INVALID_ARGUMENT, grpc::RESOURCE_EXHAUSTED, grpc::DATA_LOSS,
                      grpc::FAILED_PRECONDITION));
    internal::v1::ApplyHeader update = ApplyOf(Place(number(), random() % 2 == 0 ? 64 : number()));
    if (random() % 2 == 0) FillRows(random, number(), update.mutable_stacks(0)->add_features());
    const grpc::Status applied = Apply(update);
    EXPECT_THAT(applied.error_code(), AnyOf(grpc::INVALID_ARGUMENT, grpc::DATA_LOSS,
                                            grpc::NOT_FOUND, grpc::FAILED_PRECONDITION));
    ++seen[gathered.error_message()];
    ++seen[applied.error_message()];
  }
  // Not all of them for the same reason.
  EXPECT_GT(seen.size(), 100u);
  ExpectAllIsWell();
}

}  // namespace hostile_coordinator_test
}  // namespace emberd::testing
