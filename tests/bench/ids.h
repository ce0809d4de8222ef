// Random row numbers, uniform or Zipf 1.05.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace emberd::bench {

// `count` rows in [0, rows). Zipf: frequent rows lie scattered over the table.
inline std::vector<uint32_t> MakeIds(bool zipf, int64_t rows, int64_t count) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<uint32_t> ids(count);
  for (uint32_t& id : ids) {
    if (!zipf) {
      id = static_cast<uint32_t>(random() % rows);
      continue;
    }
    // Inverse of the continuous distribution with density x^-1.05 on [1, rows + 1).
    const double power = std::pow(static_cast<double>(rows) + 1, -0.05);
    const double rank = std::pow(1 + uniform(random) * (power - 1), -1 / 0.05) - 1;
    id = static_cast<uint32_t>(static_cast<uint64_t>(rank) * 2654435761u % rows);
  }
  return ids;
}

}  // namespace emberd::bench
