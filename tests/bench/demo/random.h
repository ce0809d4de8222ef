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

// Ranks with Zipf's law, as the ids of a click log have: few are seen all the time, most hardly
// ever. Draws rank k of 1..size with probability proportional to k^-exponent, in constant time and
// memory, by rejection-inversion (W. Hörmann and G. Derflinger, "Rejection-inversion to generate
// variates from monotone discrete distributions", 1996). Immutable, so any thread may use it.
class ZipfDistribution {
 public:
  // size >= 1; exponent > 0, other than 1.
  ZipfDistribution(int64_t size, double exponent);

  int64_t Sample(Draws* draws) const;

 private:
  double Weight(double x) const;    // x^-exponent
  double Integral(double x) const;  // of Weight, from 1 to x
  double InverseIntegral(double y) const;

  int64_t size_;
  double exponent_;
  double lower_, upper_;  // range of the integral from which Sample draws
  double accept_;         // a rank this close above its x needs no further test
};

}  // namespace emberd::demo
