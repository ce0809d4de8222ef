// The model of the tests about rows that travel once.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"

namespace emberd::testing {

inline constexpr int kRowsOfTable = 300;

// Tables of three stacks. One has padding columns; in another, c and d share a table. The third has
// neither: its sums are passed on as they come.
struct RowsFeature {
  const char* feature;
  const char* table;
  int dim;
};
inline constexpr RowsFeature kShapes[] = {{"a", "ta", 32}, {"b", "tb", 32}, {"c", "tc", 32},
                                          {"d", "tc", 32}, {"e", "te", 20}, {"f", "tf", 16},
                                          {"g", "tg", 16}};

inline std::string RowsModel(const std::string& name, const std::string& of_tables = "") {
  std::string text =
      absl::StrCat("name: '", name, "' optimizer { adagrad {} learning_rate: 0.1 }\n");
  std::string last;
  for (const RowsFeature& shape : kShapes) {
    if (last != shape.table) {
      absl::StrAppend(&text, "tables { name: '", shape.table, "' vocabulary_size: ", kRowsOfTable,
                      " embedding_dim: ", shape.dim, " combiner: SUM ", of_tables,
                      " initializer { uniform { lower: -1 upper: 1 } } }\n");
    }
    last = shape.table;
    absl::StrAppend(&text, "features { name: '", shape.feature, "' table: '", shape.table, "' }\n");
  }
  return text;
}

}  // namespace emberd::testing
