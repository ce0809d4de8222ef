#include "config/optimizer_checks.h"

#include <string>

#include <gtest/gtest.h>

#include "google/protobuf/text_format.h"
#include "google/protobuf/util/message_differencer.h"

namespace emberd::config {
namespace {

using google::protobuf::util::MessageDifferencer;

v1::OptimizerConfig Optimizer(const std::string& text) {
  v1::OptimizerConfig optimizer;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &optimizer)) << text;
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
};

TEST(CompleteOptimizer, WritesTheDefaultsOfTheProtoFile) {
  for (const Defaults& row : kDefaults) {
    v1::OptimizerConfig optimizer = Optimizer(row.given);
    CompleteOptimizer(&optimizer);
    const v1::OptimizerConfig expected =
        Optimizer(std::string(row.complete) +
                  " learning_rate: 0.01 weight_decay_factor: 0 "
                  "multiply_weight_decay_factor_by_learning_rate: false");
    EXPECT_TRUE(MessageDifferencer::Equals(optimizer, expected))
        << optimizer.ShortDebugString() << "\nexpected " << expected.ShortDebugString();
  }
}

TEST(CheckOptimizer, BoundsMayBeEqualOrOneSided) {
  for (const char* good : {"clip_gradient_min: 1 clip_gradient_max: 1", "clip_gradient_min: 5",
                           "clip_weight_max: -5", "clip_weight_min: -1 clip_weight_max: 1"}) {
    EXPECT_TRUE(CheckOptimizer(Optimizer(good), "optimizer").ok()) << good;
  }
}

TEST(CheckOptimizer, NamesTheFieldFromTheGivenPath) {
  const v1::OptimizerConfig inverted = Optimizer("clip_weight_min: 1 clip_weight_max: 0.5");
  EXPECT_EQ(CheckOptimizer(inverted, "tables[3].optimizer").message(),
            "tables[3].optimizer.clip_weight_min: 1 is not allowed; it must be <= "
            "clip_weight_max = 0.5");
  EXPECT_EQ(CheckOptimizer(inverted, "").message(),
            "clip_weight_min: 1 is not allowed; it must be <= clip_weight_max = 0.5");
}

}  // namespace
}  // namespace emberd::config
