#include "server/step/lookup_response.h"

#include <cstddef>
#include <utility>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include "base/rpc/wire.h"
#include "emberd/v1/batch.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/rpc/message.h"

namespace emberd::step {
namespace {

// One FeatureActivation as a field of a message.
class ActivationField {
 public:
  // `output` must outlive it. `feature`: index in the config. `field`: its number in the message.
  ActivationField(const LookupOutput& output, int feature, int field)
      : data_{absl::string_view(output.activations.features[feature].bytes.data(),
                                output.activations.features[feature].bytes.size()),
              output.activations.owner} {
    v1::FeatureActivation activation;
    activation.set_feature(output.model->config.features(feature).name());
    v1::Tensor tensor;
    tensor.set_dtype(output.activations.dtype);
    const int64_t samples = output.activations.features[feature].samples;
    const auto shape = output.model->ActivationShape(feature, samples);
    tensor.mutable_shape()->Assign(shape.begin(), shape.end());
    head_ = rpc::BeginFields(
        {{field, activation.SerializeAsString()},
         {v1::FeatureActivation::kActivationFieldNumber, tensor.SerializeAsString()},
         {v1::Tensor::kDataFieldNumber, ""}},
        data_.bytes.size());
  }

  // Bytes of the whole field, tag included.
  size_t size() const { return head_.size() + data_.bytes.size(); }

  // The elements are referenced.
  void AppendTo(rpc::WireEncoder* encoder) const {
    encoder->Raw(head_);
    encoder->Raw(data_);
  }

 private:
  const rpc::SharedBytes data_;
  std::string head_;  // the field without the elements, with which it ends
};

// Cuts features into messages of about 1 MiB: each but the last ends with the activation that
// brings it to that size. At least one.
std::vector<absl::Span<const int>> CutIntoMessages(const LookupOutput& output,
                                                   absl::Span<const int> features) {
  std::vector<absl::Span<const int>> messages;
  size_t count = 0, bytes = 0;  // of the message that is next
  while (count < features.size()) {
    if (bytes >= rpc::kPartBytes) {
      messages.push_back(features.first(count));
      features.remove_prefix(std::exchange(count, 0));
      bytes = 0;
    }
    bytes += output.activations.features[features[count++]].bytes.size();
  }
  messages.push_back(features);
  return messages;
}

// A TrainResponse with a lookup; `head`: the small fields of its result.
grpc::ByteBuffer EncodeMessage(const v1::TrainLookupResult& head, const LookupOutput& output,
                               absl::Span<const int> features) {
  const std::string small = head.SerializeAsString();
  size_t size = small.size();
  std::vector<ActivationField> activations;
  for (const int feature : features) {
    activations.emplace_back(output, feature, v1::TrainLookupResult::kActivationsFieldNumber);
    size += activations.back().size();
  }
  rpc::WireEncoder encoder;
  encoder.BeginField(v1::TrainResponse::kLookupFieldNumber, size);
  encoder.Raw(small);
  for (const ActivationField& activation : activations) activation.AppendTo(&encoder);
  return encoder.Finish();
}

}  // namespace

grpc::ByteBuffer EncodeLookupResponse(const LookupOutput& output) {
  using Response = v1::LookupResponse;
  rpc::WireEncoder encoder;
  if (output.batch_handle != 0) {
    encoder.Fixed64Field(Response::kBatchHandleFieldNumber, output.batch_handle);
  }
  if (output.activations.shared_bytes > 0) {
    encoder.VarintField(Response::kSharedBytesFieldNumber, output.activations.shared_bytes);
  } else {
    for (const int feature : output.order) {
      ActivationField(output, feature, Response::kActivationsFieldNumber).AppendTo(&encoder);
    }
  }
  encoder.BytesField(Response::kStatisticsFieldNumber, output.statistics.SerializeAsString());
  return encoder.Finish();
}

std::string EncodeLookupText(const LookupOutput& output) {
  std::vector<grpc::Slice> slices;
  std::string text;
  const grpc::ByteBuffer buffer = EncodeLookupResponse(output);
  // Fails for compressed bytes only.
  if (!buffer.Dump(&slices).ok()) return text;
  text.reserve(buffer.Length());
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

std::deque<grpc::ByteBuffer> EncodeTrainLookup(int64_t step, const LookupOutput& output,
                                               const v1::StepTimes& times) {
  absl::Span<const int> features;
  if (output.activations.shared_bytes == 0) features = absl::MakeConstSpan(output.order);
  v1::TrainLookupResult last;
  last.set_step(step);
  last.set_shared_bytes(output.activations.shared_bytes);
  *last.mutable_statistics() = output.statistics;
  *last.mutable_times() = times;
  v1::TrainLookupResult head;
  head.set_step(step);
  head.set_continues(true);
  std::deque<grpc::ByteBuffer> messages;
  const std::vector<absl::Span<const int>> cut = CutIntoMessages(output, features);
  for (const absl::Span<const int>& some : cut) {
    messages.push_back(EncodeMessage(&some == &cut.back() ? last : head, output, some));
  }
  return messages;
}

}  // namespace emberd::step
