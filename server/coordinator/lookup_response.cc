#include "server/coordinator/lookup_response.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include "emberd/v1/batch.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/rpc/message.h"
#include "server/rpc/wire.h"

namespace emberd::server {
namespace {

using rpc::LengthDelimitedSize;
using v1::FeatureActivation;

bool HasRows(const LookupOutput& output, int feature) {
  return output.rows != nullptr && output.rows->Has(feature);
}

// A tensor as a field of a message: its size first, then its bytes, which are referenced.
class TensorField {
 public:
  TensorField(int field, v1::DataType dtype, absl::Span<const int64_t> shape,
              std::vector<absl::string_view> pieces, std::shared_ptr<const void> owner)
      : field_(field), pieces_(std::move(pieces)), owner_(std::move(owner)) {
    v1::Tensor head;
    head.set_dtype(dtype);
    head.mutable_shape()->Assign(shape.begin(), shape.end());
    head_ = head.SerializeAsString();
    for (const absl::string_view piece : pieces_) data_bytes_ += piece.size();
  }

  // Bytes of the whole field, tag included.
  size_t size() const { return LengthDelimitedSize(field_, tensor_size()); }

  void AppendTo(rpc::WireEncoder* encoder) const {
    encoder->BeginField(field_, tensor_size());
    encoder->Raw(head_);
    encoder->BeginField(v1::Tensor::kDataFieldNumber, data_bytes_);
    for (const absl::string_view piece : pieces_) encoder->Raw(rpc::SharedBytes{piece, owner_});
  }

 private:
  size_t tensor_size() const {
    return head_.size() + LengthDelimitedSize(v1::Tensor::kDataFieldNumber, data_bytes_);
  }

  const int field_;
  const std::vector<absl::string_view> pieces_;
  const std::shared_ptr<const void> owner_;
  std::string head_;  // the tensor without its data, serialized
  size_t data_bytes_ = 0;
};

absl::string_view BytesOf(absl::Span<const int32_t> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int32_t)};
}

// What FeatureActivation has beside its name.
std::vector<TensorField> TensorsOf(const LookupOutput& output, int feature) {
  const v1::DataType dtype = output.activations.dtype;
  std::vector<TensorField> tensors;
  if (HasRows(output, feature)) {
    const AnswerRows& rows = *output.rows;
    tensors.emplace_back(FeatureActivation::kRowsFieldNumber, dtype,
                         std::vector<int64_t>{rows.rows(feature), rows.width(feature)},
                         rows.Pieces(feature), output.rows);
    tensors.emplace_back(FeatureActivation::kRowIndexFieldNumber, v1::INT32,
                         std::vector<int64_t>{rows.samples(feature)},
                         std::vector<absl::string_view>{BytesOf(rows.index(feature))}, output.rows);
    return tensors;
  }
  const FeatureActivationView& view = output.activations.features[feature];
  tensors.emplace_back(
      FeatureActivation::kActivationFieldNumber, dtype,
      output.model->ActivationShape(feature, view.samples),
      std::vector<absl::string_view>{absl::string_view(view.bytes.data(), view.bytes.size())},
      output.activations.owner);
  return tensors;
}

// One FeatureActivation as a field of a message.
class ActivationField {
 public:
  // `output` must outlive it. `feature`: index in the config. `field`: its number in the message.
  ActivationField(const LookupOutput& output, int feature, int field)
      : name_(output.model->config.features(feature).name()),
        field_(field),
        tensors_(TensorsOf(output, feature)),
        size_(LengthDelimitedSize(FeatureActivation::kFeatureFieldNumber, name_.size())) {
    for (const TensorField& tensor : tensors_) size_ += tensor.size();
  }

  // Bytes of the whole field, tag included.
  size_t size() const { return LengthDelimitedSize(field_, size_); }

  void AppendTo(rpc::WireEncoder* encoder) const {
    encoder->BeginField(field_, size_);
    encoder->BytesField(FeatureActivation::kFeatureFieldNumber, name_);
    for (const TensorField& tensor : tensors_) tensor.AppendTo(encoder);
  }

 private:
  const std::string& name_;
  const int field_;
  const std::vector<TensorField> tensors_;
  size_t size_;
};

// A TrainResponse with a lookup; `head`: the small fields of its result, serialized.
grpc::ByteBuffer EncodeTrainMessage(const std::string& head,
                                    const std::vector<ActivationField>& activations) {
  size_t size = head.size();
  for (const ActivationField& activation : activations) size += activation.size();
  rpc::WireEncoder encoder;
  encoder.BeginField(v1::TrainResponse::kLookupFieldNumber, size);
  encoder.Raw(head);
  for (const ActivationField& activation : activations) activation.AppendTo(&encoder);
  return encoder.Finish();
}

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
    bytes += BytesToSend(output, features[count++]);
  }
  messages.push_back(features);
  return messages;
}

// `head`: the small fields of the result.
grpc::ByteBuffer EncodeMessage(const v1::TrainLookupResult& head, const LookupOutput& output,
                               absl::Span<const int> features) {
  std::vector<ActivationField> activations;
  for (const int feature : features) {
    activations.emplace_back(output, feature, v1::TrainLookupResult::kActivationsFieldNumber);
  }
  return EncodeTrainMessage(head.SerializeAsString(), activations);
}

v1::TrainLookupResult HeadOfPart(int64_t step) {
  v1::TrainLookupResult head;
  head.set_step(step);
  head.set_continues(true);
  return head;
}

}  // namespace

size_t BytesToSend(const LookupOutput& output, int feature) {
  if (output.activations.shared_bytes > 0) return 0;
  if (HasRows(output, feature)) return static_cast<size_t>(output.rows->bytes(feature));
  return output.activations.features[feature].bytes.size();
}

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

std::deque<grpc::ByteBuffer> EncodeTrainActivations(int64_t step, const LookupOutput& output,
                                                    absl::Span<const int> features) {
  std::deque<grpc::ByteBuffer> messages;
  for (const absl::Span<const int> some : CutIntoMessages(output, features)) {
    messages.push_back(EncodeMessage(HeadOfPart(step), output, some));
  }
  return messages;
}

std::deque<grpc::ByteBuffer> EncodeTrainLookup(int64_t step, const LookupOutput& output,
                                               size_t sent, const v1::StepTimes& times) {
  absl::Span<const int> features;
  if (output.activations.shared_bytes == 0) features = absl::MakeConstSpan(output.order);
  features.remove_prefix(std::min(sent, features.size()));
  std::vector<absl::Span<const int>> cut = CutIntoMessages(output, features);
  const absl::Span<const int> last = cut.back();
  cut.pop_back();
  std::deque<grpc::ByteBuffer> messages;
  for (const absl::Span<const int> some : cut) {
    messages.push_back(EncodeMessage(HeadOfPart(step), output, some));
  }
  v1::TrainLookupResult head;
  head.set_step(step);
  head.set_shared_bytes(output.activations.shared_bytes);
  *head.mutable_statistics() = output.statistics;
  *head.mutable_times() = times;
  messages.push_back(EncodeMessage(head, output, last));
  return messages;
}

}  // namespace emberd::server
