// What handles hold goes when nobody asks for it, and counts against the budgets meanwhile.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/integration/program_cluster.h"

namespace emberd::testing {
namespace program_leases_test {

using v1::ElementwiseOutput;

class ProgramLeasesTest : public ProgramsTest {
 protected:
  void SetUp() override {
    StartCluster({.embedded = true,
                  .config = "timeouts { batch_ttl_ms: 4000 } budgets { batch_bytes: 400000 }"},
                 MixedModel("mixed"));
    if (HasFatalFailure()) return;
    api_ = std::make_unique<ProgramApi>(cluster_->address());
  }
};

TEST_F(ProgramLeasesTest, HandlesOfASilentClientExpire) {
  v1::Literal values;
  AddTensor("x", MakeVector<float>({1, 2}), &values);
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  const uint64_t kept = Prepare(sum, values).handle();
  ProgramApi silent(cluster_->address(), "silent");
  const auto left = silent.Prepare(sum, values);
  ASSERT_TRUE(left.ok()) << left.status();
  EXPECT_TRUE(Eventually([&] {
    EXPECT_TRUE(api_->Read(kept).ok());  // this one is heard of
    return Metric("emberd_program_handles_expired_total") == 1;
  }));
  EXPECT_EQ(silent.Read(left->handle()).status().message(),
            absl::StrCat("memory handle not found: ", left->handle()));
  EXPECT_TRUE(api_->Read(kept).ok());
  EXPECT_EQ(Metric("emberd_program_handles"), 1);
}

TEST_F(ProgramLeasesTest, WhatHandlesHoldCountsAgainstTheBudgetOfBatches) {
  v1::Literal values;
  AddTensor("x", MakeVector<float>(std::vector<float>(75000)), &values);
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  const uint64_t first = Prepare(sum, values).handle();
  const absl::Status full = api_->Prepare(sum, values).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(full.message(), "budgets.batch_bytes is 400000")) << full;
  ASSERT_TRUE(api_->Release({}, {first}).ok());
  EXPECT_TRUE(api_->Prepare(sum, values).ok());
}

}  // namespace program_leases_test
}  // namespace emberd::testing
