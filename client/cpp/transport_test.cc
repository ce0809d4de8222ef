#include "client/cpp/transport.h"

#include <new>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "base/steady_time.h"
#include "base/testing/await.h"
#include "base/testing/held_port.h"
#include "client/cpp/coordinator.h"
#include "client/cpp/testing/fake_service.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/relay.h"

namespace emberd::client {
namespace transport_test {

using ::emberd::client::testing::FakeService;
using ::testing::HasSubstr;

ClientOptions FastOptions(std::vector<std::string> addresses) {
  ClientOptions options;
  options.addresses = std::move(addresses);
  options.connect_timeout = kPatience;
  options.initial_backoff = absl::Milliseconds(5);
  options.max_backoff = absl::Milliseconds(20);
  return options;
}

TEST(BackoffPauseTest, DoublesUpToTheMaximum) {
  ClientOptions options;
  options.initial_backoff = absl::Milliseconds(50);
  options.max_backoff = absl::Milliseconds(300);
  options.jitter = 0.5;
  EXPECT_EQ(BackoffPause(options, 1, 0.5), absl::Milliseconds(50));
  EXPECT_EQ(BackoffPause(options, 2, 0.5), absl::Milliseconds(100));
  EXPECT_EQ(BackoffPause(options, 4, 0.5), absl::Milliseconds(300));
  EXPECT_EQ(BackoffPause(options, 5000, 0.5), absl::Milliseconds(300));
  EXPECT_EQ(BackoffPause(options, 1, 0), absl::Milliseconds(25));
  EXPECT_EQ(BackoffPause(options, 4, 0), absl::Milliseconds(150));
}

TEST(TransportTest, ConnectGivesUpAfterItsTimeout) {
  const auto nobody = *HeldPort::Take();
  ClientOptions options = FastOptions({nobody->address()});
  options.connect_timeout = absl::Milliseconds(200);
  const absl::Status status = Transport::Connect(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(options.addresses[0]));
  EXPECT_THAT(std::string(status.message()), HasSubstr("200ms"));
}

TEST(TransportTest, ConnectWaitsForAServerThatStartsLate) {
  const auto port = *HeldPort::Take();
  std::unique_ptr<FakeService> late;
  std::thread starter([&] {
    absl::SleepFor(absl::Milliseconds(150));
    late = std::make_unique<FakeService>(port->address());
  });
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      Transport::Connect(FastOptions({port->address()}));
  starter.join();
  EXPECT_TRUE(transport.ok()) << transport.status();
}

// Which coordinator a trainer uses does not depend on how busy its machine is.
TEST(TransportTest, ACoordinatorThatAnswersLateStaysTheFirst) {
  FakeService busy, idle;
  const auto link = *emberd::testing::Relay::Start(busy.address());
  for (bool in_time = false; !in_time;) {
    link->Stall();
    const absl::Time begin = SteadyNow();
    std::thread healer([&] {
      absl::SleepFor(absl::Milliseconds(1500));
      link->Heal();
    });
    absl::StatusOr<std::unique_ptr<Transport>> transport =
        Transport::Connect(FastOptions({link->address(), idle.address()}));
    in_time = SteadyNow() < begin + absl::Seconds(4);  // else there was reason to turn away
    healer.join();
    ASSERT_TRUE(transport.ok()) << transport.status();
    EXPECT_TRUE(!in_time || (*transport)->current() == 0);
  }
}

TEST(TransportTest, TurnsToTheNextCoordinatorAndStaysThere) {
  const auto nobody = *HeldPort::Take();
  FakeService good;
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      Transport::Connect(FastOptions({nobody->address(), good.address()}));
  ASSERT_TRUE(transport.ok()) << transport.status();
  int answered = -1;
  int tries = 0;
  const auto call = [&](const Coordinator& coordinator, grpc::ClientContext* context) {
    ++tries;
    v1::GetStatusResponse response;
    return coordinator.Call("/emberd.v1.AdminService/GetStatus", v1::GetStatusRequest(), context,
                            &response);
  };
  EXPECT_TRUE((*transport)->Call({}, call, &answered).ok());
  EXPECT_EQ(answered, 1);
  EXPECT_EQ(tries, 1);
  // A call for the dead one must not be answered by another.
  EXPECT_EQ((*transport)->Call({kPatience, 0}, call, &answered).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(answered, 0);
  EXPECT_GT(tries, 2);
}

// The fault this would catch: gRPC's own pauses grow while a server is away, and calls go on
// failing after it has come back.
TEST(TransportTest, FindsAServerThatIsBackWithinItsRetries) {
  const auto port = *HeldPort::Take();
  ClientOptions options;  // the usual pauses
  options.addresses = {port->address()};
  options.connect_timeout = kPatience;
  const auto call = [](const Coordinator& coordinator, grpc::ClientContext* context) {
    v1::GetStatusResponse response;
    return coordinator.Call("/emberd.v1.AdminService/GetStatus", v1::GetStatusRequest(), context,
                            &response);
  };
  const auto lose_it_for_a_while = [&]() -> absl::Status {
    auto service = std::make_unique<FakeService>(port->address());
    absl::StatusOr<std::unique_ptr<Transport>> transport = Transport::Connect(options);
    if (!transport.ok()) return transport.status();
    service.reset();
    EXPECT_EQ((*transport)->Call({kPatience}, call).code(), absl::StatusCode::kUnavailable);
    absl::SleepFor(absl::Milliseconds(500));
    service = std::make_unique<FakeService>(port->address());
    return (*transport)->Call({}, call);
  };
  // A server whose threads do not run for a second is not found in time: then once more.
  absl::Status status = lose_it_for_a_while();
  if (!status.ok()) status = lose_it_for_a_while();
  EXPECT_TRUE(status.ok()) << status;
}

TEST(TransportTest, GivesUpEarlyWhenTheNextPauseWouldOutlastTheDeadline) {
  FakeService service;
  ClientOptions options = FastOptions({service.address()});
  options.initial_backoff = options.max_backoff = absl::Hours(1);
  absl::StatusOr<std::unique_ptr<Transport>> transport = Transport::Connect(options);
  ASSERT_TRUE(transport.ok()) << transport.status();
  const absl::Status status = (*transport)->Call({}, [](const Coordinator&, grpc::ClientContext*) {
    return grpc::Status(grpc::UNAVAILABLE, "shard 3 is gone");
  });
  EXPECT_EQ(status, absl::UnavailableError("shard 3 is gone"));
}

// Over what was on the stack.
[[gnu::noinline]] void Scribble() {
  volatile char bytes[1 << 14];
  for (volatile char& byte : bytes) byte = 0x7f;
}

// The C interface makes an error of an exception, and its client lives on.
TEST(TransportTest, ACallThatThrewIsForgotten) {
  FakeService service;
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      Transport::Connect(FastOptions({service.address()}));
  ASSERT_TRUE(transport.ok()) << transport.status();
  const auto throws = [](const Coordinator&, grpc::ClientContext*) -> grpc::Status {
    throw std::bad_alloc();
  };
  EXPECT_THROW((*transport)->Call({}, throws).IgnoreError(), std::bad_alloc);
  Scribble();
  (*transport)->CancelCalls();
}

// As while a stream waits for shared memory before it is opened.
TEST(TransportTest, CancelEndsACallThatIsAboutToBegin) {
  FakeService service;
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      Transport::Connect(FastOptions({service.address()}));
  ASSERT_TRUE(transport.ok()) << transport.status();
  const auto ask = [&](uint64_t begun) {
    grpc::ClientContext context;
    (*transport)->AddCall(&context, begun);
    v1::GetStatusResponse response;
    const auto stub = v1::AdminService::NewStub((*transport)->channel(0));
    const grpc::Status status = stub->GetStatus(&context, v1::GetStatusRequest(), &response);
    (*transport)->RemoveCall(&context);
    return status.error_code();
  };
  const uint64_t begun = (*transport)->begun();
  EXPECT_EQ(ask(begun), grpc::OK);
  (*transport)->CancelCalls();
  EXPECT_EQ(ask(begun), grpc::CANCELLED);
  EXPECT_EQ(ask((*transport)->begun()), grpc::OK);
}

TEST(TransportTest, CancelEndsAPause) {
  FakeService service;
  ClientOptions options = FastOptions({service.address()});
  options.initial_backoff = options.max_backoff = absl::Seconds(20);
  options.jitter = 0;
  absl::StatusOr<std::unique_ptr<Transport>> transport = Transport::Connect(options);
  ASSERT_TRUE(transport.ok()) << transport.status();
  std::thread canceller;
  const absl::Status status = (*transport)->Call({}, [&](const Coordinator&, grpc::ClientContext*) {
    canceller = std::thread([&] {
      absl::SleepFor(absl::Milliseconds(50));
      (*transport)->CancelCalls();
    });
    return grpc::Status(grpc::UNAVAILABLE, "later");
  });
  canceller.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

}  // namespace transport_test
}  // namespace emberd::client
