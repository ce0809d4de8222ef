// Not a measurement with a limit, but load on a cluster that runs already, with the options of
// emberctl: emberd_bench load --model my_model --clients 4 --batch 4096 --seconds 10. What it
// prints is what the clients saw; `--help` has all options.
#include <iostream>

#include "tests/bench/bench_report.h"
#include "tests/bench/load.h"

namespace emberd::bench {
namespace load_bench {

EMBERD_BENCHMARK(load, argc, argv) { return RunLoad(argc, argv, std::cout, std::cerr); }

}  // namespace load_bench
}  // namespace emberd::bench
