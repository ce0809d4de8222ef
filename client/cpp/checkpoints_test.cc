// Checkpoints through a Client, against a service that says what the test wants.
#include "client/cpp/checkpoints.h"

#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/cpp/client.h"
#include "client/cpp/testing/fake_service.h"

namespace emberd::client {
namespace checkpoints_test {

using ::emberd::client::testing::FakeService;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kConfig[] = R"(name: "m"
    tables { name: "t" vocabulary_size: 10 embedding_dim: 2 } features { name: "x" table: "t" })";

v1::CheckpointProgress Progress(const std::string& phase, int64_t bytes, int64_t total) {
  v1::CheckpointProgress progress;
  progress.set_phase(phase);
  progress.set_bytes(bytes);
  progress.set_total_bytes(total);
  progress.set_elapsed_ms(bytes * 10);
  return progress;
}

v1::CheckpointProgress Done() {
  v1::CheckpointProgress progress = Progress("saving", 300, 300);
  progress.set_done(true);
  progress.set_pause_us(1500);
  v1::CheckpointInfo* info = progress.mutable_checkpoint();
  info->set_model("m");
  info->set_name("step-7");
  info->set_saved_at_ms(1'700'000'000'123);
  info->set_bytes(300);
  info->set_rows(20);
  info->set_parent("step-6");
  info->set_chain(2);
  info->add_groups()->set_group("run");
  info->mutable_groups(0)->set_next_step(7);
  info->set_automatic(true);
  info->set_changes(9);
  return progress;
}

class CheckpointsTest : public ::testing::Test {
 protected:
  CheckpointsTest() {
    ClientOptions options;
    options.addresses = {service_.address()};
    options.initial_backoff = absl::Milliseconds(1);
    client_ = Client::Connect(options).value();
    service_.checkpoints.progress = {Progress("pausing", 0, 0), Progress("saving", 100, 300),
                                     Done()};
  }

  // Collects the progress that it is told.
  ProgressSink Sink() {
    return [this](const CheckpointProgress& progress) { seen_.push_back(progress); };
  }

  FakeService service_;
  std::unique_ptr<Client> client_;
  std::vector<CheckpointProgress> seen_;
};

TEST_F(CheckpointsTest, SavesWithProgress) {
  const auto saved =
      client_->SaveCheckpoint("m", {.name = "step-7", .incremental = true, .progress = Sink()});
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_THAT(service_.checkpoints.calls(),
              ElementsAre("SaveCheckpoint model: \"m\" name: \"step-7\" incremental: true"));
  EXPECT_EQ(saved->pause, absl::Microseconds(1500));
  const CheckpointInfo& info = saved->checkpoint;
  EXPECT_EQ(info.model, "m");
  EXPECT_EQ(info.name, "step-7");
  EXPECT_EQ(info.saved_at, absl::FromUnixMillis(1'700'000'000'123));
  EXPECT_EQ(info.bytes, 300);
  EXPECT_EQ(info.rows, 20);
  EXPECT_EQ(info.parent, "step-6");
  EXPECT_EQ(info.chain, 2);
  ASSERT_EQ(info.groups.size(), 1u);
  EXPECT_EQ(info.groups[0].group, "run");
  EXPECT_EQ(info.groups[0].next_step, 7);
  EXPECT_TRUE(info.automatic);
  EXPECT_EQ(info.changes, 9);
  ASSERT_EQ(seen_.size(), 2u);
  EXPECT_EQ(seen_[0].phase, "pausing");
  EXPECT_EQ(seen_[1].phase, "saving");
  EXPECT_EQ(seen_[1].bytes, 100);
  EXPECT_EQ(seen_[1].total_bytes, 300);
  EXPECT_EQ(seen_[1].elapsed, absl::Seconds(1));
}

TEST_F(CheckpointsTest, RestoresAModel) {
  const auto restored = client_->RestoreCheckpoint("m", {.name = "a", .progress = Sink()});
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_THAT(service_.checkpoints.calls(),
              ElementsAre("RestoreCheckpoint model: \"m\" name: \"a\""));
  EXPECT_EQ(restored->name, "step-7");
  EXPECT_EQ(seen_.size(), 2u);
}

TEST_F(CheckpointsTest, RestoresWithAnotherConfig) {
  ASSERT_TRUE(client_->RestoreCheckpoint("m", {.config = kConfig}).ok());
  EXPECT_THAT(service_.checkpoints.calls(), ElementsAre(HasSubstr("config { name: \"m\"")));
  const auto wrong = client_->RestoreCheckpoint("m", {.config = "name: 'm' tables {}"});
  EXPECT_EQ(wrong.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(service_.checkpoints.calls().size(), 1u);
}

TEST_F(CheckpointsTest, ServesOne) {
  const auto served = client_->ServeCheckpoint(
      "m", {.name = "a", .serve_as = "live", .storage_dtype = "BFLOAT16", .progress = Sink()});
  ASSERT_TRUE(served.ok()) << served.status();
  EXPECT_EQ(served->name, "step-7");
  EXPECT_EQ(seen_.size(), 2u);
  EXPECT_THAT(service_.checkpoints.calls(),
              ElementsAre("ServeCheckpoint model: \"m\" name: \"a\" serve_as: \"live\" "
                          "storage_dtype: BFLOAT16"));
  const auto wrong = client_->ServeCheckpoint("m", {.storage_dtype = "INT8"});
  EXPECT_EQ(wrong.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(wrong.status().message(), HasSubstr("it must be FLOAT32, BFLOAT16 or FLOAT16"));
  EXPECT_EQ(service_.checkpoints.calls().size(), 1u);
}

TEST_F(CheckpointsTest, ListsAndDeletes) {
  *service_.checkpoints.list.add_checkpoints() = Done().checkpoint();
  service_.checkpoints.list.add_damaged("m/b: manifest.json: cut off");
  const auto list = client_->ListCheckpoints();
  ASSERT_TRUE(list.ok()) << list.status();
  ASSERT_EQ(list->checkpoints.size(), 1u);
  EXPECT_EQ(list->checkpoints[0].name, "step-7");
  EXPECT_THAT(list->damaged, ElementsAre("m/b: manifest.json: cut off"));
  const auto freed = client_->DeleteCheckpoint("m", "b");
  ASSERT_TRUE(freed.ok()) << freed.status();
  EXPECT_EQ(*freed, 3 << 20);
  EXPECT_THAT(service_.checkpoints.calls(),
              ElementsAre("ListCheckpoints ", "DeleteCheckpoint model: \"m\" name: \"b\""));
}

TEST_F(CheckpointsTest, TriesAgainWhatHasNotBegun) {
  service_.checkpoints.unavailable = 2;
  EXPECT_TRUE(client_->SaveCheckpoint("m").ok());
  EXPECT_EQ(service_.checkpoints.calls().size(), 3u);
}

// It may have come to its end after all: a second try could find its own first one in the way.
TEST_F(CheckpointsTest, DoesNotTryAgainWhatHasBegun) {
  service_.checkpoints.progress = {Progress("saving", 100, 300)};
  service_.checkpoints.status = grpc::Status(grpc::UNAVAILABLE, "shard 1 has gone");
  EXPECT_EQ(client_->SaveCheckpoint("m").status(), absl::UnavailableError("shard 1 has gone"));
  EXPECT_EQ(service_.checkpoints.calls().size(), 1u);
}

TEST_F(CheckpointsTest, ACallThatEndsWithoutAResultIsAnError) {
  service_.checkpoints.progress = {Progress("saving", 100, 300)};
  EXPECT_EQ(client_->SaveCheckpoint("m").status().code(), absl::StatusCode::kInternal);
  service_.checkpoints.progress = {};
  EXPECT_EQ(client_->SaveCheckpoint("m").status().code(), absl::StatusCode::kInternal);
}

TEST_F(CheckpointsTest, DeclaresWithTheRowsOfACheckpoint) {
  ASSERT_TRUE(client_->DeclareModel(kConfig).ok());
  ASSERT_TRUE(client_->DeclareModel(kConfig, {.restore_from = "newest"}).ok());
  ASSERT_EQ(service_.declares().size(), 2u);
  EXPECT_EQ(service_.declares()[0].restore_from(), "");
  EXPECT_EQ(service_.declares()[1].restore_from(), "newest");
}

}  // namespace checkpoints_test
}  // namespace emberd::client
