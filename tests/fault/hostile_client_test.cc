// Work that is valid, and sent to do harm: answers that nobody reads, steps that nobody decides,
// messages that never end. A failure here means that a client can make a process take more memory
// than its budgets, or keep other clients out when it is gone.
#include <algorithm>
#include <atomic>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/generic/generic_stub.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "base/testing/http_get.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/footprint.h"
#include "tests/testing/metrics.h"
#include "tests/testing/raw_http2.h"

namespace emberd::testing {
namespace hostile_client_test {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kInFlight = 64 * kMiB;
constexpr int64_t kBatches = 16 * kMiB;
constexpr int64_t kShared = 16 * kMiB;  // of each shard; a coordinator keeps it when it is free
constexpr int kShards = 2;
// Beyond the budgets: threads, connections, what allocators keep. More under a sanitizer.
constexpr int64_t kBesides = std::max(64 * kMiB, kAllowedGrowthKib * 1024 * 2);
constexpr int kWidth = 128;
constexpr int kRows = 4096;

using Stream = grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>;

// The most memory that each process has had, from its construction on.
class MemoryWatch {
 public:
  explicit MemoryWatch(const std::vector<pid_t>& pids) {
    for (const pid_t pid : pids) first_[pid] = most_[pid] = FootprintOf(pid).resident_kib;
    thread_ = std::thread([this] {
      for (; !stop_; absl::SleepFor(absl::Milliseconds(10))) {
        for (auto& [pid, most] : most_) most = std::max(most, FootprintOf(pid).resident_kib);
      }
    });
  }
  ~MemoryWatch() {
    if (thread_.joinable()) MostGrowth();
  }
  // In bytes, of the process that has grown most. Ends the watch.
  int64_t MostGrowth() {
    stop_ = true;
    thread_.join();
    int64_t growth = 0;
    for (const auto& [pid, most] : most_) {
      std::cout << "process " << pid << " grew from " << first_.at(pid) << " to " << most
                << " KiB\n";
      growth = std::max(growth, most - first_.at(pid));
    }
    return growth * 1024;
  }

 private:
  std::map<pid_t, int64_t> first_;
  std::map<pid_t, int64_t> most_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// A unary call whose answer is never read, until it goes.
class UnreadCall {
 public:
  UnreadCall(const std::string& address, const google::protobuf::Message& request) : api_(address) {
    grpc::GenericStub stub(api_.channel);
    stream_ = stub.PrepareCall(&context_, "/emberd.v1.EmbeddingService/Lookup", &queue_);
    const grpc::Slice slice(request.SerializeAsString());
    stream_->StartCall(nullptr);
    Await();
    stream_->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    Await();
  }
  ~UnreadCall() {
    context_.TryCancel();
    grpc::Status status;
    stream_->Finish(&status, nullptr);
    Await();
  }

 private:
  void Await() {
    void* tag = nullptr;
    bool ok = false;
    queue_.Next(&tag, &ok);
  }

  Api api_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

// A training stream by hand.
struct RawStream {
  RawStream(const Api& api, uint64_t model_id, const std::string& group, int rank = 0,
            int size = 1) {
    stream = api.embedding->Train(&context);
    v1::TrainRequest request;
    v1::TrainStart* start = request.mutable_start();
    start->set_model_id(model_id);
    start->set_group(group);
    start->set_rank(rank);
    start->mutable_options()->set_size(size);
    stream->Write(request);
  }
  ~RawStream() {
    context.TryCancel();
    if (!finished) Finish();
  }
  // Reads what is left.
  grpc::Status Finish() {
    finished = true;
    v1::TrainResponse response;
    while (stream->Read(&response)) {
    }
    return stream->Finish();
  }

  grpc::ClientContext context;
  std::unique_ptr<Stream> stream;
  bool finished = false;
};

class HostileClientTest : public ClusterFixture {
 protected:
  void SetUp() override {
    StartCluster(
        {.shards = kShards,
         .config = absl::StrCat(
             "budgets { in_flight_bytes: ", kInFlight, " batch_bytes: ", kBatches,
             " shared_memory_bytes: ", kShared, " client_requests: 2000 max_train_streams: 100 } ",
             "timeouts { shard_call_ms: 10000 silent_stream_ms: ", silence_ms_, " }")},
        absl::StrCat("name: 'm' tables { name: 't' vocabulary_size: ", kRows,
                     " embedding_dim: ", kWidth,
                     " combiner: SUM optimizer { sgd {} } } features { name: 'f' table: 't' }"));
    if (HasFatalFailure()) return;
    api_ = std::make_unique<Api>(cluster_->address());
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(Lookup(1000).ok());  // pools are filled
    watch_ = std::make_unique<MemoryWatch>(cluster_->pids());
  }

  static v1::FeatureIds Ids(int samples) {
    std::vector<int32_t> ids(samples);
    for (int i = 0; i < samples; ++i) ids[i] = i * 7919 % kRows;
    v1::FeatureIds feature;
    feature.set_feature("f");
    *feature.mutable_dense()->mutable_ids() = MakeVector(ids);
    return feature;
  }
  // Very many zeros for a few bytes.
  static v1::FeatureIds NoIds(int64_t samples) {
    v1::FeatureIds feature;
    feature.set_feature("f");
    v1::SparseIds* sparse = feature.mutable_sparse();
    *sparse->mutable_indices() = MakeTensor<int64_t>({0, 2}, {});
    *sparse->mutable_values() = MakeVector<int64_t>({});
    sparse->set_sample_count(samples);
    return feature;
  }
  v1::LookupRequest LookupOf(const v1::FeatureIds& ids, bool inference = true) const {
    v1::LookupRequest request;
    request.set_model_id(model_.id);
    request.set_inference(inference);
    *request.add_features() = ids;
    return request;
  }
  grpc::Status Lookup(int samples, bool inference = true) const {
    v1::LookupResponse response;
    return Call(&v1::EmbeddingService::Stub::Lookup, *api_, LookupOf(Ids(samples), inference),
                &response);
  }
  static bool SendLookup(RawStream& to, int64_t step, int samples) {
    v1::TrainRequest request;
    request.mutable_lookup()->set_step(step);
    *request.mutable_lookup()->add_features() = Ids(samples);
    return to.stream->Write(request);
  }
  // Of `samples` rows of gradients; 0: none.
  static bool SendUpdate(RawStream& to, int64_t step, int samples = 0) {
    v1::TrainRequest request;
    request.mutable_update()->set_step(step);
    if (samples > 0) {
      v1::FeatureGradient* gradient = request.mutable_update()->add_gradients();
      gradient->set_feature("f");
      *gradient->mutable_gradient() =
          MakeTensor<float>({samples, kWidth}, std::vector<float>(samples * kWidth, 0.1f));
    }
    return to.stream->Write(request);
  }

  // Whatever happened, no process has left its bounds, and now all is well.
  void ExpectBoundedAndServing() {
    const int64_t growth = watch_->MostGrowth();
    EXPECT_LT(growth, kInFlight + kBatches + kShards * kShared + kBesides);
    const grpc::Status status = Await([&] { return Lookup(10'000); });
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(cluster_->pids().size(), kShards + 1u);
  }

  int64_t silence_ms_ = 600'000;
  std::unique_ptr<Api> api_;
  std::unique_ptr<MemoryWatch> watch_;
};

TEST_F(HostileClientTest, BigAnswersThatNobodyReads) {
  std::vector<std::unique_ptr<UnreadCall>> calls;
  for (int i = 0; i < 24; ++i) {
    const v1::FeatureIds ids = i % 2 == 0 ? NoIds(40'000) : Ids(20'000);
    calls.push_back(std::make_unique<UnreadCall>(cluster_->address(), LookupOf(ids)));
  }
  // Calls at once also take what they need while they work, so which of them are refused is chance.
  // What is left is taken by one call after another, each as large as what is refused then.
  grpc::Status status;
  while (calls.size() < 100 && status.ok()) {
    calls.push_back(std::make_unique<UnreadCall>(cluster_->address(), LookupOf(Ids(10'000))));
    status = Lookup(10'000);
  }
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("of budgets.in_flight_bytes = 67108864 are free"));
  calls.clear();
  ExpectBoundedAndServing();
}

TEST_F(HostileClientTest, RowsThatNobodyReads) {
  v1::ReadRowsRequest request;
  request.set_model_id(model_.id);
  request.set_table("t");
  *request.mutable_ids() = MakeVector(std::vector<int64_t>(100'000, 1));  // 51 MB
  v1::ReadRowsResponse response;
  const grpc::Status status =
      Call(&v1::EmbeddingService::Stub::ReadRows, *api_, request, &response);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("budgets.in_flight_bytes = 67108864"));
  ExpectBoundedAndServing();
}

TEST_F(HostileClientTest, AThousandStreamsThatReadNothing) {
  std::vector<std::unique_ptr<Api>> apis;
  for (int i = 0; i < 4; ++i) apis.push_back(std::make_unique<Api>(cluster_->address()));
  std::vector<std::unique_ptr<RawStream>> streams;
  for (int i = 0; i < 1000; ++i) {
    streams.push_back(
        std::make_unique<RawStream>(*apis[i % 4], model_.id, absl::StrCat("group", i)));
  }
  for (int64_t step = 0; step < 6; ++step) {
    for (const auto& stream : streams) {
      if (SendLookup(*stream, step, 2000)) SendUpdate(*stream, step);
    }
  }
  absl::SleepFor(absl::Seconds(1));
  streams.clear();
  ExpectBoundedAndServing();
}

// Held back, not thrown out.
TEST_F(HostileClientTest, ATrainerThatReadsLateGetsAllItsAnswers) {
  constexpr int kSteps = 12;
  RawStream late(*api_, model_.id, "late");
  for (int64_t step = 0; step < kSteps; ++step) {
    EXPECT_TRUE(SendLookup(late, step, 8000));  // 4 MB each
    EXPECT_TRUE(SendUpdate(late, step));
  }
  absl::SleepFor(absl::Seconds(2));  // much more than the steps take
  const double lookups = MetricSum(FetchMetrics(cluster_->http_address()),
                                   "emberd_rpc_response_bytes_total", "EmbeddingService/Train");
  EXPECT_LT(lookups, 3.5 * 8000 * kWidth * sizeof(float));
  v1::TrainResponse response;
  int64_t next = 0;
  while (next < kSteps && late.stream->Read(&response)) {
    if (!response.has_update()) continue;
    EXPECT_EQ(response.update().step(), next++);
  }
  EXPECT_EQ(next, kSteps);
  ExpectBoundedAndServing();
}

TEST_F(HostileClientTest, StepsThatNobodyDecides) {
  // Ranks whose partner never sends its part: shards hold theirs.
  std::vector<std::unique_ptr<RawStream>> streams;
  for (int group = 0; group < 40; ++group) {
    for (int rank = 0; rank < 2; ++rank) {
      streams.push_back(std::make_unique<RawStream>(*api_, model_.id, absl::StrCat("half", group),
                                                    rank, /*size=*/2));
    }
  }
  for (const auto& stream : streams) SendLookup(*stream, 0, 2000);
  for (size_t i = 0; i < streams.size(); i += 2) SendUpdate(*streams[i], 0, 2000);  // 1 MB each
  // And batches that nobody uses.
  int kept = 0;
  grpc::Status status;
  for (; kept < 2000 && status.ok(); ++kept) status = Lookup(5000, /*inference=*/false);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED) << status.error_message();
  absl::SleepFor(absl::Seconds(1));
  streams.clear();
  ExpectBoundedAndServing();
}

TEST_F(HostileClientTest, MessagesThatNeverEnd) {
  std::vector<std::unique_ptr<HalfCall>> calls;
  const auto call = [&](const std::string& address, const std::string& method, int count,
                        int64_t bytes) {
    for (int i = 0; i < count; ++i) {
      calls.push_back(std::make_unique<HalfCall>(address, method, uint32_t{1} << 30));
      calls.back()->Send(bytes, absl::Milliseconds(300));
    }
  };
  const std::string lookup = "/emberd.v1.EmbeddingService/Lookup";
  const std::string assign = "/emberd.internal.v1.ShardService/AssignRows";
  call(cluster_->address(), lookup, 200, 0);
  call(cluster_->shard_address(0), assign, 200, 0);
  call(cluster_->address(), lookup, 20, 16 * kMiB);
  call(cluster_->shard_address(0), assign, 20, 16 * kMiB);
  calls.clear();
  ExpectBoundedAndServing();
}

TEST_F(HostileClientTest, HalfRequestsForPages) {
  const std::string& address = cluster_->http_address();
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
  std::vector<std::unique_ptr<HttpConnection>> halves;
  for (int i = 0; i < 200; ++i) {
    halves.push_back(std::make_unique<HttpConnection>(port));
    halves.back()->Send("GET /metrics HTTP/1.1\r\nHo");
  }
  // Connections that make room end in their own time, which is much less than their timeout.
  EXPECT_TRUE(Eventually(
      [&] { return absl::StrContains(FetchMetrics(address), "emberd_in_flight_bytes"); }));
  ExpectBoundedAndServing();
}

class SilentStreamTest : public HostileClientTest {
 protected:
  SilentStreamTest() { silence_ms_ = 6000; }
};

TEST_F(SilentStreamTest, EndsWithAReason) {
  grpc::ClientContext context;
  const auto never_begun = api_->embedding->Train(&context);
  RawStream begun(*api_, model_.id, "begun");
  RawStream unread(*api_, model_.id, "unread");
  SendLookup(unread, 0, 20'000);  // 10 MB

  grpc::Status status = never_begun->Finish();
  EXPECT_EQ(status.error_code(), grpc::DEADLINE_EXCEEDED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("not even the start of its stream"));
  status = begun.Finish();
  EXPECT_EQ(status.error_code(), grpc::DEADLINE_EXCEEDED) << status.error_message();
  EXPECT_THAT(status.error_message(),
              HasSubstr("the trainer has sent nothing for 6s (timeouts.silent_stream_ms)"));
  // The status could not be sent to one that reads nothing.
  EXPECT_TRUE(Eventually([&] {
    const std::string page = FetchMetrics(cluster_->http_address());
    return !page.empty() && MetricSum(page, "emberd_train_streams") == 0;
  }));
  ExpectBoundedAndServing();
}

// A rank that waits for the others is not silent: the server has yet to answer it.
TEST_F(SilentStreamTest, WaitsForWhatItHasToAnswer) {
  RawStream first(*api_, model_.id, "pair", 0, 2);
  SendLookup(first, 0, 10);
  absl::SleepFor(absl::Seconds(8));
  RawStream second(*api_, model_.id, "pair", 1, 2);
  SendLookup(second, 0, 10);
  v1::TrainResponse response;
  EXPECT_TRUE(first.stream->Read(&response));
  EXPECT_TRUE(response.has_started());
  EXPECT_TRUE(first.stream->Read(&response));
  EXPECT_TRUE(response.has_lookup());
}

class PausedStreamTest : public HostileClientTest {
 protected:
  PausedStreamTest() { silence_ms_ = 14'000; }
};

// As by `docker pause` of all: when they go on, the coordinator may look at its streams before it
// reads what the trainer has sent.
TEST_F(PausedStreamTest, TimeInWhichTheCoordinatorStoodStillDoesNotCount) {
  RawStream stream(*api_, model_.id, "paused");
  v1::TrainResponse response;
  ASSERT_TRUE(stream.stream->Read(&response));
  absl::SleepFor(absl::Seconds(2));  // it looks each second
  cluster_->SuspendCoordinator(0);
  absl::SleepFor(absl::Seconds(15));
  cluster_->ResumeCoordinator(0);
  absl::SleepFor(absl::Seconds(2));
  SendLookup(stream, 0, 10);
  EXPECT_TRUE(stream.stream->Read(&response)) << stream.Finish().error_message();
  EXPECT_TRUE(response.has_lookup());
}

}  // namespace hostile_client_test
}  // namespace emberd::testing
