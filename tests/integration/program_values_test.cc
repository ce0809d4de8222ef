// Results of lookups that updates donate: their handles read the new rows, every update is made
// once, and nothing is left behind.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/program_cluster.h"

namespace emberd::testing {
namespace program_values_test {

using v1::ElementwiseOutput;
using v1::ProgramSpec;

class DonatingUpdateTest : public ProgramsTest {
 protected:
  void SetUp() override {
    ProgramsTest::SetUp();
    if (HasFatalFailure()) return;
    lookup_ = Compile(Spec(ProgramSpec::LOOKUP));
    ProgramSpec spec = Spec(ProgramSpec::UPDATE);
    spec.add_aliases();
    update_ = Compile(spec);
  }
  // The handle of what a lookup of a handle found.
  uint64_t LookUpBatch(uint64_t batch) {
    const auto found = api_->Execute(lookup_, {batch});
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->results(0).handle() : 0;
  }
  absl::StatusOr<v1::ExecuteResponse> Update(uint64_t found, const v1::Literal& gradients,
                                             uint64_t sequence) {
    v1::ExecuteRequest request;
    request.set_program_handle(update_);
    request.add_arguments()->set_handle(found);
    *request.add_arguments()->mutable_literal() = gradients;
    SetKey(sequence, request.mutable_config());
    return api_->Execute(request);
  }
  std::vector<v1::NamedTensor> ReadAll(uint64_t handle) {
    const auto read = api_->Read(handle);
    EXPECT_TRUE(read.ok()) << read.status();
    if (!read.ok()) return {};
    return {read->values().begin(), read->values().end()};
  }
  // Whether the handle reads what another lookup of the batch would find.
  void ExpectReadsTheRows(uint64_t handle, uint64_t seed) {
    const auto read = api_->Read(handle);
    ASSERT_TRUE(read.ok()) << read.status();
    ExpectSameTensors(read->values(), PlainLookup(model_.id, seed, nullptr));
  }
  // The tables after `steps` of the batch of seed 1, each with the gradients of what it has found.
  std::string DigestOfPlainSteps(int steps) {
    const client::Model plain = Declare(absl::StrCat("plain", steps));
    const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP, plain.name));
    const uint64_t update = Compile(Spec(ProgramSpec::UPDATE, plain.name));
    for (int step = 0; step < steps; ++step) {
      const v1::ProgramResult found = LookUp(api_.get(), lookup, 1);
      v1::ExecuteRequest request;
      request.set_program_handle(update);
      request.add_arguments()->set_handle(found.handle());
      *request.add_arguments()->mutable_literal() = GradientLiteral(found.values());
      EXPECT_TRUE(api_->Execute(request).ok());
    }
    return DigestOf(plain);
  }

  uint64_t lookup_ = 0;
  uint64_t update_ = 0;  // donates
};

TEST_F(DonatingUpdateTest, TheOldHandleReadsTheNewRowsAndIsUpdatedAgain) {
  const uint64_t batch = Prepare(lookup_, Batch(1)).handle();
  const uint64_t found = LookUpBatch(batch);
  const std::vector<v1::NamedTensor> before = ReadAll(found);
  for (uint64_t step = 1; step <= 3; ++step) {
    const auto updated = Update(found, GradientLiteral(ReadAll(found)), step);
    ASSERT_TRUE(updated.ok()) << updated.status();
    EXPECT_EQ(updated->results_size(), 0);
    EXPECT_FALSE(updated->updates(0).replayed());
    ExpectReadsTheRows(found, 1);
  }
  EXPECT_NE(ReadAll(found)[0].SerializeAsString(), before[0].SerializeAsString());
  const std::string once = TableDigest();
  EXPECT_EQ(once, DigestOfPlainSteps(3));

  // A repeat changes nothing, and leaves a result that can be updated.
  const auto repeated = Update(found, GradientLiteral(before), 3);
  ASSERT_TRUE(repeated.ok()) << repeated.status();
  EXPECT_TRUE(repeated->updates(0).replayed());
  EXPECT_EQ(TableDigest(), once);
  ExpectReadsTheRows(found, 1);
  ASSERT_TRUE(Update(found, GradientLiteral(ReadAll(found)), 4).ok());
  EXPECT_EQ(TableDigest(), DigestOfPlainSteps(4));

  // Nothing is left when the handles are gone: neither here, nor on shards.
  ASSERT_TRUE(api_->ReleaseAll().ok());
  EXPECT_TRUE(Eventually([&] {
    const auto status = client_->GetStatus();
    return status.ok() && status->batch_bytes == 0 && status->shards[0].batch_bytes == 0;
  }));
}

TEST_F(DonatingUpdateTest, WhatComesLaterInAChainReadsTheNewRows) {
  const uint64_t found = LookUpBatch(Prepare(lookup_, Batch(1)).handle());
  const v1::Literal gradients = GradientLiteral(ReadAll(found));
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::SUBTRACT, 1));
  v1::ExecuteChainedRequest plan;
  const int data = AddData(&plan, found);
  const int values = AddLiteral(&plan, gradients);
  // What a chain has looked up itself is donated, too, with the results that name it.
  const int own = AddProgram(&plan, lookup_, {AddLiteral(&plan, Batch(2))}, /*result=*/0);
  plan.mutable_ops(own)->add_outputs()->set_result_index(1);
  plan.mutable_ops(own)->mutable_outputs(1)->set_output_index(3);
  AddProgram(&plan, update_, {data, values});
  AddProgram(&plan, update_, {own, values});
  AddProgram(&plan, update_, {data, values});
  AddProgram(&plan, sum, {data, own}, /*result=*/2);
  plan.mutable_config()->set_return_values(true);
  SetKey(1, plan.mutable_config());
  // Its first try ends after the updates, and donates nothing.
  v1::ExecuteChainedRequest failing = plan;
  v1::Literal other;
  for (int i = 0; i < 8; ++i) AddTensor("x", MakeVector<float>({1}), &other);
  AddProgram(&failing, sum, {data, AddLiteral(&failing, other)}, /*result=*/3);
  const std::vector<v1::NamedTensor> before = ReadAll(found);
  EXPECT_THAT(std::string(api_->Chain(failing).status().message()),
              ::testing::HasSubstr("updates that were applied before it: op 4, op 5, op 6"));
  EXPECT_EQ(ReadAll(found)[0].SerializeAsString(), before[0].SerializeAsString());
  const std::string once = TableDigest();

  const auto ran = api_->Chain(plan);
  ASSERT_TRUE(ran.ok()) << ran.status();
  EXPECT_EQ(TableDigest(), once);
  ASSERT_EQ(ran->updates_size(), 3);
  for (const v1::MadeUpdate& made : ran->updates()) EXPECT_TRUE(made.replayed());
  ExpectReadsTheRows(found, 1);
  const std::vector<v1::NamedTensor> second = PlainLookup(model_.id, 2, nullptr);
  // It was looked up after the other update of the same rows by then: as a repeat sees them.
  ExpectSameTensors(ran->results(0).values(), second);
  ExpectSameTensors(ran->results(1).values(), {second[2]});
  const std::vector<float> a = Floats(ReadAll(found)[0].tensor()), b = Floats(second[0].tensor());
  const std::vector<float> difference = Floats(ran->results(2).values(0).tensor());
  for (size_t i = 0; i < a.size(); ++i) ASSERT_EQ(difference[i], a[i] - b[i]);
  // Both go on, but the other's batch was there for the chain alone.
  ASSERT_TRUE(Update(found, gradients, 2).ok());
  const uint64_t other_found = ran->results(0).handle();
  EXPECT_EQ(Update(other_found, gradients, 3).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  const uint64_t kept = Prepare(update, gradients).handle();
  EXPECT_TRUE(api_->Execute(update, {other_found, kept}).ok());
}

TEST_F(DonatingUpdateTest, APartOfALookupReadsItsPart) {
  v1::ExecutionConfig config;
  config.set_return_exploded(true);
  const uint64_t batch = Prepare(lookup_, Batch(1)).handle();
  const auto parts = api_->Execute(lookup_, {batch}, config);
  ASSERT_TRUE(parts.ok()) << parts.status();
  const uint64_t second = parts->results(1).handle();
  const v1::Literal gradients = GradientLiteral(PlainLookup(model_.id, 1, nullptr));
  ASSERT_TRUE(Update(second, gradients, 1).ok());
  const std::vector<v1::NamedTensor> now = ReadAll(second);
  ASSERT_EQ(now.size(), 1u);
  EXPECT_EQ(now[0].SerializeAsString(), PlainLookup(model_.id, 1, nullptr)[1].SerializeAsString());
}

TEST_F(DonatingUpdateTest, WhatCannotBeDonatedIsRefusedBeforeAnythingRuns) {
  const uint64_t batch = Prepare(lookup_, Batch(1)).handle();
  const uint64_t found = LookUpBatch(batch);
  const v1::Literal gradients = GradientLiteral(ReadAll(found));
  const std::string before = TableDigest();
  ASSERT_TRUE(api_->Release({}, {batch}).ok());
  const absl::Status gone = Update(found, gradients, 1).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(gone.message()),
              ::testing::HasSubstr("its batch, which would be looked up again, is gone"));
  EXPECT_EQ(TableDigest(), before);
  ProgramSpec spec = Spec(ProgramSpec::UPDATE);
  spec.add_aliases()->set_argument(1);
  EXPECT_EQ(api_->Compile(spec).status().message(),
            "spec.aliases[0].argument is 1; allowed: [0, 0]");
  spec = Spec(ProgramSpec::LOOKUP);
  spec.add_aliases();
  EXPECT_EQ(api_->Compile(spec).status().message(),
            "spec.aliases is not for programs of the kind LOOKUP");
}

}  // namespace program_values_test
}  // namespace emberd::testing
