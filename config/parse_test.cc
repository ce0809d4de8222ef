// The forms in which a config comes: text proto, JSON, files, and errors of syntax.
#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "config/config.h"
#include "google/protobuf/util/message_differencer.h"

namespace emberd::config {
namespace parse_test {

using google::protobuf::util::MessageDifferencer;

constexpr char kText[] = R"pb(
  # a comment
  name: "m"
  tables { name: "a" vocabulary_size: 100 embedding_dim: 8 combiner: SUM }
  features { name: "f" table: "a" batch_size: 32 }
  optimizer {
    learning_rate: 0.25
    sgd {}
  }
)pb";

constexpr char kJson[] = R"(
  # a comment, then JSON
  {
    "name": "m",
    "tables": [{"name": "a", "vocabulary_size": 100, "embeddingDim": 8, "combiner": "SUM"}],
    "features": [{"name": "f", "table": "a", "batch_size": "32"}],
    "optimizer": {"learning_rate": 0.25, "sgd": {}}
  })";

std::string ErrorOf(absl::string_view text) {
  const auto model = ParseModel(text);
  EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(model.status().message());
}

TEST(ParseModel, TextAndJsonSayTheSame) {
  const auto text = ParseModel(kText);
  const auto json = ParseModel(kJson);
  ASSERT_TRUE(text.ok()) << text.status();
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_TRUE(MessageDifferencer::Equals(*text, *json));
  EXPECT_EQ(ModelFingerprint(*text), ModelFingerprint(*json));
}

// As editors of Windows put one before UTF-8.
TEST(ParseModel, AByteOrderMarkIsNoPartOfTheText) {
  for (const char* text : {kText, kJson}) {
    const auto marked = ParseModel(std::string("\xEF\xBB\xBF") + text);
    ASSERT_TRUE(marked.ok()) << marked.status();
    EXPECT_EQ(ModelFingerprint(*marked), ModelFingerprint(*ParseModel(text)));
  }
  EXPECT_TRUE(IsJson("\xEF\xBB\xBF{}"));
  EXPECT_THAT(ErrorOf("\xEF\xBB\xBFname: 1"), testing::StartsWith("line 1, column 7: "));
}

struct BadSyntax {
  const char* text;
  const char* error;  // start of the message
};

TEST(ParseModel, ErrorsOfTextGiveLineAndColumn) {
  const BadSyntax cases[] = {
      {"name: 'm'\n  bogus: 1",
       "line 2, column 8: there is no field \"bogus\" in ModelConfig; known fields: name, "},
      {"name: 'm'\nname: 'n'", "line 2, column 5: Non-repeated field \"name\" is specified mult"},
      {"tables { embedding_dim: 1.5 }", "line 1, column 25: Expected integer"},
      {"tables { embedding_dim: 'x' }", "line 1, column 25: Expected integer"},
      {"tables { embedding_dim: 3000000000 }", "line 1, column 25: Integer out of range"},
      {"seed: -1", "line 1, column 7: Expected integer"},
      {"tables { combiner: AVERAGE }",
       "line 1, column 28: combiner: AVERAGE is not allowed; known values: MEAN, SUM, SQRTN"},
      {"optimizer { adam {} sgd {} }", "line 1, column 25: Field \"sgd\" is specified along with"},
      {"tables {", "line 1, column 9: "},
      {"\377\376", "line 1, column "},
  };
  for (const BadSyntax& bad : cases) {
    EXPECT_THAT(ErrorOf(bad.text), testing::StartsWith(bad.error)) << bad.text;
  }
}

TEST(ParseModel, ErrorsOfJsonGiveTheField) {
  const BadSyntax cases[] = {
      {"tables { vocab: 5 }",
       "line 1, column 15: there is no field \"vocab\" in TableConfig; did you mean "
       "\"vocabulary_size\"? Known fields: name, vocabulary_size, embedding_dim, "},
      {"tables { combiner: MEEN }",
       "line 1, column 25: combiner: MEEN is not allowed; did you mean \"MEAN\"? Known values: "
       "MEAN, SUM, SQRTN"},
      {R"({"tables": [{"combiner": "MEEN"}]})",
       "tables[0].combiner: \"MEEN\" is not allowed; did you mean \"MEAN\"? Known values: MEAN, "
       "SUM, SQRTN"},
      {R"({"tabels": []})", "tabels: unknown field; did you mean \"tables\"? Known fields: name, "},
      {"name: m\ntables:\n  - name: t\n", "this looks like YAML, which emberd cannot read"},
      {"---\nname: m\n", "this looks like YAML, which emberd cannot read"},
      {R"({"bogus": 1})", "bogus: unknown field"},
      {R"({"tables": [{}, {"optimizer": {"foo": {}}}]})", "tables[1].optimizer.foo: unknown field"},
      {R"({"tables": [{"embedding_dim": 1.5}]})", "tables[0].embedding_dim: invalid value 1.5"},
      {R"({"tables": [{"embedding_dim": 3000000000}]})", "tables[0].embedding_dim: invalid value"},
      {R"({"name": 5})", "name: invalid value 5"},
      {R"({"seed": -1})", "seed: invalid value -1"},
      {R"({"tables": [{"combiner": "AVERAGE"}]})",
       "tables[0].combiner: \"AVERAGE\" is not allowed; known values: MEAN, SUM, SQRTN"},
      {R"({"plan": []})", "plan: "},
      {R"({"optimizer": {"adam": {}, "sgd": {}}})", "optimizer: invalid value oneof field 'kind'"},
      {R"({"name": "m", "name": "m"})", "name: is given more than once"},
      {"{\"name\": \"m\",\n}", "JSON parse error at line 2, column 1"},
      {"# comment\n{\"name\": }", "JSON parse error at line 2, column 10"},
  };
  for (const BadSyntax& bad : cases) {
    EXPECT_THAT(ErrorOf(bad.text), testing::StartsWith(bad.error)) << bad.text;
  }
}

TEST(ParseModel, AnEmptyTextIsAnEmptyTextProto) {
  for (const char* empty : {"", " \n\t", "# only a comment"}) {
    EXPECT_THAT(ErrorOf(empty), testing::StartsWith("name: \"\" is not allowed"));
  }
}

TEST(ParseModel, DeepNestingIsAnError) {
  std::string json = "{\"tables\": ";
  for (int i = 0; i < 200000; ++i) json += "{\"optimizer\": ";
  EXPECT_FALSE(ParseModel(json).ok());
  std::string text;
  for (int i = 0; i < 100000; ++i) text += "tables { ";
  EXPECT_FALSE(ParseModel(text).ok());
}

struct JsonSyntax {
  const char* json;
  const char* error;  // the whole message
};

// Protobuf would take the second value, drop the null and flatten the list.
TEST(ParseModel, RefusesWhatProtobufsJsonReaderWouldDropInSilence) {
  const JsonSyntax cases[] = {
      {R"({"a": 1, "b": 2, "a": 3})", "a: is given more than once"},
      {R"({"t": [{}, {"x": {"b": 1, "b": 1}}]})", "t[1].x.b: is given more than once"},
      {R"({"batch_size": 1, "batchSize": 1})", "batchSize: is given more than once"},
      {R"({"t": [1, null]})", "t[1]: null is not allowed in a list"},
      {R"({"t": [[1]]})", "t[0]: a list is not allowed in a list"},
  };
  for (const JsonSyntax& bad : cases) EXPECT_EQ(ErrorOf(bad.json), bad.error);
}

TEST(ParseModel, TakesStrictJsonOnly) {
  EXPECT_THAT(ErrorOf("{\n  \"a\": ]\n}"),
              testing::StartsWith("JSON parse error at line 2, column 8"));
  for (const char* bad : {"{", "{\"a\"}", "{\"a\": 1,}", "{'a': 1}", "{\"a\": 1} x",
                          "{\"a\": [1 2]}", "{\"a\": \"\377\"}", "{\"a\": nan}", "{\"a\": \001}"}) {
    EXPECT_THAT(ErrorOf(bad), testing::StartsWith("JSON parse error at line 1, column ")) << bad;
  }
  // What is good JSON is refused for its fields alone.
  for (const char* good : {R"({"a": 1, "b": [1, 2.5, "x", true, {"a": null}], "c": []})",
                           R"({"a": [{"a": 1}, {"a": 1}]})"}) {
    EXPECT_THAT(ErrorOf(good), testing::HasSubstr(": unknown field")) << good;
  }
  EXPECT_TRUE(ParseModel(R"({
    "name": "m", "seed": null, "plan": null, "features": [{"name": "f", "table": "t"}],
    "tables": [{"name": "t", "vocabulary_size": 1, "embedding_dim": 1, "optimizer": null}]
  })")
                  .ok());
}

class LoadTest : public testing::Test {
 protected:
  LoadTest() : path_(testing::TempDir() + "/emberd_config_" + std::to_string(getpid())) {}
  ~LoadTest() override { std::filesystem::remove(path_); }
  void Write(absl::string_view text) { std::ofstream(path_) << text; }
  const std::string path_;
};

TEST_F(LoadTest, ReadsAFile) {
  Write(kJson);
  const auto model = LoadModel(path_);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->name(), "m");
}

TEST_F(LoadTest, ErrorsBeginWithThePath) {
  Write("shards { address: 'x' }");
  const auto cluster = LoadCluster(path_);
  EXPECT_EQ(cluster.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(cluster.status().message()),
              testing::StartsWith(path_ + ": shards[0].address: \"x\" is not allowed"));
}

TEST_F(LoadTest, AnEmptyFileIsAnEmptyConfig) {
  Write("");
  EXPECT_EQ(LoadCluster(path_).status().message(),
            path_ + ": shards: empty; at least one is needed");
}

TEST_F(LoadTest, AMissingFileIsNotFound) {
  const auto model = LoadModel(path_);
  EXPECT_EQ(model.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(model.status().message(), path_ + ": No such file or directory");
}

// Would catch: a process that its service manager does not start again (exit status 2), though its
// description is right and only the disk fails; and a description that is cut where reading fails.
TEST(Load, AFailureOfTheMachineIsNoWrongPath) {
  const auto model = LoadModel("/proc/self/mem");  // nothing is at address 0
  EXPECT_EQ(model.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(model.status().message()),
              testing::StartsWith("/proc/self/mem: Input/output error; "));
}

TEST(Load, ADirectoryIsAnError) {
  EXPECT_EQ(LoadModel(testing::TempDir()).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace parse_test
}  // namespace emberd::config
