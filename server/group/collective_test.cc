// Calls to a Rendezvous of this process and over gRPC: deadlines, cancellation, watches, and what a
// server makes of bytes that are no request.
// Covers: collective_rpc.cc
#include "server/group/collective.h"

#include <future>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/testing/seed.h"
#include "server/group/collective_router.h"
#include "server/group/collective_rpc.h"
#include "server/group/testing_group.h"
#include "server/rpc/grpc_server.h"

namespace emberd::group::testing {
namespace collective_test {

using ::testing::ElementsAre;
using ::testing::StartsWith;

const GroupId kGroup{7, "g"};
constexpr int64_t kLong = 60'000;  // ms: longer than any test

// A Rendezvous, served over gRPC.
class Host {
 public:
  Host() : service_(MakeCollectiveService(&rendezvous_, metrics_.Server("shard", 0))) {
    auto server =
        rpc::GrpcServer::Start({.field = "address",
                                .address = "127.0.0.1:0",
                                .max_message_bytes = 1 << 20,
                                .services = {service_.get()},
                                .service_names = {"emberd.internal.v1.CollectiveService"}});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials());
  }
  ~Host() { Stop(); }

  Rendezvous& rendezvous() { return rendezvous_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  void Stop() {
    rendezvous_.Close(absl::UnavailableError("stopped"));
    server_->Drain(absl::ZeroDuration());
  }

 private:
  ops::Metrics metrics_{"shard"};
  Rendezvous rendezvous_;
  const std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<rpc::GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

class CollectiveTest : public ::testing::TestWithParam<bool> {
 protected:
  CollectiveTest() : remote_(MakeRemoteCollective(host_.channel(), "shard 3")) {}

  Collective& collective() { return GetParam() ? *remote_ : host_.rendezvous(); }

  // Ranks of more than one coordinator meet at the host.
  static std::string CoordinatorOf(int rank) { return std::to_string(rank); }
  // A call on a thread of its own.
  auto Join(int rank, const v1::GroupOptions& options) {
    return std::async(std::launch::async, [=, this] {
      return router_.Join(JoinOf(kGroup, rank, options, CoordinatorOf(rank)), &context_);
    });
  }
  auto Gather(int rank, int64_t step, const std::string& value) {
    return std::async(std::launch::async, [=, this] {
      return router_.AllGather(GatherOf(kGroup, generation_, rank, step, 0, value), &context_);
    });
  }
  void JoinAll(const v1::GroupOptions& options) {
    std::vector<std::future<absl::StatusOr<pb::JoinResponse>>> joins;
    for (int rank = 0; rank < options.size(); ++rank) joins.push_back(Join(rank, options));
    for (auto& join : joins) {
      const absl::StatusOr<pb::JoinResponse> membership = join.get();
      ASSERT_TRUE(membership.ok()) << membership.status();
      EXPECT_EQ(static_cast<int>(membership->coordinators().size()), options.size());
      generation_ = membership->generation();
    }
  }
  // Until a call has arrived that waits.
  void AwaitLoad(size_t joining, size_t waiting) {
    while (true) {
      const Rendezvous::Load load = host_.rendezvous().load();
      if (load.joining == joining && load.waiting == waiting) return;
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

  Host host_;
  const std::unique_ptr<Collective> remote_;
  CollectiveRouter router_{{&collective()}};
  rpc::CallContext context_{absl::Now() + absl::Minutes(1)};
  uint64_t generation_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Places, CollectiveTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Remote" : "Local"; });

TEST_P(CollectiveTest, MembersExchangeValues) {
  JoinAll(MakeOptions(2, v1::SYNC, kLong));
  for (int64_t step = 0; step < 20; ++step) {
    const std::string binary("\0\xff", 2);
    auto first = Gather(0, step, "a");
    auto second = Gather(1, step, binary);
    const absl::StatusOr<pb::AllGatherResponse> gathered = first.get();
    ASSERT_TRUE(gathered.ok()) << gathered.status();
    EXPECT_THAT(gathered->values(), ElementsAre("a", binary));
    ASSERT_EQ(gathered->arrival_us_size(), 2);
    EXPECT_EQ(std::min(gathered->arrival_us()[0], gathered->arrival_us()[1]), 0);
    EXPECT_EQ(second.get()->SerializeAsString(), gathered->SerializeAsString());
  }
}

TEST_P(CollectiveTest, ErrorsAreTheGroupsOwn) {
  JoinAll(MakeOptions(2, v1::SYNC, 500));
  auto waiting = Gather(1, 4, "b");
  const absl::Status expected = absl::DeadlineExceededError(
      "group 'g': rank 0 did not come to exchange 0 of step 4 within 500 ms; join again");
  EXPECT_EQ(waiting.get().status(), expected);
  EXPECT_EQ(Gather(0, 4, "a").get().status(), expected);
  EXPECT_EQ(router_.Join(JoinOf(kGroup, 2, MakeOptions(2), "c"), &context_).status(),
            absl::InvalidArgumentError("group 'g': rank is 2; it must be in 0 .. 1"));
}

TEST_P(CollectiveTest, ACancelledJoinHasNotHappened) {
  auto gone = Join(0, MakeOptions(2, v1::SYNC, kLong));
  AwaitLoad(1, 0);
  context_.Cancel();
  EXPECT_EQ(gone.get().status().code(), absl::StatusCode::kCancelled);
  AwaitLoad(0, 0);
}

TEST_P(CollectiveTest, ACancelledGatherLeavesItsValue) {
  JoinAll(MakeOptions(2, v1::SYNC, kLong));
  auto gone = Gather(0, 1, "a");
  AwaitLoad(0, 2);
  context_.Cancel();
  EXPECT_EQ(gone.get().status().code(), absl::StatusCode::kCancelled);
  AwaitLoad(0, 1);
  rpc::CallContext other(absl::Now() + absl::Minutes(1));
  const absl::StatusOr<pb::AllGatherResponse> gathered =
      router_.AllGather(GatherOf(kGroup, generation_, 1, 1, 0, "b"), &other);
  ASSERT_TRUE(gathered.ok()) << gathered.status();
  EXPECT_THAT(gathered->values(), ElementsAre("a", "b"));
}

TEST_P(CollectiveTest, CallersHaveDeadlinesOfTheirOwn) {
  rpc::CallContext hurried(absl::Now() + absl::Milliseconds(20));
  const absl::Status status =
      router_.Join(JoinOf(kGroup, 0, MakeOptions(2, v1::SYNC, kLong), "c"), &hurried).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  AwaitLoad(0, 0);
}

TEST_P(CollectiveTest, BoundedMembersWaitForEachOther) {
  const v1::GroupOptions options = MakeOptions(2, v1::BOUNDED, kLong);
  const absl::StatusOr<pb::JoinResponse> first =
      router_.Join(JoinOf(kGroup, 0, options, "c"), &context_);
  const absl::StatusOr<pb::JoinResponse> second =
      router_.Join(JoinOf(kGroup, 1, options, "c"), &context_);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(first->generation(), second->generation());
  auto ahead = std::async(std::launch::async, [&] {
    return router_.Advance(AdvanceOf(kGroup, first->generation(), 0, 5, 5), &context_);
  });
  AwaitLoad(0, 3);  // with the watches of both
  EXPECT_EQ(router_.Advance(AdvanceOf(kGroup, second->generation(), 1, 3, 3), &context_),
            absl::OkStatus());
  AwaitLoad(0, 3);
  router_.Leave(LeaveOf(kGroup, second->generation(), 1, "", /*finished=*/true));
  EXPECT_EQ(ahead.get(), absl::OkStatus());
}

TEST_P(CollectiveTest, WatchesTellOfTheEndOnce) {
  JoinAll(MakeOptions(2, v1::SYNC, kLong));
  std::promise<absl::Status> ended;
  const Collective::Withdraw withdraw =
      collective().Watch(RequestOf<pb::WatchRequest>(kGroup, generation_, 1), /*context=*/nullptr,
                         [&](absl::Status status) { ended.set_value(status); });
  AwaitLoad(0, 2);
  router_.Leave(LeaveOf(kGroup, generation_, 0, "why not", false));
  EXPECT_EQ(ended.get_future().get(),
            absl::AbortedError("group 'g': rank 0 left (why not); join again"));
  withdraw(absl::CancelledError("too late"));  // a second answer would throw
}

TEST_P(CollectiveTest, AWithdrawnWatchHearsNoMoreAndEndsTheGeneration) {
  JoinAll(MakeOptions(2, v1::SYNC, kLong));
  std::promise<absl::Status> ended;
  const Collective::Withdraw withdraw =
      collective().Watch(RequestOf<pb::WatchRequest>(kGroup, generation_, 1), /*context=*/nullptr,
                         [&](absl::Status status) { ended.set_value(status); });
  AwaitLoad(0, 2);
  auto waiting = Gather(0, 1, "a");
  AwaitLoad(0, 3);
  withdraw(absl::CancelledError("nobody watches"));
  EXPECT_EQ(ended.get_future().get(), absl::CancelledError("nobody watches"));
  EXPECT_EQ(
      waiting.get().status(),
      absl::AbortedError("group 'g': rank 1 left in step 1 (its coordinator is gone); join again"));
  AwaitLoad(0, 0);
  router_.Leave(LeaveOf(kGroup, generation_, 0, "why not", false));  // a second answer would throw
}

TEST_P(CollectiveTest, AHostThatStopsAnswersAll) {
  JoinAll(MakeOptions(2, v1::SYNC, kLong));
  absl::Notification ended;
  collective().Watch(RequestOf<pb::WatchRequest>(kGroup, generation_, 1), /*context=*/nullptr,
                     [&](const absl::Status&) { ended.Notify(); });
  auto waiting = Gather(0, 1, "a");
  AwaitLoad(0, 3);
  host_.Stop();
  EXPECT_EQ(waiting.get().status(), absl::UnavailableError("group 'g': stopped"));
  ended.WaitForNotification();
  const absl::Status late = Gather(1, 1, "b").get().status();
  EXPECT_EQ(late.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(late.message()), StartsWith(GetParam() ? "shard 3: " : "group 'g'"));
  router_.Leave(LeaveOf(kGroup, generation_, 0, "gone", false));  // returns all the same
}

// A call that is under way holds the channel, and a thread of gRPC's that is the last to hold it
// would crash.
TEST(RemoteCollectiveTest, ItsEndEndsCallsAndGivesTheChannelBack) {
  Host host;
  std::unique_ptr<Collective> remote = MakeRemoteCollective(host.channel(), "shard 3");
  absl::Status end;
  absl::Notification told;
  remote->Join(JoinOf(kGroup, 0, MakeOptions(2, v1::SYNC, kLong), "0"), /*context=*/nullptr,
               [&](const absl::StatusOr<pb::JoinResponse>& response) {
                 end = response.status();
                 told.Notify();
               });
  remote = nullptr;
  EXPECT_EQ(host.channel().use_count(), 1);
  told.WaitForNotification();
  EXPECT_EQ(end.code(), absl::StatusCode::kCancelled) << end;
}

// Sends bytes to a method of the service; the status.
grpc::Status SendBytes(Host& host, const std::string& method, const std::string& bytes) {
  grpc::GenericStub stub(host.channel());
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
  grpc::CompletionQueue queue;
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  auto call = stub.PrepareUnaryCall(&context, "/emberd.internal.v1.CollectiveService/" + method,
                                    request, &queue);
  call->StartCall();
  grpc::ByteBuffer response;
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag;
  bool ok;
  queue.Next(&tag, &ok);
  return status;
}

TEST(CollectiveServiceTest, BytesThatAreNoRequestAreRefused) {
  Host host;
  std::mt19937 random(static_cast<uint32_t>(TestSeed()));
  for (const std::string method : {"Join", "AllGather", "Advance", "Leave", "Watch"}) {
    const grpc::Status broken = SendBytes(host, method, std::string(7, '\xff'));
    EXPECT_EQ(broken.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(broken.error_message(),
              "the request is not a valid emberd.internal.v1." + method + "Request");
    for (int i = 0; i < 50; ++i) {
      std::string bytes(random() % 40, '\0');
      for (char& byte : bytes) byte = static_cast<char>(random());
      EXPECT_EQ(SendBytes(host, method, bytes).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    }
    EXPECT_EQ(SendBytes(host, method, "").error_message(),
              "name.group has 0 bytes; it must have 1 to 128");
  }
  EXPECT_EQ(host.rendezvous().load().groups, 0u);
}

}  // namespace collective_test
}  // namespace emberd::group::testing
