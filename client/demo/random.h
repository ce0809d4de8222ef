// Counter-based random numbers: a draw depends on its key alone, never on what was drawn elsewhere.
// Any process can make any example of the click log without making those before it.
#pragma once

#include <cstdint>

namespace emberd::demo {

// A bijection of 64-bit numbers in which every input bit reaches every output bit (the finalizer of
// SplitMix64).
uint64_t Mix(uint64_t x);

// Where index lands in a random order of 0 .. size-1: for each key a bijection. 0 <= index < size.
int64_t Permute(int64_t index, int64_t size, uint64_t key);

// The endless sequence that belongs to one key (seed, index, column). Cheap to make; not
// thread-safe.
class Draws {
 public:
  Draws(uint64_t seed, uint64_t index, uint64_t column);

  uint64_t Bits();
  double Uniform();              // in (0, 1)
  double Normal();               // mean 0, standard deviation 1
  int64_t Below(int64_t bound);  // in [0, bound); bound >= 1

 private:
  uint64_t state_;
};

}  // namespace emberd::demo
