// `emberctl explain`, from the command line to what it prints.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/testing/paths.h"
#include "client/emberctl/emberctl.h"
#include "client/emberctl/output.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::emberctl {
namespace explain_test {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// Ids 1, 5, 9, ... of "users" all live in partition 1 of 4.
constexpr char kModel[] = R"(name: "clicks"
tables { name: "users" vocabulary_size: 100 embedding_dim: 6 combiner: SUM
         max_ids_per_partition: 4 max_unique_ids_per_partition: 3 }
tables { name: "words" vocabulary_size: 1000 embedding_dim: 16 storage_dtype: BFLOAT16 }
features { name: "user" table: "users" batch_size: 8 }
features { name: "title.words" table: "words" batch_size: 8 }
optimizer { sgd {} })";
constexpr char kUsers[] = R"("user": {"ids": [1, 5, 9, 13, 17, 21, 25, 29]})";
constexpr char kWords[] = R"("title.words": {"ids": [[7, 7, 2], [], [3], [], [], [], [], [7]],
                                             "weights": [[1, 1, 2], [], 3, [], [], [], [], 4]})";

struct Outcome {
  int code = -1;
  std::string out, err;
};

class ExplainTest : public ::testing::Test {
 protected:
  ExplainTest()
      : folder_(absl::StrCat(::testing::TempDir(), "/explain_test_",
                             ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    model_ = Write("model.textproto", kModel);
  }
  ~ExplainTest() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& content) {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  template <typename T>
  void WriteNpy(const std::string& name, const std::string& type, const std::vector<T>& values,
                const std::string& shape) {
    const std::string header =
        absl::StrCat("{'descr': '", type, "', 'fortran_order': False, 'shape': ", shape, "}");
    std::string content =
        absl::StrCat("\x93NUMPY", std::string{1, 0, static_cast<char>(header.size()), 0}, header);
    content.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    Write(name, content);
  }
  static Outcome Explain(std::vector<std::string> arguments) {
    std::vector<const char*> argv = {"emberctl", "explain"};
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    std::ostringstream out, err;
    Outcome outcome;
    outcome.code = emberctl::Run(static_cast<int>(argv.size()), argv.data(), out, err);
    return {outcome.code, out.str(), err.str()};
  }
  Outcome ExplainJsonBatch(const std::string& batch, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--model", model_, "--batch", Write("batch.json", batch)});
    return Explain(more);
  }

  const std::string folder_;
  std::string model_;
};

TEST_F(ExplainTest, ReportsStacksCountsCutsAndCosts) {
  const Outcome outcome =
      ExplainJsonBatch(absl::StrCat("{", kUsers, ",", kWords, "}"), {"--shards", "2"});
  ASSERT_EQ(outcome.code, kOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("2 tables and 2 features in 2 stacks, on 2 shards x 2 "
                                     "SparseCores = 4 partitions"));
  // Four samples in each slot: 6 columns padded to 8, times 4 bytes. Each slot fills 4 cells of
  // one partition; all 8 ids go to one partition of 4.
  EXPECT_THAT(outcome.out,
              ContainsRegex("users +8 +8 +0 +0 +8 +[0-9]+ +[0-9]+% +128 B +256 B +4.00"));
  // bfloat16 rows of 16 columns: 4 distinct (sample, id) pairs.
  EXPECT_THAT(outcome.out, ContainsRegex("words +8 +4 +1 +0 +3 .* +256 B +128 B"));
  EXPECT_THAT(outcome.out, HasSubstr("stack \"users\", limits 4/3:"));
  EXPECT_THAT(outcome.out, ContainsRegex("0 +0/0 +4/4 ! +0/0 +0/0"));
  EXPECT_THAT(outcome.out, HasSubstr("stack \"users\": 2 of 8 pairs are over a limit; slot 0 sends "
                                     "partition 1 4 of 4 ids, 4 of 3 unique ids"));
  EXPECT_THAT(outcome.out, Not(HasSubstr("stack \"words\": ")));
}

// Covers: verbs/explain.cc
TEST_F(ExplainTest, ShowsTheBuffersOfAProgram) {
  const Outcome outcome =
      ExplainJsonBatch(absl::StrCat("{", kUsers, ",", kWords, "}"), {"--shards", "2"});
  ASSERT_EQ(outcome.code, kOk) << outcome.err;
  // 8 samples of up to 64 ids; 64 mini-batches, 2 slots, 4 partitions padded to 8; 4 rows of 8
  // columns on each SparseCore.
  EXPECT_THAT(outcome.out, ContainsRegex("users +8 +512 +[0-9]+ +1024 +4 +5.1 KiB"));

  const Json programs = Json::parse(
      ExplainJsonBatch(absl::StrCat("{", kUsers, ",", kWords, "}"), {"--shards", "2", "--json"})
          .out)["programs"];
  EXPECT_EQ(programs["stacks"][0]["id_capacity"], 512);
  EXPECT_EQ(programs["stacks"][0]["bytes_per_sparsecore"], (512 * 12 + 1024 * 4) / 2 + 4 * 8 * 4);
  EXPECT_EQ(programs["stacks"][0]["fits"], true);
}

// One id in each of many partitions: each fills a cell, and pads the other seven.
TEST_F(ExplainTest, MarksStacksThatDoNotFitTheirBuffers) {
  model_ = Write("wide.textproto", R"(name: "wide"
      tables { name: "t" vocabulary_size: 4096 embedding_dim: 8 }
      features { name: "f" table: "t" })");
  std::vector<int> ids(128);
  for (int i = 0; i < 128; ++i) ids[i] = i;
  const std::string batch = Json{{"f", {{"ids", Json::array({ids})}}}}.dump();
  const Outcome outcome = ExplainJsonBatch(batch, {"--shards", "2"});
  ASSERT_EQ(outcome.code, kOk) << outcome.err;
  EXPECT_THAT(outcome.out, ContainsRegex("t +1 +64 +128 ! "));
}

// Would catch: a report that calls pairs within their limits which the error says no cut can bring
// there.
TEST_F(ExplainTest, SaysNothingOfMinibatchesWhereNoCutHelps) {
  model_ = Write("tight.textproto", R"(name: "m"
      tables { name: "t" vocabulary_size: 64 embedding_dim: 8 max_ids_per_partition: 2
               max_unique_ids_per_partition: 2 combiner: SUM }
      features { name: "f" table: "t" } optimizer { sgd {} })");
  const Outcome outcome =
      ExplainJsonBatch(R"({"f": {"ids": [1, 1, 1, 1]}})", {"--sparsecores", "1"});
  EXPECT_EQ(outcome.code, kRefused);
  EXPECT_THAT(outcome.err, HasSubstr("RESOURCE_EXHAUSTED: table 't'"));
  EXPECT_THAT(outcome.out, HasSubstr("4/1 !"));
  EXPECT_THAT(outcome.out, Not(HasSubstr("within its limits")));
  const Outcome json =
      ExplainJsonBatch(R"({"f": {"ids": [1, 1, 1, 1]}})", {"--sparsecores", "1", "--json"});
  EXPECT_EQ(json.code, kRefused);
  const Json found = Json::parse(json.out);
  EXPECT_EQ(found["stacks"][0]["ids_per_partition"], Json::parse("[[4]]"));
  EXPECT_TRUE(found["num_minibatches"].is_null());
  EXPECT_TRUE(found["split_mask"].is_null());
  EXPECT_TRUE(found["bucket_to_minibatch"].is_null());
  EXPECT_TRUE(found["statistics"]["num_minibatches"].is_null());
}

// Would catch: the number of the batch without cuts, where there are some.
TEST_F(ExplainTest, WritesHowManyMinibatchesThereAre) {
  const Outcome outcome =
      ExplainJsonBatch(absl::StrCat("{", kUsers, ",", kWords, "}"), {"--shards", "2", "--json"});
  ASSERT_EQ(outcome.code, kOk) << outcome.err;
  const Json found = Json::parse(outcome.out);
  EXPECT_GT(found["num_minibatches"], 1);
  EXPECT_EQ(found["num_minibatches"], found["statistics"]["num_minibatches"]);
  EXPECT_EQ(found["num_minibatches"], found["bucket_to_minibatch"].back().get<int>() + 1);
}

TEST_F(ExplainTest, ShowsTheFullestPairsOfLargeClusters) {
  const Outcome outcome =
      ExplainJsonBatch(absl::StrCat("{", kUsers, ",", kWords, "}"), {"--shards", "16"});
  ASSERT_EQ(outcome.code, kOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("the 8 fullest of 64 pairs:"));
  EXPECT_THAT(outcome.out, HasSubstr("1 mini-batch: every pair is within its limits"));
}

// The buffers of both slots, entry by entry: partition 0 of two holds the even ids.
TEST_F(ExplainTest, WritesAllBuffersAsJson) {
  model_ = Write("flat.textproto", R"(name: "flat"
      tables { name: "t" vocabulary_size: 32 embedding_dim: 8 combiner: SUM }
      features { name: "f" table: "t" })");
  const Outcome outcome = ExplainJsonBatch(
      R"({"f": {"ids": [[4, 6, 4], [9]], "weights": [[1, 0.5, 2], 3]}})", {"--json"});
  ASSERT_EQ(outcome.code, kOk) << outcome.err;
  const Json json = Json::parse(outcome.out);
  EXPECT_EQ(json["num_minibatches"], 1);
  EXPECT_EQ(json["split_mask"], "0x0000000000000000");
  EXPECT_EQ(json["statistics"]["stacks"][0]["duplicate_ids"], "1");
  const Json& stack = json["stacks"][0];
  EXPECT_EQ(stack["ids_per_partition"], Json::parse("[[2, 0], [0, 1]]"));
  EXPECT_EQ(stack["unique_ids_per_partition"], Json::parse("[[2, 0], [0, 1]]"));
  EXPECT_EQ(stack["rows_touched"], 3);
  const Json& first = stack["segments"][0];
  EXPECT_EQ(first["row_pointers"], Json::parse("[2, 8]"));
  EXPECT_EQ(first["embedding_ids"][0], 2);
  EXPECT_EQ(first["embedding_ids"][1], 3);
  EXPECT_EQ(first["embedding_ids"][2], 2147483647);
  EXPECT_EQ(first["gains"][0], 3.0f);
  EXPECT_EQ(first["gains"][1], 0.5f);
  EXPECT_EQ(first["gains"][2], "NaN");
  const Json& second = stack["segments"][1];
  EXPECT_EQ(second["row_pointers"], Json::parse("[0, 1]"));
  EXPECT_EQ(second["embedding_ids"], Json::parse("[4]"));
  EXPECT_EQ(second["sample_ids"], Json::parse("[0]"));
}

// TensorFlow's own arrays, of the chip that the batch is of, among all of them.
TEST_F(ExplainTest, WritesTheArraysOfTensorFlow) {
  std::ifstream golden(SourcePath("tests/golden/tf/91_derived_minibatch.json"));
  int compared = 0;
  const Json all = Json::parse(golden);
  for (const Json& c : all["cases"]) {
    SCOPED_TRACE(c["name"].get<std::string>());
    const Json& params = c["params"];
    const int vocabulary = params["table_vocab_size"].get<int>();
    const auto ids_of_case = c["col_ids"].get<std::vector<int64_t>>();
    // Some cases have ids that their tables do not have.
    if (*std::max_element(ids_of_case.begin(), ids_of_case.end()) >= vocabulary) continue;
    const auto limit = [&](const char* name) {
      return absl::StrCat(" ", name, ": ", params[name].get<int>());
    };
    model_ = Write(
        "tf.textproto",
        absl::StrCat(
            "name: 'm' optimizer { sgd {} } features { name: 'f' table: 't' } tables { name: 't' "
            "embedding_dim: 8 combiner: SUM vocabulary_size: ",
            vocabulary, limit("max_ids_per_partition"), limit("max_unique_ids_per_partition"),
            " } plan { rules: TENSORFLOW",
            params["allow_id_dropping"].get<bool>() ? " allow_id_dropping: true" : "",
            params["allow_id_shuffling"].get<bool>() ? " bucket_hash: ID_MODULO" : "", " }"));
    std::vector<std::vector<int64_t>> ids(params["sample_count"].get<int>());
    for (size_t i = 0; i < c["row_ids"].size(); ++i) {
      ids[c["row_ids"][i].get<int>()].push_back(ids_of_case[i]);
    }
    const Outcome outcome =
        ExplainJsonBatch(Json{{"f", {{"ids", ids}}}}.dump(),
                         {"--format", "tensorflow", "--shards", params["num_replica"].dump(),
                          "--sparsecores", params["num_sc_per_chip"].dump()});
    ASSERT_EQ(outcome.code, kOk) << outcome.err;
    ++compared;
    const Json found = Json::parse(outcome.out);
    EXPECT_EQ(std::stoull(found["splits"].get<std::string>(), nullptr, 16),
              c["expected_splits"]["splits"].get<uint64_t>());
    Json expected = c["expected_csr"];
    expected["num_minibatches_per_physical_sparse_core"] = expected["num_minibatches_per_sc"];
    expected.erase("num_minibatches_per_sc");
    expected["sample_count"] = params["sample_count"];
    EXPECT_EQ(found["chips"], Json::array({{{"t", expected}}}));
  }
  EXPECT_EQ(compared, 6);
}

// Would catch a batch that is cut for itself alone: the rows of all replicas are updated at once.
TEST_F(ExplainTest, CutsTheBatchesOfAllReplicasAlike) {
  model_ = Write("tf.textproto", R"(name: "m"
      tables { name: "t" vocabulary_size: 64 embedding_dim: 8 max_ids_per_partition: 2
               max_unique_ids_per_partition: 2 combiner: SUM }
      features { name: "f" table: "t" } optimizer { sgd {} } plan { rules: TENSORFLOW })");
  const std::string few = R"({"f": {"ids": [[0]]}})";
  const std::string many = R"({"f": {"ids": [[0, 16, 32, 48]]}})";
  const auto explain = [&](const std::string& first, const std::string& other) {
    const Outcome outcome = ExplainJsonBatch(first, {"--sparsecores", "1", "--format", "tensorflow",
                                                     "--other", Write("other.json", other)});
    EXPECT_EQ(outcome.code, kOk) << outcome.err;
    return Json::parse(outcome.out);
  };
  const Json one = explain(few, many), other = explain(many, few);
  EXPECT_EQ(one["splits"], "0x0000000000000001");  // in the middle
  EXPECT_EQ(one["splits"], other["splits"]);
  EXPECT_EQ(one["chips"][0], other["chips"][1]);
  EXPECT_EQ(one["chips"][1], other["chips"][0]);
  EXPECT_EQ(one["chips"][0]["t"]["row_pointers"], Json::parse("[1,8,8,8,8,8,8,8,8,8,8,8,8,8,8,8]"));
  EXPECT_EQ(one["chips"][1]["t"]["row_pointers"],
            Json::parse("[2,8,8,8,8,8,8,8,10,16,16,16,16,16,16,16]"));
  const Outcome report =
      ExplainJsonBatch(few, {"--sparsecores", "1", "--other", Write("other.json", many)});
  EXPECT_THAT(report.out,
              HasSubstr("2 mini-batches, the same cuts of the vocabulary for all stacks, "
                        "because\n  the batch of another replica needs them\n"));
  EXPECT_THAT(
      ExplainJsonBatch(few, {"--other", Write("wrong.json", R"({"f": {"ids": [64]}})")}).err,
      HasSubstr("--other 1: "));
  EXPECT_EQ(ExplainJsonBatch(few, {"--format", "xml"}).code, kUsage);
}

// The same batch in every form of file gives the same answer.
TEST_F(ExplainTest, ReadsArraysOfNumpy) {
  const Outcome json = ExplainJsonBatch(absl::StrCat("{", kUsers, ",", kWords, "}"), {"--json"});
  ASSERT_EQ(json.code, kOk) << json.err;
  WriteNpy<int32_t>("user.ids.npy", "<i4", {1, 5, 9, 13, 17, 21, 25, 29}, "(8, 1)");
  WriteNpy<int64_t>("title.words.values.npy", "<i8", {7, 7, 2, 3, 7}, "(5,)");
  WriteNpy<int64_t>("title.words.row_splits.npy", "<i8", {0, 3, 3, 4, 4, 4, 4, 4, 5}, "(9,)");
  WriteNpy<float>("title.words.weights.npy", "<f4", {1, 1, 2, 3, 4}, "(5,)");
  const Outcome folder = Explain({"--json", "--model", model_, "--batch", folder_});
  ASSERT_EQ(folder.code, kOk) << folder.err;
  EXPECT_EQ(folder.out, json.out);
  const Outcome mixed = Explain({"--json", "--model", model_, "--batch", folder_ + "/user.ids.npy",
                                 "--batch", Write("w.json", absl::StrCat("{", kWords, "}"))});
  ASSERT_EQ(mixed.code, kOk) << mixed.err;
  EXPECT_EQ(mixed.out, json.out);
  WriteNpy<float>("title.words.weights.npy", "<f4", {1, 1}, "(2,)");
  EXPECT_THAT(Explain({"--model", model_, "--batch", folder_}).err,
              HasSubstr("feature 'title.words': weights: they must have the shape of the ids"));
  WriteNpy<float>("user.values.npy", "<f4", {1}, "(1,)");
  EXPECT_THAT(Explain({"--model", model_, "--batch", folder_}).err,
              HasSubstr("feature 'user': it needs either ids, or values and row_splits"));
}

TEST_F(ExplainTest, NamesAFileOfNumpyOnce) {
  const std::string path = folder_ + "/user.ids.npy";
  Write("user.ids.npy", "nonsense");
  EXPECT_EQ(Explain({"--model", model_, "--batch", path}).err,
            absl::StrCat("emberctl: INVALID_ARGUMENT: ", path,
                         ": not a usable .npy file: it does not begin with \\x93NUMPY\n"));
  EXPECT_THAT(Explain({"--model", model_, "--batch", folder_}).err,
              HasSubstr(absl::StrCat(folder_, ": user.ids.npy: not a usable .npy file")));
}

// Would catch a batch that ends the program, and one whose first half is lost without a word.
TEST_F(ExplainTest, RefusesDeepListsAndNamesThatOccurTwice) {
  constexpr int kDeep = 100'000;
  const Outcome deep = ExplainJsonBatch(absl::StrCat(
      R"({"user": {"ids": )", std::string(kDeep, '['), "1", std::string(kDeep, ']'), "}}"));
  EXPECT_EQ(deep.code, kRefused);
  EXPECT_THAT(deep.err, HasSubstr("it has more than 32 lists and objects in each other"));
  const Outcome twice = ExplainJsonBatch(R"({"user": {"ids": [1], "ids": [2]}})");
  EXPECT_EQ(twice.code, kRefused);
  EXPECT_THAT(twice.err, HasSubstr("\"ids\" occurs twice in one object"));
}

// Of every form of a batch, positions are samples of their own, whatever lists and dimensions they
// are in.
TEST_F(ExplainTest, ReadsIdsInTheShapeOfTheActivation) {
  model_ = Write("model.textproto", R"(name: "m"
      tables { name: "t" vocabulary_size: 100 embedding_dim: 8 }
      features { name: "f" table: "t" output_shape: [5, 3] })");
  const auto batch = [&](const std::string& ids, const std::string& weights) {
    return ExplainJsonBatch(
        absl::StrCat(R"({"f": {"ids": )", ids, R"(, "weights": )", weights, "}}"), {"--json"});
  };
  const Outcome flat = batch("[1, 2, 3, 4, 5, 6]", "[1, 2, 3, 4, 5, 6]");
  ASSERT_EQ(flat.code, kOk) << flat.err;
  EXPECT_EQ(batch("[[1, 2, 3], [4, 5, 6]]", "[[1, 2, 3], [4, 5, 6]]").out, flat.out);
  EXPECT_EQ(batch("[[[1], 2, 3], [4, 5, [6]]]", "[[1, [2], 3], [4, 5, 6]]").out, flat.out);
  WriteNpy<float>("f.weights.npy", "<f4", {1, 2, 3, 4, 5, 6}, "(2, 3)");
  WriteNpy<int64_t>("f.ids.npy", "<i8", {1, 2, 3, 4, 5, 6}, "(2, 3)");
  EXPECT_EQ(Explain({"--json", "--model", model_, "--batch", folder_}).out, flat.out);
  std::filesystem::remove(folder_ + "/f.ids.npy");
  WriteNpy<int64_t>("f.values.npy", "<i8", {1, 2, 3}, "(3,)");
  WriteNpy<int64_t>("f.row_splits.npy", "<i8", {0, 2, 3, 3}, "(4,)");
  WriteNpy<float>("f.weights.npy", "<f4", {1, 2, 3}, "(3,)");
  const Outcome several = batch("[[[1, 2], [3], []]]", "[[[1, 2], [3], []]]");
  ASSERT_EQ(several.code, kOk) << several.err;
  EXPECT_EQ(Explain({"--json", "--model", model_, "--batch", folder_}).out, several.out);
  const std::pair<std::string, std::string> wrong[] = {
      {"[1, 2]", "feature 'f' has 2 samples; its output_shape [5, 3] needs a multiple of 3"},
      {"[[1, 2], [3, 4], [5, 6]]", "[1,2] is not allowed in dimension 1; it must be a list of 3"},
      {"[[1, 2, 3], 4]", "4 is not allowed in dimension 1; it must be a list of 3"},
      {"[[[[1]], 2, 3]]", "ids of sample 0: [1] is not a 64-bit integer"}};
  for (const auto& [ids, message] : wrong) {
    const Outcome outcome = batch(ids, ids);
    EXPECT_EQ(outcome.code, kRefused) << ids;
    EXPECT_THAT(outcome.err, HasSubstr(message));
  }
  for (const char* file : {"f.values.npy", "f.row_splits.npy", "f.weights.npy"}) {
    std::filesystem::remove(folder_ + "/" + file);
  }
  WriteNpy<int64_t>("f.ids.npy", "<i8", {1, 2, 3, 4, 5, 6}, "(3, 2)");
  EXPECT_THAT(Explain({"--model", model_, "--batch", folder_}).err,
              HasSubstr("feature 'f': ids: shape is [3, 2]; it must be [samples], [any, 3] or "
                        "[any, 3, ids_per_sample], because output_shape is [5, 3]"));
  WriteNpy<int64_t>("f.ids.npy", "<i8", {1}, "()");
  EXPECT_THAT(Explain({"--model", model_, "--batch", folder_}).err, HasSubstr("ids: shape is []"));
}

TEST_F(ExplainTest, NamesWhatIsWrongWithABatch) {
  const std::string words = absl::StrCat(", ", kWords, "}");
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"{", "not JSON"},
      {"[]", "it must be an object of features"},
      {absl::StrCat("{", kUsers, "}"), "feature 'title.words' of the model is missing"},
      {absl::StrCat("{", kUsers, R"(, "x": {"ids": []})", words),
       "feature 'x' of the batch is not in the model"},
      {R"({"user": {"ids": 3})" + words, "feature 'user': it must be an object with \"ids\""},
      {R"({"user": {"ids": [], "weight": []})" + words, "\"weight\" is not known"},
      {R"({"user": {"ids": [[1], [2, "x"]]})" + words,
       "ids of sample 1: \"x\" is not a 64-bit integer"},
      {R"({"user": {"ids": [1.5]})" + words, "ids of sample 0: 1.5 is not"},
      {R"({"user": {"ids": [18446744073709551615]})" + words, "is not a 64-bit integer"},
      {R"({"user": {"ids": [1, 2], "weights": [1]})" + words, "as many samples as in ids"},
      {R"({"user": {"ids": [[1, 2]], "weights": [[1]]})" + words,
       "weights of sample 0: there are 1 for 2 ids"},
      {R"({"user": {"ids": [1], "weights": [null]})" + words, "null is not a number"},
      {R"({"user": {"ids": [100]})" + words, "100"}};
  for (const auto& [batch, message] : wrong) {
    const Outcome outcome = ExplainJsonBatch(batch);
    EXPECT_EQ(outcome.code, kRefused) << batch;
    EXPECT_THAT(outcome.err, HasSubstr(message));
    EXPECT_EQ(outcome.out, "");
  }
}

TEST_F(ExplainTest, TakesTheClusterFromAFile) {
  const std::string cluster = Write("cluster.textproto", R"(
      shards { address: "a:1" } shards { address: "b:1" } sparsecores_per_shard: 4
      coordinators { address: "c:1" })");
  const Outcome outcome =
      ExplainJsonBatch(absl::StrCat("{", kUsers, ",", kWords, "}"), {"--cluster", cluster});
  ASSERT_EQ(outcome.code, kOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("2 shards x 4 SparseCores = 8 partitions"));
  EXPECT_EQ(ExplainJsonBatch("{}", {"--cluster", cluster, "--shards", "2"}).code, kUsage);
  EXPECT_EQ(ExplainJsonBatch("{}", {"--shards", "3"}).code, kRefused);
  EXPECT_EQ(ExplainJsonBatch("{}", {"--shards", "1024", "--sparsecores", "64"}).code, kRefused);
}

TEST_F(ExplainTest, RefusesOtherCommandLines) {
  EXPECT_EQ(Explain({}).code, kUsage);
  EXPECT_EQ(Explain({"--model", model_}).code, kUsage);
  EXPECT_EQ(Explain({"--batch", model_}).code, kUsage);
}

}  // namespace explain_test
}  // namespace emberd::emberctl
