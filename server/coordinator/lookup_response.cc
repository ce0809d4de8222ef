#include "server/coordinator/lookup_response.h"

#include <string>

#include "emberd/v1/embedding_service.pb.h"
#include "server/rpc/wire.h"

namespace emberd::server {
namespace {

using rpc::LengthDelimitedSize;

// The tensor without its data, serialized.
std::string TensorHead(const FeatureActivationView& view, v1::DataType dtype) {
  v1::Tensor head;
  head.set_dtype(dtype);
  head.add_shape(view.samples);
  head.add_shape(view.dim);
  return head.SerializeAsString();
}

void EncodeActivation(const std::string& feature, const FeatureActivationView& view,
                      const Activations& activations, rpc::WireEncoder* encoder) {
  const std::string head = TensorHead(view, activations.dtype);
  const size_t tensor_size =
      head.size() + LengthDelimitedSize(v1::Tensor::kDataFieldNumber, view.bytes.size());
  const size_t activation_size =
      LengthDelimitedSize(v1::FeatureActivation::kFeatureFieldNumber, feature.size()) +
      LengthDelimitedSize(v1::FeatureActivation::kActivationFieldNumber, tensor_size);
  encoder->BeginField(v1::LookupResponse::kActivationsFieldNumber, activation_size);
  encoder->BytesField(v1::FeatureActivation::kFeatureFieldNumber, feature);
  encoder->BeginField(v1::FeatureActivation::kActivationFieldNumber, tensor_size);
  encoder->Raw(head);
  encoder->BeginField(v1::Tensor::kDataFieldNumber, view.bytes.size());
  encoder->Raw(
      rpc::SharedBytes{absl::string_view(view.bytes.data(), view.bytes.size()), activations.owner});
}

}  // namespace

grpc::ByteBuffer EncodeLookupResponse(const LookupOutput& output) {
  rpc::WireEncoder encoder;
  if (output.batch_handle != 0) {
    encoder.Fixed64Field(v1::LookupResponse::kBatchHandleFieldNumber, output.batch_handle);
  }
  for (const int feature : output.order) {
    EncodeActivation(output.model->config.features(feature).name(),
                     output.activations.features[feature], output.activations, &encoder);
  }
  encoder.BytesField(v1::LookupResponse::kStatisticsFieldNumber,
                     output.statistics.SerializeAsString());
  return encoder.Finish();
}

}  // namespace emberd::server
