// NAME_fuzz.cc defines one fuzz target. In the fuzz preset it is a program that libFuzzer drives;
// in every other build, replay.cc holds all targets and feeds them the committed corpus as tests.
//
// A corpus has inputs that fuzzing found, named by twelve hex digits, and seeds, with names in
// words: valid inputs, from which fuzzing starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

// EMBERD_FUZZ_TARGET(name, data, size) { ...; return 0; }
#ifdef EMBERD_FUZZ
#define EMBERD_FUZZ_TARGET(name, data, size) \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size)
#else
#define EMBERD_FUZZ_TARGET(name, data, size)                 \
  int TryInput(const uint8_t* data, size_t size);            \
  const ::emberd::fuzz::Target fuzz_target(#name, TryInput); \
  int TryInput(const uint8_t* data, size_t size)
#endif

namespace emberd::fuzz {

// Makes a target known to replay.cc.
struct Target {
  Target(const char* name, int (*try_input)(const uint8_t* data, size_t size));
};

// Set by a target that has taken its input for valid and has dropped nothing of it; never reset by
// it.
inline bool accepted = false;

// Ends the program if a promise does not hold, so that the fuzzer keeps the input.
inline void Require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", promise);
  std::abort();
}

}  // namespace emberd::fuzz
