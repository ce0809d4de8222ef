#include "config/optimizers.h"

#include <cmath>
#include <sstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "google/protobuf/text_format.h"
#include "google/protobuf/util/message_differencer.h"

namespace emberd::config {
namespace optimizers_test {

using google::protobuf::util::MessageDifferencer;

v1::OptimizerConfig Parsed(const std::string& text) {
  v1::OptimizerConfig optimizer;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &optimizer)) << text;
  return optimizer;
}

v1::OptimizerConfig Completed(const std::string& text) {
  v1::OptimizerConfig optimizer = Parsed(text);
  CompleteOptimizer(&optimizer);
  return optimizer;
}

struct Defaults {
  const char* given;
  const char* complete;  // as model.proto states it
};

const Defaults kDefaults[] = {
    {"", "adagrad { initial_accumulator: 0.1 }"},
    {"sgd {}", "sgd {}"},
    {"adagrad {}", "adagrad { initial_accumulator: 0.1 }"},
    {"rowwise_adagrad {}", "rowwise_adagrad { initial_accumulator: 0 epsilon: 1e-8 }"},
    {"momentum {}", "momentum { momentum: 0.9 }"},
    {"adagrad_momentum {}",
     "adagrad_momentum { momentum: 0.9 beta2: 1 epsilon: 1e-10 exponent: 2 "
     "initial_accumulator: 0.1 initial_momentum: 0 }"},
    {"adam {}", "adam { beta1: 0.9 beta2: 0.999 epsilon: 1e-7 sum_inside_sqrt: true }"},
    {"adam { bias_correction: true }",
     "adam { beta1: 0.9 beta2: 0.999 epsilon: 1e-8 bias_correction: true sum_inside_sqrt: false }"},
    {"adam { bias_correction: true epsilon: 0.5 }",
     "adam { beta1: 0.9 beta2: 0.999 epsilon: 0.5 bias_correction: true sum_inside_sqrt: false }"},
    {"adamw {}", "adamw { beta1: 0.9 beta2: 0.999 epsilon: 1e-8 weight_decay: 0.01 }"},
    {"ftrl {}",
     "ftrl { learning_rate_power: -0.5 l1: 0 l2: 0 beta: 0 initial_accumulator: 0.1 "
     "initial_linear: 0 }"},
    {"laprop {}", "laprop { beta1: 0.9 beta2: 0.95 epsilon: 1e-30 }"},
    {"f2a {}", "f2a { rho: 0.5 initial_accumulator: 0.1 l1: 0 l2: 0 max_lr_multiplier: 1e6 }"},
    {"rmsprop {}", "rmsprop { decay: 0.9 momentum: 0 epsilon: 1e-7 }"},
    {"none {}", "none {}"},
    {"custom { expression: 'w = g' slots { name: 'a' } hyper_parameters { name: 'k' value: -0 } }",
     "custom { expression: 'w = g' slots { name: 'a' } hyper_parameters { name: 'k' } }"},
};

TEST(CompleteOptimizer, WritesTheDefaultsOfTheProtoFile) {
  for (const Defaults& row : kDefaults) {
    v1::OptimizerConfig optimizer = Parsed(row.given);
    CompleteOptimizer(&optimizer);
    const v1::OptimizerConfig expected =
        Parsed(std::string(row.complete) +
               " learning_rate: 0.01 weight_decay_factor: 0 "
               "multiply_weight_decay_factor_by_learning_rate: false");
    EXPECT_TRUE(MessageDifferencer::Equals(optimizer, expected))
        << optimizer.ShortDebugString() << "\nexpected " << expected.ShortDebugString();
  }
}

TEST(CheckOptimizer, BoundsMayBeEqualOrOneSided) {
  for (const char* good : {"clip_gradient_min: 1 clip_gradient_max: 1", "clip_gradient_min: 5",
                           "clip_weight_max: -5", "clip_weight_min: -1 clip_weight_max: 1"}) {
    EXPECT_TRUE(CheckOptimizer(Parsed(good), "optimizer").ok()) << good;
  }
}

TEST(CheckOptimizer, NamesTheFieldFromTheGivenPath) {
  const v1::OptimizerConfig inverted = Parsed("clip_weight_min: 1 clip_weight_max: 0.5");
  EXPECT_EQ(CheckOptimizer(inverted, "tables[3].optimizer").message(),
            "tables[3].optimizer.clip_weight_min: 1 is not allowed; it must be <= "
            "clip_weight_max = 0.5");
  EXPECT_EQ(CheckOptimizer(inverted, "").message(),
            "clip_weight_min: 1 is not allowed; it must be <= clip_weight_max = 0.5");
}

struct Facts {
  const char* text;
  const char* name;
  const char* slots;  // "name=initial", "/row" if there is one per row
  bool needs_step;
};

// As model.proto states them, in storage order.
const Facts kFacts[] = {
    {"sgd {}", "sgd", "", false},
    {"adagrad {}", "adagrad", "accumulator=0.1 ", false},
    {"rowwise_adagrad { initial_accumulator: 2 }", "rowwise_adagrad", "accumulator=2/row ", false},
    {"momentum {}", "momentum", "momentum=0 ", false},
    {"adagrad_momentum { initial_momentum: 0.5 }", "adagrad_momentum",
     "accumulator=0.1 momentum=0.5 ", false},
    {"adam {}", "adam", "momentum=0 velocity=0 ", false},
    {"adam { bias_correction: true }", "adam", "momentum=0 velocity=0 ", true},
    {"adamw {}", "adamw", "momentum=0 velocity=0 ", true},
    {"ftrl { initial_accumulator: 3 initial_linear: -1 }", "ftrl", "accumulator=3 linear=-1 ",
     false},
    {"laprop {}", "laprop", "mu=0 nu=0 ", true},
    {"f2a {}", "f2a", "accumulator=0.1 local_step=0/row ", true},
    {"rmsprop {}", "rmsprop", "velocity=0 momentum=0 ", false},
    {"none {}", "none", "", false},
    {"custom { expression: 'w = g' }", "custom", "", false},
    {"custom { expression: 'w = g / step' slots { name: 'b' } slots { name: 'a' initial_value: -2 "
     "} }",
     "custom", "b=0 a=-2 ", true},
};

TEST(Optimizers, AreWhatTheProtoFileSays) {
  for (const Facts& facts : kFacts) {
    const v1::OptimizerConfig optimizer = Completed(facts.text);
    EXPECT_EQ(OptimizerName(optimizer), facts.name);
    EXPECT_EQ(OptimizerNeedsStep(optimizer), facts.needs_step) << facts.text;
    std::ostringstream slots;
    for (const SlotInfo& slot : OptimizerSlots(optimizer)) {
      slots << slot.name << "=" << slot.initial_value << (slot.one_per_row ? "/row " : " ");
    }
    EXPECT_EQ(slots.str(), facts.slots) << facts.text;
  }
}

TEST(Optimizers, NoneSetHasNoNameAndNoSlots) {
  EXPECT_EQ(OptimizerName(v1::OptimizerConfig()), "");
  EXPECT_TRUE(OptimizerSlots(v1::OptimizerConfig()).empty());
}

struct Override {
  const char* optimizer;
  const char* name;
  double value;
  const char* error;  // start of the message; empty: allowed
};

const Override kOverrides[] = {
    {"sgd {}", "learning_rate", 0.5, ""},
    {"sgd {}", "learning_rate", 0, ""},
    {"sgd {}", "weight_decay_factor", 0.5, ""},
    {"sgd {}", "clip_gradient_min", -2, ""},
    {"sgd {}", "clip_gradient_max", 3.4028235e38, ""},  // FLT_MAX as it is printed; a bit above it
    {"sgd {}", "clip_gradient_min", -3.4028235e38, ""},
    {"sgd {}", "learning_rate", -1e-60, ""},  // rounds to 0
    {"clip_gradient_max: 0", "clip_gradient_min", -1e-60, ""},
    {"adam {}", "beta1", 0.5, ""},
    {"adamw {}", "weight_decay", 0.5, ""},
    {"ftrl {}", "learning_rate_power", -1, ""},
    {"ftrl { initial_accumulator: 1e10 }", "learning_rate_power", -3, ""},
    {"ftrl { initial_accumulator: 1e10 }", "learning_rate_power", -5,
     "ftrl.learning_rate_power: -5 is not allowed; it must be at least -3.853"},
    // The bound that is named is allowed.
    {"ftrl { initial_accumulator: 1e5 }", "learning_rate_power", -7.707,
     "ftrl.learning_rate_power: -7.707 is not allowed; it must be at least -7.706"},
    {"ftrl { initial_accumulator: 1e5 }", "learning_rate_power", -7.706, ""},
    {"ftrl { initial_accumulator: 1e-10 }", "learning_rate_power", -5, ""},
    {"ftrl {}", "l1", 1, ""},
    {"f2a {}", "max_lr_multiplier", 10, ""},
    {"custom { expression: 'w = k' hyper_parameters { name: 'k' } }", "k", -2.5, ""},
    {"custom { expression: 'w = k' hyper_parameters { name: 'k' } }", "learning_rate", 2, ""},
    {"custom { expression: 'w = k' hyper_parameters { name: 'k' } }", "k", 1e300,
     "k: 1e+300 is not allowed; it must be a float32"},
    {"custom { expression: 'w = k' hyper_parameters { name: 'k' } }", "k", NAN,
     "k: nan is not allowed; it must be finite"},
    {"custom { expression: 'w = k' hyper_parameters { name: 'k' } }", "value", 1,
     "hyper-parameter \"value\": custom has no hyper-parameter of this name"},
    {"sgd {}", "learning_rate", -1, "learning_rate: -1 is not allowed; it must be >= 0"},
    {"sgd {}", "learning_rate", NAN, "learning_rate: nan is not allowed; it must be >= 0"},
    {"sgd {}", "learning_rate", INFINITY, "learning_rate: inf is not allowed"},
    {"adam {}", "beta1", 1, "beta1: 1 is not allowed; it must be in [0, 1)"},
    {"adam {}", "beta2", 1.0000000001, "beta2: 1.0000000001 is not allowed; it must be in [0, 1)"},
    {"adam {}", "beta2", NAN, "beta2: nan is not allowed; it must be in [0, 1)"},
    {"adamw {}", "beta1", -1e-60, "beta1: -1e-60 is not allowed; it must be in [0, 1)"},
    {"adagrad_momentum {}", "beta2", 0, "beta2: 0 is not allowed; it must be in (0, 1]"},
    {"sgd {}", "learning_rate", 1e300,
     "learning_rate: 1e+300 is not allowed; it must be a float32"},
    {"sgd {}", "clip_weight_min", -1e300, "clip_weight_min: -1e+300 is not allowed; it must be a"},
    {"adamw {}", "epsilon", 1e-60, "epsilon: 1e-60 is not allowed; it must be > 0"},
    {"adam {}", "epsilon", 0, "epsilon: 0 is not allowed; it must be > 0"},
    {"clip_gradient_max: 1", "clip_gradient_min", 2, "clip_gradient_min: 2 is not allowed"},
    {"clip_weight_min: 1", "clip_weight_max", 0, "clip_weight_min: 1 is not allowed; it must be"},
    {"sgd {}", "beta1", 0.5, "hyper-parameter \"beta1\": sgd has no hyper-parameter of this name"},
    {"adam {}", "bias_correction", 1, "hyper-parameter \"bias_correction\": adam has no hyper"},
    {"sgd {}", "multiply_weight_decay_factor_by_learning_rate", 1, "hyper-parameter \"multiply"},
    {"adagrad {}", "initial_accumulator", 1, "hyper-parameter \"initial_accumulator\": adagrad"},
    {"adagrad {}", "adagrad", 1, "hyper-parameter \"adagrad\": adagrad has no hyper"},
    {"adagrad {}", "", 1, "hyper-parameter \"\": adagrad has no hyper"},
    {"adagrad {}", "\n\377", 1, "hyper-parameter \"\\n\\377\": adagrad has no hyper"},
};

TEST(SetHyperparameters, SetsWhatMayChangePerStepAndNothingElse) {
  for (const Override& row : kOverrides) {
    v1::OptimizerConfig optimizer = Completed(row.optimizer);
    const v1::OptimizerConfig before = optimizer;
    const absl::Status status = SetHyperparameters(&optimizer, {{row.name, row.value}});
    const std::string what = std::string(row.optimizer) + " " + row.name;
    if (*row.error == '\0') {
      EXPECT_TRUE(status.ok()) << what << ": " << status;
      EXPECT_FALSE(MessageDifferencer::Equals(before, optimizer)) << what;
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << what;
      EXPECT_THAT(std::string(status.message()), testing::StartsWith(row.error)) << what;
      EXPECT_TRUE(MessageDifferencer::Equals(before, optimizer)) << what;
    }
  }
}

TEST(SetHyperparameters, WritesTheNamedFields) {
  v1::OptimizerConfig optimizer = Completed("momentum {}");
  ASSERT_TRUE(SetHyperparameters(&optimizer, {{"momentum", 0.25}, {"learning_rate", 3}}).ok());
  EXPECT_EQ(optimizer.momentum().momentum(), 0.25f);
  EXPECT_EQ(optimizer.learning_rate(), 3);
  ASSERT_TRUE(SetHyperparameters(&optimizer, {}).ok());
  EXPECT_EQ(optimizer.momentum().momentum(), 0.25f);
}

// The values are the same as if they stood in the config, whatever the types of the fields.
TEST(SetHyperparameters, WritesWhatAConfigWouldHold) {
  v1::OptimizerConfig optimizer = Completed("adam {}");
  const auto set = SetHyperparameters(
      &optimizer, {{"learning_rate", 0.1}, {"beta1", -0.0}, {"beta2", 0.99}, {"epsilon", 0.3}});
  ASSERT_TRUE(set.ok()) << set;
  EXPECT_TRUE(MessageDifferencer::Equals(
      optimizer, Completed("learning_rate: 0.1 adam { beta1: 0 beta2: 0.99 epsilon: 0.3 }")));
  EXPECT_FALSE(std::signbit(optimizer.adam().beta1()));
  ASSERT_TRUE(SetHyperparameters(&optimizer, {{"learning_rate", -1e-60}}).ok());
  EXPECT_FALSE(std::signbit(optimizer.learning_rate()));
}

// Catches a check between one value and the next: in either direction, one of two bounds passes the
// configured other.
TEST(SetHyperparameters, ChecksTheValuesTogether) {
  for (const double shift : {10, -10}) {
    v1::OptimizerConfig optimizer = Completed(
        "clip_gradient_min: -1 clip_gradient_max: 1 clip_weight_min: -1 clip_weight_max: 1");
    const auto set = SetHyperparameters(&optimizer, {{"clip_gradient_min", shift - 1},
                                                     {"clip_gradient_max", shift + 1},
                                                     {"clip_weight_min", shift - 1},
                                                     {"clip_weight_max", shift + 1}});
    EXPECT_TRUE(set.ok()) << set;
    EXPECT_EQ(optimizer.clip_gradient_min(), shift - 1);
    EXPECT_EQ(optimizer.clip_weight_max(), shift + 1);
  }
}

TEST(SetHyperparameters, SetsAllOrNone) {
  v1::OptimizerConfig optimizer = Completed("learning_rate: 1 clip_gradient_max: 1 sgd {}");
  const v1::OptimizerConfig before = optimizer;
  EXPECT_EQ(SetHyperparameters(&optimizer, {{"clip_gradient_min", 3}, {"clip_gradient_max", 2}})
                .message(),
            "clip_gradient_min: 3 is not allowed; it must be <= clip_gradient_max = 2");
  EXPECT_EQ(SetHyperparameters(&optimizer, {{"weight_decay_factor", -1}, {"learning_rate", -2}})
                .message(),
            "learning_rate: -2 is not allowed; it must be >= 0");
  EXPECT_FALSE(SetHyperparameters(&optimizer, {{"learning_rate", 2}, {"rate", 2}}).ok());
  EXPECT_TRUE(MessageDifferencer::Equals(before, optimizer));
}

TEST(SetHyperparameter, ReturnsWhatTheFieldHolds) {
  v1::OptimizerConfig adam = Completed("adam {}");
  EXPECT_EQ(*SetHyperparameter(&adam, "learning_rate", 0.1), double{0.1f});
  EXPECT_EQ(*SetHyperparameter(&adam, "beta2", 0.99), 0.99);
  for (const char* name : {"learning_rate", "beta1"}) {
    EXPECT_FALSE(std::signbit(*SetHyperparameter(&adam, name, -0.0))) << name;
  }
  EXPECT_FALSE(std::signbit(*SetHyperparameter(&adam, "learning_rate", -1e-60)));
}

}  // namespace optimizers_test
}  // namespace emberd::config
