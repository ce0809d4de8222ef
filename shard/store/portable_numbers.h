// Numbers that have the same bits on every machine: elementary functions and random words.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace emberd::shard {

// --- Logarithm, exponential, power and the normal quantile from +, -, *, / and sqrt alone.
//
// A C library may answer differently on two machines (it picks fused or unfused code by CPU). These
// functions do not: every IEEE 754 machine gives the same bits, which is what initial values and
// fractional powers need. Relative error below 1e-14, except InverseNormal (below 2e-9).

// Natural logarithm; x finite and > 0.
double PortableLog(double x);
// e^x; underflows to 0 and overflows to infinity.
double PortableExp(double x);
// x^y with the special values of std::pow.
double PortablePow(double x, double y);
// z with P(Z <= z) = p for a standard normal Z; 0 < p < 1.
double InverseNormal(double p);

// --- Counter-based random numbers: words that depend on a key alone, with no state and no stream,
// so that any thread may make any of them at any time.

// The step of SplitMix64: word n of a key is Mix(key + n * kGamma), n >= 1.
inline constexpr uint64_t kGamma = 0x9e3779b97f4a7c15;

// The finaliser of SplitMix64.
inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The key of part `index` of what `key` stands for, e.g. of a row of a table.
inline uint64_t SubKey(uint64_t key, uint64_t index) { return Mix(key ^ Mix(index + kGamma)); }

// The key of something named, e.g. of a table of a model with this seed. FNV-1a of the name.
inline uint64_t NamedKey(uint64_t seed, absl::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return Mix(Mix(seed + kGamma) ^ hash);
}

// 16 random bits for each of `count` columns, a multiple of 4; the same for a column whatever the
// count.
inline void RandomHalves(uint64_t key, int count, uint16_t* halves) {
  for (int c = 0; c < count; c += 4) {
    const uint64_t word = Mix(key += kGamma);
    for (int i = 0; i < 4; ++i) halves[c + i] = static_cast<uint16_t>(word >> (16 * i));
  }
}

}  // namespace emberd::shard
