// Sums whose bits do not depend on who made which part of them.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace emberd::demo {

// The sum of vectors of equal length by the balanced binary tree over their places: neighbours
// first, then pairs of pairs. So the sum over the parts of two trainers is that over all parts of
// one trainer, if each of the two has the same power of two of them. Empty vectors stand for
// nothing; empty if all are.
template <typename Vector>
Vector SumByTree(std::vector<Vector> parts) {
  for (size_t step = 1; step < parts.size(); step *= 2) {
    for (size_t i = 0; i + step < parts.size(); i += 2 * step) {
      Vector &left = parts[i], &right = parts[i + step];
      if (left.size() == 0) std::swap(left, right);
      for (decltype(right.size()) k = 0; k < right.size(); ++k) left[k] += right[k];
    }
  }
  return parts.empty() ? Vector() : std::move(parts.front());
}

}  // namespace emberd::demo
