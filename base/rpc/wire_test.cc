#include "base/rpc/wire.h"

#include <string_view>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/channel_arguments.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/types.pb.h"

namespace emberd::rpc {
namespace wire_test {

std::string Flatten(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  EXPECT_TRUE(buffer.DumpToSingleSlice(&slice).ok());
  return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
}

TEST(WireEncoderTest, ProtobufReadsWhatItWrites) {
  auto payload = std::make_shared<std::string>(10'000, 'p');
  v1::Tensor head;
  head.set_dtype(v1::FLOAT32);
  head.add_shape(2500);
  WireEncoder encoder;
  encoder.Raw(head.SerializeAsString());
  encoder.BeginField(v1::Tensor::kDataFieldNumber, payload->size());
  encoder.Raw(SharedBytes{*payload, payload});

  v1::Tensor tensor;
  ASSERT_TRUE(tensor.ParseFromString(Flatten(encoder.Finish())));
  EXPECT_EQ(tensor.data(), *payload);
  EXPECT_EQ(tensor.shape(0), 2500);
}

TEST(WireEncoderTest, LargeBytesAreReferencedAndGivenBack) {
  auto payload = std::make_shared<std::string>(1 << 20, 'p');
  {
    WireEncoder encoder;
    encoder.Raw(SharedBytes{*payload, payload});
    const grpc::ByteBuffer buffer = encoder.Finish();
    EXPECT_EQ(payload.use_count(), 2);
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 1u);
    EXPECT_EQ(reinterpret_cast<const char*>(slices[0].begin()), payload->data()) << "it was copied";
  }
  EXPECT_EQ(payload.use_count(), 1) << "the reference leaked";
}

TEST(WireEncoderTest, FieldsBeginAsProtobufWritesThem) {
  for (const size_t length : {1, 127, 128, 16'383, 16'384}) {
    v1::FeatureActivation activation;
    activation.set_feature("f");
    v1::Tensor tensor;
    tensor.set_dtype(v1::FLOAT32);
    tensor.add_shape(7);
    const std::string begin =
        BeginFields({{v1::LookupResponse::kActivationsFieldNumber, activation.SerializeAsString()},
                     {v1::FeatureActivation::kActivationFieldNumber, tensor.SerializeAsString()},
                     {v1::Tensor::kDataFieldNumber, ""}},
                    length);
    const std::string data(length, 'x');
    tensor.set_data(data);
    *activation.mutable_activation() = tensor;
    v1::LookupResponse response;
    *response.add_activations() = activation;
    EXPECT_EQ(begin + data, response.SerializeAsString());
  }
}

// README.md promises that training continues within half a minute after a cut network works again;
// to connect takes a moment, too. tests/fault/shard_kill_test.cc cuts one.
TEST(ConnectionArgumentsTest, ASilentPeerIsGivenUpWithinHalfAMinute) {
  const grpc::ChannelArguments arguments = ConnectionArguments();
  const grpc_channel_args all = arguments.c_channel_args();
  int found = 0, silence_ms = 0;
  for (size_t i = 0; i < all.num_args; ++i) {
    const std::string_view key = all.args[i].key;
    if (key != GRPC_ARG_KEEPALIVE_TIME_MS && key != GRPC_ARG_KEEPALIVE_TIMEOUT_MS) continue;
    ++found;
    silence_ms += all.args[i].value.integer;
  }
  EXPECT_EQ(found, 2);
  EXPECT_LT(silence_ms, 29'000);
}

TEST(StatusCodesTest, EveryCodeGoesThereAndBack) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "because");
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
  }
  // What is longer than gRPC takes in headers; a character stays whole.
  std::string umlauts = "long";
  for (int i = 0; i < 3000; ++i) umlauts += "\u00e4";
  const grpc::Status cut = ToGrpcStatus(absl::NotFoundError(umlauts));
  EXPECT_EQ(cut.error_code(), grpc::NOT_FOUND);
  EXPECT_EQ(cut.error_message(), umlauts.substr(0, 2050));
  EXPECT_EQ(Annotate(absl::NotFoundError("gone"), "shard 1"), absl::NotFoundError("shard 1: gone"));
  EXPECT_TRUE(Annotate(absl::OkStatus(), "shard 1").ok());
}

}  // namespace wire_test
}  // namespace emberd::rpc
