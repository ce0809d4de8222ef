// Covers: client/emberctl/verbs/checkpoint.cc
// Covers: client/emberctl/verbs/model.cc
// emberctl checkpoint against a service that says what the test wants.
#include "client/cpp/testing/fake_service.h"
#include "client/emberctl/output.h"
#include "client/emberctl/testing_emberctl.h"
#include "gmock/gmock.h"

namespace emberd::emberctl {
namespace checkpoint_test {

using ::emberd::client::testing::FakeService;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

v1::CheckpointInfo Info(const std::string& name) {
  v1::CheckpointInfo info;
  info.set_model("m");
  info.set_name(name);
  info.set_saved_at_ms(1'700'000'000'000);
  info.set_bytes(3 * kMiB);
  info.set_rows(1000);
  info.add_groups()->set_group("run");
  info.mutable_groups(0)->set_next_step(7);
  return info;
}

class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() {
    v1::CheckpointProgress& saving = progress().emplace_back();
    saving.set_phase("saving");
    saving.set_bytes(kMiB);
    saving.set_total_bytes(3 * kMiB);
    saving.set_elapsed_ms(100);
    v1::CheckpointProgress& done = progress().emplace_back();
    done.set_done(true);
    done.set_bytes(3 * kMiB);
    done.set_elapsed_ms(2000);
    done.set_pause_us(1500);
    *done.mutable_checkpoint() = Info("step-7");
  }

  std::vector<v1::CheckpointProgress>& progress() { return service_.checkpoints.progress; }
  v1::CheckpointInfo& saved() { return *progress().back().mutable_checkpoint(); }

  Outcome Call(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "checkpoint");
    arguments.insert(arguments.end(), {"--address", service_.address()});
    return Emberctl(arguments);
  }

  FakeService service_;
};

TEST_F(CheckpointTest, Saves) {
  const Outcome save = Call({"save", "m"});
  EXPECT_EQ(save.code, kOk) << save.err;
  EXPECT_EQ(save.out,
            "saving: 33%  1.0 MiB of 3.0 MiB\n"
            "checkpoint 'step-7' of model 'm' saved: 1000 rows, 3.0 MiB in 2.00 s (1.5 MiB/s); "
            "updates paused 1.5 ms; groups: run from step 7\n");
  saved().set_parent("step-6");
  EXPECT_THAT(Call({"save", "m", "step-7", "--incremental"}).out,
              HasSubstr("(1.5 MiB/s), on top of 'step-6'; updates"));
  EXPECT_THAT(service_.checkpoints.calls(),
              ElementsAre("SaveCheckpoint model: \"m\"",
                          "SaveCheckpoint model: \"m\" name: \"step-7\" incremental: true"));
}

TEST_F(CheckpointTest, SavesAsJson) {
  const Outcome save = Call({"save", "m", "--json"});
  EXPECT_EQ(save.code, kOk) << save.err;
  const Json json = Json::parse(save.out);
  EXPECT_EQ(json["checkpoint"]["name"], "step-7");
  EXPECT_EQ(json["pause_us"], "1500");
}

TEST_F(CheckpointTest, SaysWhatTheServerSaid) {
  progress().pop_back();
  service_.checkpoints.status = grpc::Status(grpc::DATA_LOSS, "m/a/x.safetensors: changed");
  const Outcome verify = Call({"verify", "m", "a"});
  EXPECT_EQ(verify.code, kRefused);
  EXPECT_THAT(verify.err, HasSubstr("DATA_LOSS: m/a/x.safetensors: changed"));
  const Outcome gone = Call({"delete", "m", "a", "--json"});
  EXPECT_EQ(gone.code, kRefused);
  EXPECT_EQ(Json::parse(gone.err)["error"]["code"], "DATA_LOSS");
}

TEST_F(CheckpointTest, VerifiesRestoresAndMerges) {
  EXPECT_THAT(Call({"verify", "m"}).out,
              HasSubstr("\ncheckpoint 'step-7' of model 'm' is intact: 3.0 MiB in 2.00 s (1.5"));
  saved().set_chain(2);
  EXPECT_THAT(Call({"verify", "m", "step-7"}).out,
              HasSubstr("is intact, with the 2 checkpoints that it builds on: 3.0 MiB"));
  EXPECT_THAT(Call({"merge", "m", "step-7"}).out,
              HasSubstr("checkpoint 'step-7' of model 'm' needs no other checkpoint: 3.0 MiB in"));
  EXPECT_THAT(Call({"restore", "m", "step-7"}).out,
              HasSubstr("\nmodel 'm' has the rows of checkpoint 'step-7' on all shards: 3.0 MiB in "
                        "2.00 s (1.5 MiB/s); groups: run from step 7\n"));
  EXPECT_THAT(
      service_.checkpoints.calls(),
      ElementsAre("VerifyCheckpoint model: \"m\"", "VerifyCheckpoint model: \"m\" name: \"step-7\"",
                  "MergeCheckpoint model: \"m\" name: \"step-7\"",
                  "RestoreCheckpoint model: \"m\" name: \"step-7\""));
}

TEST_F(CheckpointTest, RestoresWithAnotherConfig) {
  const std::string path = WriteTestFile("other.textproto", R"(name: "m"
      tables { name: "t" vocabulary_size: 10 embedding_dim: 2 storage_dtype: BFLOAT16 }
      features { name: "x" table: "t" })");
  EXPECT_EQ(Call({"restore", "m", "--config", path}).code, kOk);
  EXPECT_THAT(service_.checkpoints.calls(), ElementsAre(HasSubstr("storage_dtype: BFLOAT16")));
  EXPECT_EQ(Call({"restore", "m", "--config", "/nowhere"}).code, kRefused);
}

TEST_F(CheckpointTest, Serves) {
  progress().back().set_model_id(0xabc);
  const std::vector<std::string> at = {"--address", service_.address()};
  const auto serve = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "serve");
    arguments.insert(arguments.end(), at.begin(), at.end());
    return Emberctl(arguments);
  };
  EXPECT_THAT(
      serve({"m"}).out,
      HasSubstr("\nmodel 'm' serves checkpoint 'step-7' of model 'm' on all shards, with id "
                "0000000000000abc: 3.0 MiB in 2.00 s (1.5 MiB/s)\n"));
  EXPECT_THAT(serve({"m", "step-7", "--as", "live", "--storage", "bfloat16"}).out,
              HasSubstr("\nmodel 'live' serves checkpoint 'step-7' of model 'm'"));
  EXPECT_EQ(Json::parse(serve({"m", "--json"}).out)["checkpoint"]["name"], "step-7");
  EXPECT_EQ(serve({"m", "--storage", "int8"}).code, kUsage);
  EXPECT_THAT(service_.checkpoints.calls(),
              ElementsAre("ServeCheckpoint model: \"m\"",
                          "ServeCheckpoint model: \"m\" name: \"step-7\" serve_as: \"live\" "
                          "storage_dtype: BFLOAT16",
                          "ServeCheckpoint model: \"m\""));
}

TEST_F(CheckpointTest, Lists) {
  EXPECT_EQ(Call({"list"}).out, "no checkpoints\n");
  *service_.checkpoints.list.add_checkpoints() = Info("step-7");
  v1::CheckpointInfo& second = *service_.checkpoints.list.add_checkpoints();
  second = Info("a");
  second.set_automatic(true);
  second.set_parent("b");
  second.clear_groups();
  service_.checkpoints.list.add_damaged("m/c: manifest.json: cut off");
  const Outcome list = Call({"list", "m"});
  EXPECT_EQ(list.code, kOk) << list.err;
  EXPECT_EQ(list.out,
            "MODEL  NAME    SAVED                 SIZE     ROWS  ON TOP OF  MADE        GROUPS\n"
            "m      step-7  2023-11-14 22:13:20Z  3.0 MiB  1000  -          on request  run from "
            "step 7\n"
            "m      a       2023-11-14 22:13:20Z  3.0 MiB  1000  b          automatic   -\n"
            "2 checkpoints: 6.0 MiB on disk, of which 3.0 MiB were saved automatically\n"
            "DAMAGED: m/c: manifest.json: cut off\n");
  const Json json = Json::parse(Call({"list", "--json"}).out);
  EXPECT_EQ(json["checkpoints"][1]["parent"], "b");
  EXPECT_EQ(json["damaged"][0], "m/c: manifest.json: cut off");
}

TEST_F(CheckpointTest, Shows) {
  v1::CheckpointManifest& manifest = service_.checkpoints.manifest;
  manifest.set_model("m");
  manifest.set_name("step-7");
  manifest.set_checkpoint_id(0xabc);
  manifest.set_model_id(0x2a);
  manifest.set_history(0x77);
  manifest.set_saved_at_ms(1'700'000'000'000);
  manifest.set_changes(1);
  manifest.set_parent("step-6");
  manifest.set_chain(1);
  manifest.mutable_plan()->set_partitions(2);
  manifest.mutable_plan()->set_shards(1);
  for (int partition = 0; partition < 2; ++partition) {
    v1::CheckpointFile* file = manifest.add_files();
    file->set_stack("wide");
    file->set_array("weights");
    file->set_partition(partition);
    file->set_rows(100);
    file->set_bytes(kMiB);
  }
  v1::CheckpointInfo& newer = *service_.checkpoints.list.add_checkpoints();
  newer = Info("step-8");
  newer.set_saved_at_ms(manifest.saved_at_ms() + 1);
  *service_.checkpoints.list.add_checkpoints() = Info("step-7");
  service_.checkpoints.list.add_damaged("m/c: manifest.json: cut off");
  const Outcome show = Call({"show", "m"});
  EXPECT_EQ(show.code, kOk) << show.err;
  EXPECT_EQ(show.out,
            "checkpoint 'step-7' of model 'm', id 0000000000000abc, saved 2023-11-14 22:13:20Z on "
            "request\n"
            "on top of 'step-6'; needs 1 checkpoint in addition to itself\n"
            "model id 000000000000002a, history 0000000000000077, 1 change, 2 partitions on 1 "
            "shard\n"
            "groups: -\n"
            "\n"
            "STACK  ARRAY    FILES  ROWS  SIZE\n"
            "wide   weights  2      200   2.0 MiB\n"
            "PASSED OVER: 'step-8' is newer, but what it builds on is damaged or missing\n"
            "DAMAGED: m/c: manifest.json: cut off\n");
  EXPECT_THAT(Call({"show", "m", "step-7"}).out, ::testing::EndsWith("2.0 MiB\n"));
  const Json json = Json::parse(Call({"show", "m", "step-7", "--json"}).out);
  EXPECT_EQ(json["history"], "0000000000000077");
  EXPECT_EQ(json["files"][1]["partition"], 1);
}

TEST_F(CheckpointTest, TellsDifferences) {
  v1::ArrayDiff* array = service_.checkpoints.diff.add_arrays();
  array->set_table("users");
  array->set_slot("accumulator");
  array->set_rows(1000);
  array->set_rows_changed(20);
  array->set_max_difference(0.25);
  service_.checkpoints.diff.set_config_difference("seed: 1 and 2");
  const Outcome diff = Call({"diff", "m", "a", "b"});
  EXPECT_EQ(diff.code, kOk) << diff.err;
  EXPECT_EQ(diff.out,
            "TABLE  SLOT         ROWS  CHANGED  OF ALL  MAX DIFFERENCE\n"
            "users  accumulator  1000  20       2.0%    0.25\n"
            "configs differ: seed: 1 and 2\n");
  EXPECT_THAT(service_.checkpoints.calls(),
              ElementsAre("DiffCheckpoints model: \"m\" before: \"a\" after: \"b\""));
}

TEST_F(CheckpointTest, Deletes) {
  const Outcome deleted = Call({"delete", "m", "a"});
  EXPECT_EQ(deleted.code, kOk) << deleted.err;
  EXPECT_EQ(deleted.out, "checkpoint 'a' of model 'm' deleted: 3.0 MiB freed\n");
  EXPECT_EQ(Call({"prune", "m"}).out, "checkpoint 'auto-*' of model 'm' deleted: 3.0 MiB freed\n");
  EXPECT_EQ(service_.checkpoints.calls().at(1), "DeleteCheckpoint model: \"m\" name: \"auto-*\"");
}

// Somebody may have saved another one of this name meanwhile.
TEST_F(CheckpointTest, DeletesNothingTwice) {
  service_.checkpoints.unavailable = 1;
  const Outcome deleted = Call({"delete", "m", "a"});
  EXPECT_NE(deleted.code, kOk);
  EXPECT_THAT(deleted.err, HasSubstr("look before you repeat it"));
  EXPECT_EQ(service_.checkpoints.calls().size(), 1u);
}

TEST_F(CheckpointTest, DeclaresFromACheckpoint) {
  const std::string path = WriteTestFile("restored.textproto", R"(name: "m"
      tables { name: "t" vocabulary_size: 10 embedding_dim: 2 } features { name: "x" table: "t" })");
  const Outcome declared =
      Emberctl({"declare", path, "--restore-from", "newest", "-a", service_.address()});
  EXPECT_EQ(declared.code, kOk) << declared.err;
  EXPECT_EQ(service_.declares().at(0).restore_from(), "newest");
}

}  // namespace checkpoint_test
}  // namespace emberd::emberctl
