#include "server/coordinator/train/train_message.h"

#include <array>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::coordinator {
namespace {

using rpc::WireCursor;
using rpc::WireEncoder;

// Fields on the way from a TrainRequest to the bytes of a gradient.
constexpr std::array<int, 4> kPath = {
    v1::TrainRequest::kUpdateFieldNumber, v1::TrainUpdate::kGradientsFieldNumber,
    v1::FeatureGradient::kGradientFieldNumber, v1::Tensor::kDataFieldNumber};
constexpr size_t kGradientLevel = 1, kDataLevel = 3;

absl::Status Malformed() {
  return absl::InvalidArgumentError("the request is not a valid emberd.v1.TrainRequest");
}

// Copies a message but for the bytes of gradients. The copy is what protobuf reads.
class Splitter {
 public:
  explicit Splitter(std::vector<rpc::SharedPieces>* data) : data_(data) {}

  // The next `length` bytes, a message that stands at `level` of the path.
  absl::Status Copy(WireCursor* from, size_t length, size_t level, WireEncoder* to) {
    const size_t end = from->remaining() - length;
    while (from->remaining() > end) {
      ASSIGN_OR_RETURN(const WireCursor::Tag tag, Short(from, &WireCursor::ReadTag));
      if (level < kPath.size() && tag.field == kPath[level] &&
          tag.wire_type == rpc::kWireLengthDelimited) {
        RETURN_IF_ERROR(Descend(from, end, level, to));
      } else {
        RETURN_IF_ERROR(CopyField(from, tag, to));
      }
    }
    return from->remaining() == end ? absl::OkStatus() : Malformed();
  }

 private:
  // Tags and lengths, which protobuf reads from at most 5 bytes.
  template <typename Value>
  static absl::StatusOr<Value> Short(WireCursor* from,
                                     absl::StatusOr<Value> (WireCursor::*read)()) {
    const size_t before = from->remaining();
    ASSIGN_OR_RETURN(const Value value, (from->*read)());
    if (before - from->remaining() > 5) return Malformed();
    return value;
  }

  // A field of the path in a message that ends where `end` bytes are left.
  absl::Status Descend(WireCursor* from, size_t end, size_t level, WireEncoder* to) {
    ASSIGN_OR_RETURN(const size_t length, Short(from, &WireCursor::ReadLength));
    if (from->remaining() < end || length > from->remaining() - end) return Malformed();
    if (level == kDataLevel) {
      ASSIGN_OR_RETURN(data_->back(), from->Share(length));  // the last one counts
      return absl::OkStatus();
    }
    if (level == kGradientLevel) data_->emplace_back();
    WireEncoder inside;
    RETURN_IF_ERROR(Copy(from, length, level + 1, &inside));
    to->BytesField(kPath[level], inside.FinishText());
    return absl::OkStatus();
  }

  static absl::Status CopyField(WireCursor* from, const WireCursor::Tag& tag, WireEncoder* to) {
    to->Varint(static_cast<uint64_t>(tag.field) << 3 | tag.wire_type);
    size_t size = 0;
    switch (tag.wire_type) {
      case rpc::kWireVarint: {
        ASSIGN_OR_RETURN(const uint64_t value, from->ReadVarint());
        to->Varint(value);
        return absl::OkStatus();
      }
      case rpc::kWireFixed64:
        size = 8;
        break;
      case rpc::kWireFixed32:
        size = 4;
        break;
      case rpc::kWireLengthDelimited: {
        ASSIGN_OR_RETURN(size, Short(from, &WireCursor::ReadLength));
        to->Varint(size);
        break;
      }
      default:
        return Malformed();
    }
    if (size > from->remaining()) return Malformed();
    std::string bytes(size, '\0');
    RETURN_IF_ERROR(from->Copy(bytes.data(), size));
    to->Raw(bytes);
    return absl::OkStatus();
  }

  std::vector<rpc::SharedPieces>* const data_;
};

absl::Status CheckSameStep(int64_t step, int64_t of_message) {
  if (step == of_message) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("step is ", of_message, " in a message of the request of step ", step));
}

absl::Status TooEarly(absl::string_view what, int64_t step, absl::string_view open,
                      int64_t open_step) {
  return absl::InvalidArgumentError(absl::StrCat(what, " of step ", step, " begins before the ",
                                                 open, " of step ", open_step, " is complete"));
}

}  // namespace

absl::StatusOr<TrainMessage> DecodeTrainMessage(const grpc::ByteBuffer& bytes) {
  TrainMessage message;
  ASSIGN_OR_RETURN(WireCursor cursor, WireCursor::Over(bytes));
  WireCursor first = cursor;
  const absl::StatusOr<WireCursor::Tag> tag = first.ReadTag();
  if (!tag.ok() || tag->field != v1::TrainRequest::kUpdateFieldNumber) {
    RETURN_IF_ERROR(rpc::DecodeMessage(bytes, &message.request));
    return message;
  }
  WireEncoder rest;
  if (!Splitter(&message.data).Copy(&cursor, cursor.remaining(), 0, &rest).ok() ||
      !message.request.ParseFromString(rest.FinishText())) {
    return Malformed();
  }
  // Fewer gradients than were read: something else has taken the place of an update.
  const size_t gradients = message.request.update().gradients_size();
  if (gradients != message.data.size()) return Malformed();
  return message;
}

absl::StatusOr<std::optional<TrainStepRequest>> TrainAssembler::Add(TrainMessage* message,
                                                                    int64_t bytes) {
  switch (message->request.request_case()) {
    case v1::TrainRequest::kLookup:
      return AddLookup(message->request.mutable_lookup(), bytes);
    case v1::TrainRequest::kUpdate:
      return AddUpdate(message, bytes);
    case v1::TrainRequest::kStart:
      return absl::InvalidArgumentError("start: it was sent already, as the first message");
    case v1::TrainRequest::REQUEST_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("request: neither lookup nor update is set");
}

absl::StatusOr<std::optional<TrainStepRequest>> TrainAssembler::AddLookup(v1::TrainLookup* message,
                                                                          int64_t bytes) {
  if (update_.has_value()) return TooEarly("lookup", message->step(), "update", update_->step);
  if (!lookup_.has_value()) {
    lookup_.emplace().step = message->step();
    lookup_->lookup.emplace().set_activation_dtype(message->activation_dtype());
    if (message->has_shared()) lookup_->lookup->mutable_shared()->Swap(message->mutable_shared());
  }
  RETURN_IF_ERROR(CheckSameStep(lookup_->step, message->step()));
  lookup_->bytes += bytes;
  for (v1::FeatureIds& ids : *message->mutable_features()) {
    *lookup_->lookup->add_features() = std::move(ids);
  }
  if (message->continues()) return std::nullopt;
  return std::exchange(lookup_, std::nullopt);
}

absl::StatusOr<std::optional<TrainStepRequest>> TrainAssembler::AddUpdate(TrainMessage* message,
                                                                          int64_t bytes) {
  v1::TrainUpdate* const update = message->request.mutable_update();
  if (lookup_.has_value()) return TooEarly("update", update->step(), "lookup", lookup_->step);
  if (!update_.has_value()) update_.emplace(OpenUpdate{update->step()});
  RETURN_IF_ERROR(CheckSameStep(update_->step, update->step()));
  update_->skip |= update->skip();
  if (update_->feature.empty() && update->gradients_size() > 0) {
    update_->feature = update->gradients(0).feature();
  }
  if (update_->skip && (update->gradients_size() > 0 || !update_->feature.empty())) {
    return absl::InvalidArgumentError(
        absl::StrCat("update.skip is true in step ", update_->step, ", but gradients of feature \"",
                     update_->feature, "\" came with it; a skipped step has none"));
  }
  auto gradients = std::make_shared<v1::ApplyGradientsRequest>();
  gradients->set_step(update->step());
  gradients->mutable_gradients()->Swap(update->mutable_gradients());
  gradients->mutable_hyperparameters()->Swap(update->mutable_hyperparameters());
  TrainStepRequest part;
  part.step = update->step();
  part.bytes = bytes;
  part.update = TrainUpdatePart{std::move(gradients), std::move(message->data),
                                update->checkpoint(), update->skip(), !update->continues()};
  if (part.update->last) update_.reset();
  return part;
}

}  // namespace emberd::coordinator
