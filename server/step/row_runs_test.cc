// Rows that lie in pieces of any size. Catches: a row that is lost or doubled at the end of a
// piece, one that is put together from the wrong bytes, and a copy that moves while others are
// added.
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "server/step/gradients.h"

namespace emberd::step {
namespace row_runs_test {

std::string Concat(const RowRuns& rows, int64_t row_bytes) {
  std::string all;
  int64_t next = 0;
  for (const RowRuns::Run& run : rows.runs()) {
    EXPECT_EQ(run.begin, next);
    EXPECT_LT(run.begin, run.end);
    next = run.end;
    all.append(run.data, (run.end - run.begin) * row_bytes);
  }
  return all;
}

TEST(RowRunsTest, AnyCutsGiveTheSameRows) {
  std::mt19937 random(TestSeed());
  for (int round = 0; round < 2000; ++round) {
    const int64_t rows = random() % 20, row_bytes = 1 + random() % 40;
    std::string bytes(rows * row_bytes, 0);
    for (char& byte : bytes) byte = static_cast<char>(random());
    const absl::string_view view = bytes;
    rpc::SharedPieces pieces;
    const size_t longest = 1 + random() % (round % 2 == 0 ? 8 : 200);
    for (size_t begin = 0; begin < bytes.size();) {
      const size_t size = std::min<size_t>(1 + random() % longest, bytes.size() - begin);
      pieces.pieces.push_back(view.substr(begin, size));
      begin += size;
    }
    const RowRuns found(pieces, rows, row_bytes);
    EXPECT_TRUE(found.given());
    ASSERT_EQ(Concat(found, row_bytes), bytes) << "round " << round;
    const RowRuns copy = found;
    ASSERT_EQ(Concat(copy, row_bytes), bytes);
  }
}

TEST(RowRunsTest, OnePieceIsOneRunAndIsNotCopied) {
  const std::string bytes(60, 'r');
  const RowRuns plain(bytes.data(), 3);
  ASSERT_EQ(plain.runs().size(), 1u);
  EXPECT_EQ(plain.runs()[0].end, 3);
  EXPECT_EQ(plain.runs()[0].data, bytes.data());
  const RowRuns piece({{bytes}, nullptr}, 3, 20);
  ASSERT_EQ(piece.runs().size(), 1u);
  EXPECT_EQ(piece.runs()[0].data, bytes.data());
}

TEST(RowRunsTest, NoTensorIsNotATensorWithoutRows) {
  EXPECT_FALSE(RowRuns().given());
  EXPECT_TRUE(RowRuns(nullptr, 0).given());
  EXPECT_TRUE(RowRuns({}, 0, 16).given());
  EXPECT_TRUE(RowRuns({}, 0, 16).runs().empty());
}

}  // namespace row_runs_test
}  // namespace emberd::step
