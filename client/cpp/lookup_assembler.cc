#include "client/cpp/lookup_assembler.h"

#include <utility>

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/bfloat16.h"
#include "base/status.h"
#include "client/cpp/batch_codec.h"

namespace emberd::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

constexpr WireFormatLite::WireType kVarint = WireFormatLite::WIRETYPE_VARINT;
constexpr WireFormatLite::WireType kBytes = WireFormatLite::WIRETYPE_LENGTH_DELIMITED;

constexpr uint32_t TagOf(int field, WireFormatLite::WireType type) {
  return WireFormatLite::MakeTag(field, type);
}

absl::Status Malformed() {
  return absl::InternalError("the server sent an invalid TrainLookupResult");
}

// The elements of a tensor, to where they are read.
bool ReadFloats(CodedInputStream* input, WireType type, absl::Span<float> values) {
  if (type == WireType::kFloat32) {
    return input->ReadRaw(values.data(), static_cast<int>(values.size() * sizeof(float)));
  }
  char halves[4096];  // an element may begin in one slice of the message and end in the next
  while (!values.empty()) {
    const absl::Span<float> some = values.subspan(0, sizeof(halves) / 2);
    if (!input->ReadRaw(halves, static_cast<int>(2 * some.size()))) return false;
    FromBfloat16Bytes(halves, some);
    values.remove_prefix(some.size());
  }
  return true;
}

// The same to rows that do not lie one after the other.
bool ReadSamples(CodedInputStream* input, WireType type, const ExpectedLookup::Feature& feature,
                 float* to) {
  if (feature.row_stride == feature.dim) {
    return ReadFloats(input, type, absl::MakeSpan(to, feature.span()));
  }
  for (int64_t row = 0; row < feature.samples; ++row, to += feature.row_stride) {
    if (!ReadFloats(input, type, absl::MakeSpan(to, feature.dim))) return false;
  }
  return true;
}

// A tensor, its elements aside: read_data(bytes) reads them, which come next, or says what is wrong
// with them. It may be asked before the shape is known.
absl::Status ReadTensor(CodedInputStream* input, v1::Tensor* head,
                        absl::FunctionRef<absl::Status(size_t)> read_data) {
  int bytes = 0;
  const CodedInputStream::Limit limit = input->ReadLengthAndPushLimit();
  while (const uint32_t tag = input->ReadTag()) {
    uint64_t number = 0;
    bool good = true;
    switch (tag) {
      case TagOf(v1::Tensor::kDtypeFieldNumber, kVarint):
        good = input->ReadVarint64(&number);
        head->set_dtype(static_cast<v1::DataType>(number));
        break;
      case TagOf(v1::Tensor::kShapeFieldNumber, kVarint):
        good = input->ReadVarint64(&number);
        head->add_shape(static_cast<int64_t>(number));
        break;
      case TagOf(v1::Tensor::kShapeFieldNumber, kBytes):
        good = WireFormatLite::ReadPackedPrimitive<int64_t, WireFormatLite::TYPE_INT64>(
            input, head->mutable_shape());
        break;
      case TagOf(v1::Tensor::kDataFieldNumber, kBytes):
        if (!input->ReadVarintSizeAsInt(&bytes)) return Malformed();
        RETURN_IF_ERROR(read_data(bytes));
        break;
      default:
        good = WireFormatLite::SkipField(input, tag);
    }
    if (!good) return Malformed();
  }
  return input->CheckEntireMessageConsumedAndPopLimit(limit) ? absl::OkStatus() : Malformed();
}

void FromBfloat16Block(const ExpectedLookup& expected, float* floats) {
  const char* from = expected.activations->data();
  if (expected.concat) {
    return FromBfloat16Bytes(from, absl::MakeSpan(floats, expected.floats));
  }
  for (const ExpectedLookup::Feature& feature : expected.features) {
    FromBfloat16Bytes(from, absl::MakeSpan(floats + feature.offset, feature.span()));
    from += AlignTensor(feature.span() * ElementBytes(expected.type));
  }
}

Activation ActivationIn(const ExpectedLookup::Feature& feature, const float* memory) {
  return {feature.name, feature.samples, feature.dim,
          absl::MakeConstSpan(memory + feature.offset, feature.span()), feature.row_stride};
}

}  // namespace

void ExpectedLookup::Lend() {
  if (ids != nullptr) ids->Lend();
  if (activations != nullptr) activations->Lend();
}

void ExpectedLookup::Settle() {
  if (ids != nullptr) ids->Settle();
  if (activations != nullptr) activations->Settle();
  ids = nullptr;
}

absl::Status PlaceActivations(bool concat, ExpectedLookup* expected) {
  expected->concat = concat;
  size_t end = 0;
  for (ExpectedLookup::Feature& feature : expected->features) {
    feature.offset = end;
    feature.row_stride = feature.dim;
    end += concat
               ? feature.dim
               : AlignTensor(static_cast<size_t>(feature.samples) * feature.dim * sizeof(float)) /
                     sizeof(float);
  }
  expected->floats = end;
  if (!concat || expected->features.empty()) return absl::OkStatus();
  const ExpectedLookup::Feature& first = expected->features.front();
  for (ExpectedLookup::Feature& feature : expected->features) {
    feature.row_stride = static_cast<int64_t>(end);
    if (feature.samples == first.samples) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "concat: feature \"", first.name, "\" has ", first.samples, " samples, and feature \"",
        feature.name, "\" has ", feature.samples, "; they must have the same number"));
  }
  expected->floats = end * first.samples;
  return absl::OkStatus();
}

size_t SharedBytes(const ExpectedLookup& expected) {
  // Sparse ids may come with any number of samples. What no answer can hold is not shared either.
  constexpr double kMostElements = int64_t{1} << 31;
  double elements = 0;
  for (const ExpectedLookup::Feature& feature : expected.features) {
    elements += static_cast<double>(feature.samples) * static_cast<double>(feature.dim);
  }
  if (elements > kMostElements) return 0;
  const size_t element = ElementBytes(expected.type);
  if (expected.concat) return expected.floats * element;
  size_t bytes = 0;
  for (const ExpectedLookup::Feature& feature : expected.features) {
    bytes += AlignTensor(feature.samples * feature.dim * element);
  }
  return bytes;
}

absl::StatusOr<std::shared_ptr<float>> ReadShared(const ExpectedLookup& expected, uint64_t bytes,
                                                  BufferPool* pool,
                                                  std::vector<Activation>* activations) {
  const std::shared_ptr<SharedBlock>& block = expected.activations;
  const size_t all = SharedBytes(expected);
  if (block == nullptr || bytes != all) {
    return absl::InternalError(absl::StrCat("shared_bytes: the server sent ", bytes, "; ",
                                            block == nullptr ? 0 : all, " was expected"));
  }
  std::shared_ptr<float> floats;
  if (expected.type == WireType::kFloat32) {
    floats = {block, reinterpret_cast<float*>(block->data())};
  } else {
    floats = TakeFloats(pool, expected.floats);
    FromBfloat16Block(expected, floats.get());
  }
  for (const ExpectedLookup::Feature& feature : expected.features) {
    activations->push_back(ActivationIn(feature, floats.get()));
  }
  return floats;
}

LookupAssembler::LookupAssembler(ExpectedLookup expected, BufferPool* pool)
    : expected_(std::move(expected)), pool_(pool) {
  result_.step = expected_.step;
}

absl::StatusOr<bool> LookupAssembler::Add(CodedInputStream* input) {
  using Result = v1::TrainLookupResult;
  int64_t step = 0;
  uint64_t shared_bytes = 0;
  bool continues = false;
  v1::BatchStatistics statistics;
  v1::StepTimes times;
  while (const uint32_t tag = input->ReadTag()) {
    uint64_t number = 0;
    bool good = true;
    switch (tag) {
      case TagOf(Result::kActivationsFieldNumber, kBytes):
        RETURN_IF_ERROR(AddActivation(input));
        break;
      case TagOf(Result::kStepFieldNumber, kVarint):
        good = input->ReadVarint64(&number);
        step = static_cast<int64_t>(number);
        break;
      case TagOf(Result::kContinuesFieldNumber, kVarint):
        good = input->ReadVarint64(&number);
        continues = number != 0;
        break;
      case TagOf(Result::kStatisticsFieldNumber, kBytes):
        good = WireFormatLite::ReadMessage(input, &statistics);
        break;
      case TagOf(Result::kTimesFieldNumber, kBytes):
        good = WireFormatLite::ReadMessage(input, &times);
        break;
      case TagOf(Result::kSharedBytesFieldNumber, kVarint):
        good = input->ReadVarint64(&shared_bytes);
        break;
      default:
        good = WireFormatLite::SkipField(input, tag);
    }
    if (!good) return Malformed();
  }
  if (!input->ConsumedEntireMessage()) return Malformed();
  if (step != expected_.step) {
    return absl::InternalError(
        absl::StrCat("step: the server sent ", step, "; ", expected_.step, " was expected"));
  }
  if (continues) return false;
  result_.statistics = DecodeStatistics(statistics);
  result_.times = DecodeTimes(times);
  expected_.Settle();
  if (shared_bytes > 0) {
    if (next_ > 0) return absl::InternalError("the server sent activations and shared_bytes");
    ASSIGN_OR_RETURN(memory_, ReadShared(expected_, shared_bytes, pool_, &result_.activations));
    next_ = expected_.features.size();
  }
  if (next_ < expected_.features.size()) {
    return absl::InternalError(absl::StrCat("activations: the server sent ", next_, "; ",
                                            expected_.features.size(), " were expected"));
  }
  if (memory_ == nullptr) memory_ = TakeFloats(pool_, expected_.floats);  // there are none
  return true;
}

absl::Status LookupAssembler::AddActivation(CodedInputStream* input) {
  if (memory_ == nullptr) memory_ = TakeFloats(pool_, expected_.floats);
  if (next_ == expected_.features.size()) {
    return absl::InternalError(
        absl::StrCat("activations: the server sent more than ", next_, ", which were expected"));
  }
  const ExpectedLookup::Feature& feature = expected_.features[next_];
  std::string name;
  absl::Status status;
  bool has_activation = false;
  const CodedInputStream::Limit limit = input->ReadLengthAndPushLimit();
  while (const uint32_t tag = input->ReadTag()) {
    bool good = true;
    if (tag == TagOf(v1::FeatureActivation::kFeatureFieldNumber, kBytes)) {
      good = WireFormatLite::ReadBytes(input, &name);
    } else if (tag == TagOf(v1::FeatureActivation::kActivationFieldNumber, kBytes)) {
      has_activation = true;
      status = ReadActivation(input, feature);
    } else {
      good = WireFormatLite::SkipField(input, tag);
    }
    if (!good) return Malformed();
    if (!status.ok()) break;
  }
  if (status.ok() && !input->CheckEntireMessageConsumedAndPopLimit(limit)) return Malformed();
  if (status.ok() && name != feature.name) {
    status = absl::InternalError(absl::StrCat("feature: the server sent \"", name, "\""));
  }
  if (status.ok() && !has_activation) {
    status = absl::InternalError("the server sent no activation");
  }
  if (!status.ok()) {
    return absl::InternalError(absl::StrCat("activations[", next_, "] (feature \"", feature.name,
                                            "\").", status.message()));
  }
  result_.activations.push_back(ActivationIn(feature, memory_.get()));
  ++next_;
  return absl::OkStatus();
}

absl::Status LookupAssembler::ReadActivation(CodedInputStream* input,
                                             const ExpectedLookup::Feature& feature) {
  const auto bytes =
      static_cast<size_t>(feature.samples * feature.dim * ElementBytes(expected_.type));
  v1::Tensor head;
  bool read = false;
  absl::Status status = ReadTensor(input, &head, [&](size_t size) {
    if (size != bytes) return WrongDataSize(size);
    read = true;
    const bool good = ReadSamples(input, expected_.type, feature, memory_.get() + feature.offset);
    return good ? absl::OkStatus() : Malformed();
  });
  RETURN_IF_ERROR(status);
  status = CheckTensorHead(head, feature.samples, feature.dim, expected_.type);
  if (status.ok() && !read && bytes > 0) status = WrongDataSize(0);
  return status;
}

TrainLookupResult LookupAssembler::Take() {
  if (expected_.concat) result_.concat = absl::MakeConstSpan(memory_.get(), expected_.floats);
  result_.memory = std::move(memory_);
  return std::move(result_);
}

StepTimes DecodeTimes(const v1::StepTimes& message) {
  return {.preprocess = absl::Microseconds(message.preprocess_us()),
          .wait_for_ranks = absl::Microseconds(message.wait_for_ranks_us()),
          .wait_for_update = absl::Microseconds(message.wait_for_update_us()),
          .shards = absl::Microseconds(message.shards_us()),
          .combine = absl::Microseconds(message.combine_us()),
          .slowest_rank = message.slowest_rank()};
}

}  // namespace emberd::client
