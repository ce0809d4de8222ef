// Training from Python: what the Python client costs beside the C++ client on the same stream, and
// PyTorch with tables in a cluster beside PyTorch with tables in its own process. The work is done
// by python_steps.py, which starts clusters (`emberd up`, one process) on this machine, and this
// program again as a client in C++:
//
//   emberd_bench python --client ADDRESS BATCH BAG IDS_FILE
//
// declares the model and writes its ids, int32, feature after feature; then for each line "STEPS"
// of its input it trains so many steps on a stream, and prints the median seconds of a step.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/paths.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/peer.h"
#include "tests/bench/step_trainer.h"

namespace emberd::bench {
namespace python_bench {

int RunClient(char** argv) {
  client::ClientOptions client_options;
  client_options.addresses = {argv[0]};
  StepOptions options;
  options.shape.batch = std::atoi(argv[1]);
  options.shape.bag = std::atoi(argv[2]);
  std::ofstream file(argv[3], std::ios::binary);
  for (int f = 0; f < options.shape.features; ++f) {
    const std::vector<int32_t> ids = MakeIds(options.shape, f);
    file.write(reinterpret_cast<const char*>(ids.data()),
               static_cast<std::streamsize>(ids.size() * sizeof(int32_t)));
  }
  file.close();
  auto client = client::Client::Connect(client_options);
  DieUnless(client.status());
  DieUnless((*client)->DeclareModel(ModelText(options.shape)).status());
  std::cout << "ready" << std::endl;
  while (std::cin >> options.steps) {
    std::cout << RunSteps(client_options, options).step << std::endl;
  }
  return file.good() ? 0 : 1;
}

EMBERD_BENCHMARK(python, argc, argv) {
  if (argc == 6 && std::string(argv[1]) == "--client") return RunClient(argv + 2);
  Report report(argc, argv);
  const std::string command = absl::StrCat(
      "EMBERD_PROGRAMS=", EMBERD_BIN_FOLDER, " EMBERD_LIBRARY=", EMBERD_CLIENT_LIBRARY, " ",
      PeerPython(), " -B -W ignore ", SourcePath("tests/bench/python_steps.py "),
      std::filesystem::canonical("/proc/self/exe").string(), " '", report.filter(), "'");
  FILE* output = popen(command.c_str(), "r");
  if (output == nullptr) return 1;
  char name[128], unit[32];
  double value = 0, limit = 0;
  int width = 0;
  while (std::fscanf(output, "%127s %lf %31s %d %lf", name, &value, unit, &width, &limit) == 5) {
    if (report.Wants(name)) report.Add({name, value, unit, 1, width, limit});
  }
  return pclose(output) == 0 ? report.Finish() : 1;
}

}  // namespace python_bench
}  // namespace emberd::bench
