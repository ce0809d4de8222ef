// A message whose gradients stay in its slices must be what protobuf makes of it, wherever the
// slices end and in whatever order its fields come. Catches: bytes that are given to the wrong
// gradient, fields that are lost, and lengths that are believed.
#include "server/coordinator/train/train_message.h"

#include <random>
#include <string>
#include <vector>

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/support/byte_buffer.h>
#include <gtest/gtest.h>

#include "base/testing/seed.h"

namespace emberd::coordinator {
namespace train_message_test {

grpc::ByteBuffer Cut(const std::string& bytes, std::mt19937* random) {
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t size = std::min<size_t>((*random)() % 70, bytes.size() - begin);
    slices.emplace_back(bytes.substr(begin, size));
    begin += size;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// With the bytes of gradients back in their tensors.
std::string Whole(TrainMessage message) {
  for (size_t i = 0; i < message.data.size(); ++i) {
    std::string bytes;
    for (const absl::string_view piece : message.data[i].pieces) {
      bytes.append(piece.data(), piece.size());
    }
    v1::FeatureGradient* gradient =
        message.request.mutable_update()->mutable_gradients(static_cast<int>(i));
    EXPECT_TRUE(gradient->gradient().data().empty()) << "in two places";
    if (!bytes.empty()) gradient->mutable_gradient()->set_data(bytes);
  }
  return message.request.SerializeAsString();
}

v1::TrainRequest RandomUpdate(std::mt19937* random) {
  v1::TrainRequest request;
  v1::TrainUpdate* update = request.mutable_update();
  update->set_step((*random)() % 3 == 0 ? -1 : (*random)() % 1000);
  update->set_continues((*random)() % 2);
  const int gradients = (*random)() % 4;
  for (int i = 0; i < gradients; ++i) {
    v1::FeatureGradient* gradient = update->add_gradients();
    gradient->set_feature(std::string((*random)() % 40, 'f'));
    if ((*random)() % 4 == 0) gradient->mutable_shared()->set_size((*random)());
    if ((*random)() % 4 == 0) continue;
    gradient->mutable_gradient()->set_dtype(v1::FLOAT32);
    gradient->mutable_gradient()->add_shape((*random)() % 100);
    gradient->mutable_gradient()->set_data(std::string((*random)() % 300, 'a' + i));
  }
  if ((*random)() % 2) (*update->add_hyperparameters()->mutable_values())["rate"] = 0.5;
  if ((*random)() % 2) update->set_checkpoint("c");
  return request;
}

TEST(TrainMessageTest, IsWhatProtobufReads) {
  std::mt19937 random(TestSeed());
  int64_t apart = 0;
  for (int round = 0; round < 5000; ++round) {
    v1::TrainRequest request = RandomUpdate(&random);
    if (round % 10 == 0) {
      request.mutable_lookup()->add_features()->set_feature("x");
    } else if (round % 10 == 1) {
      request.mutable_start()->set_group("g");
    }
    const auto message = DecodeTrainMessage(Cut(request.SerializeAsString(), &random));
    ASSERT_TRUE(message.ok()) << message.status();
    for (const rpc::SharedPieces& pieces : message->data) apart += !pieces.pieces.empty();
    ASSERT_EQ(Whole(*message), request.SerializeAsString()) << "round " << round;
  }
  EXPECT_GT(apart, 1000);
}

// Two encoded messages one after the other are one that has been merged; of bytes the last count.
TEST(TrainMessageTest, MergesAsProtobufDoes) {
  std::mt19937 random(TestSeed());
  for (int round = 0; round < 1000; ++round) {
    v1::Tensor first, second;
    first.set_data("first");
    second.add_shape(2);
    if (round % 2) second.set_data("second");
    v1::FeatureGradient gradient, more;
    *gradient.mutable_gradient() = first;
    *more.mutable_gradient() = second;
    v1::TrainRequest before = RandomUpdate(&random), request;
    request.mutable_update()->add_gradients()->ParseFromString(gradient.SerializeAsString() +
                                                               more.SerializeAsString());
    // The same fields, but not yet merged.
    std::string inside = gradient.SerializeAsString() + more.SerializeAsString();
    std::string update = std::string("\x12") + static_cast<char>(inside.size()) + inside;
    const std::string bytes =
        before.SerializeAsString() + "\x1a" + static_cast<char>(update.size()) + update;
    const auto message = DecodeTrainMessage(Cut(bytes, &random));
    ASSERT_TRUE(message.ok()) << message.status();
    before.MergeFrom(request);
    ASSERT_EQ(Whole(*message), before.SerializeAsString()) << "round " << round;
  }
}

TEST(TrainMessageTest, RefusesWhatIsNoMessage) {
  const google::protobuf::LogSilencer silence;  // protobuf writes what it refuses
  std::mt19937 random(TestSeed());
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = RandomUpdate(&random).SerializeAsString();
    if (bytes.empty()) continue;
    if (round % 2) {
      bytes.resize(random() % bytes.size());
    } else {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    const auto message = DecodeTrainMessage(Cut(bytes, &random));
    v1::TrainRequest request;
    if (!message.ok()) {
      EXPECT_EQ(message.status().code(), absl::StatusCode::kInvalidArgument);
      ++refused;
    } else if (request.ParseFromString(bytes)) {
      ASSERT_EQ(Whole(*message), request.SerializeAsString()) << "round " << round;
    } else {
      ADD_FAILURE() << "protobuf refuses what was read, round " << round;
    }
  }
  EXPECT_GT(refused, 1000);
  // A tag that is longer than it may be.
  v1::TrainRequest request;
  const std::string overlong("\x9a\x80\x80\x80\x80\x00\x00", 7);
  EXPECT_FALSE(request.ParseFromString(overlong));
  EXPECT_FALSE(DecodeTrainMessage(Cut(overlong, &random)).ok());
  // An update whose place has been taken by something else.
  v1::TrainRequest update = RandomUpdate(&random), lookup;
  update.mutable_update()->add_gradients();
  lookup.mutable_lookup()->set_step(1);
  EXPECT_FALSE(
      DecodeTrainMessage(Cut(update.SerializeAsString() + lookup.SerializeAsString(), &random))
          .ok());
}

}  // namespace train_message_test
}  // namespace emberd::coordinator
