#include "server/checkpoint/manifest.h"

#include <functional>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/crc32c.h"
#include "base/testing/seed.h"
#include "server/checkpoint/testing/tables.h"

namespace emberd::checkpoint {
namespace manifest_test {

using absl::StatusCode;
using testing::HasSubstr;

// The tables of a random config, with every field set and a file for each of two partitions.
v1::CheckpointManifest Example() {
  std::mt19937_64 random(TestSeed(1));
  const TestTables tables(RandomTables(random), 2);
  v1::CheckpointManifest manifest;
  manifest.set_format_version(kManifestVersion);
  manifest.set_model("m");
  manifest.set_name("step-7");
  manifest.set_checkpoint_id(0xffff'ffff'ffff'fff1);
  manifest.set_saved_at_ms(1'700'000'000'000);
  manifest.set_model_id(1);
  manifest.set_history(2);
  manifest.set_changes(int64_t{1} << 60);
  manifest.set_automatic(true);
  manifest.set_parent("step-6");
  manifest.set_parent_id(3);
  manifest.set_chain(1);
  manifest.add_groups()->set_group("g");
  manifest.mutable_groups(0)->set_next_step(7);
  *manifest.mutable_config() = tables.config();
  *manifest.mutable_plan() = tables.plan();
  for (int p = 0; p < 2; ++p) {
    v1::CheckpointFile& file = *manifest.add_files();
    file.set_path(absl::StrCat("p", p, ".safetensors"));
    file.set_stack(tables.plan().stacks(0).name());
    file.set_array("weights");
    file.set_partition(p);
    file.set_rows(10 + p);
    file.set_bytes(1000);
    file.set_header_crc32c(0xffffffff);
  }
  manifest.add_states()->set_path("state.s0000.pb");
  manifest.mutable_states(0)->set_bytes(5);
  return manifest;
}

TEST(ManifestTest, ReadsWhatItWrites) {
  const v1::CheckpointManifest manifest = Example();
  const std::string text = *EncodeManifest(manifest);
  const auto read = ParseManifest(text);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->SerializeAsString(), manifest.SerializeAsString());
  EXPECT_THAT(text, HasSubstr("\"checkpoint_id\": \"18446744073709551601\""));
  EXPECT_THAT(text, testing::EndsWith("\"\n}\n"));

  const v1::CheckpointInfo info = InfoOf(manifest);
  EXPECT_EQ(info.bytes(), 2005);
  EXPECT_EQ(info.rows(), 21);
  EXPECT_EQ(info.parent(), "step-6");
  EXPECT_EQ(info.groups(0).next_step(), 7);
  EXPECT_TRUE(info.automatic());
}

// Whoever wrote it, no file outside of the checkpoint is opened, and nothing is read beyond a row.
TEST(ManifestTest, RefusesWhatContradictsItself) {
  using Change = std::function<void(v1::CheckpointManifest&)>;
  const std::vector<Change> changes = {
      [](auto& m) { m.set_name("../x"); },
      [](auto& m) { m.set_parent(""); },
      [](auto& m) { m.set_parent("a/b"); },
      [](auto& m) { m.set_parent(m.name()); },
      [](auto& m) { m.set_chain(0); },
      [](auto& m) { m.mutable_plan()->set_partitions(0); },
      [](auto& m) { m.mutable_plan()->mutable_stacks(0)->set_embedding_dim(0); },
      [](auto& m) { m.mutable_plan()->mutable_stacks(0)->set_rows_per_partition(1); },
      [](auto& m) {
        m.mutable_plan()->mutable_stacks(0)->mutable_tables(0)->set_embedding_dim(99);
      },
      [](auto& m) { m.mutable_plan()->mutable_stacks(0)->mutable_tables(0)->set_row_offset(-1); },
      [](auto& m) {
        m.mutable_plan()->mutable_stacks(0)->mutable_tables(0)->set_shard_rotation(2);
      },
      [](auto& m) {
        m.mutable_plan()->mutable_stacks(0)->mutable_tables(0)->set_vocabulary_size(1 << 30);
      },
      [](auto& m) { m.mutable_files(0)->set_path("../p0.safetensors"); },
      [](auto& m) { m.mutable_files(0)->set_path("/etc/passwd"); },
      [](auto& m) { m.mutable_files(0)->set_path(".lock"); },
      [](auto& m) { m.mutable_files(0)->set_path("manifest.json"); },
      [](auto& m) { m.mutable_files(0)->set_path("p1.safetensors"); },
      [](auto& m) { m.mutable_files(0)->set_path("state.s0000.pb"); },
      [](auto& m) { m.mutable_files(0)->set_bytes(-1); },
      [](auto& m) { m.mutable_files(0)->set_rows(-1); },
      [](auto& m) { m.mutable_files(0)->set_partition(2); },
      [](auto& m) { m.mutable_files(0)->set_partition(-1); },
      [](auto& m) { m.mutable_files(0)->set_partition(1); },
      [](auto& m) { m.mutable_files(0)->set_stack("none"); },
      [](auto& m) { m.mutable_files(0)->set_array("none"); },
      [](auto& m) { m.mutable_states(0)->set_path("a/b"); },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    v1::CheckpointManifest manifest = Example();
    changes[i](manifest);
    EXPECT_EQ(EncodeManifest(manifest).status().code(), StatusCode::kInternal) << i;
  }
}

// With a checksum that is right.
std::string Sealed(absl::string_view json) {
  const uint32_t crc = ExtendCrc32c(0, absl::MakeConstSpan(json.data(), json.size()));
  return absl::StrFormat("%s,\n \"crc32c\": \"%08x\"\n}\n", json, crc);
}

TEST(ManifestTest, RefusesWhatOthersMightWrite) {
  const std::string text = *EncodeManifest(Example());
  const std::string json = text.substr(0, text.size() - Sealed("").size());
  ASSERT_EQ(Sealed(json), text);
  const auto parse = [&](absl::string_view from, absl::string_view to) {
    return ParseManifest(Sealed(absl::StrReplaceAll(json, {{from, to}}))).status();
  };
  EXPECT_TRUE(parse("", "").ok());
  // A later version may have fields that this one does not know.
  const absl::Status later =
      parse("\"format_version\": 1", "\"format_version\": 2, \"new_field\": 3");
  EXPECT_EQ(later.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(later.message()), HasSubstr("its format_version is 2"));
  EXPECT_EQ(parse("p0.safetensors", "../p0").code(), StatusCode::kDataLoss);
  EXPECT_EQ(parse("\"files\": [", "\"files\": {").code(), StatusCode::kDataLoss);
  for (const std::string& bad : {std::string(), std::string("{}"), Sealed("["), json}) {
    EXPECT_EQ(ParseManifest(bad).status().code(), StatusCode::kDataLoss) << bad.size();
  }
}

}  // namespace manifest_test
}  // namespace emberd::checkpoint
