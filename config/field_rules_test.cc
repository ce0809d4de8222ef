#include <cmath>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "config/fields.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/model.pb.h"
#include "emberd/v1/plan.pb.h"

namespace emberd::config {
namespace field_rules_test {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

// All message types that can stand inside of `type`, itself included.
void CollectTypes(const Descriptor* type, std::set<const Descriptor*>* types) {
  if (!types->insert(type).second) return;
  for (int i = 0; i < type->field_count(); ++i) {
    if (type->field(i)->message_type() != nullptr) {
      CollectTypes(type->field(i)->message_type(), types);
    }
  }
}

std::set<const Descriptor*> ConfigTypes() {
  std::set<const Descriptor*> types;
  CollectTypes(v1::ModelConfig::descriptor(), &types);
  CollectTypes(v1::ClusterConfig::descriptor(), &types);
  CollectTypes(v1::TokenFile::descriptor(), &types);
  CollectTypes(v1::StackLimit::descriptor(), &types);
  return types;
}

// Catches a field that is added to a .proto file and then checked by nobody.
TEST(FieldRules, EveryNumberAndEnumHasARule) {
  for (const Descriptor* type : ConfigTypes()) {
    for (int i = 0; i < type->field_count(); ++i) {
      const FieldDescriptor& field = *type->field(i);
      const bool is_plain_flag =
          field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL && !field.has_optional_keyword();
      if (field.message_type() != nullptr || is_plain_flag ||
          field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
        continue;
      }
      EXPECT_NE(FindFieldRule(field), nullptr) << field.full_name();
    }
  }
}

// Catches a misspelt row: it would check nothing.
TEST(FieldRules, EveryRuleBelongsToAField) {
  std::set<std::string> fields;
  for (const Descriptor* type : ConfigTypes()) {
    for (int i = 0; i < type->field_count(); ++i) {
      fields.insert(type->name() + "." + type->field(i)->name());
    }
  }
  std::set<std::string> seen;
  for (const FieldRule& rule : FieldRules()) {
    const std::string name(rule.field);
    EXPECT_TRUE(fields.count(name)) << name;
    EXPECT_TRUE(seen.insert(name).second) << name << " has two rules";
  }
}

TEST(FieldRules, DefaultsAreAllowedValues) {
  for (const FieldRule& rule : FieldRules()) {
    EXPECT_TRUE(!rule.default_value || rule.range.Contains(*rule.default_value)) << rule.field;
  }
}

TEST(Range, ContainsItsBoundsUnlessTheyAreExcluded) {
  const Range closed{.min = 1, .max = 3};
  EXPECT_TRUE(closed.Contains(1));
  EXPECT_TRUE(closed.Contains(3));
  EXPECT_FALSE(closed.Contains(std::nextafter(1, 0)));
  EXPECT_FALSE(closed.Contains(std::nextafter(3, 4)));
  const Range open{.min = 1, .max = 3, .min_excluded = true, .max_excluded = true};
  EXPECT_FALSE(open.Contains(1));
  EXPECT_FALSE(open.Contains(3));
  EXPECT_TRUE(open.Contains(2));
}

TEST(Range, NeverContainsWhatIsNotFinite) {
  const Range all;
  EXPECT_TRUE(all.Contains(-1e300));
  EXPECT_FALSE(all.Contains(INFINITY));
  EXPECT_FALSE(all.Contains(-INFINITY));
  EXPECT_FALSE(all.Contains(NAN));
}

TEST(Range, IsWrittenAsPeopleWriteIt) {
  EXPECT_EQ(Range{}.ToString(), "finite");
  EXPECT_EQ((Range{.min = 0}).ToString(), ">= 0");
  EXPECT_EQ((Range{.min = 0, .min_excluded = true}).ToString(), "> 0");
  EXPECT_EQ((Range{.max = -0.5}).ToString(), "<= -0.5");
  EXPECT_EQ((Range{.min = 0, .max = 1, .max_excluded = true}).ToString(), "in [0, 1)");
  EXPECT_EQ((Range{.min = 1, .max = 0x1p40}).ToString(), "in [1, 1099511627776]");
}

TEST(Names, HaveOneSetOfCharacters) {
  EXPECT_TRUE(HasNameCharacters("aZ09_.-"));
  for (const char* bad : {"", " ", "a b", "a/b", "a:b", "\303\244", "a\n", "a\"b"}) {
    EXPECT_FALSE(HasNameCharacters(bad)) << bad;
  }
  for (const char* good : {"a", "user/history/item", "a.b/c"}) {
    EXPECT_TRUE(HasPathCharacters(good)) << good;
  }
  for (const char* bad : {"", "/", "a/", "/a", "a//b", "a/b c"}) {
    EXPECT_FALSE(HasPathCharacters(bad)) << bad;
  }
}

}  // namespace field_rules_test
}  // namespace emberd::config
