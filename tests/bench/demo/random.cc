#include "tests/bench/demo/random.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace emberd::demo {
namespace {
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
}

uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A Feistel network over the smallest even number of bits that holds size; what falls beyond size
// goes round again.
int64_t Permute(int64_t index, int64_t size, uint64_t key) {
  int half = 1;
  while (int64_t{1} << (2 * half) < size) ++half;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  uint64_t x = static_cast<uint64_t>(index);
  do {
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t left = x >> half, right = x & mask;
      x = right << half | (left ^ (Mix(Mix(key + round * kGolden) + right) & mask));
    }
  } while (x >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(x);
}

Draws::Draws(uint64_t seed, uint64_t index, uint64_t column)
    : state_(Mix(Mix(Mix(seed + kGolden) + index) + (column + 1) * kGolden)) {}

uint64_t Draws::Bits() { return Mix(state_ += kGolden); }

// 53 random bits and a half: neither 0 nor 1, so that logarithms are finite.
double Draws::Uniform() { return (static_cast<double>(Bits() >> 11) + 0.5) * 0x1p-53; }

double Draws::Normal() {
  const double radius = std::sqrt(-2.0 * std::log(Uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * Uniform());
}

int64_t Draws::Below(int64_t bound) {
  return static_cast<int64_t>(
      (static_cast<unsigned __int128>(Bits()) * static_cast<uint64_t>(bound)) >> 64);
}

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
