#include "server/shard/apply_codec.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "base/status.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/group/group_rules.h"
#include "server/shard/request_payload.h"

namespace emberd::server {
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

namespace {

absl::Status DecodeGroupPart(const internal::v1::GroupPart& from, GroupPart* part) {
  RETURN_IF_ERROR(CheckInRange("group_part.size", from.size(), 1, kMaxGroupSize));
  RETURN_IF_ERROR(CheckInRange("group_part.rank", from.rank(), 0, from.size() - 1));
  RETURN_IF_ERROR(CheckInRange("group_part.step", from.step(), 0, kMaxStep));
  *part = GroupPartOf(from);
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

}  // namespace emberd::server
