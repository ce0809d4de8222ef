// Ten thousand requests that no trainer would send, from many threads at once: malformed, damaged,
// oversized, absurd, given up half-way. A failure here means that one of them ends a process, makes
// it grow, or gets another status than such a request deserves.
#include <algorithm>
#include <atomic>
#include <iostream>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/generic/generic_stub.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/testing/seed.h"
#include "gtest/gtest.h"
#include "tests/integration/bad_cases.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/footprint.h"
#include "tests/testing/garbage.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace abuse_test {

constexpr int kRequests = 10'000;
constexpr int kThreads = 4;
constexpr int64_t kAllowedKib = std::max<int64_t>(64 * 1024, kAllowedGrowthKib);

using Codes = std::set<grpc::StatusCode>;

constexpr const char* kUnaryMethods[] = {"DeclareModel",   "DescribeModel", "Lookup",
                                         "ApplyGradients", "ReleaseBatch",  "ReadRows",
                                         "AssignRows"};

// One thread's connection and what it may send.
class Abuser {
 public:
  Abuser(const Cluster& cluster, uint64_t model_id, uint32_t seed, uint64_t first_sequence)
      : address_(cluster.address()),
        api_(address_),
        generic_(api_.channel),
        model_id_(model_id),
        random_(seed),
        sequence_(first_sequence) {
    for (auto* list : {&BadLookups, &BadApplies, &BadRows, &BadModels}) {
      for (BadCase& bad : (*list)()) bad_cases_.push_back(std::move(bad));
    }
  }

  void SendOne() {
    static constexpr void (Abuser::*kKinds[])() = {
        &Abuser::Malformed, &Abuser::Damaged,   &Abuser::Wrong,     &Abuser::Oversized,
        &Abuser::Absurd,    &Abuser::GivenUp,   &Abuser::BadStream, &Abuser::BrokenStream,
        &Abuser::NoMethod,  &Abuser::BigHeaders};
    (this->*kKinds[random_() % std::size(kKinds)])();
  }

 private:
  std::string Method(const std::string& name) {
    return absl::StrCat("/emberd.v1.EmbeddingService/", name);
  }
  std::string AnyMethod() { return Method(kUnaryMethods[random_() % std::size(kUnaryMethods)]); }

  grpc::StatusCode Send(const std::string& method, const std::string& message,
                        absl::Duration deadline = absl::Minutes(2)) {
    return SendMessage(generic_, method, message, deadline);
  }
  void Expect(const char* kind, grpc::StatusCode code, const Codes& expected) {
    EXPECT_TRUE(expected.contains(code)) << kind << " got code " << code;
  }

  void Malformed() {
    const Codes refusals = {grpc::INVALID_ARGUMENT, grpc::NOT_FOUND, grpc::OUT_OF_RANGE};
    // A wire type that does not exist, so that it is no message whatever follows.
    Expect("malformed",
           Send(AnyMethod(), absl::StrCat("\x0f", RandomBytes(random_, random_() % 2000))),
           refusals);
  }
  void Damaged() {
    v1::LookupRequest request = GoodLookup(model_id_);
    request.set_inference(true);
    std::string bytes = request.SerializeAsString();
    bytes[random_() % bytes.size()] ^= static_cast<char>(1 << random_() % 8);
    // Without `inference` its batch would be kept, and take room that other cases count on.
    v1::LookupRequest damaged;
    if (damaged.ParseFromString(bytes) && !damaged.inference()) return;
    Expect("damaged", Send(Method("Lookup"), bytes),
           {grpc::OK, grpc::INVALID_ARGUMENT, grpc::OUT_OF_RANGE, grpc::NOT_FOUND,
            grpc::RESOURCE_EXHAUSTED});
  }
  void Wrong() {
    // Some cases need room for a batch, some fill it: they take turns.
    static absl::Mutex mutex;
    absl::MutexLock lock(&mutex);
    const BadCase& bad = bad_cases_[random_() % bad_cases_.size()];
    const grpc::Status status = bad.call({api_, model_id_, sequence_});
    sequence_ += 100;
    EXPECT_EQ(status.error_code(), bad.code) << bad.name << ": " << status.error_message();
  }
  void Oversized() {
    Expect("oversized", Send(AnyMethod(), std::string((1 << 20) + 1 + random_() % 1000, 'x')),
           {grpc::RESOURCE_EXHAUSTED});
  }
  // Small messages that speak of huge things.
  void Absurd() {
    constexpr int64_t kHuge[] = {INT64_MAX, INT64_MAX / 2, int64_t{1} << 40, INT64_MIN, -1};
    const int64_t huge = kHuge[random_() % std::size(kHuge)];
    v1::LookupRequest request = GoodLookup(model_id_);
    request.set_inference(true);
    switch (random_() % 4) {
      case 0:
        request.mutable_features(0)->mutable_dense()->mutable_ids()->set_shape(0, huge);
        break;
      case 1:
        request.mutable_features(0)->mutable_dense()->mutable_ids()->add_shape(huge);
        break;
      case 2:
        request.mutable_features(2)->mutable_sparse()->set_sample_count(huge);
        break;
      default:
        *request.mutable_features(0)->mutable_dense()->mutable_ids() =
            MakeVector<int64_t>({huge, huge, huge});
    }
    Expect("absurd", Send(Method("Lookup"), request.SerializeAsString()),
           {grpc::INVALID_ARGUMENT, grpc::OUT_OF_RANGE, grpc::RESOURCE_EXHAUSTED});
  }
  void GivenUp() {
    v1::LookupRequest request = GoodLookup(model_id_);
    request.set_inference(true);
    const absl::Duration patience = absl::Microseconds(random_() % 2000);
    Expect("given up", Send(Method("Lookup"), request.SerializeAsString(), patience),
           {grpc::OK, grpc::DEADLINE_EXCEEDED, grpc::CANCELLED, grpc::RESOURCE_EXHAUSTED});
  }
  void NoMethod() {
    Expect("no method", Send(Method("Explode"), RandomBytes(random_, 100)), {grpc::UNIMPLEMENTED});
  }
  // gRPC itself refuses them, at times with the whole connection: so they have their own.
  void BigHeaders() {
    const Api api(address_);
    grpc::ClientContext context;
    Prepare(&context);
    for (int i = 0; i < 20; ++i) {
      context.AddMetadata(absl::StrCat("x-padding-", i), std::string(1000, 'x'));
    }
    v1::LookupResponse response;
    Expect("big headers",
           api.embedding->Lookup(&context, GoodLookup(model_id_), &response).error_code(),
           {grpc::RESOURCE_EXHAUSTED, grpc::UNAVAILABLE});
  }
  // A stream that begins with what is no start.
  void BadStream() {
    grpc::ClientContext context;
    Prepare(&context);
    auto stream = api_.embedding->Train(&context);
    v1::TrainRequest request;
    switch (random_() % 3) {
      case 0:
        request.mutable_update()->set_step(static_cast<int64_t>(random_()));
        break;
      case 1:
        request.mutable_start()->set_model_id(random_());
        break;
      default:
        request.mutable_start()->set_model_id(model_id_);
        request.mutable_start()->set_group("g");
        request.mutable_start()->set_rank(static_cast<int>(random_()));
        request.mutable_start()->mutable_options()->set_size(static_cast<int>(random_()));
    }
    stream->Write(request);
    Expect("bad stream", stream->Finish().error_code(),
           {grpc::INVALID_ARGUMENT, grpc::NOT_FOUND, grpc::OUT_OF_RANGE});
  }
  // A good start, then a request for another step, or nobody who goes on.
  void BrokenStream() {
    grpc::ClientContext context;
    Prepare(&context);
    auto stream = api_.embedding->Train(&context);
    v1::TrainRequest request;
    request.mutable_start()->set_model_id(model_id_);
    request.mutable_start()->set_group(absl::StrCat("g", sequence_ % 10'007, "-", random_() % 4));
    request.mutable_start()->mutable_options()->set_step_timeout_ms(60'000);
    sequence_ += 100;
    v1::TrainResponse response;
    if (stream->Write(request) && stream->Read(&response) && random_() % 2 == 0) {
      context.TryCancel();
    } else {
      request.mutable_lookup()->set_step(-1 - static_cast<int64_t>(random_()));
      stream->Write(request);
    }
    Expect("broken stream", stream->Finish().error_code(),
           {grpc::INVALID_ARGUMENT, grpc::OUT_OF_RANGE, grpc::CANCELLED, grpc::FAILED_PRECONDITION,
            grpc::ABORTED, grpc::ALREADY_EXISTS});
  }

  const std::string address_;
  const Api api_;
  grpc::GenericStub generic_;
  const uint64_t model_id_;
  std::mt19937 random_;
  uint64_t sequence_;
  std::vector<BadCase> bad_cases_;
};

class AbuseTest : public ClusterFixture {
 protected:
  void SetUp() override {
    StartCluster({.shards = 2, .config = kStrictCluster}, StrictModel().DebugString());
  }

  void Abuse(int requests, uint32_t seed, uint64_t first_sequence) {
    std::atomic<int> left = requests;
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        Abuser abuser(*cluster_, model_.id, seed + t, first_sequence + t * 100'000'000ull);
        while (left.fetch_sub(1) > 0) abuser.SendOne();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  int64_t ResidentKib() {
    int64_t sum = 0;
    for (const pid_t pid : cluster_->pids()) sum += FootprintOf(pid).resident_kib;
    return sum;
  }
};

TEST_F(AbuseTest, TenThousandBadRequests) {
  const uint32_t seed = static_cast<uint32_t>(TestSeed());
  const std::string tables = TableDigest();
  const std::vector<pid_t> pids = cluster_->pids();
  Abuse(500, seed, 1);  // what is made once is made here
  const int64_t before = ResidentKib();
  Abuse(kRequests, seed + 1000, 1'000'000'000'000);
  const int64_t after = ResidentKib();
  std::cout << "resident memory of all processes: " << before << " KiB, then " << after << " KiB\n";
  EXPECT_LT(after - before, kAllowedKib);
  EXPECT_EQ(cluster_->pids(), pids);
  EXPECT_EQ(TableDigest(), tables);
  const absl::Status status = client_->GetStatus().status();
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace abuse_test
}  // namespace emberd::testing
