// Covers: client/emberctl/verbs/checkpoint_files.cc
// emberctl checkpoint export and import: what stands in the files, and which files are refused.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "client/cpp/testing/fake_service.h"
#include "client/emberctl/output.h"
#include "client/emberctl/tensor_file.h"
#include "client/emberctl/testing_emberctl.h"
#include "gmock/gmock.h"

namespace emberd::emberctl {
namespace checkpoint_files_test {

namespace fs = std::filesystem;
using ::emberd::client::testing::FakeService;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr char kModel[] = R"(name: "m"
    tables { name: "t" vocabulary_size: 10 embedding_dim: 2 }
    tables { name: "u" vocabulary_size: 4 embedding_dim: 3 }
    features { name: "x" table: "t" } features { name: "y" table: "u" })";

std::string Text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The rows [begin, end) of a table of FakeService, or of FakeCheckpoints.
std::string Rows(int begin, int end, int columns, float more = 0) {
  std::string bytes;
  for (int id = begin; id < end; ++id) {
    for (int c = 0; c < columns; ++c) {
      const float value = static_cast<float>(id) + static_cast<float>(c) / 100 + more;
      bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
  }
  return bytes;
}

class CheckpointFilesTest : public ::testing::Test {
 protected:
  CheckpointFilesTest() {
    const std::string model = WriteTestFile("files_model.textproto", kModel);
    EXPECT_EQ(Emberctl({"declare", model, "-a", service_.address()}).code, kOk);
    v1::CheckpointManifest& manifest = service_.checkpoints.manifest;
    manifest.set_model("m");
    manifest.set_name("step-7");
    *manifest.mutable_config() = service_.declares().at(0).config();
    for (const v1::TableConfig& table : manifest.config().tables()) {
      v1::StackPlan* stack = manifest.mutable_plan()->add_stacks();
      stack->add_slots(table.name() == "t" ? "accumulator" : "row");
      v1::TablePlan* plan = stack->add_tables();
      plan->set_name(table.name());
      plan->set_vocabulary_size(table.vocabulary_size());
      plan->set_embedding_dim(table.embedding_dim());
    }
  }

  std::string Path(const std::string& name) const { return folder_.Path(name); }
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name), std::ios::binary) << text;
    return Path(name);
  }
  Outcome Call(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "checkpoint");
    arguments.insert(arguments.end(), {"--address", service_.address()});
    return Emberctl(arguments);
  }
  // What import has written: row by row, as one text.
  std::string Assigned(const std::string& table, const std::string& slot) const {
    std::string rows;
    for (const v1::AssignRowsRequest& request : service_.assigns()) {
      if (request.table() == table && request.slot() == slot) rows += request.values().data();
    }
    return rows;
  }

  const TempDir folder_ = TempDir::Create().value();
  FakeService service_;
};

TEST_F(CheckpointFilesTest, ExportsEveryTableAndSlot) {
  const Outcome exported = Call({"export", "m", "newest", Path("out")});
  ASSERT_EQ(exported.code, kOk) << exported.err;
  EXPECT_THAT(exported.out,
              HasSubstr(absl::StrCat(
                  Path("out/t.safetensors"), "\n", Path("out/t.accumulator.safetensors"), "\n",
                  Path("out/u.safetensors"), "\n", Path("out/u.row.safetensors"), "\n")));
  EXPECT_EQ(service_.checkpoints.calls().at(0), "GetCheckpoint model: \"m\"");
  EXPECT_EQ(service_.checkpoints.calls().at(2),
            "ExportCheckpoint model: \"m\" name: \"step-7\" table: \"t\" slot: \"accumulator\"");
  const std::tuple<const char*, const char*, int, int, float> expected[] = {
      {"out/t.safetensors", "t", 10, 2, 0},
      {"out/t.accumulator.safetensors", "t.accumulator", 10, 2, 1000},
      {"out/u.safetensors", "u", 4, 3, 0},
      {"out/u.row.safetensors", "u.row", 4, 1, 1000}};
  for (const auto& [file, name, rows, columns, more] : expected) {
    const auto tensors = ReadTensorHeaders(Path(file));
    ASSERT_TRUE(tensors.ok()) << tensors.status();
    ASSERT_THAT(*tensors, SizeIs(1));
    EXPECT_EQ(tensors->front().name, name);
    EXPECT_EQ(tensors->front().rows, rows);
    EXPECT_EQ(tensors->front().metadata.at("checkpoint"), "step-7");
    EXPECT_EQ(Text(Path(file)).substr(tensors->front().offset), Rows(0, rows, columns, more));
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(Path("out")), {}), 4);
}

TEST_F(CheckpointFilesTest, TheTensorIsThatOfALiveModel) {
  ASSERT_EQ(Call({"export", "m", "newest", Path("out")}).code, kOk);
  ASSERT_EQ(Emberctl({"export", "m", "t", Path("live.safetensors"), "-a", service_.address()}).code,
            kOk);
  const TensorInFile live = ReadTensorHeaders(Path("live.safetensors")).value().front();
  const TensorInFile saved = ReadTensorHeaders(Path("out/t.safetensors")).value().front();
  EXPECT_EQ(live.name, saved.name);
  EXPECT_EQ(Text(live.path).substr(live.offset), Text(saved.path).substr(saved.offset));
}

TEST_F(CheckpointFilesTest, SplitsLargeTablesAndImportsThem) {
  // Three rows of t, two of u.
  const Outcome exported =
      Call({"export", "m", "step-7", Path("out"), "--file-bytes", "24", "--json"});
  ASSERT_EQ(exported.code, kOk) << exported.err;
  EXPECT_THAT(Json::parse(exported.out)["files"], SizeIs(4 + 4 + 2 + 1));
  const Json index = Json::parse(Text(Path("out/t.safetensors.index.json")));
  EXPECT_EQ(index["metadata"]["total_size"], 80);
  EXPECT_THAT(index["weight_map"], SizeIs(4));
  EXPECT_EQ(index["weight_map"]["t-00004-of-00004"], "t-00004-of-00004.safetensors");
  const TensorInFile last = ReadTensorHeaders(Path("out/t-00004-of-00004.safetensors"))->front();
  EXPECT_EQ(last.name, "t-00004-of-00004");
  EXPECT_EQ(last.rows, 1);
  EXPECT_EQ(Text(last.path).substr(last.offset), Rows(9, 10, 2));
  EXPECT_FALSE(fs::exists(Path("out/u.row.safetensors.index.json")));

  const Outcome imported = Call({"import", "m", Path("out/t.safetensors.index.json")});
  ASSERT_EQ(imported.code, kOk) << imported.err;
  EXPECT_THAT(imported.out, HasSubstr("\ntable \"t\": 10 rows\n"));
  EXPECT_EQ(Assigned("t", ""), Rows(0, 10, 2));
  ASSERT_TRUE(fs::remove(Path("out/t-00002-of-00004.safetensors")));
  const Outcome missing = Call({"import", "m", Path("out/t.safetensors.index.json")});
  EXPECT_EQ(missing.code, kRefused);
  EXPECT_THAT(missing.err, HasSubstr("t-00002-of-00004.safetensors: No such file"));
  fs::remove(Path("out/u.row.safetensors"));  // which is no slot of this model
  EXPECT_THAT(Call({"import", "m", Path("out")}).err,
              HasSubstr("table \"t\" has 10 rows, but the files do not have row 3"));
}

TEST_F(CheckpointFilesTest, AnExportThatFailsLeavesNoFile) {
  service_.checkpoints.status = grpc::Status(grpc::DATA_LOSS, "x.safetensors: changed");
  v1::CheckpointManifest manifest = service_.checkpoints.manifest;
  EXPECT_EQ(Call({"export", "m", "step-7", Path("out")}).code, kRefused);
  service_.checkpoints.status = grpc::Status::OK;
  // The service believes in fewer rows than the manifest.
  service_.checkpoints.manifest.mutable_config()->mutable_tables(0)->set_vocabulary_size(9);
  const Outcome shorter = Call({"export", "m", "step-7", Path("out")});
  EXPECT_EQ(shorter.code, kRefused);
  EXPECT_THAT(shorter.err, HasSubstr("the server ended the export at row 9 of 10"));
  EXPECT_TRUE(fs::is_empty(Path("out")));
}

TEST_F(CheckpointFilesTest, ExportsToEmptyFoldersOnly) {
  Write("something", "");
  const Outcome exported = Call({"export", "m", "step-7", folder_.path()});
  EXPECT_EQ(exported.code, kRefused);
  EXPECT_THAT(exported.err, HasSubstr("is not empty; name a new or empty folder"));
}

// Would catch: tables of one checkpoint beside those of another.
TEST_F(CheckpointFilesTest, AnExportOfTwoCheckpointsOfANameIsAborted) {
  service_.checkpoints.saved_anew = true;
  const Outcome exported = Call({"export", "m", "step-7", Path("out")});
  EXPECT_EQ(exported.code, kRefused);
  EXPECT_THAT(exported.err, HasSubstr("ABORTED: checkpoint \"step-7\" of model \"m\" was deleted "
                                      "and saved anew while it was exported"));
}

TEST_F(CheckpointFilesTest, ExportTriesAgain) {
  ASSERT_EQ(Call({"list"}).code, kOk);
  service_.checkpoints.unavailable = 1;
  const Outcome exported = Call({"export", "m", "step-7", Path("out")});
  EXPECT_EQ(exported.code, kOk) << exported.err;
}

TEST_F(CheckpointFilesTest, ImportsFilesByTheirNames) {
  Write("t.accumulator.npy", NpyHeader(10, 2) + Rows(0, 10, 2, 5));
  Write("u.safetensors", SafetensorsStart("u", {}, 4, 3) + Rows(0, 4, 3, 7));
  Write("README", "not a table");
  const Outcome imported = Call({"import", "m", folder_.path(), "--json"});
  ASSERT_EQ(imported.code, kOk) << imported.err;
  const Json json = Json::parse(imported.out);
  EXPECT_EQ(json["imported"][0]["slot"], "accumulator");
  EXPECT_EQ(json["imported"][1]["rows"], 4);
  EXPECT_EQ(Assigned("t", "accumulator"), Rows(0, 10, 2, 5));
  EXPECT_EQ(Assigned("u", ""), Rows(0, 4, 3, 7));
}

TEST_F(CheckpointFilesTest, ErrorsOfExportAndImportHaveAdvice) {
  const std::string path = Write("u.npy", NpyHeader(4, 3) + Rows(0, 4, 3));
  for (const int calls_before : {0, 2}) {
    for (const bool imports : {false, true}) {
      for (int i = 0; i < calls_before; ++i) service_.AddFault({});
      service_.AddFault({grpc::Status(grpc::UNAUTHENTICATED, "authorization: is missing")});
      const Outcome refused =
          imports ? Call({"import", "m", path})
                  : Emberctl({"export", "m", "t", Path("t.npy"), "-a", service_.address()});
      EXPECT_EQ(refused.code, kRefused) << calls_before << " " << imports;
      EXPECT_THAT(refused.err, HasSubstr("--token-file")) << calls_before << " " << imports;
    }
  }
}

TEST_F(CheckpointFilesTest, ImportsAFileOfAnotherNameToATable) {
  const std::string path = Write("vectors.npy", NpyHeader(4, 3) + Rows(0, 4, 3));
  const Outcome unknown = Call({"import", "m", path});
  EXPECT_EQ(unknown.code, kRefused);
  EXPECT_THAT(unknown.err, HasSubstr("the model has no table \"vectors\"; known tables: t, u; or "
                                     "name one by --table"));
  const Outcome imported = Call({"import", "m", path, "--table", "u", "--slot", "accumulator"});
  EXPECT_EQ(imported.code, kOk) << imported.err;
  EXPECT_EQ(Assigned("u", "accumulator"), Rows(0, 4, 3));
}

// Would catch: accumulators that are taken for weights.
TEST_F(CheckpointFilesTest, ASlotIsNotTakenForWeights) {
  const std::string path =
      Write("old.safetensors",
            SafetensorsStart("old.accumulator", {{"table", "old"}, {"slot", "accumulator"}}, 4, 3) +
                Rows(0, 4, 3));
  const Outcome refused = Call({"import", "m", path, "--table", "u"});
  EXPECT_EQ(refused.code, kRefused);
  EXPECT_THAT(refused.err,
              HasSubstr("old.safetensors: holds slot \"accumulator\" of table \"old\", but --table "
                        "without --slot names the weights of \"u\"; give --slot accumulator"));
  EXPECT_THAT(service_.assigns(), IsEmpty());
  EXPECT_EQ(Call({"import", "m", path, "--table", "u", "--slot", "accumulator"}).code, kOk);
  EXPECT_EQ(Assigned("u", "accumulator"), Rows(0, 4, 3));

  const std::string live = Path("live.safetensors");
  ASSERT_EQ(
      Emberctl({"export", "m", "t", live, "--slot", "accumulator", "--address", service_.address()})
          .code,
      kOk);
  EXPECT_THAT(Call({"import", "m", live, "--table", "t"}).err,
              HasSubstr("live.safetensors: holds slot \"accumulator\" of table \"t\""));
  EXPECT_EQ(Assigned("t", ""), "");
}

// Batches of 4 MiB: the ids must go on where those of the batch before end.
TEST_F(CheckpointFilesTest, ImportsInBatches) {
  constexpr int kRows = 300'000;
  const std::string model =
      WriteTestFile("large.textproto", absl::StrCat(R"(name: "l"
      tables { name: "big" vocabulary_size: )",
                                                    kRows, R"( embedding_dim: 4 }
      features { name: "x" table: "big" })"));
  ASSERT_EQ(Emberctl({"declare", model, "-a", service_.address()}).code, kOk);
  const std::string rows = Rows(0, kRows, 4);
  const std::string path = Write("big.npy", NpyHeader(kRows, 4) + rows);
  ASSERT_EQ(Call({"import", "l", path}).code, kOk);
  ASSERT_THAT(service_.assigns(), SizeIs(2));
  EXPECT_EQ(Assigned("big", ""), rows);
  const v1::AssignRowsRequest second = service_.assigns().at(1);
  int64_t first_id = 0;
  std::memcpy(&first_id, second.ids().data().data(), sizeof(first_id));
  EXPECT_EQ(first_id, (4 << 20) / 16);
}

TEST_F(CheckpointFilesTest, NothingIsWrittenBeforeAllFilesFit) {
  const auto error = [this](const std::string& path) {
    const Outcome imported = Call({"import", "m", path});
    EXPECT_EQ(imported.code, kRefused);
    return imported.err;
  };
  EXPECT_THAT(error(folder_.path()), HasSubstr("contains no .safetensors and no .npy"));
  EXPECT_THAT(error(Path("t.npy")), HasSubstr("t.npy: No such file"));
  Write("t.npy", NpyHeader(10, 2) + Rows(0, 10, 2));
  Write("u.npy", NpyHeader(4, 2) + Rows(0, 4, 2));
  EXPECT_THAT(error(folder_.path()),
              HasSubstr("\"u\" has 2 columns, but table \"u\" has rows of 3"));
  Write("u.npy", NpyHeader(5, 3) + Rows(0, 5, 3));
  EXPECT_THAT(error(folder_.path()), HasSubstr("table \"u\" has 4 rows, but the files have more"));
  Write("u.npy", NpyHeader(3, 3) + Rows(0, 3, 3));
  EXPECT_THAT(error(folder_.path()),
              HasSubstr("table \"u\" has 4 rows, but the files do not have row 3"));
  Write("u.npy", NpyHeader(4, 3) + Rows(0, 4, 3));
  Write("u.safetensors", SafetensorsStart("u", {}, 4, 3) + Rows(0, 4, 3));
  EXPECT_THAT(error(folder_.path()), HasSubstr("import only one of them"));
  Write("u.safetensors", SafetensorsStart("u.accu", {}, 4, 3) + Rows(0, 4, 3));
  EXPECT_THAT(error(folder_.path()),
              HasSubstr("slot \"accu\" of table \"u\" does not exist; did you mean "
                        "\"accumulator\"? Known slots: accumulator"));
  Write("u.safetensors",
        SafetensorsStart("x", {{"table", "u"}, {"slot", "accu"}}, 4, 3) + Rows(0, 4, 3));
  EXPECT_THAT(error(folder_.path()), HasSubstr("slot \"accu\" of table \"u\" does not exist"));
  fs::remove(Path("u.safetensors"));
  service_.damage_describe = [](v1::DescribeModelResponse* response) {
    v1::SlotShape* const slot = response->add_slots();
    slot->set_table("u");
    slot->set_slot("accumulator");
    slot->add_shape(4);
    slot->add_shape(1);
  };
  Write("u.accumulator.npy", NpyHeader(4, 3) + Rows(0, 4, 3));
  EXPECT_THAT(error(folder_.path()), HasSubstr("\"u.accumulator\" has 3 columns, but slot "
                                               "\"accumulator\" of table \"u\" has rows of 1"));
  fs::remove(Path("u.accumulator.npy"));
  Write("t.accumulator.npy", NpyHeader(10, 1) + Rows(0, 10, 1));
  EXPECT_THAT(error(folder_.path()), HasSubstr("\"t.accumulator\" has 1 column, but slot "
                                               "\"accumulator\" of table \"t\" has rows of 2"));
  Write("t.safetensors.index.json", "{}");
  EXPECT_THAT(error(Path("t.safetensors.index.json")), HasSubstr("it has no weight_map"));
  EXPECT_THAT(service_.assigns(), IsEmpty());
}

// The last of them, far behind the first batch.
TEST_F(CheckpointFilesTest, NothingIsWrittenBeforeAllValuesAreFinite) {
  constexpr int kRows = 300'000;
  const std::string model =
      WriteTestFile("infinite.textproto", absl::StrCat(R"(name: "l"
      tables { name: "big" vocabulary_size: )",
                                                       kRows, R"( embedding_dim: 4 }
      features { name: "x" table: "big" })"));
  ASSERT_EQ(Emberctl({"declare", model, "-a", service_.address()}).code, kOk);
  std::string rows = Rows(0, kRows, 4);
  const float bad = -std::numeric_limits<float>::infinity();
  std::memcpy(rows.data() + rows.size() - sizeof(bad), &bad, sizeof(bad));
  const Outcome imported = Call({"import", "l", Write("big.npy", NpyHeader(kRows, 4) + rows)});
  EXPECT_EQ(imported.code, kRefused);
  EXPECT_THAT(imported.err, HasSubstr("big.npy: table \"big\": row 299999, column 3 is -inf; all "
                                      "values must be finite. Nothing was written"));
  EXPECT_THAT(service_.assigns(), IsEmpty());
}

}  // namespace checkpoint_files_test
}  // namespace emberd::emberctl
