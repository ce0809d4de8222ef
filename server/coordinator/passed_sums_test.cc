// Catches: sums that are passed on where a row of the stack is not among them, is twice, or is
// narrower than the shard's; rows or halves in another order than the shard's; halves for a shard
// of before; memory that may be gone before it is sent; and sums that are copied where they need
// not be.
#include "server/coordinator/passed_sums.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/region_server.h"
#include "base/shared_arena.h"
#include "config/config.h"
#include "server/coordinator/activations.h"
#include "server/coordinator/row_gradients.h"

namespace emberd::server {
namespace passed_sums_test {

using testing::ElementsAre;
using testing::ElementsAreArray;

constexpr int kWidth = 8;

// Features f and g of tables a and b, which are one stack; the shard has 3 rows of f and 2 of g, in
// this order.
class PassedSumsTest : public testing::Test {
 protected:
  PassedSumsTest() : PassedSumsTest(kWidth) {}
  explicit PassedSumsTest(int dim)
      : model_(*MakeServedModel(
            *config::ParseModel(absl::StrCat(
                "name: 'm' tables { name: 'a' vocabulary_size: 40 embedding_dim: ", dim,
                "} tables { name: 'b' vocabulary_size: 40 embedding_dim: ", dim,
                "} features { name: 'f' table: 'a' } features { name: 'g' table: 'b' }")),
            {.shards = 1, .sparsecores_per_shard = 1}, nullptr, &metrics_)) {}

  KeptBatch Keep() {
    EXPECT_EQ(model_->plan.stacks.size(), 1u);
    const std::vector<int64_t> f = {3, 5, 7}, g = {9, 8};
    std::vector<preprocess::FeatureInput> inputs(2);
    inputs[0].ids = preprocess::DenseInput{absl::MakeConstSpan(f), 1, 3};
    inputs[1].ids = preprocess::DenseInput{absl::MakeConstSpan(g), 1, 2};
    const auto batch = *model_->preprocessor->Run(inputs);
    GatherResult result;
    result.max_joined_bytes = max_joined_bytes_;
    result.rows.push_back({0, kWidth * 4, absl::MakeConstSpan(bytes_).first(5 * kWidth * 4), 0});
    EXPECT_TRUE(ArrangeUniqueRows(*model_, *batch, 0, pool_, cpu_, &result).ok());
    return KeptBatch(model_, *batch, {&result, 1}, places_);
  }
  // A tensor in two pieces; `owned`: that stay as long as something refers to them.
  template <typename T>
  static FeatureGradientView Sums(const std::vector<T>& values, size_t cut = 0, bool owned = true) {
    const absl::string_view bytes(reinterpret_cast<const char*>(values.data()),
                                  values.size() * sizeof(T));
    FeatureGradientView view;
    view.of_rows = true;
    view.dtype = sizeof(T) == 4 ? v1::FLOAT32 : v1::BFLOAT16;
    const auto rows = static_cast<int64_t>(values.size()) / kWidth;
    if (!owned) {
      view.rows = RowRuns(bytes.data(), rows);
      return view;
    }
    rpc::SharedPieces pieces;
    for (const absl::string_view piece : {bytes.substr(0, cut), bytes.substr(cut)}) {
      if (!piece.empty()) pieces.pieces.push_back(piece);
    }
    pieces.owner = std::make_shared<int>();
    view.rows = RowRuns(pieces, rows, kWidth * sizeof(T));
    return view;
  }
  static GradientInput Input(const FeatureGradientView& f, const FeatureGradientView& g) {
    GradientInput input;
    input.hyperparameters.resize(1);
    input.features = {f, g};
    input.of_rows = true;
    return input;
  }
  // Of kWidth values from `first` on for each row.
  static std::vector<float> Rows(float first, int rows) {
    std::vector<float> values;
    for (int i = 0; i < rows * kWidth; ++i) values.push_back(first + static_cast<float>(i) * 1.25f);
    return values;
  }
  static std::string Bytes(const SumPieces& sums) {
    std::string bytes;
    for (const rpc::SharedBytes& piece : sums.pieces)
      bytes.append(piece.bytes.begin(), piece.bytes.end());
    return bytes;
  }
  static std::vector<float> Floats(const SumPieces& sums) {
    const std::string bytes = Bytes(sums);
    std::vector<float> floats(bytes.size() / 4);
    std::memcpy(floats.data(), bytes.data(), bytes.size());
    return floats;
  }
  static std::vector<uint16_t> Halves(const SumPieces& sums) {
    const std::string bytes = Bytes(sums);
    std::vector<uint16_t> halves(bytes.size() / 2);
    std::memcpy(halves.data(), bytes.data(), bytes.size());
    return halves;
  }
  // That they are copied instead, whether they come at once or one by one.
  void ExpectCopied(const GradientInput& input) {
    const KeptBatch batch = Keep();
    const auto expected = RowSums(batch, /*shard=*/0).Finish(input);
    ASSERT_TRUE(expected.has_value());
    for (const bool advance : {false, true}) {
      RowSums sums(batch, /*shard=*/0, nullptr, /*pass_on=*/true);
      if (advance) {
        GradientInput first = input;
        first.features[1] = {};
        sums.Advance(first);
        sums.Advance(input);
      }
      const auto sent = sums.Finish(input);
      ASSERT_TRUE(sent.has_value());
      EXPECT_THAT(sent->pieces, testing::IsEmpty());
      EXPECT_TRUE(sent->input.stacks[0].of_rows);
      EXPECT_EQ(sent->input.stacks[0].gradients, expected->input.stacks[0].gradients);
    }
  }

  ops::Metrics metrics_{"test"};
  const std::vector<char> bytes_ = std::vector<char>(1000);
  const std::shared_ptr<const ServedModel> model_;
  CpuPool cpu_{1};
  BufferPool pool_;
  int64_t max_joined_bytes_ = 5 * kWidth * 4;                   // of the shard: all its rows
  std::vector<RowPlaces> places_ = {{{0, 0, 3}}, {{0, 3, 5}}};  // that the trainer was sent
};

TEST_F(PassedSumsTest, StayWhereTheyAre) {
  const KeptBatch batch = Keep();
  const std::vector<float> f = Rows(1, 3), g = Rows(100, 2);
  std::vector<float> all = f;
  all.insert(all.end(), g.begin(), g.end());
  for (size_t cut = 0; cut <= f.size() * 4; ++cut) {
    const GradientInput input = Input(Sums(f, cut), Sums(g));
    RowSums sums(batch, /*shard=*/0, nullptr, /*pass_on=*/true);
    sums.Advance(input);
    const auto sent = sums.Finish(input);
    ASSERT_TRUE(sent.has_value());
    EXPECT_TRUE(sent->input.stacks[0].of_rows);
    EXPECT_THAT(sent->input.stacks[0].gradients, testing::IsEmpty());
    ASSERT_EQ(sent->pieces.size(), 1u);
    const SumPieces& pieces = sent->pieces[0];
    EXPECT_EQ(pieces.stack, 0);
    EXPECT_EQ(pieces.dtype, v1::FLOAT32);
    EXPECT_EQ(pieces.rows, 5);
    EXPECT_EQ(pieces.width, kWidth);
    EXPECT_THAT(pieces.lower_rows, testing::IsEmpty());
    EXPECT_THAT(Floats(pieces), ElementsAreArray(all)) << "cut " << cut;
    EXPECT_EQ(pieces.pieces.back().bytes.data(), reinterpret_cast<const char*>(g.data()));
    for (const rpc::SharedBytes& piece : pieces.pieces) EXPECT_NE(piece.owner, nullptr);
  }
}

TEST_F(PassedSumsTest, GoInTheOrderOfTheShard) {
  // f's tensor begins with its last row, and has one of another shard in between.
  places_ = {{{0, 4, 5}, {1, 0, 1}, {0, 0, 2}}, {{0, 2, 4}}};
  const KeptBatch batch = Keep();
  const std::vector<float> f = Rows(1, 4), g = Rows(100, 2);
  const auto pieces = PassedSums(batch, 0, 0, /*halves=*/true).Pass(Input(Sums(f), Sums(g)));
  ASSERT_TRUE(pieces.has_value());
  std::vector<float> expected(f.begin() + 2 * kWidth, f.end());
  expected.insert(expected.end(), g.begin(), g.end());
  expected.insert(expected.end(), f.begin(), f.begin() + kWidth);
  EXPECT_THAT(Floats(*pieces), ElementsAreArray(expected));
}

TEST_F(PassedSumsTest, GoInTheOrderOfTheShardInHalves) {
  places_ = {{{0, 4, 5}, {1, 0, 1}, {0, 0, 2}}, {{0, 2, 4}}};
  const KeptBatch batch = Keep();
  // Row r of a tensor has the halves begin + r, and its lower ones begin + 10 + r.
  const auto tensor = [](uint16_t begin, int rows, const std::vector<int32_t>& lower) {
    std::vector<uint16_t> halves;
    for (int row = 0; row < rows; ++row) halves.insert(halves.end(), kWidth, begin + row);
    for (const int32_t row : lower) halves.insert(halves.end(), kWidth, begin + 10 + row);
    return halves;
  };
  const std::vector<int32_t> f_lower = {0, 1, 3}, g_lower = {1};
  const std::vector<uint16_t> f = tensor(100, 4, f_lower), g = tensor(200, 2, g_lower);
  for (size_t cut = 0; cut <= f.size() * 2; ++cut) {
    GradientInput input = Input(Sums(f, cut), Sums(g));
    input.features[0].lower_rows = f_lower;
    input.features[1].lower_rows = g_lower;
    const auto pieces = PassedSums(batch, 0, 0, /*halves=*/true).Pass(input);
    ASSERT_TRUE(pieces.has_value());
    EXPECT_EQ(pieces->dtype, v1::BFLOAT16);
    EXPECT_EQ(pieces->rows, 5);
    EXPECT_THAT(pieces->lower_rows, ElementsAre(1, 3, 4));
    std::vector<uint16_t> expected;
    for (const uint16_t value : {102, 103, 200, 201, 100, 113, 211, 110}) {
      expected.insert(expected.end(), kWidth, value);
    }
    EXPECT_THAT(Halves(*pieces), ElementsAreArray(expected)) << "cut " << cut;
  }
}

TEST_F(PassedSumsTest, AreCopiedWhereTheyAreNotAllRowsOnce) {
  const std::vector<float> f = Rows(1, 3), g = Rows(100, 2);
  for (const std::vector<RowPlaces>& places :
       std::vector<std::vector<RowPlaces>>{{{{0, 0, 3}}, {{0, 2, 4}}},
                                           {{{0, 0, 2}, {1, 0, 1}}, {{0, 3, 5}}},
                                           {{{0, 1, 4}}, {{0, 3, 5}}}}) {
    places_ = places;
    EXPECT_FALSE(PassedSums(Keep(), 0, 0, /*halves=*/true).MayPass(Input(Sums(f), Sums(g))));
  }
  // The same rows of both, as many as the stack has.
  places_ = {{{0, 0, 5}}, {{0, 0, 5}}};
  EXPECT_FALSE(
      PassedSums(Keep(), 0, 0, /*halves=*/true).MayPass(Input(Sums(Rows(1, 5)), Sums(Rows(2, 5)))));
  // g was sent activations.
  places_ = {{{0, 0, 3}}, {}};
  EXPECT_FALSE(PassedSums(Keep(), 0, 0, /*halves=*/true).MayPass(Input(Sums(f), {})));
}

TEST_F(PassedSumsTest, AreCopiedWhereSomeAreOfAnotherKind) {
  const std::vector<float> f = Rows(1, 3), g = Rows(100, 2);
  const std::vector<uint16_t> halves(2 * kWidth, 0x3f80);
  ExpectCopied(Input(Sums(f), {}));
  ExpectCopied(Input({}, Sums(g)));
  ExpectCopied(Input(Sums(f), Sums(halves)));
  ExpectCopied(Input(Sums(f), Sums(g, 0, /*owned=*/false)));
  ExpectCopied(Input(Sums(f, 0, /*owned=*/false), Sums(g)));
  GradientInput input = Input(Sums(f), Sums(g));
  input.features[1].of_rows = false;  // of samples
  ExpectCopied(input);
}

TEST_F(PassedSumsTest, AreCopiedToAShardThatDoesNotTakeThem) {
  const std::vector<uint16_t> f(3 * kWidth, 0x3f80), g(2 * kWidth, 0x4000);
  const auto pass = [&] {
    const KeptBatch batch = Keep();
    return RowSums(batch, 0, nullptr, /*pass_on=*/true).Finish(Input(Sums(f), Sums(g)));
  };
  EXPECT_EQ(pass()->pieces.size(), 1u);
  for (const int64_t bytes : {max_joined_bytes_ - 1, int64_t{0}, int64_t{-1}}) {
    max_joined_bytes_ = bytes;
    ExpectCopied(Input(Sums(f), Sums(g)));
  }
}

// Five rows of eight: 80 bytes of upper halves; 20 for each row that has lower ones.
TEST_F(PassedSumsTest, AreCopiedWhereHalvesAreNoFewerBytes) {
  for (int lower = 0; lower <= 3; ++lower) {
    const std::vector<uint16_t> f((3 + lower) * kWidth, 0x3f80), g(3 * kWidth, 0x4000);
    GradientInput input = Input(Sums(f), Sums(g));
    const std::vector<int32_t> f_lower = {0, 1, 2}, g_lower = {1};
    input.features[0].lower_rows = absl::MakeConstSpan(f_lower).first(lower);
    input.features[1].lower_rows = g_lower;
    if (lower == 3) {
      ExpectCopied(input);
    } else {
      const KeptBatch batch = Keep();
      const auto sent = RowSums(batch, 0, nullptr, /*pass_on=*/true).Finish(input);
      EXPECT_EQ(sent->pieces.size(), 1u) << lower;
    }
  }
}

// The shard reads all of an update from a block, if there is one.
TEST_F(PassedSumsTest, AreCopiedToABlock) {
  auto server = RegionServer::Start({.name = "emberd-test", .max_bytes = 1 << 24});
  ASSERT_TRUE(server.ok()) << server.status();
  const RegionServer::Invitation invitation = (*server)->Invite();
  auto arena = SharedArena::Connect(invitation.socket, invitation.ticket);
  ASSERT_TRUE(arena.ok()) << arena.status();
  const KeptBatch batch = Keep();
  const std::vector<float> f = Rows(1, 3), g = Rows(100, 2);
  std::vector<float> all = f;
  all.insert(all.end(), g.begin(), g.end());
  RowSums sums(
      batch, /*shard=*/0, [&](int64_t bytes) { return (*arena)->Take(bytes); }, /*pass_on=*/true);
  sums.Advance(Input(Sums(f), {}));
  const auto sent = sums.Finish(Input(Sums(f), Sums(g)));
  ASSERT_TRUE(sent.has_value());
  EXPECT_NE(sent->block, nullptr);
  EXPECT_THAT(sent->pieces, testing::IsEmpty());
  EXPECT_THAT(sent->input.stacks[0].gradients, ElementsAreArray(all));
  EXPECT_EQ(reinterpret_cast<const char*>(sent->input.stacks[0].gradients.data()),
            sent->block->data());
}

// An update that another attempt is made at.
TEST_F(PassedSumsTest, CanBePassedAgain) {
  const KeptBatch batch = Keep();
  const std::vector<float> f = Rows(1, 3), g = Rows(100, 2);
  const GradientInput input = Input(Sums(f), Sums(g));
  RowSums sums(batch, /*shard=*/0, nullptr, /*pass_on=*/true);
  const auto first = sums.Finish(input), second = sums.Finish(input);
  ASSERT_TRUE(first.has_value() && second.has_value());
  EXPECT_EQ(Floats(first->pieces.at(0)), Floats(second->pieces.at(0)));
}

// A stack beside it that has columns of padding, or gradients of samples.
TEST_F(PassedSumsTest, GoBesideACopiedStack) {
  const std::shared_ptr<const ServedModel> model = *MakeServedModel(
      *config::ParseModel("name: 'm' tables { name: 'a' vocabulary_size: 40 embedding_dim: 8 }"
                          "tables { name: 'b' vocabulary_size: 40 embedding_dim: 12 }"
                          "features { name: 'f' table: 'a' } features { name: 'g' table: 'b' }"),
      {.shards = 1, .sparsecores_per_shard = 1}, nullptr, &metrics_);
  ASSERT_EQ(model->plan.stacks[0].features[0].feature, 0);
  const std::vector<int64_t> ids = {3, 3, 3, 5};
  std::vector<preprocess::FeatureInput> inputs(2);
  for (auto& input : inputs) input.ids = preprocess::DenseInput{absl::MakeConstSpan(ids), 1, 4};
  const auto batch = *model->preprocessor->Run(inputs);
  GatherResult result;
  for (int k = 0; k < 2; ++k) {
    const int64_t bytes = model->plan.stacks[k].embedding_dim * 4;
    result.rows.push_back({k, bytes, absl::MakeConstSpan(bytes_).first(2 * bytes), 0});
  }
  ASSERT_TRUE(ArrangeUniqueRows(*model, *batch, 0, pool_, cpu_, &result).ok());
  const KeptBatch kept(model, *batch, {&result, 1}, {{{0, 0, 2}}, {{0, 0, 2}}});
  const std::vector<float> f = Rows(1, 2), g(4 * 12, 0.5f);
  for (const bool of_rows : {false, true}) {
    GradientInput input = Input(Sums(f), {});
    input.hyperparameters.resize(2);
    input.features[1].of_rows = of_rows;
    input.features[1].rows = RowRuns(reinterpret_cast<const char*>(g.data()), of_rows ? 2 : 4);
    const auto sent = RowSums(kept, 0, nullptr, /*pass_on=*/true).Finish(input);
    ASSERT_TRUE(sent.has_value());
    ASSERT_EQ(sent->pieces.size(), 1u);
    EXPECT_EQ(sent->pieces[0].stack, 0);
    EXPECT_EQ(Floats(sent->pieces[0]), f);
    std::vector<float> expected(16);
    std::fill_n(expected.begin(), 12, of_rows ? 0.5f : 1.5f);
    expected.resize(32);
    std::fill_n(expected.begin() + 16, 12, 0.5f);
    EXPECT_THAT(sent->input.stacks[1].gradients, ElementsAreArray(expected));
    EXPECT_TRUE(sent->input.stacks[1].of_rows);
  }
}

class NarrowSumsTest : public PassedSumsTest {
 protected:
  NarrowSumsTest() : PassedSumsTest(kWidth / 2) {}
};
TEST_F(NarrowSumsTest, AreCopiedToTheWidthOfTheShard) {
  EXPECT_FALSE(PassedSums(Keep(), 0, 0, /*halves=*/true)
                   .MayPass(Input(Sums(Rows(1, 3)), Sums(Rows(100, 2)))));
}

}  // namespace passed_sums_test
}  // namespace emberd::server
