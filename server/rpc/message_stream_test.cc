#include "server/rpc/message_stream.h"

#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include <grpcpp/create_channel.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/testing/seed.h"
#include "emberd/internal/v1/shard_service.grpc.pb.h"

namespace emberd::rpc {
namespace message_stream_test {

constexpr int64_t kMaxBytes = 256 << 20;

OutgoingMessage MakeMessage(const std::vector<std::vector<int32_t>>& arrays) {
  OutgoingMessage message;
  message.header = "header";
  for (const auto& array : arrays) {
    auto owner = std::make_shared<std::vector<int32_t>>(array);
    message.Append(absl::MakeConstSpan(*owner), owner);
  }
  return message;
}

absl::StatusOr<std::optional<IncomingMessage>> AddAll(MessageAssembler& assembler,
                                                      const std::deque<grpc::ByteBuffer>& parts) {
  absl::StatusOr<std::optional<IncomingMessage>> message = std::optional<IncomingMessage>();
  for (const grpc::ByteBuffer& part : parts) {
    if (!message.ok() || message->has_value())
      return absl::InternalError("complete before its last part");
    message = assembler.Add(part);
  }
  return message;
}

TEST(LongMessageTest, ArrivesAsItLeftWhateverThePartSize) {
  std::vector<int32_t> large(5000);
  std::iota(large.begin(), large.end(), 0);
  for (const size_t part_bytes : {1ul, 7ul, 1000ul, 4096ul, 1ul << 20}) {
    MessageAssembler assembler({kMaxBytes});
    for (int repeat = 0; repeat < 2; ++repeat) {  // an assembler takes one message after another
      auto message =
          AddAll(assembler, SplitMessage(MakeMessage({{1, 2, 3}, {}, large, {4}}), part_bytes));
      ASSERT_TRUE(message.ok()) << message.status();
      ASSERT_TRUE(message->has_value());
      EXPECT_EQ((*message)->header(), "header");
      EXPECT_EQ(reinterpret_cast<uintptr_t>((*message)->payload().data()) % 64, 0u);
      PayloadReader payload((*message)->payload());
      EXPECT_EQ(payload.Int32s(3, "a")->at(2), 3);
      EXPECT_EQ(*payload.Int32s(5000, "b"), absl::MakeConstSpan(large));
      EXPECT_EQ(payload.Int32s(1, "c")->at(0), 4);
      EXPECT_TRUE(payload.Finish().ok());
    }
  }
}

// What is joined are the bytes that gRPC would carry, and outlives them.
TEST(LongMessageTest, OneInOnePieceIsTheSame) {
  std::vector<int32_t> large(5000);
  std::iota(large.begin(), large.end(), 0);
  for (const OutgoingMessage& message : {MakeMessage({}), MakeMessage({{1, 2, 3}, {}, large})}) {
    const std::deque<grpc::ByteBuffer> parts = SplitMessage(message);
    ASSERT_EQ(parts.size(), 1u);
    grpc::Slice slice;
    ASSERT_TRUE(parts[0].TrySingleSlice(&slice).ok() || parts[0].DumpToSingleSlice(&slice).ok());
    std::string joined = JoinMessage(message);
    EXPECT_EQ(joined, std::string(reinterpret_cast<const char*>(slice.begin()), slice.size()));
    MessageAssembler assembler({kMaxBytes});
    auto found = assembler.Add(joined);
    joined.assign(joined.size(), 'x');
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_TRUE(found->has_value());
    EXPECT_EQ((*found)->header(), "header");
    EXPECT_EQ(static_cast<int64_t>((*found)->payload().size()), message.payload_bytes());
    PayloadReader payload((*found)->payload());
    if (message.payload.empty()) continue;
    EXPECT_EQ(payload.Int32s(3, "a")->at(2), 3);
    EXPECT_EQ(*payload.Int32s(5000, "b"), absl::MakeConstSpan(large));
    EXPECT_FALSE(assembler.Add(absl::string_view()).ok());
  }
}

TEST(LongMessageTest, AMessageWithoutPayloadIsOnePart) {
  MessageAssembler assembler({kMaxBytes});
  const std::deque<grpc::ByteBuffer> parts = SplitMessage(MakeMessage({}));
  ASSERT_EQ(parts.size(), 1u);
  auto message = AddAll(assembler, parts);
  ASSERT_TRUE(message.ok() && message->has_value());
  EXPECT_EQ((*message)->payload().size(), 0u);
}

TEST(LongMessageTest, PartsAreMessagePartsForAnyProtobufReader) {
  const std::deque<grpc::ByteBuffer> parts = SplitMessage(MakeMessage({{1, 2, 3}}), 8);
  ASSERT_EQ(parts.size(), 2u);
  grpc::Slice slice;
  ASSERT_TRUE(parts[0].DumpToSingleSlice(&slice).ok());
  internal::v1::MessagePart part;
  ASSERT_TRUE(part.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
  EXPECT_EQ(part.header(), "header");
  EXPECT_EQ(part.payload_size(), 12u);
  EXPECT_EQ(part.payload().size(), 8u);
}

TEST(LongMessageTest, RefusesAMessageOverTheBudgetBeforeTakingMemory) {
  MessageAssembler assembler({100});
  auto message = assembler.Add(SplitMessage(MakeMessage({std::vector<int32_t>(26)})).front());
  EXPECT_EQ(message.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(message.status().message(),
            "a message of 104 bytes is larger than budgets.max_message_bytes = 100");
}

// What was announced counts at once, for its memory was taken; what is small goes through always.
TEST(LongMessageTest, MessagesCountInABudgetUntilTheirPayloadIsGone) {
  const MessageLimits limits{kMaxBytes, MemoryBudget(10'000, "budgets.in_flight_bytes")};
  const auto parts = SplitMessage(MakeMessage({std::vector<int32_t>(2000)}), 4096);
  ASSERT_EQ(parts.size(), 2u);
  MessageAssembler first(limits);
  ASSERT_TRUE(first.Add(parts[0]).ok());
  EXPECT_EQ(limits.memory.used(), 8006);

  MessageAssembler second(limits);
  EXPECT_EQ(second.Add(parts[0]).status(),
            absl::ResourceExhaustedError("a message needs 8006 bytes; 1994 of "
                                         "budgets.in_flight_bytes = 10000 are free; retry later"));
  EXPECT_TRUE(MessageAssembler(limits).Add(SplitMessage(MakeMessage({{1, 2}})).front()).ok());

  auto message = first.Add(parts[1]);
  ASSERT_TRUE(message.ok() && message->has_value());
  std::shared_ptr<const void> owner = (*message)->owner();
  message->reset();
  EXPECT_EQ(limits.memory.used(), 8006);
  owner.reset();
  EXPECT_EQ(limits.memory.used(), 0);

  { MessageAssembler(limits).Add(parts[0]).IgnoreError(); }  // never completed
  EXPECT_EQ(limits.memory.used(), 0);
}

grpc::ByteBuffer Encode(const internal::v1::MessagePart& part) {
  grpc::Slice slice(part.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

TEST(LongMessageTest, RefusesMorePayloadThanItsSize) {
  internal::v1::MessagePart part;
  part.set_payload_size(4);
  part.set_payload("12345");
  EXPECT_EQ(MessageAssembler({kMaxBytes}).Add(Encode(part)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(LongMessageTest, RefusesAFirstPartWithoutSize) {
  internal::v1::MessagePart part;
  part.set_payload("12345");
  EXPECT_EQ(MessageAssembler({kMaxBytes}).Add(Encode(part)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Bytes from a port may be anything. None may crash the reader or make it take memory beyond the
// budget.
TEST(LongMessageTest, SurvivesRandomBytes) {
  std::mt19937 random(static_cast<uint32_t>(TestSeed()));
  const std::string valid = [] {
    grpc::Slice slice;
    EXPECT_TRUE(SplitMessage(MakeMessage({{1, 2, 3, 4}})).front().DumpToSingleSlice(&slice).ok());
    return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }();
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = valid;
    const int changes = static_cast<int>(random() % 8);
    for (int change = 0; change < changes; ++change)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    bytes.resize(random() % (bytes.size() + 1));
    MessageAssembler assembler({1 << 16});
    grpc::Slice slice(bytes);
    auto message = assembler.Add(grpc::ByteBuffer(&slice, 1));
    if (message.ok() && message->has_value()) {
      EXPECT_LE((*message)->payload().size(), 1u << 16);
    }
  }
}

TEST(PayloadReaderTest, RefusesArraysThatDoNotFit) {
  const std::vector<int32_t> values = {1, 2, 3};
  const absl::Span<const char> bytes(reinterpret_cast<const char*>(values.data()), 12);
  EXPECT_EQ(PayloadReader(bytes).Int32s(4, "ids").status().message(),
            "ids: 4 values do not fit the 12 bytes of payload that are left");
  EXPECT_FALSE(PayloadReader(bytes).Floats(-1, "ids").ok());
  EXPECT_FALSE(PayloadReader(bytes).Floats(int64_t{1} << 62, "ids").ok());
  PayloadReader reader(bytes);
  ASSERT_TRUE(reader.Int32s(2, "ids").ok());
  EXPECT_FALSE(reader.Finish().ok());
}

// A real server and client in one process, over loopback.
constexpr char kMethod[] = "/emberd.internal.v1.ShardService/Gather";

// What the server does with a message, by its header: "echo" answers with the same message and
// waits for the next, "last" answers and ends, "fail" ends with an error, "hang" answers never.
class ScriptedStream final : public ServerMessageStream {
 public:
  ScriptedStream(std::atomic<int>* alive, absl::Notification* hangs)
      : ServerMessageStream({kMaxBytes}), alive_(alive), hangs_(hangs) {
    ++*alive_;
    Begin();
  }
  ~ScriptedStream() override { --*alive_; }

 private:
  void OnMessage(IncomingMessage message) override {
    OutgoingMessage answer;
    answer.header = message.header();
    answer.payload.push_back(
        {{message.payload().data(), message.payload().size()}, message.owner()});
    if (message.header() == "echo") {
      Send(std::move(answer));
    } else if (message.header() == "last") {
      SendLast(std::move(answer));
    } else if (message.header() == "hang") {
      hangs_->Notify();
      std::thread([this] {
        while (!peer_cancelled()) absl::SleepFor(absl::Milliseconds(1));
        Close(absl::CancelledError("at last"));
      }).detach();
    } else {
      Close(absl::FailedPreconditionError("as told"));
    }
  }

  std::atomic<int>* const alive_;
  absl::Notification* const hangs_;
};

class ScriptedService final : public internal::v1::ShardService::WithRawCallbackMethod_Gather<
                                  internal::v1::ShardService::Service> {
 public:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Gather(
      grpc::CallbackServerContext*) override {
    return new ScriptedStream(&alive_, &hangs);
  }
  // Until every call is over.
  void WaitUntilGone() const {
    while (alive_ > 0) absl::SleepFor(absl::Milliseconds(1));
  }
  absl::Notification hangs;

 private:
  std::atomic<int> alive_ = 0;
};

class MessageStreamTest : public testing::Test {
 protected:
  MessageStreamTest() {
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(-1);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    channel_ =
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port_), grpc::InsecureChannelCredentials());
    messages_ = std::make_unique<MessageChannel>(channel_);
  }

  std::unique_ptr<ClientMessageStream> Open(CallContext* context) {
    return std::make_unique<ClientMessageStream>(messages_.get(), kMethod, context,
                                                 MessageLimits{kMaxBytes});
  }
  static OutgoingMessage Message(const std::string& header, size_t floats) {
    OutgoingMessage message;
    message.header = header;
    auto values = std::make_shared<std::vector<float>>(floats, 1.5f);
    message.Append(absl::MakeConstSpan(*values), values);
    return message;
  }

  ScriptedService service_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<MessageChannel> messages_;
  CallContext context_{absl::Now() + absl::Seconds(60)};
};

TEST_F(MessageStreamTest, SeveralMessagesOnOneCall) {
  auto stream = Open(&context_);
  for (const size_t floats : {0ul, 1ul, 1'000'000ul}) {
    stream->Send(Message("echo", floats));
    auto answer = stream->Receive();
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->payload().size(), floats * sizeof(float));
  }
  stream->Send(Message("last", 3));
  ASSERT_TRUE(stream->Receive().ok());
  EXPECT_EQ(stream->Receive().status().code(), absl::StatusCode::kInternal) << "the call is over";
}

TEST_F(MessageStreamTest, MoreThanGrpcsOwnLimitOfFourMegabytes) {
  auto stream = Open(&context_);
  stream->Send(Message("last", 20'000'000));  // 80 MB
  auto answer = stream->Receive();
  ASSERT_TRUE(answer.ok()) << answer.status();
  PayloadReader payload(answer->payload());
  EXPECT_EQ(payload.Floats(20'000'000, "values")->back(), 1.5f);
}

TEST_F(MessageStreamTest, AnErrorArrivesWithItsCodeAndMessage) {
  auto stream = Open(&context_);
  stream->Send(Message("fail", 1));
  EXPECT_EQ(stream->Receive().status(), absl::FailedPreconditionError("as told"));
}

TEST_F(MessageStreamTest, AnAnswerOverTheLimitIsRefused) {
  ClientMessageStream stream(messages_.get(), kMethod, &context_, {100});
  stream.Send(Message("last", 1000));
  EXPECT_EQ(stream.Receive().status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(MessageStreamTest, CancellationEndsAReceiveAndReachesTheServer) {
  auto stream = Open(&context_);
  stream->Send(Message("hang", 1));
  std::thread canceller([this] {
    service_.hangs.WaitForNotification();
    context_.Cancel();
  });
  EXPECT_EQ(stream->Receive().status().code(), absl::StatusCode::kCancelled);
  canceller.join();
  service_.WaitUntilGone();
}

TEST_F(MessageStreamTest, TheDeadlineEndsAReceive) {
  CallContext context(absl::Now() + absl::Milliseconds(50));
  auto stream = Open(&context);
  stream->Send(Message("hang", 1));
  EXPECT_EQ(stream->Receive().status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(MessageStreamTest, AStreamThatGoesAwayIsCancelled) {
  {
    auto stream = Open(&context_);
    stream->Send(Message("hang", 1));
    service_.hangs.WaitForNotification();
  }
  service_.WaitUntilGone();
}

// Prevents: a channel that goes while the calls of streams which have gone away use it. With
// AddressSanitizer, also calls that nobody deletes.
TEST_F(MessageStreamTest, AChannelWaitsForTheCallsOfItsStreams) {
  for (int i = 0; i < 50; ++i) {
    auto channel =
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port_), grpc::InsecureChannelCredentials());
    auto messages = std::make_unique<MessageChannel>(channel);
    const std::weak_ptr<grpc::Channel> left = channel;
    channel.reset();
    for (int call = 0; call < 8; ++call) {
      ClientMessageStream stream(messages.get(), kMethod, &context_, {kMaxBytes});
      if (call % 4 == 0) continue;  // goes away before it has sent anything
      stream.Send(Message(call % 4 == 1 ? "echo" : "last", 1000));
      if (call % 4 == 2) continue;  // ... before it is answered
      ASSERT_TRUE(stream.Receive().ok());
    }
    messages.reset();
    EXPECT_TRUE(left.expired()) << "a call still refers to it";
  }
}

TEST_F(MessageStreamTest, NobodyThereIsUnavailable) {
  server_->Shutdown();
  auto channel = grpc::CreateChannel("127.0.0.1:1", grpc::InsecureChannelCredentials());
  MessageChannel messages(channel);
  ClientMessageStream stream(&messages, kMethod, &context_, {kMaxBytes});
  stream.Send(Message("echo", 1));
  EXPECT_EQ(stream.Receive().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(MessageStreamTest, AContextThatIsCancelledAlreadyOpensNothing) {
  context_.Cancel();
  auto stream = Open(&context_);
  stream->Send(Message("echo", 1));
  EXPECT_EQ(stream->Receive().status().code(), absl::StatusCode::kCancelled);
}

}  // namespace message_stream_test
}  // namespace emberd::rpc
