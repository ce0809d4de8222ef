// A real server and client in one process, over loopback.
#include "server/rpc/message_stream.h"

#include <thread>

#include <grpcpp/create_channel.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "emberd/internal/v1/shard_service.grpc.pb.h"

namespace emberd::rpc {
namespace {

constexpr int64_t kMaxBytes = 256 << 20;
constexpr char kMethod[] = "/emberd.internal.v1.ShardService/Gather";

// What the server does with a message, by its header: "echo" answers with the same message and
// waits for the next, "last" answers and ends, "fail" ends with an error, "hang" answers never.
class ScriptedStream final : public ServerMessageStream {
 public:
  ScriptedStream(int* alive, absl::Notification* hangs, absl::Notification* gone)
      : ServerMessageStream(kMaxBytes), alive_(alive), hangs_(hangs), gone_(gone) {
    ++*alive_;
    Begin();
  }
  ~ScriptedStream() override {
    if (--*alive_ == 0) gone_->Notify();
  }

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

  int* const alive_;
  absl::Notification* const hangs_;
  absl::Notification* const gone_;
};

class ScriptedService final : public internal::v1::ShardService::WithRawCallbackMethod_Gather<
                                  internal::v1::ShardService::Service> {
 public:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Gather(
      grpc::CallbackServerContext*) override {
    return new ScriptedStream(&alive_, &hangs, &gone);
  }
  absl::Notification hangs;
  absl::Notification gone;

 private:
  int alive_ = 0;
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
    stub_ = std::make_unique<grpc::GenericStub>(channel_);
  }

  std::unique_ptr<ClientMessageStream> Open(CallContext* context) {
    return std::make_unique<ClientMessageStream>(stub_.get(), kMethod, context, kMaxBytes);
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
  std::unique_ptr<grpc::GenericStub> stub_;
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
  ClientMessageStream stream(stub_.get(), kMethod, &context_, /*max_message_bytes=*/100);
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
  service_.gone.WaitForNotification();
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
  service_.gone.WaitForNotification();
}

TEST_F(MessageStreamTest, NobodyThereIsUnavailable) {
  server_->Shutdown();
  auto channel = grpc::CreateChannel("127.0.0.1:1", grpc::InsecureChannelCredentials());
  grpc::GenericStub stub(channel);
  ClientMessageStream stream(&stub, kMethod, &context_, kMaxBytes);
  stream.Send(Message("echo", 1));
  EXPECT_EQ(stream.Receive().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(MessageStreamTest, AContextThatIsCancelledAlreadyOpensNothing) {
  context_.Cancel();
  auto stream = Open(&context_);
  stream->Send(Message("echo", 1));
  EXPECT_EQ(stream->Receive().status().code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace emberd::rpc
