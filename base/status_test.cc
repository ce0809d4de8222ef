#include "base/status.h"

#include <cerrno>
#include <memory>
#include <string>

#include <gtest/gtest.h>

namespace emberd {
namespace status_test {

absl::StatusOr<std::unique_ptr<int>> Parse(int value) {
  if (value < 0) return absl::OutOfRangeError("negative");
  return std::make_unique<int>(value);
}

absl::StatusOr<int> Sum(int a, int b) {
  ASSIGN_OR_RETURN(const std::unique_ptr<int> first, Parse(a));
  std::unique_ptr<int> second;
  ASSIGN_OR_RETURN(second, Parse(b));
  return *first + *second;
}

absl::Status Check(int value, int* calls) {
  RETURN_IF_ERROR((++*calls, Parse(value).status()));
  return absl::AlreadyExistsError("checked");
}

TEST(Status, AssignsValuesAndReturnsTheFirstError) {
  EXPECT_EQ(*Sum(2, 3), 5);
  EXPECT_EQ(Sum(2, -1).status(), absl::OutOfRangeError("negative"));
  EXPECT_EQ(Sum(-1, 2).status(), absl::OutOfRangeError("negative"));
}

TEST(Status, EvaluatesItsExpressionOnce) {
  int calls = 0;
  EXPECT_EQ(Check(-1, &calls).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(Check(1, &calls).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(calls, 2);
}

TEST(Status, AnnotateKeepsTheCodeAndLeavesOkAlone) {
  EXPECT_EQ(Annotate(absl::DataLossError("gone"), "shard 2"), absl::DataLossError("shard 2: gone"));
  EXPECT_TRUE(Annotate(absl::OkStatus(), "shard 2").ok());
}

// Would catch: a socket that is named for a file, and a start that is tried again for ever.
TEST(Status, TellsAWrongPathFromAFailure) {
  for (const int error : {ENOENT, EACCES, ENXIO}) EXPECT_TRUE(IsWrongPath(error)) << error;
  for (const int error : {EIO, EMFILE, ENOMEM}) EXPECT_FALSE(IsWrongPath(error)) << error;
}

}  // namespace status_test
}  // namespace emberd
