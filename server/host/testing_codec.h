// What the tests of the codecs share: a command, a transport, memory that two ends have.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <grpcpp/support/byte_buffer.h>
#include <gtest/gtest.h>

#include "base/regions.h"
#include "server/host/shard_codec.h"

namespace emberd::host {

inline constexpr int kPartitions = 2;  // of a shard

// Sends a message through the transport's parts.
inline rpc::IncomingMessage Transport(rpc::OutgoingMessage message) {
  rpc::MessageAssembler assembler({1 << 20});
  absl::StatusOr<std::optional<rpc::IncomingMessage>> result =
      std::optional<rpc::IncomingMessage>();
  for (const grpc::ByteBuffer& part : rpc::SplitMessage(std::move(message), 13))
    result = assembler.Add(part);
  EXPECT_TRUE(result.ok() && result->has_value()) << result.status();
  return **std::move(result);
}

struct GatherMemory {
  std::vector<int32_t> row_ends = {1, 9, 0, 3};
  std::vector<int32_t> embedding_ids = {5, 6, 7, 8, 9};
  std::vector<int32_t> sample_ids = {0, 1, 2, 3, 4};
  std::vector<float> gains = {1, 2, 3, 4, 5};
  std::vector<int64_t> feature_samples = {4, 0, 3};
  std::vector<std::vector<preprocess::SampleSpan>> spans = {{{0, 0, 2}, {2, 6, 1}}, {{0, 2, 4}}};
};

inline GatherCommand MakeGather(const std::shared_ptr<GatherMemory>& memory) {
  GatherCommand command;
  command.model_id = 11;
  command.batch_handle = 12;
  command.batch_ttl = absl::Milliseconds(1500);
  command.owner = memory;
  preprocess::StackBatchView& stack = command.stacks.emplace_back();
  stack.stack = 3;
  stack.sample_count = 7;
  stack.slots = 2;
  stack.minibatches = 1;
  stack.feature_samples = memory->feature_samples;
  for (int segment = 0; segment < 2; ++segment) {
    preprocess::CsrSegmentView& view = stack.segments.emplace_back();
    const size_t from = segment == 0 ? 0 : 2;
    const size_t size = segment == 0 ? 2 : 3;
    view.base = 8 * segment;
    view.row_ends = absl::MakeConstSpan(memory->row_ends).subspan(2 * segment, 2);
    view.embedding_ids = absl::MakeConstSpan(memory->embedding_ids).subspan(from, size);
    view.sample_ids = absl::MakeConstSpan(memory->sample_ids).subspan(from, size);
    view.gains = absl::MakeConstSpan(memory->gains).subspan(from, size);
  }
  for (const auto& slot : memory->spans) stack.spans.push_back(slot);
  return command;
}

// Both ends of a region, and a block in it.
struct SharedEnds {
  explicit SharedEnds(size_t bytes) {
    const LocalInvitation invitation = local->Invite({});
    block = (*SharedArena::Connect(invitation.socket, invitation.ticket, absl::InfiniteFuture(),
                                   absl::Minutes(2)))
                ->Take(bytes);
    place.set_region(block->region());
    place.set_offset(block->offset());
    place.set_size(bytes);
  }
  AnswerRoom OfCaller() const {
    return {std::shared_ptr<char>(block, block->data()), place.size()};
  }

  const std::unique_ptr<RegionServer> server = std::make_unique<RegionServer>(
      RegionServer::Options{.name = "codec-test", .max_bytes = int64_t{256} << 20});
  const std::unique_ptr<LocalServer> local = *LocalServer::Start({}, server.get(), nullptr);
  std::shared_ptr<SharedBlock> block;
  v1::SharedBlock place;
};

// The message with its payload in the block, as a coordinator puts it there.
template <typename Header>
rpc::OutgoingMessage InBlock(rpc::OutgoingMessage message, const SharedEnds& ends,
                             v1::SharedBlock place) {
  uint64_t bytes = 0;
  for (const rpc::SharedBytes& piece : message.payload) {
    std::memcpy(ends.block->data() + bytes, piece.bytes.data(), piece.bytes.size());
    bytes += piece.bytes.size();
  }
  message.payload.clear();
  Header header;
  place.set_size(bytes);
  *header.mutable_payload() = place;
  message.header += header.SerializeAsString();
  return message;
}

}  // namespace emberd::host
