// An EmbeddingService, AdminService and CheckpointService in this process, on a port of the
// loopback, for tests of clients. It learns nothing: it keeps what it was asked, answers in the
// right shape, and misbehaves on demand.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/testing/fake_checkpoints.h"
#include "emberd/v1/admin_service.grpc.pb.h"
#include "emberd/v1/embedding_service.grpc.pb.h"

namespace emberd::client::testing {

// What happens to one coming call.
struct Fault {
  grpc::Status status = {};     // what the caller gets
  bool after_the_work = false;  // true: the call takes effect, only its reply is lost
  absl::Duration delay = absl::ZeroDuration();  // before; a cancelled call waits no longer
};

// Edits what a service is about to send. A test may give another one while calls are answered.
template <typename Message>
class Damage {
 public:
  Damage& operator=(std::function<void(Message*)> damage) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    damage_ = std::move(damage);
    return *this;
  }
  void operator()(Message* message) const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (damage_) damage_(message);
  }

 private:
  mutable absl::Mutex mutex_;
  std::function<void(Message*)> damage_ ABSL_GUARDED_BY(mutex_);
};

// Answers:
//   DeclareModel   id 42, one stack per table, slot "accumulator"
//   Lookup         handles 1, 2, ...; every element of sample s of feature i of the request is 100
//   * i + s ApplyGradients rows_updated is the number of gradients ReadRows       column c of id e
//   is e + c / 100, unless AssignRows has written it ExportTable    the same, `export_rows` rows a
//   part
//   Train          next_step 7, generation 5, made_generation 4; as Lookup and ApplyGradients, but
//   1000 * step is added to every element, and each activation comes in a part of its own
// A mutation that has been applied before is answered with replayed = true. Thread-safe.
class FakeService final : public v1::EmbeddingService::Service, public v1::AdminService::Service {
 public:
  explicit FakeService(std::string address = "127.0.0.1:0");
  ~FakeService() override;

  const std::string& address() const { return address_; }
  // The next calls, whatever their method, meet these faults, one each.
  void AddFault(Fault fault);
  // Faults that no call has met yet, for instance because it ended before it got here.
  void ClearFaults();
  Damage<v1::LookupResponse> damage_lookup;
  Damage<v1::DeclareModelResponse> damage_declare;
  Damage<v1::DescribeModelResponse> damage_describe;
  Damage<v1::GetStatusResponse> damage_status;
  Damage<v1::ReadRowsResponse> damage_read;
  Damage<v1::ExportTableResponse> damage_export;
  Damage<v1::TrainResponse> damage_train;
  FakeCheckpoints checkpoints;
  // Ends a stream after so many responses; negative: when the client does.
  int train_responses = -1;
  grpc::Status train_status;
  int64_t export_rows = 3;
  bool draining = false;  // what GetStatus says
  // Answers to GetStats and to Drain, in turn; the last one stays.
  std::vector<v1::GetStatsResponse> stats;
  std::vector<v1::DrainResponse> drains;
  // The last DropGroup, which has dropped it.
  v1::DropGroupRequest dropped_group;
  // An export breaks with UNAVAILABLE after its first part, this often.
  int broken_exports = 0;

  // Every request that arrived, faulty calls included.
  std::vector<v1::DeclareModelRequest> declares() const;
  std::vector<v1::LookupRequest> lookups() const;
  std::vector<v1::ApplyGradientsRequest> applies() const;
  std::vector<v1::AssignRowsRequest> assigns() const;
  std::vector<v1::ExportTableRequest> exports() const;
  std::vector<v1::ReleaseBatchRequest> releases() const;
  std::vector<v1::TrainRequest> train_requests() const;
  std::vector<v1::GetStatsRequest> stats_requests() const;
  std::vector<v1::DrainRequest> drain_requests() const;
  // Updates that took effect, each once.
  int applied() const;

  grpc::Status DeclareModel(grpc::ServerContext* context, const v1::DeclareModelRequest* request,
                            v1::DeclareModelResponse* response) override;
  grpc::Status DescribeModel(grpc::ServerContext* context, const v1::DescribeModelRequest* request,
                             v1::DescribeModelResponse* response) override;
  grpc::Status Lookup(grpc::ServerContext* context, const v1::LookupRequest* request,
                      v1::LookupResponse* response) override;
  grpc::Status ApplyGradients(grpc::ServerContext* context,
                              const v1::ApplyGradientsRequest* request,
                              v1::ApplyGradientsResponse* response) override;
  grpc::Status ReleaseBatch(grpc::ServerContext* context, const v1::ReleaseBatchRequest* request,
                            v1::ReleaseBatchResponse* response) override;
  grpc::Status Train(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::TrainResponse, v1::TrainRequest>* stream) override;
  grpc::Status ReadRows(grpc::ServerContext* context, const v1::ReadRowsRequest* request,
                        v1::ReadRowsResponse* response) override;
  grpc::Status AssignRows(grpc::ServerContext* context, const v1::AssignRowsRequest* request,
                          v1::AssignRowsResponse* response) override;
  grpc::Status ExportTable(grpc::ServerContext* context, const v1::ExportTableRequest* request,
                           grpc::ServerWriter<v1::ExportTableResponse>* writer) override;
  grpc::Status GetStatus(grpc::ServerContext* context, const v1::GetStatusRequest* request,
                         v1::GetStatusResponse* response) override;
  grpc::Status GetStats(grpc::ServerContext* context, const v1::GetStatsRequest* request,
                        v1::GetStatsResponse* response) override;
  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                     v1::DrainResponse* response) override;
  grpc::Status DropGroup(grpc::ServerContext* context, const v1::DropGroupRequest* request,
                         v1::DropGroupResponse* response) override;

 private:
  // Runs `work` unless a fault comes before it.
  grpc::Status Meet(grpc::ServerContext* context, const std::function<grpc::Status()>& work);
  bool FirstTime(const v1::MutationId& mutation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int Dim(const std::string& table) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Every element of sample s is `base` + s.
  v1::FeatureActivation Activate(const v1::FeatureIds& feature, v1::DataType type, float base) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<v1::TrainResponse> Answer(const v1::TrainLookup& part, v1::TrainLookup* whole) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FillRow(const std::string& table, int64_t id, v1::Tensor* values) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::string address_;
  std::unique_ptr<grpc::Server> server_;

  mutable absl::Mutex mutex_;
  std::deque<Fault> faults_ ABSL_GUARDED_BY(mutex_);
  v1::ModelConfig config_ ABSL_GUARDED_BY(mutex_);
  v1::ModelPlan plan_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<std::string, uint64_t>, int> mutations_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<std::string, int64_t>, std::string> assigned_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::DeclareModelRequest> declares_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::LookupRequest> lookups_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::ApplyGradientsRequest> applies_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::AssignRowsRequest> assigns_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::ExportTableRequest> exports_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::ReleaseBatchRequest> releases_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::TrainRequest> train_requests_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::GetStatsRequest> stats_requests_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::DrainRequest> drain_requests_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::client::testing
