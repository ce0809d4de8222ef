#include "client/demo/random.h"

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

}  // namespace emberd::demo
