#include "client/demo/zipf.h"

#include <algorithm>
#include <cmath>

namespace emberd::demo {

ZipfDistribution::ZipfDistribution(int64_t size, double exponent)
    : size_(size), exponent_(exponent) {
  lower_ = Integral(1.5) - 1.0;
  upper_ = Integral(static_cast<double>(size) + 0.5);
  accept_ = 2.0 - InverseIntegral(Integral(2.5) - Weight(2.0));
}

double ZipfDistribution::Weight(double x) const { return std::pow(x, -exponent_); }

double ZipfDistribution::Integral(double x) const {
  const double power = 1.0 - exponent_;
  return std::expm1(power * std::log(x)) / power;
}

double ZipfDistribution::InverseIntegral(double y) const {
  const double power = 1.0 - exponent_;
  return std::exp(std::log1p(power * y) / power);
}

int64_t ZipfDistribution::Sample(Draws* draws) const {
  while (true) {
    const double y = upper_ + draws->Uniform() * (lower_ - upper_);
    const double x = InverseIntegral(y);
    const int64_t rank = std::clamp<int64_t>(std::llround(x), 1, size_);
    const double k = static_cast<double>(rank);
    if (k - x <= accept_ || y >= Integral(k + 0.5) - Weight(k)) return rank;
  }
}

}  // namespace emberd::demo
