// Makes one call in a cluster that lives in this process, with its client, and counts coverage of
// that call alone: rooms.py says which files had a part in it.
//
// usage: emberd_rooms VERB FOLDER, where VERB is declare, lookup, update, stream or save, and
// FOLDER a new one for logs and checkpoints.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "config/config.h"
#include "server/coordinator/coordinator_server.h"
#include "tests/testing/training.h"

extern "C" {
// Of GCC's library for coverage.
void __gcov_reset(void);
void __gcov_dump(void);
}

namespace emberd::rooms {
namespace {

constexpr int64_t kSamples = 8;

void DieUnless(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "emberd_rooms: %s\n", std::string(status.message()).c_str());
  std::exit(1);
}

template <typename T>
T Have(absl::StatusOr<T> result) {
  DieUnless(result.status());
  return *std::move(result);
}

// A coordinator behind a port of the loopback interface, over a shard with a log.
class Cluster {
 public:
  explicit Cluster(const std::string& folder) {
    v1::ClusterConfig cluster = Have(config::ParseCluster(
        absl::StrCat("shards { address: '127.0.0.1:1' } coordinators { address: '127.0.0.1:0' }"
                     "sparsecores_per_shard: 2 storage { durability: LOG directory: '",
                     folder, "' }")));
    DieUnless(config::CompleteCluster(&cluster));
    server_ = Have(coordinator::CoordinatorServer::Start(
        {.cluster = cluster,
         .shards = {Have(host::MakeLocalShard(cluster, 0, &metrics_, &threads_))},
         .metrics = &metrics_,
         .threads = &threads_}));
  }
  std::string address() const { return server_->address(); }

 private:
  ops::Metrics metrics_{"rooms"};
  ThreadPools threads_{1};
  std::unique_ptr<coordinator::CoordinatorServer> server_;
};

// Every call is made once before it is counted: what is made only at first is not on the way.
class Caller {
 public:
  Caller(const Cluster& cluster, client::TransportKind transport)
      : client_(Connect(cluster, transport)),
        model_(Have(client_->DeclareModel(testing::MixedModel("m")))) {}

  // Makes what the call needs, and returns the call.
  std::function<void()> Prepare(const std::string& verb) {
    if (verb == "declare") {
      return [this, name = absl::StrCat("n", ++calls_)] {
        Have(client_->DeclareModel(testing::MixedModel(name)));
      };
    }
    if (verb == "lookup") {
      return [this] { found_ = LookUp(); };
    }
    if (verb == "update") {
      found_ = LookUp();
      return [this] { Apply(); };
    }
    if (verb == "stream") {
      if (stream_ == nullptr) stream_ = Have(client_->Train(model_, {.group = "rooms"}));
      return [this] { Step(); };
    }
    if (verb == "save") {
      return [this, name = absl::StrCat("c", ++calls_)] {
        Have(client_->SaveCheckpoint("m", {.name = name}));
      };
    }
    DieUnless(absl::InvalidArgumentError(
        absl::StrCat("VERB is '", verb, "'; it must be declare, lookup, update, stream or save")));
    return nullptr;
  }

 private:
  static std::unique_ptr<client::Client> Connect(const Cluster& cluster,
                                                 client::TransportKind transport) {
    client::ClientOptions options;
    options.addresses = {cluster.address()};
    options.transport = transport;
    return Have(client::Client::Connect(options));
  }
  client::LookupResult LookUp() { return Have(client_->Lookup(model_, testing::Features(batch_))); }
  void Apply() {
    const auto values = testing::MixedGradients(1, found_);
    DieUnless(
        client_->ApplyGradients(model_, found_.batch, testing::Gradients(found_, values)).status());
  }
  // A lookup and its update.
  void Step() {
    const int64_t step = next_step_++;
    DieUnless(stream_->SendLookup(step, testing::Features(batch_)));
    const client::TrainLookupResult found = Have(stream_->ReceiveLookup());
    client::LookupResult as_lookup;
    as_lookup.activations = found.activations;
    const auto values = testing::MixedGradients(1, as_lookup);
    DieUnless(stream_->SendUpdate(step, testing::Gradients(as_lookup, values)));
    DieUnless(stream_->ReceiveUpdate().status());
  }

  const std::unique_ptr<client::Client> client_;
  const client::Model model_;
  const std::vector<testing::OwnedIds> batch_ = testing::MixedBatch(1, kSamples);
  client::LookupResult found_;
  std::unique_ptr<client::TrainStream> stream_;
  int64_t next_step_ = 0;
  int calls_ = 0;
};

int Main(const std::string& verb, const std::string& folder) {
  const Cluster cluster(folder);
  const bool shares = verb == "stream";
  Caller caller(cluster, shares ? client::TransportKind::kShared : client::TransportKind::kTcp);
  for (int i = 0; i < 3; ++i) caller.Prepare(verb)();
  const std::function<void()> call = caller.Prepare(verb);
  __gcov_reset();
  call();
  __gcov_dump();
  // What ends is not counted, and takes its time.
  _exit(0);
}

}  // namespace
}  // namespace emberd::rooms

int main(int argc, char** argv) {
  if (argc == 3) return emberd::rooms::Main(argv[1], argv[2]);
  std::fprintf(stderr, "usage: %s declare|lookup|update|stream|save FOLDER\n", argv[0]);
  return 2;
}
