#include "server/coordinator/lookup_response.h"

#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/activation_wire.h"

namespace emberd::server {

grpc::ByteBuffer EncodeLookupResponse(const LookupOutput& output) {
  rpc::WireEncoder encoder;
  if (output.batch_handle != 0) {
    encoder.Fixed64Field(v1::LookupResponse::kBatchHandleFieldNumber, output.batch_handle);
  }
  for (const int feature : output.order) {
    ActivationWire(output, feature, v1::LookupResponse::kActivationsFieldNumber).AppendTo(&encoder);
  }
  encoder.BytesField(v1::LookupResponse::kStatisticsFieldNumber,
                     output.statistics.SerializeAsString());
  return encoder.Finish();
}

}  // namespace emberd::server
