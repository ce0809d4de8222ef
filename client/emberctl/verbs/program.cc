#include <cstdint>
#include <string>

#include "base/command_line.h"
#include "base/status.h"
#include "client/cpp/options.h"
#include "client/emberctl/output.h"
#include "client/emberctl/plan_view.h"
#include "client/emberctl/verbs/verb.h"
#include "emberd/v1/program_service.pb.h"

namespace emberd::emberctl {
namespace {

struct ProgramOptions {
  std::string model;
  int64_t samples = 0;
};

// Compiles the lookup, says what it would hold, and gives it back.
absl::Status ShowProgram(Session& session, const ProgramOptions& options) {
  ASSIGN_OR_RETURN(const auto model, session.DescribeModel(options.model));
  v1::CompileRequest request;
  request.set_client_id(client::RandomUuid());
  request.mutable_spec()->set_kind(v1::ProgramSpec::LOOKUP);
  request.mutable_spec()->set_model(options.model);
  for (const v1::FeatureConfig& feature : model.config().features()) {
    v1::ProgramInput* const input = request.mutable_spec()->add_inputs();
    input->set_feature(feature.name());
    input->set_max_samples(options.samples);
  }
  ASSIGN_OR_RETURN(const auto compiled, session.Call<v1::CompileResponse>(request));
  v1::ReleaseRequest release;
  release.set_all_of_client(request.client_id());
  RETURN_IF_ERROR(session.Call<v1::ReleaseResponse>(release).status());
  if (session.json) return PrintJson(compiled, session.out);
  session.out << "program " << compiled.fingerprint() << (compiled.cached() ? ", in use" : "")
              << ": " << Bytes(compiled.bytes_per_sparsecore()) << " on each SparseCore\n";
  Table lines = {{"STACK", "SAMPLES", "ROOM FOR IDS", "MAX IDS", "MAX UNIQUE", "SIZE", "KERNEL"}};
  for (const v1::StackProgram& stack : compiled.stacks()) {
    lines.push_back({stack.stack(), stack.samples(), stack.id_capacity(),
                     Limit(stack.limits().max_ids_per_partition()),
                     Limit(stack.limits().max_unique_ids_per_partition()),
                     Bytes(stack.bytes_per_sparsecore()), stack.kernel()});
  }
  PrintColumns(lines, session.out);
  return absl::OkStatus();
}

}  // namespace

void AddProgram(CLI::App& app, Session& session) {
  auto [program, options] = AddVerb(app, session, "program",
                                    "Show what a compiled lookup of all features of a model holds",
                                    "emberctl program my_model --samples 4096", ShowProgram);
  program->add_option("MODEL", options->model, "Name of the model")->required();
  program
      ->add_option("--samples", options->samples,
                   "Samples of each feature; default: those that the model is planned for")
      ->check(Within(int64_t{1}, (int64_t{1} << 31) - 1));
}

}  // namespace emberd::emberctl
