// Ranks with Zipf's law, as the ids of a click log have: few are seen all the time, most hardly
// ever.
#pragma once

#include <cstdint>

#include "client/demo/random.h"

namespace emberd::demo {

// Draws rank k of 1..size with probability proportional to k^-exponent, in constant time and
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
