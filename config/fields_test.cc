#include "config/fields.h"

#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "emberd/v1/model.pb.h"

namespace emberd::config {
namespace fields_test {

TEST(FieldPath, JoinsNamesAndIndices) {
  EXPECT_EQ(FieldPath("", "name"), "name");
  EXPECT_EQ(FieldPath("", "tables", 0), "tables[0]");
  EXPECT_EQ(FieldPath("tables[2]", "optimizer"), "tables[2].optimizer");
}

TEST(ValueText, IsOneLineOfTextProto) {
  v1::TableConfig table;
  table.set_vocabulary_size(int64_t{1} << 40);
  table.set_name("a\"b\n");
  table.set_combiner(v1::SQRTN);
  table.mutable_optimizer()->set_learning_rate(0.1f);
  const auto text = [&](const char* field) {
    return ValueText(table, *table.GetDescriptor()->FindFieldByName(field));
  };
  EXPECT_EQ(text("vocabulary_size"), "1099511627776");
  EXPECT_EQ(text("name"), R"("a\"b\n")");
  EXPECT_EQ(text("combiner"), "SQRTN");
  EXPECT_EQ(text("optimizer"), "{learning_rate: 0.1}");
}

// A megabyte of bad name must not become a megabyte of error message.
TEST(ValueText, IsShort) {
  v1::TableConfig table;
  table.set_name(std::string(1 << 20, '\377'));
  EXPECT_LT(ValueText(table, *table.GetDescriptor()->FindFieldByName("name")).size(), 100u);
  EXPECT_LT(QuotedText(table.name()).size(), 400u);
}

// A newer client's setting must not be ignored in silence.
TEST(CheckFields, RefusesFieldsOfALaterVersion) {
  v1::ModelConfig model;
  model.set_name("m");
  model.add_tables()->set_name("t");
  auto* initializer = model.mutable_tables(0)->mutable_initializer();
  initializer->GetReflection()->MutableUnknownFields(initializer)->AddVarint(77, 1);
  EXPECT_EQ(CheckFields(model.tables(0).initializer(), "tables[0].initializer").message(),
            "tables[0].initializer: field number 77 is not known to this version of emberd");
  v1::ModelConfig root;
  root.GetReflection()->MutableUnknownFields(&root)->AddVarint(9, 1);
  EXPECT_EQ(CheckFields(root).message(),
            "ModelConfig: field number 9 is not known to this version of emberd");
}

TEST(CheckFields, StopsAtTheFirstFaultInTheOrderOfTheProtoFile) {
  v1::TableConfig table;
  table.set_name("t");
  table.set_embedding_dim(-1);
  table.mutable_optimizer()->set_learning_rate(-1);
  EXPECT_EQ(CheckFields(table).message(),
            "vocabulary_size: 0 is not allowed; it must be in [1, 1099511627776]");
  table.set_vocabulary_size(1);
  EXPECT_EQ(CheckFields(table).message(),
            "embedding_dim: -1 is not allowed; it must be in [1, 8192]");
  table.set_embedding_dim(1);
  EXPECT_EQ(CheckFields(table).message(),
            "optimizer.learning_rate: -1 is not allowed; it must be >= 0");
}

TEST(FillFields, WritesDefaultsOfDoubleFieldsToTheLastBit) {
  v1::OptimizerConfig optimizer;
  optimizer.mutable_adam();
  FillFields(&optimizer);
  EXPECT_EQ(optimizer.adam().beta1(), 0.9);
  EXPECT_EQ(optimizer.adam().beta2(), 0.999);
}

TEST(FillFields, ClearsTheSignOfZeroWithAndWithoutPresence) {
  v1::TableConfig table;
  table.mutable_initializer()->mutable_constant()->set_value(-0.0f);
  table.mutable_optimizer()->set_clip_weight_min(-0.0f);
  table.mutable_optimizer()->mutable_adam()->set_beta1(-0.0);
  FillFields(&table);
  EXPECT_FALSE(std::signbit(table.optimizer().adam().beta1()));
  EXPECT_FALSE(std::signbit(table.initializer().constant().value()));
  EXPECT_TRUE(table.optimizer().has_clip_weight_min());
  EXPECT_FALSE(std::signbit(table.optimizer().clip_weight_min()));
  EXPECT_FALSE(table.optimizer().has_clip_weight_max());
}

TEST(ToFloat, RoundsAsAConfigDoes) {
  constexpr float kMax = std::numeric_limits<float>::max();
  EXPECT_EQ(ToFloat(0.1), 0.1f);
  EXPECT_EQ(ToFloat(kMax), kMax);
  EXPECT_EQ(ToFloat(3.4028235e38), kMax);  // above FLT_MAX, and the text that FLT_MAX is printed as
  EXPECT_EQ(ToFloat(-3.4028235e38), -kMax);
  EXPECT_EQ(ToFloat(3.4029e38), std::nullopt);
  EXPECT_EQ(ToFloat(-1e300), std::nullopt);
  EXPECT_EQ(ToFloat(INFINITY), INFINITY);
  EXPECT_TRUE(std::isnan(*ToFloat(NAN)));
}

TEST(ToFloat, HasNoNegativeZero) {
  for (const double value : {-0.0, -1e-60}) {
    EXPECT_EQ(ToFloat(value), 0);
    EXPECT_FALSE(std::signbit(*ToFloat(value))) << value;
  }
}

TEST(NumberText, TellsAnyTwoNumbersApart) {
  EXPECT_EQ(NumberText(0.1 + 0.2), "0.30000000000000004");
  EXPECT_EQ(NumberText(0.3), "0.3");
  EXPECT_EQ(NumberText(100000), "100000");
  EXPECT_EQ(NumberText(1e300), "1e+300");
}

}  // namespace fields_test
}  // namespace emberd::config
