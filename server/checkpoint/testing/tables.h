// Tables that a test changes and saves, and what a checkpoint of them must hold: a plain copy of
// all values.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "emberd/v1/model.pb.h"
#include "emberd/v1/plan.pb.h"
#include "server/checkpoint/store.h"

namespace emberd::checkpoint {

// A complete config with one to four tables of any shapes, storage types, optimizers and initial
// values.
v1::ModelConfig RandomTables(std::mt19937_64& random);

class TestTables {
 public:
  // Weights (slot is empty) or a slot of a table; [rows, columns].
  struct Array {
    std::string table;
    std::string slot;
    int64_t rows = 0;
    int columns = 0;
    std::vector<float> values = {};
  };

  // Ends the process if the config cannot be planned.
  TestTables(const v1::ModelConfig& config, int partitions);

  const v1::ModelConfig& config() const { return config_; }
  const v1::ModelPlan& plan() const { return plan_; }
  const std::vector<Array>& arrays() const { return arrays_; }
  int64_t rows_changed() const { return static_cast<int64_t>(changed_.size()); }

  // Random values for random rows, in all arrays of their table.
  void Change(std::mt19937_64& random);
  // Saves all rows that were ever changed, or with a parent those that were changed since the last
  // save.
  absl::Status Save(const CheckpointStore& store, const std::string& name,
                    const std::string& parent = "");

 private:
  struct RowName {
    std::string table;
    int64_t id = 0;
    auto operator<=>(const RowName&) const = default;
  };

  absl::Status SaveArray(const std::string& folder, const v1::StackPlan& stack,
                         const std::string& array, const std::map<RowName, bool>& rows,
                         v1::CheckpointManifest* manifest);
  const Array& Find(const std::string& table, const std::string& array) const;

  const v1::ModelConfig config_;
  v1::ModelPlan plan_;
  std::vector<Array> arrays_;
  std::map<RowName, bool> touched_;
  std::map<RowName, bool> changed_;  // since the last save
  int64_t clock_ = 0;
};

}  // namespace emberd::checkpoint
