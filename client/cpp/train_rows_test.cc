// Streams whose answers have rows instead of activations, and whose updates have sums of rows.
// Catches: rows that are read from the wrong place of a message, sums that are sent where nobody
// may sum, or of another step, and whatever a server may send that does not fit together.
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/tensor_codec.h"
#include "client/cpp/testing/train_stream_fixture.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::client {
namespace train_rows_test {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kDim;
using testing::kSamples;
using ::testing::SizeIs;

constexpr int64_t kRows = 700, kWidth = kDim + 8;

// What bfloat16 can hold.
float ValueOf(int64_t row) { return static_cast<float>(row % 251) - 5; }

// Sample s has row s % rows; every ninth has none.
int32_t RowOf(int64_t sample, int64_t rows) {
  return sample % 9 == 0 ? -1 : static_cast<int32_t>(sample % rows);
}

// Takes the activation's place.
void SendRows(v1::FeatureActivation* feature, int64_t rows = kRows) {
  const bool floats = feature->activation().dtype() == v1::FLOAT32;
  const int64_t samples = feature->activation().shape(0);
  feature->clear_activation();
  std::vector<float> values;
  for (int64_t row = 0; row < rows; ++row) values.insert(values.end(), kWidth, ValueOf(row));
  EncodeFloats(values, {rows, kWidth}, floats ? WireType::kFloat32 : WireType::kBfloat16,
               feature->mutable_rows());
  std::vector<int32_t> index;
  for (int64_t s = 0; s < samples; ++s) index.push_back(RowOf(s, rows));
  EncodeInts(absl::MakeConstSpan(index), {samples}, feature->mutable_row_index());
}

// The sums that a gradient has, [kRows, kDim].
std::vector<float> SumsOf(const v1::FeatureGradient& gradient) {
  const v1::Tensor& tensor = gradient.gradient();
  const int64_t rows = kRows + gradient.lower_rows_size();
  EXPECT_THAT(tensor.shape(), ElementsAre(rows, kDim));
  std::vector<float> values(rows * kDim);
  const size_t element = tensor.dtype() == v1::FLOAT32 ? sizeof(float) : sizeof(uint16_t);
  EXPECT_THAT(tensor.data(), SizeIs(values.size() * element));
  if (tensor.dtype() == v1::FLOAT32) {
    EXPECT_EQ(rows, kRows);
    std::memcpy(values.data(), tensor.data().data(), tensor.data().size());
    return values;
  }
  // All have several samples, and sums that bfloat16 can hold.
  EXPECT_EQ(gradient.lower_rows_size(), kRows);
  FromBfloat16Bytes(tensor.data().data(), absl::MakeSpan(values));
  EXPECT_THAT(absl::MakeConstSpan(values).subspan(kRows * kDim), Each(0));
  values.resize(kRows * kDim);
  return values;
}

class TrainRowsTest : public testing::TrainStreamTest {
 protected:
  // Features a and b are answered with rows; c has two samples.
  void AnswerWithRows() {
    service_.damage_train = [](v1::TrainResponse* response) {
      if (!response->has_lookup()) return;
      for (auto& feature : *response->mutable_lookup()->mutable_activations()) {
        if (feature.feature() != "c") SendRows(&feature);
      }
    };
  }
  void LookUp(int64_t step) {
    ASSERT_TRUE(stream_->SendLookup(step, Features()).ok());
    absl::StatusOr<TrainLookupResult> found = stream_->ReceiveLookup();
    ASSERT_TRUE(found.ok()) << found.status();
    for (int f = 0; f < 2; ++f) {
      const Activation& activation = found->activations[f];
      ASSERT_EQ(activation.samples, kSamples);
      for (int64_t s = 0; s < kSamples; ++s) {
        const int32_t row = RowOf(s, kRows);
        ASSERT_THAT(activation.values.subspan(s * kDim, kDim), Each(row < 0 ? 0 : ValueOf(row)));
      }
    }
    EXPECT_THAT(found->activations[2].values.subspan(0, kDim), Each(1000 * step + 200));
  }
  // Whether the update of the step was sent with sums of rows, for each of its features.
  std::vector<std::pair<std::string, bool>> Sent(int64_t step) const {
    std::vector<std::pair<std::string, bool>> sent;
    for (const v1::TrainRequest& request : Requests()) {
      if (request.update().step() != step) continue;
      for (const v1::FeatureGradient& gradient : request.update().gradients()) {
        sent.emplace_back(gradient.feature(), gradient.of_rows());
      }
    }
    return sent;
  }
  static std::vector<std::pair<std::string, bool>> Of(bool a, bool b) {
    return {{"a", a}, {"c", false}, {"b", b}};
  }
};

TEST_F(TrainRowsTest, AStepWithRows) {
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16}) {
    Connect(type);
    AnswerWithRows();
    Open();
    LookUp(7);
    ASSERT_TRUE(stream_->SendUpdate(7, Gradients(), {.memory = gradient_}).ok());
    ASSERT_TRUE(stream_->ReceiveUpdate().ok());
    ASSERT_TRUE(stream_->Finish().ok());
    stream_.reset();
  }
  const std::vector<v1::TrainRequest> requests = service_.train_requests();
  int sums = 0, updates = 0;
  for (const v1::TrainRequest& request : requests) {
    EXPECT_EQ(request.lookup().distinct_rows(), request.has_lookup());
    for (const v1::FeatureGradient& gradient : request.update().gradients()) {
      ++updates;
      ASSERT_EQ(gradient.of_rows(), gradient.feature() != "c");
      if (!gradient.of_rows()) continue;
      ++sums;
      const std::vector<float> values = SumsOf(gradient);
      ASSERT_THAT(values, SizeIs(kRows * kDim));
      for (int64_t row = 0; row < kRows; ++row) {
        int count = 0;
        for (int64_t s = row; s < kSamples; s += kRows) count += RowOf(s, kRows) == row;
        ASSERT_THAT(absl::MakeConstSpan(values).subspan(row * kDim, kDim), Each(0.5f * count))
            << row;
      }
    }
  }
  EXPECT_EQ(sums, 4);
  EXPECT_EQ(updates, 6);
}

TEST_F(TrainRowsTest, SumsAreOfTheirOwnStep) {
  AnswerWithRows();
  Open();
  LookUp(7);
  ASSERT_TRUE(stream_->SendUpdate(7, Gradients()).ok());
  // Its answer has not come, so that there is no knowing what rows it has.
  service_.damage_train = nullptr;
  ASSERT_TRUE(stream_->SendUpdate(8, Gradients()).ok());
  AnswerWithRows();
  LookUp(9);
  ASSERT_TRUE(stream_->SendUpdate(9, Gradients()).ok());
  // What is refused here is not sent, and the next one is sent whole.
  LookUp(10);
  EXPECT_FALSE(stream_->SendUpdate(10, {{"q", *gradient_, kSamples}}).ok());
  ASSERT_TRUE(stream_->SendUpdate(10, Gradients()).ok());
  ASSERT_TRUE(stream_->Finish().ok());
  EXPECT_EQ(Sent(7), Of(true, true));
  EXPECT_EQ(Sent(8), Of(false, false));
  EXPECT_EQ(Sent(9), Of(true, true));
  EXPECT_EQ(Sent(10), Of(false, false));
}

TEST_F(TrainRowsTest, AGradientThatIsNotFiniteIsSentAsItIs) {
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16}) {
    Connect(type);
    AnswerWithRows();
    Open();
    const int64_t step = type == WireType::kFloat32 ? 7 : 3;
    LookUp(step);
    std::vector<float> bad = *gradient_;
    bad[10 * kDim + 3] = std::numeric_limits<float>::infinity();
    ASSERT_TRUE(
        stream_->SendUpdate(step, {{"a", bad, kSamples}, {"b", *gradient_, kSamples}}).ok());
    ASSERT_TRUE(stream_->Finish().ok());
    EXPECT_THAT(Sent(step), ElementsAre(std::pair<std::string, bool>("a", false),
                                        std::pair<std::string, bool>("b", true)));
    stream_.reset();
  }
}

// The server may judge by the bytes of all features; sums of most samples are not worth making.
TEST_F(TrainRowsTest, ManyRowsAreNotSummed) {
  service_.damage_train = [](v1::TrainResponse* response) {
    if (!response->has_lookup()) return;
    for (auto& feature : *response->mutable_lookup()->mutable_activations()) {
      if (feature.feature() != "c") SendRows(&feature, feature.feature() == "a" ? 2900 : 100);
    }
  };
  Open();
  ASSERT_TRUE(stream_->SendLookup(7, Features()).ok());
  ASSERT_TRUE(stream_->ReceiveLookup().ok());
  ASSERT_TRUE(stream_->SendUpdate(7, Gradients()).ok());
  ASSERT_TRUE(stream_->Finish().ok());
  EXPECT_EQ(Sent(7), Of(false, true));
}

// Sums of two samples each have two halves: as many bytes as the gradients.
TEST_F(TrainRowsTest, HalvesAreNotSentWhereTheyAreNotFewer) {
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16}) {
    Connect(type);
    service_.damage_train = [](v1::TrainResponse* response) {
      if (!response->has_lookup()) return;
      for (auto& feature : *response->mutable_lookup()->mutable_activations()) {
        if (feature.feature() != "c") SendRows(&feature, kSamples / 2);
      }
    };
    Open();
    const int64_t step = type == WireType::kFloat32 ? 7 : 3;
    ASSERT_TRUE(stream_->SendLookup(step, Features()).ok());
    ASSERT_TRUE(stream_->ReceiveLookup().ok());
    ASSERT_TRUE(stream_->SendUpdate(step, Gradients()).ok());
    ASSERT_TRUE(stream_->Finish().ok());
    const bool floats = type == WireType::kFloat32;
    EXPECT_EQ(Sent(step), Of(floats, floats));
    stream_.reset();
  }
}

// Another rank's gradients belong to the same sums.
TEST_F(TrainRowsTest, AGroupOfSeveralSendsNoSums) {
  AnswerWithRows();
  Open({.group = "g", .rank = 0, .size = 2});
  LookUp(7);
  ASSERT_TRUE(stream_->SendUpdate(7, Gradients()).ok());
  ASSERT_TRUE(stream_->Finish().ok());
  EXPECT_EQ(Sent(7), Of(false, false));
}

// And so do those of another feature of the table.
TEST_F(TrainRowsTest, ASharedTableHasNoSums) {
  AnswerWithRows();
  model_.features[2].table = "a";
  Open();
  LookUp(7);
  ASSERT_TRUE(stream_->SendUpdate(7, Gradients()).ok());
  ASSERT_TRUE(stream_->Finish().ok());
  EXPECT_EQ(Sent(7), Of(false, true));
}

TEST_F(TrainRowsTest, WhoDoesNotAskDoubtsRows) {
  ClientOptions options;
  options.addresses = {service_.address()};
  options.distinct_rows = false;
  client_ = *Client::Connect(options);
  AnswerWithRows();
  Open();
  ASSERT_TRUE(stream_->SendLookup(7, Features()).ok());
  const absl::Status status = stream_->ReceiveLookup().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("activations[0] (feature \"a\").rows: the server sent some, but"));
  EXPECT_FALSE(Requests()[0].lookup().distinct_rows());
}

TEST_F(TrainRowsTest, DoubtsWhatTheServerSends) {
  using Damage = std::function<void(v1::FeatureActivation*)>;
  const auto set_index = [](int32_t value) {
    return [value](v1::FeatureActivation* a) {
      std::string* data = a->mutable_row_index()->mutable_data();
      data->replace(data->size() - 4, 4, reinterpret_cast<const char*>(&value), 4);
    };
  };
  const std::vector<std::pair<Damage, std::string>> cases = {
      {[](auto* a) { a->clear_row_index(); }, "rows and row_index: the server sent only one"},
      {[](auto* a) { a->clear_rows(); }, "rows and row_index: the server sent only one"},
      {[](auto* a) { a->mutable_activation()->set_dtype(v1::FLOAT32); }, "shape: the server sent"},
      {[](auto* a) {
         const std::vector<float> floats(kSamples * kDim);
         EncodeFloats(floats, {kSamples, kDim}, WireType::kFloat32, a->mutable_activation());
       },
       "the server sent both an activation and rows"},
      {[](auto* a) {
         a->clear_rows();
         a->clear_row_index();
       },
       "the server sent no activation"},
      {set_index(kRows), "row_index: the server sent 700 for sample 2999; it must be in [-1, 700)"},
      {set_index(-2), "row_index: the server sent -2 for sample 2999"},
      {[](auto* a) { a->mutable_row_index()->set_dtype(v1::INT64); }, "row_index: "},
      {[](auto* a) { a->mutable_row_index()->set_shape(0, 1); }, "row_index: "},
      {[](auto* a) { a->mutable_row_index()->mutable_data()->pop_back(); }, "data: "},
      {[](auto* a) { a->mutable_row_index()->clear_data(); }, "rows and row_index: "},
      {[](auto* a) { a->mutable_rows()->set_dtype(v1::BFLOAT16); }, "dtype: "},
      {[](auto* a) { a->mutable_rows()->set_shape(0, kRows + 1); }, "data: "},
      {[](auto* a) { a->mutable_rows()->set_shape(0, -1); }, "shape: "},
      {[](auto* a) { a->mutable_rows()->set_shape(1, kDim - 1); },
       "rows: the server sent a tensor"},
      {[](auto* a) { a->mutable_rows()->add_shape(1); }, "rows: the server sent a tensor"},
      {[](auto* a) { a->mutable_rows()->mutable_data()->pop_back(); }, "data: "},
      {[](auto* a) { a->mutable_rows()->clear_data(); }, "data: "},
  };
  for (const auto& [damage, message] : cases) {
    SCOPED_TRACE(message);
    service_.damage_train = [damage = damage](v1::TrainResponse* response) {
      if (!response->has_lookup()) return;
      for (auto& feature : *response->mutable_lookup()->mutable_activations()) {
        if (feature.feature() != "b") continue;
        SendRows(&feature);
        damage(&feature);
      }
    };
    Open();
    ASSERT_TRUE(stream_->SendLookup(7, Features()).ok());
    const absl::Status status = stream_->ReceiveLookup().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
    stream_.reset();
  }
}

}  // namespace train_rows_test
}  // namespace emberd::client
