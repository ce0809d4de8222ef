#include "server/shard/apply_codec.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "base/float_halves.h"
#include "base/status.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/group/group_rules.h"
#include "server/shard/places_codec.h"
#include "server/shard/request_payload.h"

namespace emberd::server {
namespace {

// Null: the stack's gradients are in the command's input.
const SumPieces* FindPieces(const ApplyCommand& command, int stack) {
  const auto it = std::find_if(command.pieces.begin(), command.pieces.end(),
                               [stack](const SumPieces& pieces) { return pieces.stack == stack; });
  return it == command.pieces.end() ? nullptr : &*it;
}

void EncodePiecesHeader(const SumPieces& sums, internal::v1::StackGradientHeader* to) {
  to->set_floats(sums.rows * sums.width);
  if (sums.dtype != v1::BFLOAT16) return;
  to->set_half_width(static_cast<int32_t>(sums.width));
  to->set_lower_rows(static_cast<int32_t>(sums.lower_rows.size()));
}

void AppendPieces(const SumPieces& sums, rpc::OutgoingMessage* message) {
  if (!sums.lower_rows.empty()) {
    auto lower_rows = std::make_shared<const std::vector<int32_t>>(sums.lower_rows);
    const absl::Span<const int32_t> rows = *lower_rows;
    message->Append(rows, std::move(lower_rows));
  }
  message->payload.insert(message->payload.end(), sums.pieces.begin(), sums.pieces.end());
}

// Rows that ascend in [0, rows).
absl::Status CheckLowerRows(absl::Span<const int32_t> lower_rows, int64_t rows) {
  int64_t least = 0;
  for (const int32_t row : lower_rows) {
    if (row < least || row >= rows) return Malformed("lower_rows that do not ascend");
    least = int64_t{row} + 1;
  }
  return absl::OkStatus();
}

// Memory for the floats of all stacks that come in halves; null if none do. What their headers say
// of them is checked.
absl::StatusOr<std::shared_ptr<float>> TakeJoined(const internal::v1::ApplyHeader& header,
                                                  size_t payload_bytes,
                                                  const rpc::MessageLimits& limits) {
  int64_t joined = 0;  // floats
  for (const internal::v1::StackGradientHeader& stack : header.stacks()) {
    const int64_t width = stack.half_width(), floats = stack.floats();
    if (width == 0) continue;
    // Rows that change after they were checked would be written anywhere.
    if (header.has_payload()) return Malformed("halves in shared memory");
    if (width < 0 || width % 2 != 0 || floats < 0 || floats % width != 0 || !stack.of_rows() ||
        stack.lower_rows() < 0 || stack.lower_rows() > floats / width) {
      return Malformed("halves that are not those of rows");
    }
    if (floats > static_cast<int64_t>(payload_bytes) / kHalfBytes - joined) {
      return Malformed("more halves than its payload has");
    }
    joined += floats;
  }
  ASSIGN_OR_RETURN(const std::shared_ptr<char> memory,
                   rpc::TakePayload(joined * sizeof(float), /*header_bytes=*/0, limits));
  return std::shared_ptr<float>(memory, reinterpret_cast<float*>(memory.get()));
}

// Puts sums together that came in halves.
absl::Status JoinHalves(const internal::v1::StackGradientHeader& from, rpc::PayloadReader* payload,
                        float* to) {
  const int64_t width = from.half_width(), floats = from.floats();
  ASSIGN_OR_RETURN(const auto lower_rows, payload->Int32s(from.lower_rows(), "lower_rows"));
  RETURN_IF_ERROR(CheckLowerRows(lower_rows, floats / width));
  ASSIGN_OR_RETURN(const auto upper, payload->Bytes(floats * kHalfBytes, "upper halves"));
  ASSIGN_OR_RETURN(const auto lower,
                   payload->Bytes(from.lower_rows() * width * kHalfBytes, "lower halves"));
  FloatsOfUpperHalves(upper.data(), floats, to);
  const char* halves = lower.data();
  for (const int32_t row : lower_rows) {
    AddLowerHalves(halves, width, to + row * width);
    halves += width * kHalfBytes;
  }
  return absl::OkStatus();
}

}  // namespace

int64_t MaxJoinedBytes(const rpc::MessageLimits& limits) {
  return std::min(limits.max_bytes, limits.memory.limit() / 4);
}

internal::v1::GroupPart GroupPartToProto(const GroupPart& part) {
  internal::v1::GroupPart to;
  to.set_group(part.group);
  to.set_generation(part.generation);
  to.set_rank(part.rank);
  to.set_size(part.size);
  to.set_step(part.step);
  return to;
}

GroupPart GroupPartOf(const internal::v1::GroupPart& part) {
  return {part.group(), part.generation(), part.rank(), part.size(), part.step()};
}

rpc::OutgoingMessage EncodeApply(const ApplyCommand& command) {
  internal::v1::ApplyHeader header;
  header.set_model_id(command.model_id);
  header.set_batch_handle(command.batch_handle);
  header.set_history(command.history);
  header.set_client_id(command.mutation.client_id);
  header.set_sequence(command.mutation.sequence);
  header.set_attempt(command.attempt);
  header.set_step(command.input.step);
  header.set_rng_seed(command.input.rng_seed);
  if (command.group_part.has_value()) {
    *header.mutable_group_part() = GroupPartToProto(*command.group_part);
    header.mutable_group_part()->set_skip(command.input.skip);
  }
  for (const shard::StackGradients& stack : command.input.stacks) {
    internal::v1::StackGradientHeader* to = header.add_stacks();
    to->set_stack(stack.stack);
    to->set_floats(static_cast<int64_t>(stack.gradients.size()));
    to->mutable_hyperparameters()->insert(stack.hyperparameters.begin(),
                                          stack.hyperparameters.end());
    to->set_of_rows(stack.of_rows);
    const SumPieces* const pieces = FindPieces(command, stack.stack);
    if (pieces != nullptr) EncodePiecesHeader(*pieces, to);
    for (const auto& rows : stack.features) {
      EncodeFeatureRows(rows, command.regions, to->add_features());
    }
  }
  rpc::OutgoingMessage message = rpc::OutgoingMessage::WithHeader(header);
  for (const shard::StackGradients& stack : command.input.stacks) {
    message.Append(stack.gradients, command.input.owner);
    const SumPieces* const pieces = FindPieces(command, stack.stack);
    if (pieces != nullptr) AppendPieces(*pieces, &message);
  }
  return message;
}

namespace {

absl::Status DecodeGroupPart(const internal::v1::GroupPart& from, GroupPart* part) {
  RETURN_IF_ERROR(CheckInRange("group_part.size", from.size(), 1, kMaxGroupSize));
  RETURN_IF_ERROR(CheckInRange("group_part.rank", from.rank(), 0, from.size() - 1));
  RETURN_IF_ERROR(CheckInRange("group_part.step", from.step(), 0, kMaxStep));
  *part = GroupPartOf(from);
  return absl::OkStatus();
}

// `joined`: where floats go that come in halves; moves on by them.
absl::StatusOr<shard::StackGradients> DecodeStackGradients(
    const internal::v1::StackGradientHeader& from, const RegionServer* regions,
    rpc::PayloadReader* payload, float** joined, PlaceOwners* owners) {
  shard::StackGradients stack;
  stack.stack = from.stack();
  stack.hyperparameters.insert(from.hyperparameters().begin(), from.hyperparameters().end());
  stack.of_rows = from.of_rows();
  if (from.half_width() != 0) {
    RETURN_IF_ERROR(JoinHalves(from, payload, *joined));
    stack.gradients = absl::MakeConstSpan(*joined, from.floats());
    *joined += from.floats();
  } else {
    ASSIGN_OR_RETURN(stack.gradients, payload->Floats(from.floats(), "gradients"));
  }
  for (const internal::v1::FeatureRows& rows : from.features()) {
    ASSIGN_OR_RETURN(stack.features.emplace_back(),
                     DecodeFeatureRows<const float>(rows, regions, owners));
  }
  return stack;
}

// Whether the payload is needed any longer. Halves have been joined.
bool IsReferredTo(const internal::v1::ApplyHeader& header) {
  return std::any_of(header.stacks().begin(), header.stacks().end(), [](const auto& stack) {
    return stack.half_width() == 0 && stack.floats() > 0;
  });
}

}  // namespace

absl::StatusOr<ApplyCommand> DecodeApply(const rpc::IncomingMessage& message,
                                         const RegionServer* regions,
                                         const rpc::MessageLimits& limits) {
  internal::v1::ApplyHeader header;
  RETURN_IF_ERROR(ParseHeader(message, &header));
  ASSIGN_OR_RETURN(RequestPayload bytes, FindPayload(message, header, regions));
  ApplyCommand command;
  command.model_id = header.model_id();
  command.batch_handle = header.batch_handle();
  command.history = header.history();
  if (header.has_group_part()) {
    RETURN_IF_ERROR(DecodeGroupPart(header.group_part(), &command.group_part.emplace()));
    command.input.skip = header.group_part().skip();
  } else {
    command.mutation = {header.client_id(), header.sequence(), UpdateTag(header.model_id())};
    command.attempt = header.attempt();
    RETURN_IF_ERROR(CheckMutation(command.mutation));
    RETURN_IF_ERROR(CheckAttempt(command.attempt));
  }
  command.input.step = header.step();
  command.input.rng_seed = header.rng_seed();
  command.payload_bytes = static_cast<int64_t>(bytes.bytes.size());
  ASSIGN_OR_RETURN(const std::shared_ptr<float> joined,
                   TakeJoined(header, bytes.bytes.size(), limits));
  auto owners = std::make_shared<PlaceOwners>(1, joined);
  float* next = joined.get();
  rpc::PayloadReader payload(bytes.bytes);
  for (const internal::v1::StackGradientHeader& from : header.stacks()) {
    ASSIGN_OR_RETURN(command.input.stacks.emplace_back(),
                     DecodeStackGradients(from, regions, &payload, &next, owners.get()));
  }
  RETURN_IF_ERROR(payload.Finish());
  if (IsReferredTo(header)) owners->push_back(std::move(bytes.owner));
  command.input.owner = std::move(owners);
  return command;
}

}  // namespace emberd::server
