// All benchmarks in one program: emberd_bench NAME [--json FILE] [--filter TEXT].
#include <cstdio>
#include <map>
#include <string>

#include "tests/bench/bench_report.h"

namespace emberd::bench {
namespace {

std::map<std::string, int (*)(int, char**)>& Benchmarks() {
  static auto& benchmarks = *new std::map<std::string, int (*)(int, char**)>;
  return benchmarks;
}

}  // namespace

Benchmark::Benchmark(const char* name, int (*run)(int, char**)) { Benchmarks()[name] = run; }

}  // namespace emberd::bench

int main(int argc, char** argv) {
  const auto& benchmarks = emberd::bench::Benchmarks();
  const auto found = benchmarks.find(argc > 1 ? argv[1] : "");
  if (found != benchmarks.end()) return found->second(argc - 1, argv + 1);
  std::fprintf(stderr, "usage: %s NAME [--json FILE] [--filter TEXT]; benchmarks:\n", argv[0]);
  for (const auto& [name, run] : benchmarks) std::fprintf(stderr, "  %s\n", name.c_str());
  return 2;
}
