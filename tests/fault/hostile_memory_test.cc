// A client that shares memory with a coordinator and does not mean well: it changes ids and
// gradients while the coordinator reads them, and names places that are not there. The coordinator
// must answer each request, with a result or with an error that fits, and nobody else may notice.
//
// Covers: server/step/request_reader.cc, server/step/activations.cc
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/regions.h"
#include "base/testing/await.h"
#include "base/testing/seed.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/shared_place.h"

namespace emberd::testing {
namespace hostile_memory_test {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using Stub = v1::EmbeddingService::Stub;

constexpr int64_t kSamples = 512;
constexpr int kDim = 8;
constexpr int64_t kRows = 1000;
constexpr uint64_t kRagged = 256 * 1024;  // where in the block row_splits, then values are

// Of each test with chance in it. EMBERD_HOSTILE_ROUNDS=500000 takes about half an hour under
// AddressSanitizer.
int Rounds() {
  const char* const asked = std::getenv("EMBERD_HOSTILE_ROUNDS");
  int rounds = 3000;
  if (asked != nullptr) {
    EXPECT_TRUE(absl::SimpleAtoi(asked, &rounds) && rounds > 0) << asked;
  }
  return rounds;
}

class HostileMemoryTest : public ClusterFixture {
 protected:
  void SetUp() override { Start(""); }
  void Start(const std::string& config) {
    StartCluster(
        {.shards = 2, .config = config},
        absl::StrCat("name: 'm' optimizer { sgd {} learning_rate: 0.1 } tables { name: 't' "
                     "vocabulary_size: ",
                     kRows, " embedding_dim: ", kDim,
                     " combiner: SUM } features { name: 'f' table: 't' }"));
    api_ = std::make_unique<Api>(cluster_->address());
    v1::ShareMemoryResponse invitation;
    ASSERT_TRUE(Call(&Stub::ShareMemory, *api_, v1::ShareMemoryRequest(), &invitation).ok());
    auto arena = SharedArena::Connect(invitation.socket(), invitation.ticket(),
                                      absl::InfiniteFuture(), emberd::kPatience);
    ASSERT_TRUE(arena.ok()) << arena.status();
    arena_ = *std::move(arena);
    block_ = arena_->Take(1 << 20);
    ASSERT_NE(block_, nullptr);
    std::memset(block_->data(), 0, 1 << 20);
  }

  v1::SharedBlock Place(uint64_t offset, uint64_t size) const {
    return PlaceIn(*block_, offset, size);
  }
  v1::LookupRequest Request(bool inference = true) const {
    v1::LookupRequest request;
    request.set_model_id(model_.id);
    request.set_inference(inference);
    v1::FeatureIds* const feature = request.add_features();
    feature->set_feature("f");
    v1::Tensor* const ids = feature->mutable_dense()->mutable_ids();
    ids->set_dtype(v1::INT64);
    ids->add_shape(kSamples);
    *request.mutable_shared()->mutable_ids() = Place(0, kSamples * sizeof(int64_t));
    *request.mutable_shared()->mutable_activations() =
        Place(64 * 1024, kSamples * kDim * sizeof(float));
    return request;
  }
  // The same with ids of another kind, from kRagged on.
  v1::LookupRequest RaggedRequest() const {
    v1::LookupRequest request = Request(/*inference=*/false);
    v1::RaggedIds* const ragged = request.mutable_features(0)->mutable_ragged();
    ragged->mutable_row_splits()->set_dtype(v1::INT64);
    ragged->mutable_row_splits()->add_shape(kSamples + 1);
    ragged->mutable_values()->set_dtype(v1::INT64);
    ragged->mutable_values()->add_shape(kSamples);
    const uint64_t splits = (kSamples + 1) * sizeof(int64_t), values = kSamples * sizeof(int64_t);
    *request.mutable_shared()->mutable_ids() = Place(kRagged, (splits + 63) / 64 * 64 + values);
    return request;
  }
  grpc::Status Lookup(const v1::LookupRequest& request, v1::LookupResponse* response) {
    return Call(&Stub::Lookup, *api_, request, response);
  }
  grpc::Status Lookup(const v1::LookupRequest& request) {
    v1::LookupResponse response;
    return Lookup(request, &response);
  }
  // The coordinator is there, and serves others what they are to get.
  void ExpectAllIsWell() {
    const auto rows = client_->ReadRows(model_, "t", {1, 2, 3});
    EXPECT_TRUE(rows.ok()) << rows.status();
    EXPECT_TRUE(cluster_->coordinator_process(0)->Running());
    EXPECT_TRUE(cluster_->shard_process(0)->Running());
    EXPECT_TRUE(cluster_->shard_process(1)->Running());
  }

  std::unique_ptr<Api> api_;
  std::shared_ptr<SharedArena> arena_;
  std::shared_ptr<SharedBlock> block_;
};

TEST_F(HostileMemoryTest, PlacesThatAreNotThereAreRefusedByName) {
  v1::LookupResponse response;
  ASSERT_TRUE(Lookup(Request(), &response).ok());
  EXPECT_EQ(response.shared_bytes(), kSamples * kDim * sizeof(float));
  EXPECT_EQ(response.activations_size(), 0);

  const auto refusal = [&](const auto& change, grpc::StatusCode code) {
    v1::LookupRequest request = Request();
    change(request.mutable_shared());
    const grpc::Status status = Lookup(request);
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    return status.error_message();
  };
  const auto bad = [&](const auto& change) { return refusal(change, grpc::INVALID_ARGUMENT); };
  EXPECT_THAT(bad([](v1::SharedLookup* s) { s->mutable_ids()->set_size(~uint64_t{0}); }),
              HasSubstr("shared.ids: offset"));
  EXPECT_THAT(bad([](v1::SharedLookup* s) { s->mutable_ids()->set_offset(~uint64_t{0}); }),
              HasSubstr("shared.ids: offset"));
  EXPECT_THAT(bad([](v1::SharedLookup* s) { s->mutable_ids()->set_size(8); }),
              HasSubstr("shared.ids.size is 8; feature 'f'.dense.ids of 4096 bytes"));
  EXPECT_THAT(bad([](v1::SharedLookup* s) { s->mutable_activations()->set_offset(~uint64_t{63}); }),
              HasSubstr("shared.activations: offset"));
  EXPECT_THAT(bad([](v1::SharedLookup* s) { s->mutable_activations()->set_offset(1); }),
              HasSubstr("must be a multiple of 64"));
  EXPECT_THAT(bad([](v1::SharedLookup* s) { s->mutable_activations()->set_size(64); }),
              HasSubstr("the activations need 16384 bytes"));
  for (const bool ids : {true, false}) {
    EXPECT_THAT(refusal(
                    [&](v1::SharedLookup* s) {
                      (ids ? s->mutable_ids() : s->mutable_activations())->set_region(12345);
                    },
                    grpc::FAILED_PRECONDITION),
                HasSubstr("there is no shared region"));
  }
  v1::LookupRequest huge = Request();
  huge.mutable_features(0)->mutable_dense()->mutable_ids()->set_shape(0, int64_t{1} << 62);
  EXPECT_EQ(Lookup(huge).error_code(), grpc::INVALID_ARGUMENT);
  huge.mutable_features(0)->mutable_dense()->mutable_ids()->set_shape(0, -1);
  EXPECT_EQ(Lookup(huge).error_code(), grpc::INVALID_ARGUMENT);
  v1::LookupRequest twice = Request();
  twice.mutable_features(0)->mutable_dense()->mutable_ids()->set_data("12345678");
  EXPECT_THAT(Lookup(twice).error_message(), HasSubstr("must be empty where shared.ids is set"));
  ExpectAllIsWell();
}

TEST_F(HostileMemoryTest, RandomPlacesNeverReachOtherMemory) {
  std::mt19937_64 random(TestSeed());
  const auto number = [&]() -> uint64_t {
    switch (random() % 4) {
      case 0:
        return random();
      case 1:
        return random() % (128 << 20);
      case 2:
        return (uint64_t{64} << 20) - random() % 8192;
      default:
        return random() % 65536 * 64;
    }
  };
  int served = 0;
  for (int i = 0, rounds = Rounds(); i < rounds; ++i) {
    v1::LookupRequest request = Request();
    for (v1::SharedBlock* block : {request.mutable_shared()->mutable_ids(),
                                   request.mutable_shared()->mutable_activations()}) {
      if (random() % 2 == 0) continue;
      block->set_offset(number());
      block->set_size(number());
    }
    request.mutable_shared()->set_concat(random() % 2 == 0);
    if (random() % 4 == 0) {
      request.mutable_features(0)->mutable_dense()->mutable_ids()->set_shape(
          0, static_cast<int64_t>(number()));
    }
    const grpc::Status status = Lookup(request);
    served += status.ok() ? 1 : 0;
    ASSERT_THAT(status.error_code(), AnyOf(grpc::OK, grpc::INVALID_ARGUMENT, grpc::OUT_OF_RANGE,
                                           grpc::RESOURCE_EXHAUSTED))
        << status.error_message();
  }
  EXPECT_GT(served, 0);
  ExpectAllIsWell();
}

// What is checked must be what is used: an id that is good when it is checked and 2^60 when it
// is used would be a read outside of the tables.
TEST_F(HostileMemoryTest, IdsAndGradientsThatChangeWhileTheyAreReadBreakNothing) {
  const std::string untouched = [&] {
    const auto rows = client_->ReadRows(model_, "t", {500, 501, 502});
    return absl::StrJoin(rows->values, " ");
  }();
  std::atomic<bool> stop = false;
  auto* const ids = reinterpret_cast<volatile int64_t*>(block_->data());
  auto* const floats = reinterpret_cast<volatile uint32_t*>(block_->data() + 128 * 1024);
  auto* const splits = reinterpret_cast<volatile int64_t*>(block_->data() + kRagged);
  for (int64_t i = 0; i <= kSamples; ++i) splits[i] = i;
  std::thread writer([&] {
    std::mt19937_64 random(TestSeed() + 1);
    while (!stop) {
      const uint64_t at = random() % kSamples;
      // Mostly good ones, so that many requests get through the check.
      ids[at] = random() % 20000 == 0 ? static_cast<int64_t>(random()) : random() % 100;
      const uint64_t split = random() % (kSamples + 1);
      splits[split] = static_cast<int64_t>(random() % 20000 == 0 ? random() : split);
      if (random() % 20000 == 0) floats[random() % (kSamples * kDim)] = 0x7fc00000;  // NaN
      if (random() % 2 == 0) floats[random() % (kSamples * kDim)] = 0x3f800000;
      for (int i = 0; i < 10; ++i) ids[random() % kSamples] = random() % 100;
    }
  });
  const absl::Cleanup join = [&] {
    stop = true;
    writer.join();
  };
  int looked_up = 0, updated = 0;
  for (int i = 0, rounds = Rounds(); i < rounds; ++i) {
    v1::LookupResponse found;
    const bool ragged = i % 4 == 0;
    const grpc::Status status =
        Lookup(ragged ? RaggedRequest() : Request(/*inference=*/false), &found);
    ASSERT_THAT(status.error_code(),
                AnyOf(grpc::OK, grpc::OUT_OF_RANGE, ragged ? grpc::INVALID_ARGUMENT : grpc::OK))
        << status.error_message();
    if (!status.ok()) continue;
    ++looked_up;
    v1::ApplyGradientsRequest update;
    update.set_model_id(model_.id);
    update.set_batch_handle(found.batch_handle());
    update.mutable_mutation()->set_client_id("hostile");
    update.mutable_mutation()->set_sequence(i + 1);
    v1::FeatureGradient* const gradient = update.add_gradients();
    gradient->set_feature("f");
    gradient->mutable_gradient()->set_dtype(v1::FLOAT32);
    gradient->mutable_gradient()->add_shape(kSamples);
    gradient->mutable_gradient()->add_shape(kDim);
    *gradient->mutable_shared() = Place(128 * 1024, kSamples * kDim * sizeof(float));
    v1::ApplyGradientsResponse applied;
    const grpc::Status done = Call(&Stub::ApplyGradients, *api_, update, &applied);
    ASSERT_THAT(done.error_code(), AnyOf(grpc::OK, grpc::INVALID_ARGUMENT)) << done.error_message();
    updated += done.ok() ? 1 : 0;
    if (done.ok()) continue;
    v1::ReleaseBatchRequest release;
    release.set_model_id(model_.id);
    release.set_batch_handle(found.batch_handle());
    v1::ReleaseBatchResponse released;
    Call(&Stub::ReleaseBatch, *api_, release, &released);
  }
  EXPECT_GT(looked_up, 0);
  EXPECT_GT(updated, 0);
  const auto rows = client_->ReadRows(model_, "t", {500, 501, 502});
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(absl::StrJoin(rows->values, " "), untouched);
  // No table holds what is not a number.
  std::vector<int64_t> all(kRows);
  for (int64_t i = 0; i < kRows; ++i) all[i] = i;
  const auto table = client_->ReadRows(model_, "t", all);
  ASSERT_TRUE(table.ok()) << table.status();
  for (const float value : table->values) ASSERT_TRUE(std::isfinite(value));
  ExpectAllIsWell();
}

TEST_F(HostileMemoryTest, GradientsThatDoNotFitTheirPlaceAreRefused) {
  v1::LookupResponse found;
  ASSERT_TRUE(Lookup(Request(/*inference=*/false), &found).ok());
  v1::ApplyGradientsRequest update;
  update.set_model_id(model_.id);
  update.set_batch_handle(found.batch_handle());
  update.mutable_mutation()->set_client_id("hostile");
  update.mutable_mutation()->set_sequence(1);
  v1::FeatureGradient* const gradient = update.add_gradients();
  gradient->set_feature("f");
  gradient->mutable_gradient()->set_dtype(v1::FLOAT32);
  gradient->mutable_gradient()->add_shape(kSamples);
  gradient->mutable_gradient()->add_shape(kDim);
  const auto refusal = [&](const v1::SharedBlock& place) {
    *gradient->mutable_shared() = place;
    v1::ApplyGradientsResponse applied;
    return Call(&Stub::ApplyGradients, *api_, update, &applied).error_message();
  };
  const uint64_t bytes = kSamples * kDim * sizeof(float);
  EXPECT_THAT(refusal(Place(0, bytes - 4)), HasSubstr("shared.size is 16380"));
  EXPECT_THAT(refusal(Place(0, 0)), HasSubstr("they must be 16384 and 0"));
  EXPECT_THAT(refusal(Place(uint64_t{64} << 20, bytes)), HasSubstr("are not inside shared region"));
  v1::SharedBlock unknown = Place(0, bytes);
  unknown.set_region(77);
  EXPECT_THAT(refusal(unknown), HasSubstr("there is no shared region"));
  EXPECT_EQ(refusal(Place(0, bytes)), "");
}

TEST_F(HostileMemoryTest, MayNotLend) {
  const auto region = *SharedRegion::Create("hostile", 4096);
  EXPECT_FALSE(arena_->LendRegion(7, *region));
  v1::LookupRequest request = Request();
  request.mutable_shared()->mutable_ids()->set_region(7);
  EXPECT_EQ(Lookup(request).error_code(), grpc::FAILED_PRECONDITION);
  ExpectAllIsWell();
}

class SmallBudgetTest : public HostileMemoryTest {
 protected:
  void SetUp() override { Start("budgets { in_flight_bytes: 1000000 }"); }
};

// A request of a few bytes would have the coordinator copy all that a block has.
TEST_F(SmallBudgetTest, IdsCountAsIfTheyHadBeenSent) {
  v1::LookupRequest request = Request();
  EXPECT_TRUE(Lookup(request).ok());
  request.mutable_shared()->mutable_ids()->set_size(1 << 20);
  const grpc::Status status = Lookup(request);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("the ids"));
  EXPECT_THAT(status.error_message(), HasSubstr("budgets.in_flight_bytes = 1000000"));
  ExpectAllIsWell();
}

}  // namespace hostile_memory_test
}  // namespace emberd::testing
