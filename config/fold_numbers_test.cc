#include "config/fold_numbers.h"

#include <gtest/gtest.h>

#include "emberd/v1/admin_service.pb.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/message_differencer.h"

namespace emberd::config {
namespace fold_numbers_test {

using ::google::protobuf::TextFormat;

v1::GetStatsResponse Stats(const std::string& text) {
  v1::GetStatsResponse stats;
  EXPECT_TRUE(TextFormat::ParseFromString(text, &stats)) << text;
  return stats;
}

constexpr char kFirst[] = R"(
    batches: 2
    methods { method: "a" codes { key: "OK" value: 9007199254740993 } codes { key: "NO" value: 2 }
              seconds { count: 3 sum: 1.5 buckets { upper: 0.1 count: 1 } buckets { upper: inf count: 3 } } }
    stacks { model: "m" stack: "s" ids: 10 max_ids_per_partition: 8 largest_ids_per_partition: 5 }
    groups { model: "m" group: "g" updates: 7 dropped_ids { key: "0" value: 4 } })";
constexpr char kSecond[] = R"(
    batches: 3
    methods { method: "b" request_bytes: 1 }
    methods { method: "a" codes { key: "OK" value: 9007199254740999 } codes { key: "BAD" value: 1 }
              seconds { count: 5 sum: 2 buckets { upper: 0.1 count: 2 } buckets { upper: inf count: 5 } } }
    stacks { model: "m" stack: "t" ids: 1 }
    stacks { model: "m" stack: "s" ids: 15 max_ids_per_partition: 8 largest_ids_per_partition: 4 }
    groups { model: "m" group: "g" updates: 3 dropped_ids { key: "0" value: 5 } })";

void ExpectFold(Fold fold, const std::string& expected) {
  v1::GetStatsResponse stats = Stats(kSecond);
  FoldNumbers(Stats(kFirst), &stats, fold);
  google::protobuf::util::MessageDifferencer differencer;
  std::string differences;
  differencer.ReportDifferencesToString(&differences);
  EXPECT_TRUE(differencer.Compare(Stats(expected), stats)) << differences;
}

// What this would catch: a field that is left out of a sum, and digits that a double would lose.
TEST(FoldNumbersTest, Adds) {
  ExpectFold(Fold::kAdd, R"(
      batches: 5
      methods { method: "b" request_bytes: 1 }
      methods { method: "a" codes { key: "OK" value: 18014398509481992 } codes { key: "NO" value: 2 } codes { key: "BAD" value: 1 }
                seconds { count: 8 sum: 3.5 buckets { upper: 0.1 count: 3 } buckets { upper: inf count: 8 } } }
      stacks { model: "m" stack: "t" ids: 1 }
      stacks { model: "m" stack: "s" ids: 25 max_ids_per_partition: 8 largest_ids_per_partition: 5 }
      groups { model: "m" group: "g" updates: 10 dropped_ids { key: "0" value: 9 } })");
}

TEST(FoldNumbersTest, SubtractsWhatWasThere) {
  ExpectFold(Fold::kSubtract, R"(
      batches: 1
      methods { method: "b" request_bytes: 1 }
      methods { method: "a" codes { key: "OK" value: 6 } codes { key: "BAD" value: 1 }
                seconds { count: 2 sum: 0.5 buckets { upper: 0.1 count: 1 } buckets { upper: inf count: 2 } } }
      stacks { model: "m" stack: "t" ids: 1 }
      stacks { model: "m" stack: "s" ids: 5 max_ids_per_partition: 8 largest_ids_per_partition: 4 }
      groups { model: "m" group: "g" updates: 3 dropped_ids { key: "0" value: 1 } })");
}

// Cumulative buckets would not rise any more if some were subtracted and others not.
TEST(FoldNumbersTest, LeavesADistributionOfARestartedProcess) {
  const std::string now = R"(
      methods { method: "a" seconds { count: 2 sum: 1 buckets { upper: 0.1 count: 2 } buckets { upper: inf count: 2 } } })";
  v1::GetStatsResponse stats = Stats(now);
  FoldNumbers(Stats(kFirst), &stats, Fold::kSubtract);
  EXPECT_EQ(stats.methods(0).seconds().buckets(0).count(), 2);
  EXPECT_EQ(stats.methods(0).seconds().sum(), 1);
}

TEST(FoldNumbersTest, AddsWhatTheOtherLacks) {
  v1::GetStatsResponse sum;
  FoldNumbers(Stats(kFirst), &sum, Fold::kAdd);
  EXPECT_EQ(sum.DebugString(), Stats(kFirst).DebugString());
}

}  // namespace fold_numbers_test
}  // namespace emberd::config
