#include "tests/testing/api.h"

#include <cstring>

namespace emberd::testing {

Api::Api(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  embedding = v1::EmbeddingService::NewStub(channel);
  admin = v1::AdminService::NewStub(channel);
  checkpoints = v1::CheckpointService::NewStub(channel);
}

std::vector<float> Floats(const v1::Tensor& tensor) {
  std::vector<float> floats(tensor.data().size() / sizeof(float));
  std::memcpy(floats.data(), tensor.data().data(), floats.size() * sizeof(float));
  return floats;
}

}  // namespace emberd::testing
