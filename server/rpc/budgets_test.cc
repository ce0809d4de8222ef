#include "server/rpc/budgets.h"

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::rpc {
namespace budgets_test {

using ::testing::HasSubstr;

v1::BudgetConfig Budgets(int64_t bytes, int64_t client_bytes, int client_requests) {
  v1::BudgetConfig budgets;
  budgets.set_in_flight_bytes(bytes);
  budgets.set_client_in_flight_bytes(client_bytes);
  budgets.set_client_requests(client_requests);
  return budgets;
}

std::string Refusal(Admission& admission, const std::string& client, int64_t bytes) {
  const absl::Status status = admission.Admit(client, bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  return std::string(status.message());
}

TEST(AdmissionTest, AllClientsShareTheBytes) {
  Admission admission(Budgets(100, 100, 10));
  std::optional<Admission::Grant> first = *admission.Admit("a", 60);
  EXPECT_THAT(Refusal(admission, "b", 41), HasSubstr("a request needs 41 bytes; 40 of "
                                                     "budgets.in_flight_bytes = 100 are free"));
  EXPECT_TRUE(admission.Admit("b", 40).ok());
  first.reset();
  EXPECT_TRUE(admission.Admit("b", 100).ok());
  EXPECT_EQ(admission.bytes(), 0);
  EXPECT_EQ(admission.requests(), 0);
}

TEST(AdmissionTest, OneClientLeavesRoomForOthers) {
  Admission admission(Budgets(100, 50, 2));
  std::vector<Admission::Grant> grants;
  grants.push_back(*admission.Admit("a", 30));
  EXPECT_THAT(Refusal(admission, "a", 21),
              HasSubstr("needs 21 bytes; 20 of client a's budgets.client_in_flight_bytes = 50"));
  grants.push_back(*admission.Admit("a", 1));
  EXPECT_THAT(Refusal(admission, "a", 1), HasSubstr("client a has 2 requests in progress already; "
                                                    "budgets.client_requests is 2"));
  grants.push_back(*admission.Admit("b", 50));
  EXPECT_EQ(admission.requests(), 3);
  EXPECT_EQ(admission.bytes(), 81);
  grants.clear();
  EXPECT_TRUE(admission.Admit("a", 50).ok());
}

TEST(AdmissionTest, AStreamTakesAndGivesBytesAsItGoes) {
  Admission admission(Budgets(100, 100, 10));
  Admission::Grant stream = *admission.Admit("a", 0);
  EXPECT_TRUE(stream.AddBytes(70).ok());
  EXPECT_EQ(stream.AddBytes(31).code(), absl::StatusCode::kResourceExhausted);
  stream.ReleaseBytes(20);
  EXPECT_TRUE(stream.AddBytes(31).ok());
  EXPECT_EQ(admission.bytes(), 81);
  { const Admission::Grant moved = std::move(stream); }
  EXPECT_EQ(admission.bytes(), 0);
  EXPECT_EQ(admission.requests(), 0);
}

// What a request has produced is often still being sent when the request is done with.
TEST(AdmissionTest, WhatARequestProducesCountsUntilItIsGone) {
  Admission admission(Budgets(100, 80, 10));
  std::optional<Admission::Grant> request = *admission.Admit("a", 10);
  auto answer = *request->Reserve(60, "the answer");
  EXPECT_EQ(request->Reserve(11, "the answer").status(),
            absl::ResourceExhaustedError(
                "the answer needs 11 bytes; 10 of client a's budgets.client_in_flight_bytes = 80 "
                "are free; retry later"));
  EXPECT_EQ(admission.bytes(), 70);
  request.reset();
  EXPECT_EQ(admission.requests(), 0);
  EXPECT_EQ(admission.bytes(), 60);
  EXPECT_THAT(Refusal(admission, "b", 41), HasSubstr("40 of budgets.in_flight_bytes = 100"));
  EXPECT_THAT(Refusal(admission, "a", 21),
              HasSubstr("20 of client a's budgets.client_in_flight_bytes = 80"));
  { const absl::StatusOr<Admission::Grant> other = admission.Admit("a", 20); }
  EXPECT_THAT(Refusal(admission, "a", 21), HasSubstr("20 of client a's"));
  answer.reset();
  EXPECT_EQ(admission.bytes(), 0);
  EXPECT_TRUE(admission.Admit("a", 80).ok());
}

TEST(MemoryBudgetTest, RefusesWithTheFigures) {
  const MemoryBudget budget(100, "budgets.in_flight_bytes");
  std::optional<MemoryRoom> room = *budget.Take(60, "a request");
  EXPECT_EQ(budget.Take(41, "an answer").status(),
            absl::ResourceExhaustedError("an answer needs 41 bytes; 40 of budgets.in_flight_bytes "
                                         "= 100 are free; retry later"));
  EXPECT_EQ(budget.Take(101, "an answer").status(),
            absl::ResourceExhaustedError("an answer needs 101 bytes; 40 of "
                                         "budgets.in_flight_bytes = 100 are free; ask for less"));
  EXPECT_EQ(budget.used(), 60);
  room.reset();
  EXPECT_EQ(budget.used(), 0);
  EXPECT_TRUE(budget.Take(100, "an answer").ok());
}

TEST(MemoryBudgetTest, RoomsGrowShrinkAndMove) {
  const MemoryBudget budget(100, "b");
  MemoryRoom room = *budget.Take(10, "x");
  EXPECT_TRUE(room.Grow(90, "x").ok());
  EXPECT_EQ(room.Grow(1, "x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(room.bytes(), 100);
  room.Shrink(70);
  EXPECT_EQ(budget.used(), 30);
  room.Shrink(1000);  // not more than it has
  EXPECT_EQ(budget.used(), 0);
  EXPECT_TRUE(room.Grow(40, "x").ok());
  {
    const MemoryRoom moved = std::move(room);
    EXPECT_EQ(budget.used(), 40);
  }
  EXPECT_EQ(budget.used(), 0);
}

TEST(MemoryBudgetTest, ARoomOutlivesItsBudget) {
  MemoryRoom room;
  {
    const MemoryBudget budget(100, "b");
    room = *budget.Take(60, "x");
  }
  EXPECT_EQ(room.Grow(41, "x").code(), absl::StatusCode::kResourceExhausted);
}

TEST(MemoryBudgetTest, ManyThreadsNeverTakeMoreThanThereIs) {
  constexpr int kThreads = 4;
  const MemoryBudget budget(kThreads - 1, "b");
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&budget] {
      for (int i = 0; i < 20'000; ++i) {
        const auto room = budget.Take(1, "x");
        // Takers that are refused show for a moment.
        EXPECT_LE(budget.used(), 2 * kThreads);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.used(), 0);
}

}  // namespace budgets_test
}  // namespace emberd::rpc
