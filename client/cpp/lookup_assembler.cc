#include "client/cpp/lookup_assembler.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/floats.h"
#include "base/status.h"
#include "client/cpp/batch_codec.h"

namespace emberd::client {
namespace {

// The elements of a tensor, which has the feature's shape, to where they are read.
void CopyElements(const v1::Tensor& tensor, WireType type, const ExpectedLookup::Feature& feature,
                  float* to) {
  const int64_t runs = feature.row_stride == feature.dim ? 1 : feature.samples;
  const size_t run = runs == 1 ? feature.span() : feature.dim;
  const char* from = tensor.data().data();
  for (int64_t i = 0; i < runs; ++i) {
    if (type == WireType::kFloat32) {
      std::memcpy(to, from, run * sizeof(float));
    } else {
      FromBfloat16Bytes(from, absl::MakeSpan(to, run));
    }
    from += run * ElementBytes(type);
    to += feature.row_stride;
  }
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

absl::StatusOr<bool> LookupAssembler::Add(const v1::TrainLookupResult& part) {
  if (part.step() != expected_.step) {
    return absl::InternalError(
        absl::StrCat("step: the server sent ", part.step(), "; ", expected_.step, " was expected"));
  }
  for (const v1::FeatureActivation& activation : part.activations()) {
    RETURN_IF_ERROR(AddActivation(activation));
  }
  if (part.continues()) return false;
  result_.statistics = DecodeStatistics(part.statistics());
  result_.times = DecodeTimes(part.times());
  RETURN_IF_ERROR(Finish(part.shared_bytes()));
  return true;
}

absl::Status LookupAssembler::Finish(uint64_t shared_bytes) {
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
  return absl::OkStatus();
}

absl::Status LookupAssembler::AddActivation(const v1::FeatureActivation& activation) {
  if (memory_ == nullptr) memory_ = TakeFloats(pool_, expected_.floats);
  if (next_ == expected_.features.size()) {
    return absl::InternalError(
        absl::StrCat("activations: the server sent more than ", next_, ", which were expected"));
  }
  const ExpectedLookup::Feature& feature = expected_.features[next_];
  const v1::Tensor& tensor = activation.activation();
  const absl::Status status =
      activation.feature() == feature.name
          ? CheckTensor(tensor, feature.samples, feature.dim, expected_.type)
          : absl::InternalError(
                absl::StrCat("feature: the server sent \"", activation.feature(), "\""));
  if (!status.ok()) {
    return absl::InternalError(absl::StrCat("activations[", next_, "] (feature \"", feature.name,
                                            "\").", status.message()));
  }
  CopyElements(tensor, expected_.type, feature, memory_.get() + feature.offset);
  result_.activations.push_back(ActivationIn(feature, memory_.get()));
  ++next_;
  return absl::OkStatus();
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
