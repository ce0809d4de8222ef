// What programs cost and save, for a trainer with stubs against a coordinator and two shard
// processes on this machine: 26 features of width 64 with Adagrad, batches of 4096 and of 64
// samples, with 1 and 20 ids for each sample and feature.
//
// Rows and their limits, in milliseconds, measured in turns in the same run:
//   programs/.../execute          a batch that was prepared before, against Lookup
//   programs/.../prepare_execute  PrepareBatch and Execute, against Lookup
//   programs/.../two_calls        Execute of update(k) and of lookup(k + 1), against
//                                 ApplyGradients and Lookup
//   programs/.../chain            both in one ExecuteChained, against these two calls of Execute
//   programs/.../python_chain     the chain from Python, against the same two calls from Python
//   programs/.../python           the chain from Python, against the chain with stubs in C++
// A ratio below 1 is a saving.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/paths.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/step_trainer.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/program_api.h"

namespace emberd::bench {
namespace programs_bench {

constexpr int kUntimed = 3;

double MedianOf(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void DieUnlessOk(const grpc::Status& status) {
  DieUnless(
      absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message()));
}

template <typename Call>
double MillisecondsOf(const Call& call) {
  const absl::Time start = absl::Now();
  call();
  return absl::ToDoubleMilliseconds(absl::Now() - start);
}

class ProgramsBench {
 public:
  ProgramsBench(const testing::Cluster& cluster, const StepShape& shape, Report* report)
      : shape_(shape),
        address_(cluster.address()),
        api_(cluster.address(), "bench"),
        report_(report) {
    const auto client = cluster.Connect();
    const auto model = client->DeclareModel(ModelText(shape));
    DieUnless(model.status());
    model_id_ = model->id;
    for (int f = 0; f < shape.features; ++f) {
      const std::vector<int32_t> ids = MakeIds(shape, f);
      const std::string name = absl::StrCat("f", f);
      v1::FeatureIds* feature = batch_.add_features();
      feature->set_feature(name);
      *feature->mutable_dense()->mutable_ids() =
          testing::MakeTensor<int32_t>({shape.batch, shape.bag}, ids);
      testing::AddTensor(
          name,
          testing::MakeTensor<float>({shape.batch, shape.width},
                                     std::vector<float>(int64_t{shape.batch} * shape.width, 1e-3f)),
          &gradients_);
    }
    lookup_ = Compile(v1::ProgramSpec::LOOKUP, /*inference=*/false);
    inference_ = Compile(v1::ProgramSpec::LOOKUP, /*inference=*/true);
    update_ = Compile(v1::ProgramSpec::UPDATE, /*inference=*/false);
  }

  void Run(const std::string& name, int repeats) {
    std::vector<double> plain_lookup, execute, prepare_execute, plain_step, two_calls, chain;
    const uint64_t prepared = Prepare();
    v1::LookupResponse plain = PlainLookup(/*inference=*/false);
    uint64_t found = ExecuteLookup(lookup_, nullptr);
    uint64_t chained = ExecuteLookup(lookup_, nullptr);
    for (int i = 0; i < kUntimed + repeats; ++i) {
      std::vector<double> took;
      took.push_back(MillisecondsOf([&] { PlainLookup(/*inference=*/true); }));
      took.push_back(MillisecondsOf([&] { ExecuteLookup(inference_, &prepared); }));
      uint64_t fresh = 0;
      took.push_back(MillisecondsOf([&] {
        fresh = Prepare();
        ExecuteLookup(inference_, &fresh);
      }));
      Release(fresh);
      took.push_back(MillisecondsOf([&] { plain = PlainStep(plain.batch_handle()); }));
      took.push_back(MillisecondsOf([&] {
        ExecuteUpdate(found);
        found = ExecuteLookup(lookup_, nullptr);
      }));
      const uint64_t before = chained;
      took.push_back(MillisecondsOf([&] { chained = Chain(before); }));
      Release(before);
      if (i < kUntimed) continue;
      size_t k = 0;
      for (auto* const times :
           {&plain_lookup, &execute, &prepare_execute, &plain_step, &two_calls, &chain}) {
        times->push_back(took[k++]);
      }
    }
    const auto add = [&](const char* what, const std::vector<double>& times,
                         const std::vector<double>& limit) {
      report_->Add(
          {absl::StrCat(name, "/", what), MedianOf(times), "ms", 1, shape_.width, MedianOf(limit)});
    };
    add("execute", execute, plain_lookup);
    add("prepare_execute", prepare_execute, plain_lookup);
    add("two_calls", two_calls, plain_step);
    add("chain", chain, two_calls);
    double python_calls = 0, python_chain = 0;
    RunPython(repeats, &python_calls, &python_chain);
    add("python_chain", {python_chain}, {python_calls});
    add("python", {python_chain}, chain);
    DieUnless(api_.ReleaseAll());
  }

 private:
  // Milliseconds of two calls and of a chain.
  void RunPython(int repeats, double* two_calls, double* chain) {
    const std::string command = absl::StrCat(
        "EMBERD_PROGRAMS=", EMBERD_BIN_FOLDER, " EMBERD_LIBRARY=", EMBERD_CLIENT_LIBRARY, " ",
        EMBERD_PYTHON, " -B ", SourcePath("tests/bench/python_programs.py "), address_, " ",
        shape_.features, " ", shape_.batch, " ", shape_.bag, " ", shape_.width, " ", repeats);
    FILE* const output = popen(command.c_str(), "r");
    const bool read = output != nullptr && std::fscanf(output, "%lf %lf", two_calls, chain) == 2;
    const bool ended = output != nullptr && pclose(output) == 0;
    DieUnless(read && ended ? absl::OkStatus() : absl::InternalError("python_programs.py failed"));
  }
  uint64_t Compile(v1::ProgramSpec::Kind kind, bool inference) {
    v1::ProgramSpec spec;
    spec.set_kind(kind);
    spec.set_model("step");
    spec.set_inference(inference);
    for (int f = 0; f < shape_.features; ++f) {
      v1::ProgramInput* input = spec.add_inputs();
      input->set_feature(absl::StrCat("f", f));
      input->set_max_samples(shape_.batch);
    }
    const auto compiled = api_.Compile(spec);
    DieUnless(compiled.status());
    return compiled->program_handle();
  }
  uint64_t Prepare() {
    const auto prepared = api_.Prepare(inference_, batch_);
    DieUnless(prepared.status());
    return prepared->handle();
  }
  void Release(uint64_t handle) { DieUnless(api_.Release({}, {handle})); }
  // Of the batch, or of one that was prepared. The handle of what was found; 0: for inference.
  uint64_t ExecuteLookup(uint64_t program, const uint64_t* prepared) {
    v1::ExecuteRequest request;
    request.set_program_handle(program);
    if (prepared != nullptr) {
      request.add_arguments()->set_handle(*prepared);
    } else {
      *request.add_arguments()->mutable_literal() = batch_;
    }
    request.mutable_config()->set_return_values(true);
    const auto found = api_.Execute(std::move(request));
    DieUnless(found.status());
    return found->results(0).handle();
  }
  void SetKey(v1::ExecutionConfig* config) {
    config->mutable_execution_instance_key()->set_client_id("bench");
    config->mutable_execution_instance_key()->set_sequence(++sequence_);
  }
  void ExecuteUpdate(uint64_t found) {
    v1::ExecuteRequest request;
    request.set_program_handle(update_);
    request.add_arguments()->set_handle(found);
    *request.add_arguments()->mutable_literal() = gradients_;
    SetKey(request.mutable_config());
    request.mutable_config()->set_release_input_handles(true);
    DieUnless(api_.Execute(std::move(request)).status());
  }
  uint64_t Chain(uint64_t found) {
    v1::ExecuteChainedRequest plan;
    const int batch = testing::AddData(&plan, found);
    const int gradients = testing::AddLiteral(&plan, gradients_);
    testing::AddProgram(&plan, update_, {batch, gradients});
    testing::AddProgram(&plan, lookup_, {testing::AddLiteral(&plan, batch_)}, /*result=*/0);
    plan.mutable_config()->set_return_values(true);
    SetKey(plan.mutable_config());
    const auto ran = api_.Chain(std::move(plan));
    DieUnless(ran.status());
    return ran->results(0).handle();
  }
  v1::LookupResponse PlainLookup(bool inference) {
    v1::LookupRequest request;
    request.set_model_id(model_id_);
    *request.mutable_features() = batch_.features();
    request.set_inference(inference);
    v1::LookupResponse response;
    DieUnlessOk(testing::Call(&v1::EmbeddingService::Stub::Lookup, api_.api(), request, &response));
    return response;
  }
  v1::LookupResponse PlainStep(uint64_t batch) {
    v1::ApplyGradientsRequest request;
    request.set_model_id(model_id_);
    request.set_batch_handle(batch);
    request.mutable_mutation()->set_client_id("bench, plain");
    request.mutable_mutation()->set_sequence(++sequence_);
    for (const v1::NamedTensor& gradient : gradients_.tensors()) {
      v1::FeatureGradient* to = request.add_gradients();
      to->set_feature(gradient.name());
      *to->mutable_gradient() = gradient.tensor();
    }
    v1::ApplyGradientsResponse response;
    DieUnlessOk(
        testing::Call(&v1::EmbeddingService::Stub::ApplyGradients, api_.api(), request, &response));
    return PlainLookup(/*inference=*/false);
  }

  const StepShape shape_;
  const std::string address_;
  testing::ProgramApi api_;
  Report* const report_;
  uint64_t model_id_ = 0;
  v1::Literal batch_, gradients_;
  uint64_t lookup_ = 0, inference_ = 0, update_ = 0;
  uint64_t sequence_ = 0;
};

EMBERD_BENCHMARK(programs, argc, argv) {
  Report report(argc, argv);
  for (const int samples : {4096, 64}) {
    for (const int bag : {1, 20}) {
      const std::string name = absl::StrCat("programs/samples", samples, "/bag", bag);
      if (!report.Wants(name)) continue;
      const auto cluster = testing::Cluster::Start({.shards = 2, .sparsecores_per_shard = 2});
      DieUnless(cluster.status());
      ProgramsBench bench(**cluster, {.batch = samples, .bag = bag}, &report);
      bench.Run(name, samples > 64 ? 15 : 201);
    }
  }
  return report.Finish();
}

}  // namespace programs_bench
}  // namespace emberd::bench
