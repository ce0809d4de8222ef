// One fuzz target per program: NAME_fuzz.cc defines LLVMFuzzerTestOneInput. libFuzzer drives it in
// the fuzz preset; in every other build, replay.cc feeds it the committed corpus as a test.
//
// A corpus has inputs that fuzzing found, named by twelve hex digits, and seeds, with names in
// words: valid inputs, from which fuzzing starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace emberd::fuzz {

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
