// A test with a cluster of its own and one model that is declared there.
#pragma once

#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace emberd::testing {

class ClusterFixture : public ::testing::Test {
 protected:
  // Before folders of fixtures that a process would fill again while they are removed.
  void TearDown() override { cluster_.reset(); }

  // Call it from SetUp, or first in a test; the test fails if it does not work. `model`: whatever
  // Client::DeclareModel takes.
  template <typename Description>
  void StartCluster(const ClusterOptions& options, const Description& model) {
    auto cluster = Cluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    client_ = cluster_->Connect();
    ASSERT_NE(client_, nullptr);
    auto declared = client_->DeclareModel(model);
    ASSERT_TRUE(declared.ok()) << declared.status();
    model_ = *std::move(declared);
  }

  // SHA-256 of the model's tables.
  std::string TableDigest() {
    absl::StatusOr<std::string> digest = Digest(*client_, model_);
    EXPECT_TRUE(digest.ok()) << digest.status();
    return digest.value_or("none");
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
  client::Model model_;
};

}  // namespace emberd::testing
