// A step end to end: trainers on Train streams against a coordinator and two shard processes, over
// loopback gRPC, (.../shards) with memory that the coordinator shares with the shards,
// (.../shared) with memory that it shares with the trainer as well, and (.../sidecar) with the
// trainer alone, as where the shards are on other machines. It stands for a recommender's sparse
// part (26 features of width 64, batch 4096, Zipf-skewed ids) without the trainer's dense part,
// with all processes on one machine: a real cluster would not share its CPUs.
//
// Limits of the payload rates, measured in the same run (raw_rpc.h): of the rows .../lookup_payload
// and .../update_payload a bare stream between two ends; of .../lookup_relay and .../update_relay
// the same bytes through a bare relay, as they go from shard to coordinator to trainer and back.
//
// The rows .../pytorch and .../fbgemm are printed where PyTorch and FBGEMM (fbgemm_gpu) are
// installed: `examples` is theirs at their best, `threads` and `tables` are how that was, `gain` is
// how many times as fast emberd's step is. So are .../ranks2/torchrec_{row_wise,table_wise} and
// .../ranks2/tensorflow (its parameter servers), which have two trainers, beside two of emberd.
// Malloc is asked for huge pages, as emberd has them; for .../{pytorch,fbgemm}/4k_pages it is not.
// peer.h says where their Python is.
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "server/ops/catalogue.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/peer.h"
#include "tests/bench/raw_rpc.h"
#include "tests/bench/step_trainer.h"
#include "tests/testing/cluster.h"
#include "tests/testing/metrics.h"

namespace emberd::bench {
namespace step_bench {

constexpr int kRepeats = 9;

// Bytes per second of the bare streams.
struct RawRates {
  double receive = 0, send = 0, relay_receive = 0, relay_send = 0;
};

RawRates MeasureRaw(int64_t bytes) {
  RawRates rates;
  for (const bool relay : {false, true}) {
    auto raw = RawRpc::Start(relay);
    DieUnless(raw.status());
    const auto rate = [&](auto call) {
      return static_cast<double>(bytes) /
             MedianSeconds(kRepeats, [&] { DieUnless(((**raw).*call)(bytes)); });
    };
    (relay ? rates.relay_receive : rates.receive) = rate(&RawRpc::Receive);
    (relay ? rates.relay_send : rates.send) = rate(&RawRpc::Send);
  }
  return rates;
}

// Seconds that the coordinator has spent in each stage so far.
std::map<std::string, double> StageSeconds(const testing::Cluster& cluster) {
  const std::string page = testing::FetchMetrics(cluster.http_address());
  std::map<std::string, double> seconds;
  for (size_t i = 0; i < ops::kStageCount; ++i) {
    const std::string name(ops::StageName(static_cast<ops::Stage>(i)));
    seconds[name] = testing::MetricSum(page, "emberd_stage_duration_seconds_sum",
                                       absl::StrCat("stage=\"", name, "\""));
  }
  return seconds;
}

// CPU seconds that all processes of the cluster, and this one, have used so far.
double CpuSeconds(testing::Cluster* cluster) {
  double ticks = 0;
  std::vector<pid_t> pids = cluster->pids();
  pids.push_back(getpid());
  for (const pid_t pid : pids) {
    std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
    std::string line;
    std::getline(file, line);
    // The second field, in parentheses, may hold anything; of the others, 14 and 15 are these.
    std::istringstream fields(line.substr(line.rfind(')') + 1));
    std::string skipped;
    for (int i = 3; i < 14; ++i) fields >> skipped;
    double user = 0, system = 0;
    fields >> user >> system;
    ticks += user + system;
  }
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

class StepBench {
 public:
  StepBench(testing::Cluster* cluster, client::TransportKind transport, Report* report)
      : cluster_(*cluster), client_options_(cluster->client_options()), report_(report) {
    client_options_.transport = transport;
  }

  // One trainer, one step after the other.
  void Plain(const std::string& name, const StepOptions& options) {
    const StepShape& shape = options.shape;
    const double element = options.wire == client::WireType::kFloat32 ? 4 : 2;
    const double payload = shape.elements() * element;
    const RawRates raw = MeasureRaw(static_cast<int64_t>(payload));
    std::map<std::string, double> before;
    double cpu = 0;
    const StepSeconds seconds = RunSteps(
        client_options_, options,
        [&] {
          before = StageSeconds(cluster_);
          cpu = CpuSeconds(&cluster_);
        },
        [&] { cpu = CpuSeconds(&cluster_) - cpu; });
    Add(name + "/examples", shape.batch / seconds.step, "examples/s");
    Add(name + "/cpu", cpu / seconds.steps, "CPU s/step");
    Add(name + "/rows", shape.ids() / seconds.step, "rows/s");
    Add(name + "/wire", (2 * payload + 4 * shape.ids()) / seconds.step, "B/s");
    Add(name + "/lookup_payload", payload / seconds.lookup, "B/s", raw.receive);
    Add(name + "/lookup_relay", payload / seconds.lookup, "B/s", raw.relay_receive);
    Add(name + "/update_payload", payload / seconds.update, "B/s", raw.send);
    Add(name + "/update_relay", payload / seconds.update, "B/s", raw.relay_send);
    Add(name + "/share/preprocess", seconds.preprocess / seconds.step, "share of step");
    Add(name + "/share/shards", seconds.shards / seconds.step, "share of step");
    Add(name + "/share/combine", seconds.combine / seconds.step, "share of step");
    for (const auto& [stage, sum] : StageSeconds(cluster_)) {
      Add(absl::StrCat(name, "/stage/", stage), (sum - before[stage]) / seconds.total,
          "share of step");
    }
    server_seconds_ = seconds.lookup + seconds.update;
    step_seconds_ = seconds.step;
  }

  // The same step in one process: PyTorch's EmbeddingBag and sparse Adagrad, and FBGEMM's
  // table-batched embeddings, with huge pages and without; whichever is fastest of one thread or as
  // many as there are processors, and of one table with all rows or one for each feature.
  void Peers(const std::string& name, const StepShape& shape) {
    for (const bool huge_pages : {true, false}) {
      const std::string pages = huge_pages ? "" : "/4k_pages";
      Peer(name + "/pytorch" + pages, "torch_steps.py", "1,", shape, step_seconds_, huge_pages);
      Peer(name + "/fbgemm" + pages, "fbgemm_steps.py", "1,", shape, step_seconds_, huge_pages);
    }
  }

  // The same batch divided between two ranks, who agree on mini-batches and on the update; and, if
  // asked for, between two trainers of the peers that have such.
  void TwoRanks(const std::string& name, StepOptions options, bool peers) {
    options.ranks = 2;
    const StepSeconds seconds = RunSteps(client_options_, options);
    Add(name + "/ranks2/examples", options.shape.batch / seconds.step, "examples/s");
    Add(name + "/ranks2/wait_for_ranks", seconds.ranks / seconds.step, "share of step");
    if (!peers) return;
    const std::string ours = name + "/ranks2";
    for (const std::string sharding : {"row_wise", "table_wise"}) {
      Peer(ours + "/torchrec_" + sharding, "torchrec_steps.py " + sharding, "", options.shape,
           seconds.step);
    }
    Peer(ours + "/tensorflow", "tensorflow_steps.py", "", options.shape, seconds.step);
  }

  // A trainer that computes as long as the server has taken for its lookup and update.
  void Pipelined(const std::string& name, StepOptions options) {
    options.compute_seconds = server_seconds_;
    options.ids_ahead = true;
    for (const auto& [word, compute] :
         {std::pair("spin", Compute::kSpin), std::pair("sleep", Compute::kSleep)}) {
      options.compute = compute;
      options.pipelined = false;
      const double plain = RunSteps(client_options_, options).step;
      options.pipelined = true;
      const double pipelined = RunSteps(client_options_, options).step;
      Add(absl::StrCat(name, "/", word, "/plain"), options.shape.batch / plain, "examples/s");
      Add(absl::StrCat(name, "/", word, "/pipelined"), options.shape.batch / pipelined,
          "examples/s");
      Add(absl::StrCat(name, "/", word, "/gain"), plain / pipelined, "times");
    }
  }

 private:
  void Add(const std::string& name, double value, const std::string& unit, double limit = 0) {
    report_->Add({name, value, unit, 1, StepShape().width, limit});
  }

  // `one_table`: "1,", if a single table with all rows is to be tried as well. `ours`: seconds.
  void Peer(const std::string& name, const std::string& script, const std::string& one_table,
            const StepShape& shape, double ours, bool huge_pages = true) {
    PeerBatch batch = {.name = "step", .bag = shape.bag, .ids = {}};
    for (int f = 0; f < shape.features; ++f) {
      for (const int32_t id : MakeIds(shape, f)) {
        batch.ids.push_back(static_cast<uint32_t>(id + f * shape.rows));
      }
    }
    const auto seconds = RunPeer(script, int64_t{shape.features} * shape.rows, shape.width, {batch},
                                 {.tables = absl::StrCat(one_table, shape.features),
                                  .threads = absl::StrCat("1,", sysconf(_SC_NPROCESSORS_ONLN)),
                                  .huge_pages = huge_pages});
    if (seconds.empty()) return;
    Add(name + "/examples", shape.batch / seconds[0].step, "examples/s");
    Add(name + "/threads", seconds[0].threads, "threads");
    Add(name + "/tables", seconds[0].tables, "tables");
    Add(name + "/gain", seconds[0].step / ours, "times");
  }

  testing::Cluster& cluster_;
  client::ClientOptions client_options_;
  Report* report_;
  double server_seconds_ = 0, step_seconds_ = 0;  // of the last Plain
};

EMBERD_BENCHMARK(step, argc, argv) {
  Report report(argc, argv);
  auto plain = testing::Cluster::Start(
      {.shards = 2, .sparsecores_per_shard = 2, .config = "transport: TCP"});
  DieUnless(plain.status());
  auto sharing = testing::Cluster::Start({.shards = 2, .sparsecores_per_shard = 2});
  DieUnless(sharing.status());
  auto apart = testing::Cluster::Start(
      {.shards = 2, .sparsecores_per_shard = 2, .shard_config = "transport: TCP"});
  DieUnless(apart.status());
  StepBench tcp(plain->get(), client::TransportKind::kTcp, &report);
  StepBench shards(sharing->get(), client::TransportKind::kTcp, &report);
  StepBench shared(sharing->get(), client::TransportKind::kAuto, &report);
  StepBench sidecar(apart->get(), client::TransportKind::kAuto, &report);
  for (const int bag : {1, 20}) {
    for (const auto wire : {client::WireType::kFloat32, client::WireType::kBfloat16}) {
      const bool full = wire == client::WireType::kFloat32;
      const std::string name = absl::StrCat("step/bag", bag, full ? "/float32" : "/bfloat16");
      const StepOptions options = {.shape = {.bag = bag}, .wire = wire};
      if (report.Wants(name)) {
        tcp.Plain(name, options);
        if (full) tcp.Peers(name, options.shape);
        tcp.TwoRanks(name, options, full);
        tcp.Pipelined(name, options);
      }
      if (report.Wants(name + "/shards")) shards.Plain(name + "/shards", options);
      if (report.Wants(name + "/sidecar")) sidecar.Plain(name + "/sidecar", options);
      if (report.Wants(name + "/shared")) {
        shared.Plain(name + "/shared", options);
        if (full) shared.Peers(name + "/shared", options.shape);
        shared.TwoRanks(name + "/shared", options, full);
        shared.Pipelined(name + "/shared", options);
      }
    }
  }
  return report.Finish();
}

}  // namespace step_bench
}  // namespace emberd::bench
