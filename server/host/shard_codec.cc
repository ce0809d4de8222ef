#include "server/host/shard_codec.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "server/group/group.h"
#include "shard/gather/pooling.h"
#include "shard/update/update.h"

namespace emberd::host {
namespace {

using preprocess::CsrSegmentView;
using preprocess::SampleSpan;
using preprocess::StackBatchView;

// Where payloads begin in shared memory.
constexpr uint64_t kSharedAlignment = 64;

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("malformed message: ", what));
}

template <typename Header>
absl::Status ParseHeader(const rpc::IncomingMessage& message, Header* header) {
  if (header->ParseFromString(message.header())) return absl::OkStatus();
  return Malformed(absl::StrCat("its header is not a valid ", header->GetTypeName()));
}

// Whether the place begins where it may. `what` names it.
absl::Status CheckAligned(absl::string_view what, const v1::SharedBlock& place) {
  if (place.offset() % kSharedAlignment == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ".offset is ", place.offset(), "; it must be a multiple of 64"));
}

struct RequestPayload {
  absl::Span<const char> bytes;
  std::shared_ptr<const void> owner;
};

// That of a request: in the message, or where its header says, in memory of `regions`, which may be
// null. FAILED_PRECONDITION if it is not known there.
template <typename Header>
absl::StatusOr<RequestPayload> FindPayload(const rpc::IncomingMessage& message,
                                           const Header& header, const RegionServer* regions) {
  if (!header.has_payload()) return RequestPayload{message.payload(), message.owner()};
  if (!message.payload().empty()) return Malformed("a payload that is both sent and shared");
  const v1::SharedBlock& place = header.payload();
  RETURN_IF_ERROR(CheckAligned("payload", place));
  if (regions == nullptr) {
    return absl::FailedPreconditionError("payload is set, but this shard shares no memory");
  }
  const auto memory = regions->Find(place.region(), place.offset(), place.size());
  if (!memory.ok()) return Annotate(memory.status(), "payload");
  return RequestPayload{absl::MakeConstSpan(memory->get(), place.size()), *memory};
}

// What decoded places refer to: keeps regions mapped.
using PlaceOwners = std::vector<std::shared_ptr<const void>>;

// `rows` lie in one of `regions`, or nowhere.
template <typename Value>
void EncodeFeatureRows(const shard::FeatureRows<Value>& rows, absl::Span<const NamedRegion> regions,
                       internal::v1::FeatureRows* to) {
  to->set_width(static_cast<int32_t>(rows.width));
  to->set_stride(static_cast<int32_t>(rows.stride));
  to->set_first_sample(static_cast<int32_t>(rows.first_sample));
  to->set_samples(static_cast<int32_t>(rows.samples));
  const auto* const first = reinterpret_cast<const char*>(rows.first);
  for (const NamedRegion& region : regions) {
    if (first == nullptr || region.memory == nullptr) continue;
    const char* const begin = region.memory->data();
    if (first < begin || first >= begin + region.memory->size()) continue;
    to->set_region(region.name);
    to->set_offset(first - begin);
  }
}

// INVALID_ARGUMENT if they are not inside of their region; FAILED_PRECONDITION, so that the caller
// sends what lies there, if the region is not known here.
template <typename Value>
absl::StatusOr<shard::FeatureRows<Value>> DecodeFeatureRows(const internal::v1::FeatureRows& from,
                                                            const RegionServer* regions,
                                                            PlaceOwners* owners) {
  shard::FeatureRows<Value> rows = {nullptr, from.width(), from.stride(), from.first_sample(),
                                    from.samples()};
  if (from.region() == 0) return rows;
  if (from.width() < 0 || from.stride() < from.width() || from.samples() < 0 ||
      from.first_sample() < 0 || from.offset() % sizeof(float) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("malformed message: a feature's rows lie at offset ", from.offset(), ", ",
                     from.stride(), " floats apart, of ", from.width(), " each, ", from.samples(),
                     " samples from sample ", from.first_sample()));
  }
  if (regions == nullptr) {
    return absl::FailedPreconditionError("a region is named, but this shard shares no memory");
  }
  const uint64_t floats =
      from.samples() == 0
          ? 0
          : uint64_t(from.samples() - 1) * uint64_t(from.stride()) + uint64_t(from.width());
  auto memory = regions->Find(from.region(), from.offset(), floats * sizeof(float));
  if (!memory.ok()) return Annotate(memory.status(), "a feature's rows");
  rows.first = reinterpret_cast<Value*>(memory->get());
  owners->push_back(*std::move(memory));
  return rows;
}

// All but the words of passed_over, which are payload.
void EncodePlaces(const shard::SumPlaces& places, const NamedRegion& region,
                  internal::v1::StackBatchHeader* header) {
  for (const shard::FeatureRows<float>& rows : places.features) {
    EncodeFeatureRows(rows, absl::MakeConstSpan(&region, 1), header->add_places());
  }
  header->set_passes_over(!places.passed_over.empty());
}

absl::StatusOr<shard::SumPlaces> DecodePlaces(const internal::v1::StackBatchHeader& header,
                                              const RegionServer* regions,
                                              rpc::PayloadReader* payload, PlaceOwners* owners) {
  shard::SumPlaces places;
  places.stack = header.stack();
  for (const internal::v1::FeatureRows& rows : header.places()) {
    ASSIGN_OR_RETURN(places.features.emplace_back(),
                     DecodeFeatureRows<float>(rows, regions, owners));
  }
  if (!header.passes_over()) return places;
  ASSIGN_OR_RETURN(const auto words,
                   payload->Int32s((int64_t{header.sample_count()} + 31) / 32, "passed_over"));
  places.passed_over.assign(words.begin(), words.end());
  return places;
}

void EncodeStackHeader(const StackBatchView& stack, internal::v1::StackBatchHeader* header) {
  header->set_stack(stack.stack);
  header->set_sample_count(stack.sample_count);
  header->set_slots(stack.slots);
  header->set_minibatches(stack.minibatches);
  header->set_single_rows(stack.single_rows);
  for (const int64_t samples : stack.feature_samples)
    header->add_feature_samples(static_cast<int32_t>(samples));
  for (const CsrSegmentView& segment : stack.segments) {
    internal::v1::SegmentHeader* to = header->add_segments();
    to->set_base(segment.base);
    to->set_entries(static_cast<int32_t>(segment.embedding_ids.size()));
  }
  for (const absl::Span<const SampleSpan>& slot : stack.spans) {
    header->add_spans_per_slot(static_cast<int32_t>(slot.size()));
    for (const SampleSpan& span : slot) {
      internal::v1::SampleSpan* to = header->add_spans();
      to->set_slot_begin(span.slot_begin);
      to->set_sample_begin(span.sample_begin);
      to->set_count(span.count);
    }
  }
}

// Spans and sample counts of a decoded batch point in here. Inner vectors do not move with the
// outer ones.
struct GatherOwner {
  std::shared_ptr<const void> payload;
  std::vector<std::vector<SampleSpan>> spans;
  std::vector<std::vector<int64_t>> feature_samples;
};

// What a decoded result refers to.
struct ResultOwner {
  std::shared_ptr<const void> payload;
  std::shared_ptr<const void> room;
  std::deque<std::vector<int32_t>> samples;
};

absl::Status DecodeSpans(const internal::v1::StackBatchHeader& header, StackBatchView* stack,
                         GatherOwner* owner) {
  int next = 0;
  for (const int32_t count : header.spans_per_slot()) {
    if (count < 0 || count > header.spans_size() - next)
      return Malformed("spans_per_slot exceeds the spans");
    std::vector<SampleSpan>& slot = owner->spans.emplace_back();
    for (int i = 0; i < count; ++i, ++next) {
      const internal::v1::SampleSpan& from = header.spans(next);
      slot.push_back({from.slot_begin(), from.sample_begin(), from.count()});
    }
    stack->spans.push_back(slot);
  }
  return absl::OkStatus();
}

// One array of all segments: cuts `all` into the segments' pieces.
template <typename T>
void Distribute(absl::Span<const T> all, const internal::v1::StackBatchHeader& header,
                StackBatchView* stack, absl::Span<const T> CsrSegmentView::*field) {
  size_t next = 0;
  for (size_t i = 0; i < stack->segments.size(); ++i) {
    const size_t size = header.segments(static_cast<int>(i)).entries();
    stack->segments[i].*field = all.subspan(next, size);
    next += size;
  }
}

absl::Status DecodeStack(const internal::v1::StackBatchHeader& header, int partitions,
                         rpc::PayloadReader* payload, StackBatchView* stack) {
  stack->stack = header.stack();
  stack->sample_count = header.sample_count();
  stack->slots = header.slots();
  stack->minibatches = header.minibatches();
  stack->single_rows = header.single_rows();
  int64_t entries = 0;
  for (const internal::v1::SegmentHeader& segment : header.segments()) {
    if (segment.entries() < 0) return Malformed("a segment has a negative number of entries");
    entries += segment.entries();
    stack->segments.emplace_back().base = segment.base();
  }
  ASSIGN_OR_RETURN(const auto row_ends,
                   payload->Int32s(int64_t{header.segments_size()} * partitions, "row_ends"));
  for (size_t i = 0; i < stack->segments.size(); ++i) {
    stack->segments[i].row_ends = row_ends.subspan(i * partitions, partitions);
  }
  ASSIGN_OR_RETURN(const auto embedding_ids, payload->Int32s(entries, "embedding_ids"));
  ASSIGN_OR_RETURN(const auto sample_ids, payload->Int32s(entries, "sample_ids"));
  ASSIGN_OR_RETURN(const auto gains, payload->Floats(entries, "gains"));
  Distribute(embedding_ids, header, stack, &CsrSegmentView::embedding_ids);
  Distribute(sample_ids, header, stack, &CsrSegmentView::sample_ids);
  Distribute(gains, header, stack, &CsrSegmentView::gains);
  return absl::OkStatus();
}

absl::StatusOr<RequestPayload> CopyOf(const RequestPayload& payload, size_t header_bytes,
                                      const rpc::MessageLimits& limits) {
  ASSIGN_OR_RETURN(std::shared_ptr<char> copy,
                   rpc::TakePayload(payload.bytes.size(), header_bytes, limits));
  if (copy != nullptr) std::memcpy(copy.get(), payload.bytes.data(), payload.bytes.size());
  return RequestPayload{absl::MakeConstSpan(copy.get(), payload.bytes.size()), copy};
}

// Where in `room` the sums lie, if they do.
std::optional<uint64_t> OffsetOfSums(const shard::StackSums& stack, const AnswerRoom& room) {
  const auto* const at = reinterpret_cast<const char*>(stack.sums.data());
  const char* const begin = room.memory.get();
  if (stack.sums.empty() || at < begin || at >= begin + room.size) return std::nullopt;
  return at - begin;
}

// Moves the payload of a message into `room`, from `offset` on. Its bytes, or 0 if it stays in the
// message, as it does where it does not fit.
uint64_t MovePayload(const AnswerRoom& room, uint64_t offset, rpc::OutgoingMessage* message) {
  const auto bytes = static_cast<uint64_t>(message->payload_bytes());
  if (offset > room.size || bytes > room.size - offset) return 0;
  char* to = room.memory.get() + offset;
  for (const rpc::SharedBytes& piece : message->payload) {
    std::memcpy(to, piece.bytes.data(), piece.bytes.size());
    to += piece.bytes.size();
  }
  message->payload.clear();
  return bytes;
}

absl::StatusOr<absl::Span<const float>> FindSums(const internal::v1::StackSums& from,
                                                 const AnswerRoom& room,
                                                 rpc::PayloadReader* payload) {
  const int64_t floats = int64_t{from.placed() ? from.rows() : from.samples()} * from.width();
  if (!from.has_sums_offset()) return payload->Floats(floats, "sums");
  const uint64_t offset = from.sums_offset(), bytes = floats * sizeof(float);
  if (offset % sizeof(float) != 0 || offset > room.size || bytes > room.size - offset) {
    return Malformed("sums that are not where they were to be written");
  }
  return absl::MakeConstSpan(reinterpret_cast<const float*>(room.memory.get() + offset), floats);
}

absl::Status DecodeGroupPart(const GroupPart& from, GroupPart* part) {
  RETURN_IF_ERROR(group::CheckInRange("group_part.size", from.size(), 1, group::kMaxGroupSize));
  RETURN_IF_ERROR(group::CheckInRange("group_part.rank", from.rank(), 0, from.size() - 1));
  RETURN_IF_ERROR(group::CheckInRange("group_part.step", from.step(), 0, group::kMaxStep));
  *part = from;
  part->clear_skip();
  return absl::OkStatus();
}

absl::StatusOr<shard::StackGradients> DecodeStackGradients(
    const internal::v1::StackGradientHeader& from, const RegionServer* regions,
    rpc::PayloadReader* payload, PlaceOwners* owners) {
  shard::StackGradients stack;
  stack.stack = from.stack();
  stack.hyperparameters.insert(from.hyperparameters().begin(), from.hyperparameters().end());
  stack.of_rows = from.of_rows();
  ASSIGN_OR_RETURN(stack.gradients, payload->Floats(from.floats(), "gradients"));
  for (const internal::v1::FeatureRows& rows : from.features()) {
    ASSIGN_OR_RETURN(stack.features.emplace_back(),
                     DecodeFeatureRows<const float>(rows, regions, owners));
  }
  return stack;
}

}  // namespace

rpc::OutgoingMessage EncodeGather(const GatherCommand& command) {
  rpc::ArenaMessage<internal::v1::GatherHeader> message_header;
  internal::v1::GatherHeader& header = *message_header;
  header.set_model_id(command.model_id);
  header.set_history(command.history);
  header.set_batch_handle(command.batch_handle);
  header.set_batch_ttl_ms(absl::ToInt64Milliseconds(command.batch_ttl));
  header.set_activation_dtype(command.activation_dtype);
  if (command.answer.size() > 0) *header.mutable_answer() = command.answer;
  for (const StackBatchView& stack : command.stacks) {
    EncodeStackHeader(stack, header.add_stacks());
    const shard::SumPlaces* const places = command.places.Find(stack.stack);
    if (places == nullptr) continue;
    EncodePlaces(*places, command.region, header.mutable_stacks(header.stacks_size() - 1));
  }

  rpc::OutgoingMessage message = rpc::OutgoingMessage::WithHeader(header);
  for (const StackBatchView& stack : command.stacks) {
    for (const CsrSegmentView& segment : stack.segments)
      message.Append(segment.row_ends, command.owner);
    for (const CsrSegmentView& segment : stack.segments)
      message.Append(segment.embedding_ids, command.owner);
    for (const CsrSegmentView& segment : stack.segments)
      message.Append(segment.sample_ids, command.owner);
    for (const CsrSegmentView& segment : stack.segments)
      message.Append(segment.gains, command.owner);
    const shard::SumPlaces* const places = command.places.Find(stack.stack);
    if (places != nullptr && !places->passed_over.empty()) {
      auto words = std::make_shared<const std::vector<uint32_t>>(places->passed_over);
      const absl::Span<const uint32_t> bytes = *words;
      message.Append(bytes, std::move(words));
    }
  }
  return message;
}

absl::StatusOr<GatherCommand> DecodeGather(const rpc::IncomingMessage& message, int partitions,
                                           const RegionServer* regions,
                                           const rpc::MessageLimits& limits) {
  rpc::ArenaMessage<internal::v1::GatherHeader> message_header;
  internal::v1::GatherHeader& header = *message_header;
  RETURN_IF_ERROR(ParseHeader(message, &header));
  ASSIGN_OR_RETURN(RequestPayload bytes, FindPayload(message, header, regions));
  if (header.has_payload()) {
    ASSIGN_OR_RETURN(bytes, CopyOf(bytes, message.header().size(), limits));
  }
  auto owner = std::make_shared<GatherOwner>();
  owner->payload = std::move(bytes.owner);
  auto regions_named = std::make_shared<std::vector<std::shared_ptr<const void>>>();

  GatherCommand command;
  command.model_id = header.model_id();
  command.history = header.history();
  command.batch_handle = header.batch_handle();
  command.batch_ttl = absl::Milliseconds(header.batch_ttl_ms());
  command.activation_dtype = header.activation_dtype();
  command.answer = header.answer();
  rpc::PayloadReader payload(bytes.bytes);
  for (const internal::v1::StackBatchHeader& stack_header : header.stacks()) {
    StackBatchView& stack = command.stacks.emplace_back();
    stack.feature_samples = owner->feature_samples.emplace_back(
        stack_header.feature_samples().begin(), stack_header.feature_samples().end());
    RETURN_IF_ERROR(DecodeSpans(stack_header, &stack, owner.get()));
    RETURN_IF_ERROR(DecodeStack(stack_header, partitions, &payload, &stack));
    if (stack_header.places().empty()) continue;
    ASSIGN_OR_RETURN(command.places.stacks.emplace_back(),
                     DecodePlaces(stack_header, regions, &payload, regions_named.get()));
  }
  RETURN_IF_ERROR(payload.Finish());
  command.owner = std::move(owner);
  command.places.owner = std::move(regions_named);
  return command;
}

absl::StatusOr<AnswerRoom> FindAnswerRoom(const RegionServer* regions,
                                          const v1::SharedBlock& place) {
  if (regions == nullptr || place.size() == 0) return AnswerRoom();
  RETURN_IF_ERROR(CheckAligned("answer", place));
  auto memory = regions->Find(place.region(), place.offset(), place.size());
  if (memory.ok()) return AnswerRoom{*std::move(memory), place.size()};
  // The shard has been restarted, or the region was dropped just now.
  if (absl::IsFailedPrecondition(memory.status())) return AnswerRoom();
  return Annotate(memory.status(), "answer");
}

rpc::OutgoingMessage EncodeGatherResult(const GatherResult& result, const AnswerRoom& room) {
  internal::v1::GatherReply header;
  header.set_history(result.history);
  uint64_t room_taken = 0;  // by sums that were written there
  for (const shard::StackSums& stack : result.stacks) {
    internal::v1::StackSums* to = header.add_stacks();
    to->set_stack(stack.stack);
    to->set_samples(static_cast<int32_t>(stack.samples.size()));
    const auto rows = stack.placed ? stack.rows : static_cast<int64_t>(stack.samples.size());
    if (stack.placed) to->set_rows(static_cast<int32_t>(rows));
    to->set_width(rows == 0 ? 0 : static_cast<int32_t>(stack.sums.size() / rows));
    to->set_rows_gathered(stack.rows_gathered);
    to->set_placed(stack.placed);
    if (const auto offset = OffsetOfSums(stack, room)) {
      to->set_sums_offset(*offset);
      const uint64_t end = *offset + stack.sums.size() * sizeof(float);
      room_taken =
          std::max(room_taken, (end + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment);
    }
  }
  for (const shard::StackRows& stack : result.rows) {
    internal::v1::StackRows* to = header.add_rows();
    to->set_stack(stack.stack);
    to->set_rows(static_cast<int32_t>(static_cast<int64_t>(stack.rows.size()) / stack.row_bytes));
    to->set_row_bytes(static_cast<int32_t>(stack.row_bytes));
    to->set_rows_gathered(stack.rows_gathered);
    to->set_rounded(stack.rounded);
  }
  rpc::OutgoingMessage message;
  for (const shard::StackSums& stack : result.stacks) {
    message.Append(stack.samples, result.owner);
    if (!OffsetOfSums(stack, room).has_value()) message.Append(stack.sums, result.owner);
  }
  for (const shard::StackRows& stack : result.rows) message.Append(stack.rows, result.owner);
  header.set_shared_bytes(MovePayload(room, room_taken, &message));
  header.set_shared_offset(room_taken);
  message.header = header.SerializeAsString();
  return message;
}

absl::StatusOr<GatherResult> DecodeGatherResult(const rpc::IncomingMessage& message,
                                                const AnswerRoom& room) {
  internal::v1::GatherReply header;
  RETURN_IF_ERROR(ParseHeader(message, &header));
  const bool shared = header.shared_bytes() > 0;
  if (shared && (!message.payload().empty() || header.shared_offset() > room.size ||
                 header.shared_bytes() > room.size - header.shared_offset())) {
    return Malformed("a payload that is not where it was to be written");
  }
  auto owner = std::make_shared<ResultOwner>();
  owner->payload = message.owner();
  owner->room = room.memory;
  GatherResult result;
  result.history = header.history();
  rpc::PayloadReader payload(
      shared
          ? absl::MakeConstSpan(room.memory.get() + header.shared_offset(), header.shared_bytes())
          : message.payload());
  for (const internal::v1::StackSums& from : header.stacks()) {
    if (from.samples() < 0 || from.width() < 0 || from.rows() < 0) {
      return Malformed("a negative size in StackSums");
    }
    ASSIGN_OR_RETURN(auto samples, payload.Int32s(from.samples(), "samples"));
    // What is checked must be what is used, whatever the shard writes there later.
    if (shared) samples = owner->samples.emplace_back(samples.begin(), samples.end());
    ASSIGN_OR_RETURN(const auto sums, FindSums(from, room, &payload));
    result.stacks.push_back(
        {from.stack(), samples, sums, from.rows_gathered(), from.rows(), from.placed()});
  }
  for (const internal::v1::StackRows& from : header.rows()) {
    if (from.rows() < 0 || from.row_bytes() <= 0) return Malformed("a negative size in StackRows");
    ASSIGN_OR_RETURN(const auto rows,
                     payload.Bytes(int64_t{from.rows()} * from.row_bytes(), "rows"));
    result.rows.push_back(
        {from.stack(), from.row_bytes(), rows, from.rows_gathered(), from.rounded()});
  }
  RETURN_IF_ERROR(payload.Finish());
  result.owner = std::move(owner);
  return result;
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
    *header.mutable_group_part() = *command.group_part;
    header.mutable_group_part()->set_skip(command.input.skip);
  }
  for (const shard::StackGradients& stack : command.input.stacks) {
    internal::v1::StackGradientHeader* to = header.add_stacks();
    to->set_stack(stack.stack);
    to->set_floats(static_cast<int64_t>(stack.gradients.size()));
    to->mutable_hyperparameters()->insert(stack.hyperparameters.begin(),
                                          stack.hyperparameters.end());
    to->set_of_rows(stack.of_rows);
    for (const auto& rows : stack.features) {
      EncodeFeatureRows(rows, command.regions, to->add_features());
    }
  }
  rpc::OutgoingMessage message = rpc::OutgoingMessage::WithHeader(header);
  for (const shard::StackGradients& stack : command.input.stacks) {
    message.Append(stack.gradients, command.input.owner);
  }
  return message;
}

absl::StatusOr<ApplyCommand> DecodeApply(const rpc::IncomingMessage& message,
                                         const RegionServer* regions) {
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
  auto owners = std::make_shared<PlaceOwners>(1, std::move(bytes.owner));
  rpc::PayloadReader payload(bytes.bytes);
  for (const internal::v1::StackGradientHeader& from : header.stacks()) {
    ASSIGN_OR_RETURN(command.input.stacks.emplace_back(),
                     DecodeStackGradients(from, regions, &payload, owners.get()));
  }
  RETURN_IF_ERROR(payload.Finish());
  command.input.owner = std::move(owners);
  return command;
}

// ---- Rows that are named one by one

namespace {

constexpr int kMaxColumns = 8192;

template <typename T>
std::string Pack(absl::Span<const T> values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
absl::StatusOr<std::vector<T>> Unpack(const std::string& bytes, absl::string_view what) {
  if (bytes.size() % sizeof(T) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has ", bytes.size(), " bytes, not a multiple of ", sizeof(T)));
  }
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

template <typename Request>
Request EncodeSelection(const shard::RowSelection& selection) {
  Request request;
  request.set_model_id(selection.model_id);
  request.set_history(selection.history);
  request.set_stack(selection.stack);
  request.set_slot(selection.slot);
  request.set_partitions(Pack(selection.partitions));
  request.set_local_rows(Pack(selection.local_rows));
  request.set_columns(selection.columns);
  return request;
}

template <typename Request>
absl::Status DecodeSelection(const Request& request, NamedRows* rows) {
  ASSIGN_OR_RETURN(rows->partitions, Unpack<int32_t>(request.partitions(), "partitions"));
  ASSIGN_OR_RETURN(rows->local_rows, Unpack<int64_t>(request.local_rows(), "local_rows"));
  if (rows->partitions.size() != rows->local_rows.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("partitions has ", rows->partitions.size(), " values, but local_rows ",
                     rows->local_rows.size(), "; each row needs one of each"));
  }
  RETURN_IF_ERROR(group::CheckInRange("columns", request.columns(), 1, kMaxColumns));
  rows->selection = {request.model_id(), request.stack(),   request.slot(),   rows->partitions,
                     rows->local_rows,   request.columns(), request.history()};
  return absl::OkStatus();
}

}  // namespace

internal::v1::ReadShardRowsRequest EncodeRead(const shard::RowSelection& selection) {
  return EncodeSelection<internal::v1::ReadShardRowsRequest>(selection);
}

internal::v1::AssignShardRowsRequest EncodeAssign(const AssignCommand& command) {
  auto request = EncodeSelection<internal::v1::AssignShardRowsRequest>(command.rows);
  request.set_values(Pack(command.values));
  return request;
}

absl::Status DecodeRead(const internal::v1::ReadShardRowsRequest& request, NamedRows* rows) {
  return DecodeSelection(request, rows);
}

absl::StatusOr<AssignCommand> DecodeAssign(const internal::v1::AssignShardRowsRequest& request,
                                           rpc::MemoryRoom room) {
  const auto rows = std::make_shared<NamedRows>();
  rows->room = std::move(room);
  RETURN_IF_ERROR(DecodeSelection(request, rows.get()));
  ASSIGN_OR_RETURN(rows->values, Unpack<float>(request.values(), "values"));
  if (rows->values.size() != rows->floats()) {
    return absl::InvalidArgumentError(
        absl::StrCat("values has ", rows->values.size(), " floats; ", rows->partitions.size(),
                     " rows of ", rows->selection.columns, " columns need ", rows->floats()));
  }
  AssignCommand command;
  command.rows = rows->selection;
  command.values = rows->values;
  command.owner = rows;
  return command;
}

}  // namespace emberd::host
