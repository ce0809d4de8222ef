#include "server/coordinator/activation_wire.h"

#include "emberd/v1/batch.pb.h"

namespace emberd::server {
namespace {

using rpc::LengthDelimitedSize;

std::string TensorHead(const FeatureActivationView& view, v1::DataType dtype) {
  v1::Tensor head;
  head.set_dtype(dtype);
  head.add_shape(view.samples);
  head.add_shape(view.dim);
  return head.SerializeAsString();
}

}  // namespace

ActivationWire::ActivationWire(const LookupOutput& output, int feature, int field)
    : name_(output.model->config.features(feature).name()),
      activations_(output.activations),
      view_(output.activations.features[feature]),
      field_(field),
      tensor_head_(TensorHead(view_, activations_.dtype)),
      tensor_size_(tensor_head_.size() +
                   LengthDelimitedSize(v1::Tensor::kDataFieldNumber, view_.bytes.size())),
      activation_size_(
          LengthDelimitedSize(v1::FeatureActivation::kFeatureFieldNumber, name_.size()) +
          LengthDelimitedSize(v1::FeatureActivation::kActivationFieldNumber, tensor_size_)) {}

size_t ActivationWire::size() const { return LengthDelimitedSize(field_, activation_size_); }

void ActivationWire::AppendTo(rpc::WireEncoder* encoder) const {
  encoder->BeginField(field_, activation_size_);
  encoder->BytesField(v1::FeatureActivation::kFeatureFieldNumber, name_);
  encoder->BeginField(v1::FeatureActivation::kActivationFieldNumber, tensor_size_);
  encoder->Raw(tensor_head_);
  encoder->BeginField(v1::Tensor::kDataFieldNumber, view_.bytes.size());
  encoder->Raw(rpc::SharedBytes{absl::string_view(view_.bytes.data(), view_.bytes.size()),
                                activations_.owner});
}

}  // namespace emberd::server
