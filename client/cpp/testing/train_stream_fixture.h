// A stream to a service that answers as tests want it to, and requests for it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/testing/fake_service.h"
#include "client/cpp/train_stream.h"
#include "gtest/gtest.h"

namespace emberd::client::testing {

inline constexpr int kDim = 64;
inline constexpr int64_t kSamples = 3000;  // 0.73 MiB of float32 per feature: one in a message

class TrainStreamTest : public ::testing::Test {
 protected:
  void SetUp() override { Connect(WireType::kFloat32); }

  void Connect(WireType type) {
    stream_.reset();
    ClientOptions options;
    options.addresses = {service_.address()};
    options.activation_type = options.gradient_type = type;
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    ModelDescription description;
    description.name = "m";
    for (const char* name : {"a", "b", "c"}) {
      description.tables.push_back({.name = name, .vocabulary_size = 10, .embedding_dim = kDim});
      description.features.push_back({.name = name, .table = name});
    }
    absl::StatusOr<Model> model = client_->DeclareModel(description);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }
  void Open(const TrainOptions& options = {.group = "run"}) {
    absl::StatusOr<std::unique_ptr<TrainStream>> stream = client_->Train(model_, options);
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
  }
  std::vector<FeatureIds> Features() const {
    return {{"a", DenseIds{ids_}}, {"b", DenseIds{ids_}}, {"c", DenseIds{few_}}};
  }
  std::vector<FeatureGradient> Gradients() const {
    const absl::Span<const float> values = *gradient_;
    return {
        {"a", values, kSamples}, {"c", values.subspan(0, 2 * kDim), 2}, {"b", values, kSamples}};
  }
  // The requests but for the start.
  std::vector<v1::TrainRequest> Requests() const {
    std::vector<v1::TrainRequest> requests = service_.train_requests();
    requests.erase(requests.begin());
    return requests;
  }

  const std::vector<int64_t> ids_ = std::vector<int64_t>(kSamples, 4);
  const std::vector<int32_t> few_ = {1, 2};
  const std::shared_ptr<std::vector<float>> gradient_ =
      std::make_shared<std::vector<float>>(kSamples * kDim, 0.5f);
  FakeService service_;
  std::unique_ptr<Client> client_;
  Model model_;
  std::unique_ptr<TrainStream> stream_;
};

}  // namespace emberd::client::testing
