// Recorded cases of TensorFlow's and JAX's SparseCore embeddings, from tests/golden.
#include <cmath>
#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/testing/paths.h"
#include "config/optimizers.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/reference.h"
#include "shard/testing/scalar_optimizers.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace golden_test {

using nlohmann::json;
using testing::Row;
using testing::RowValues;
using testing::TestBatch;
using testing::TestEngine;
using testing::TestEntry;
using testing::TestShape;

json ReadGolden(const std::string& name) {
  std::ifstream file(SourcePath("tests/golden/" + name));
  EXPECT_TRUE(file.good()) << name;
  return json::parse(file);
}

// `relative` to the expected value, or to `scale` where that is larger: a weight that passes near 0
// keeps the rounding of the values it came from.
void ExpectNear(double value, double expected, double relative, double scale = 0) {
  EXPECT_NEAR(value, expected, relative * std::max(std::abs(expected), scale));
}

// Hyper-parameters under the names of either system, as an OptimizerConfig.
v1::OptimizerConfig MakeOptimizer(const std::string& name, const json& hyper) {
  static const std::map<std::string, std::string> kNames = {
      {"beta_1", "beta1"},
      {"beta_2", "beta2"},
      {"b1", "beta1"},
      {"b2", "beta2"},
      {"eps", "epsilon"},
      {"lr_power", "learning_rate_power"},
      {"mul", "multiply_linear_by_learning_rate"},
      {"initial_accumulator_value", "initial_accumulator"}};
  std::string common, kind;
  for (const auto& [key, value] : hyper.items()) {
    if (key == "lr" || key == "learning_rate") {
      common += " learning_rate: " + value.dump();
    } else if (key == "clip") {
      common += " clip_weight_min: " + value[0].dump() + " clip_weight_max: " + value[1].dump();
    } else {
      const auto it = kNames.find(key);
      kind += " " + (it == kNames.end() ? key : it->second) + ": " + value.dump();
    }
  }
  return testing::CompleteOptimizer(name + " {" + kind + "}" + common);
}

TEST(Golden, TensorFlowOptimizerSteps) {
  static const std::map<std::string, std::string> kSlots = {{"acc", "accumulator"},
                                                            {"mom", "momentum"},
                                                            {"m", "momentum"},
                                                            {"v", "velocity"},
                                                            {"lin", "linear"}};
  const json golden = ReadGolden("tf/93_derived_optimizer_steps.json");
  for (const json& c : golden["cases"]) {
    SCOPED_TRACE(c["name"].get<std::string>());
    json hyper = c["hyper"];
    hyper["learning_rate"] = c["learning_rate"];
    const v1::OptimizerConfig optimizer = MakeOptimizer(c["optimizer"], hyper);
    const std::vector<config::SlotInfo> slots = config::OptimizerSlots(optimizer);
    RowValues row{Row(8, c["w0"]), {}};
    for (const config::SlotInfo& slot : slots) {
      for (const auto& [key, value] : c["slots0"].items()) {
        if (kSlots.at(key) == slot.name) row.slots.emplace_back(8, value.get<float>());
      }
    }
    ASSERT_EQ(row.slots.size(), slots.size());
    for (size_t step = 0; step < c["gradients"].size(); ++step) {
      testing::KernelUpdate(MakeStepRule(optimizer, step), Row(8, c["gradients"][step]), row);
      for (const auto& [key, value] : c["expected_after_each_step"][step].items()) {
        if (key == "w") {
          ExpectNear(row.w[7], value, 1e-6, 1);
          continue;
        }
        for (size_t s = 0; s < slots.size(); ++s) {
          if (kSlots.at(key) == slots[s].name) ExpectNear(row.slots[s][0], value, 1e-6);
        }
      }
    }
  }
}

TEST(Golden, JaxOptimizerTraces) {
  const json golden = ReadGolden("jax/070.json");
  const Row table = golden["input"]["table"];
  int cases = 0;
  for (const json& c : golden["expected"]) {
    SCOPED_TRACE(c["optimizer"].get<std::string>() + c["hyper"].dump());
    json hyper = c["hyper"];
    if (c["optimizer"] == "adam") hyper["bias_correction"] = true;
    const v1::OptimizerConfig optimizer = MakeOptimizer(c["optimizer"], hyper);
    const std::vector<config::SlotInfo> slots = config::OptimizerSlots(optimizer);
    ASSERT_EQ(slots.size(), c["initial_slots"].size());
    RowValues row{table, {}};
    for (size_t s = 0; s < slots.size(); ++s) {
      row.slots.emplace_back(slots[s].one_per_row ? 1 : 8, c["initial_slots"][s].get<float>());
    }
    for (const json& step : c["trace"]) {
      const int number = step["step"];
      testing::KernelUpdate(MakeStepRule(optimizer, number), golden["input"]["grads"][number], row);
      for (int i = 0; i < 8; ++i) {
        EXPECT_NEAR(row.w[i], step["table"][i].get<double>(),
                    1e-6 * std::max(1e-1, std::abs(step["table"][i].get<double>())));
      }
      for (size_t s = 0; s < slots.size(); ++s) {
        for (size_t i = 0; i < row.slots[s].size(); ++i) {
          ExpectNear(row.slots[s][i], step["slots"][s][i], 1e-6);
        }
      }
    }
    ++cases;
  }
  EXPECT_GE(cases, 11);
}

TEST(Golden, TensorFlowQuantization) {
  const json golden = ReadGolden("tf/92_derived_quantization.json");
  for (const json& c : golden["cases"]) {
    const int points = static_cast<int>(c["points"].size());
    const TestShape shape{1, 16, points};
    StackSpec stack = OneTableStack(shape, 8, 8, testing::CompleteOptimizer("sgd {}"));
    stack.quantized = true;
    stack.quantization.set_lower(c["lower"]);
    stack.quantization.set_upper(c["upper"]);
    stack.quantization.set_num_buckets(c["num_buckets"]);
    TestEngine engine({stack}, shape, 0, 1);
    std::vector<TestEntry> entries;
    for (int i = 0; i < points; ++i) {
      const std::vector<int32_t> partition = {0};
      const std::vector<int64_t> row = {i};
      ASSERT_TRUE(
          engine.Assign({7, 0, "", partition, row, 8}, Row(8, c["points"][i][0].get<float>()))
              .ok());
      entries.push_back({i, 0, i, 1.0f});
    }
    TestBatch batch(entries, shape, 0, 1, 1, 1);
    const StackSums sums = engine.Gather(*engine.Prepare(batch.view()))[0];
    for (int i = 0; i < points; ++i) {
      ExpectNear(sums.sums[i * 8], c["points"][i][1], 1e-6, 1e-1);
      EXPECT_EQ(engine.ReadRow(0, 0, i, 1)[0], c["points"][i][0].get<float>()) << "storage";
    }
  }
}

// One SparseCore, one table whose id e is local row e.
class OneTable {
 public:
  OneTable(const v1::OptimizerConfig& optimizer, int rows, int columns, int samples)
      : shape_{1, (rows + 7) / 8 * 8, samples},
        columns_(columns),
        engine_({OneTableStack(shape_, 8, columns, optimizer)}, shape_, 0, 1) {}

  void Assign(int row, const Row& values) {
    const std::vector<int32_t> partition = {0};
    const std::vector<int64_t> rows = {row};
    ASSERT_TRUE(engine_.Assign({7, 0, "", partition, rows, columns_}, values).ok());
  }
  Row Read(int row, const std::string& slot = "") {
    return engine_.ReadRow(0, 0, row, columns_, slot);
  }

  // Activations of all samples, each of which has at least one id.
  std::vector<Row> Lookup(const std::vector<TestEntry>& entries) {
    TestBatch batch(entries, shape_, 0, 1, 1, 1);
    batch_ = *engine_.Prepare(batch.view());
    const StackSums sums = engine_.Gather(batch_)[0];
    EXPECT_EQ(static_cast<int>(sums.samples.size()), shape_.samples);
    std::vector<Row> rows;
    for (int i = 0; i < shape_.samples; ++i) {
      rows.emplace_back(sums.sums.data() + i * 8, sums.sums.data() + i * 8 + columns_);
    }
    return rows;
  }

  void Apply(const std::vector<Row>& gradients) {
    std::vector<float> packed;
    for (Row row : gradients) {
      row.resize(8);
      packed.insert(packed.end(), row.begin(), row.end());
    }
    ApplyInput input;
    input.stacks.push_back({0, packed, {}});
    engine_.Apply(batch_, input);
  }

 private:
  const TestShape shape_;
  const int columns_;
  TestEngine engine_;
  std::shared_ptr<const Batch> batch_;
};

// Rows given by the rules of the file, looked up one table at a time.
TEST(Golden, TensorFlowInitializersAndLookup) {
  const json golden = ReadGolden("tf/08_initializers_and_lookup.json");
  const auto find = [&](const std::string& name) {
    for (const json& c : golden["cases"]) {
      if (c["name"] == name) return c;
    }
    ADD_FAILURE() << name;
    return json();
  };
  // `samples` bags; id k < ids goes to sample k mod samples. Checks that every column of every
  // sample is value_of(sample).
  const auto check = [](const std::string& initializer, int dim, int samples, int ids,
                        const auto& value_of) {
    const TestShape shape{1, (ids + 7) / 8 * 8, samples};
    const int width = (dim + 7) / 8 * 8;
    StackSpec stack = OneTableStack(shape, width, dim, testing::CompleteOptimizer("sgd {}"));
    ASSERT_TRUE(
        google::protobuf::TextFormat::ParseFromString(initializer, &stack.tables[0].initializer));
    TestEngine engine({stack}, shape, 0, 1);
    std::vector<TestEntry> entries;
    for (int sample = 0; sample < samples; ++sample) {
      for (int k = sample; k < ids; k += samples) entries.push_back({sample, 0, k, 1.0f});
    }
    TestBatch batch(entries, shape, 0, 1, 1, 1);
    const StackSums sums = engine.Gather(*engine.Prepare(batch.view()))[0];
    for (int sample = 0; sample < samples; ++sample) {
      for (int c = 0; c < dim; ++c)
        ASSERT_EQ(sums.sums[sample * width + c], value_of(sample)) << sample;
    }
  };
  const json single = find("single_table_row_id_init");
  const auto row_id = [](int sample) { return static_cast<float>(sample); };
  check("row_id {}", single["table"]["dim"], single["samples"], single["samples"], row_id);
  for (const auto& [row, values] : single["expected_rows"].items()) {
    for (const float value : values) EXPECT_EQ(value, row_id(std::stoi(row)));
  }
  const json many = find("sum_of_64_ids_per_sample_constant_one");
  check("constant { value: 1 }", many["table"]["dim"], many["samples"], 1024,
        [](int) { return 64; });
  const json two = find("two_features_512_ids");
  for (const json& table : two["tables"]) {
    const float expected = two["expected"][table["name"].get<std::string>()];
    check("constant { value: " + table["init"].dump() + " }", 8, two["samples"], 512,
          [&](int) { return expected; });
  }
}

TEST(Golden, TensorFlowSgdBackward) {
  const json golden = ReadGolden("tf/09_sgd_backward.json");
  const std::vector<Row> grad1 = golden["grad1"], grad2 = golden["grad2"];
  const v1::OptimizerConfig sgd = testing::CompleteOptimizer("sgd {} learning_rate: 1");
  // ids 0 to count - 1, id k in sample k mod 16 of each of `features`.
  const auto run = [&](int count, int features, float start, const std::vector<Row>& gradients,
                       const json& expected, int unchanged) {
    OneTable table(sgd, count + 1, 4, 16 * features);
    for (int row = 0; row <= count; ++row) table.Assign(row, Row(4, start));
    std::vector<TestEntry> entries;
    for (int sample = 0; sample < 16 * features; ++sample) {
      for (int k = sample % 16; k < count; k += 16) entries.push_back({sample, 0, k, 1.0f});
    }
    table.Lookup(entries);
    table.Apply(gradients);
    for (const auto& [id, row] : expected.items())
      EXPECT_EQ(table.Read(std::stoi(id)), row.get<Row>());
    EXPECT_EQ(table.Read(unchanged), Row(4, start));
  };
  std::vector<Row> both = grad1;
  both.insert(both.end(), grad2.begin(), grad2.end());
  const json& cases = golden["cases"];
  run(1024, 1, 1, grad1, cases[0]["expected_rows"], 1024);
  run(512, 2, 1, both, cases[1]["expected_rows"], 512);
  run(512, 1, 1, grad1, cases[2]["expected_rows"]["video"], 512);
  run(512, 1, 2, grad2, cases[2]["expected_rows"]["user"], 512);
}

TEST(Golden, TensorFlowLookupAndOptimizers) {
  static const std::map<std::string, std::string> kSlots = {{"parameters", ""},
                                                            {"accumulators", "accumulator"},
                                                            {"momenta", "momentum"},
                                                            {"velocities", "velocity"},
                                                            {"linears", "linear"}};
  const json golden = ReadGolden("tf/10_lookup_and_optimizers.json");
  const json& training = golden["training"];
  for (const auto& [name, hyper] : training["optimizers"].items()) {
    json full = hyper;
    // The file's numbers have AdagradMomentum start from 0, and Adam sum outside of the root.
    if (name == "adagrad_momentum") full["initial_accumulator"] = 0.0;
    if (name == "adam") full["sum_inside_sqrt"] = false;
    for (const std::string table_name : {"video", "user"}) {
      SCOPED_TRACE(name + " " + table_name);
      const json& table_spec = golden["tables"][table_name];
      const int rows = table_spec["vocabulary_size"], columns = table_spec["dim"];
      std::vector<TestEntry> entries;
      std::vector<Row> expected;
      for (const auto& [feature, spec] : golden["features"].items()) {
        if (spec["table"] != table_name) continue;
        for (size_t i = 0; i < spec["rows"].size(); ++i) {
          const std::vector<int> ids = spec["rows"][i];
          const float gain = table_spec["combiner"] == "mean" ? 1.0f / ids.size() : 1.0f;
          for (const int id : ids)
            entries.push_back({static_cast<int>(expected.size()), 0, id, gain});
          expected.push_back(golden["expected_activations"][feature][i]);
        }
      }
      OneTable table(MakeOptimizer(name, full), rows, columns, static_cast<int>(expected.size()));
      for (int row = 0; row < rows; ++row) {
        Row values(columns);
        for (int c = 0; c < columns; ++c) values[c] = static_cast<float>(row * columns + c);
        table.Assign(row, values);
      }
      std::vector<Row> gradients = table.Lookup(entries);
      for (size_t i = 0; i < expected.size(); ++i) {
        for (int c = 0; c < columns; ++c) {
          ExpectNear(gradients[i][c], expected[i][c], 1e-6);
          gradients[i][c] *= 2 / training["global_batch"].get<float>();
        }
      }
      table.Apply(gradients);
      for (const auto& [array, by_row] : training["expected"][table_name][name].items()) {
        for (const auto& [row, values] : by_row.items()) {
          const Row actual = table.Read(std::stoi(row), kSlots.at(array));
          for (int c = 0; c < columns; ++c) ExpectNear(actual[c], values[c], 1e-6, 1);
        }
      }
    }
  }
}

}  // namespace golden_test
}  // namespace emberd::shard
