// The smallest trainer: pulls four rows towards 1, in ten steps, and says where they are.
//
// usage: trainer ADDRESS
#include <cstdint>
#include <iostream>
#include <vector>

#include "client/cpp/client.h"

namespace {

using emberd::client::Client;

constexpr char kModel[] = R"(
    name: "package"
    tables { name: "word" vocabulary_size: 100 embedding_dim: 8 initializer { zeros {} } }
    features { name: "words" table: "word" batch_size: 4 }
    optimizer { learning_rate: 0.5 sgd {} })";
constexpr int kSteps = 10;

absl::Status Step(Client& client, const emberd::client::Model& model,
                  const std::vector<int64_t>& words) {
  const auto found = client.Lookup(model, {{"words", emberd::client::DenseIds{words}}});
  if (!found.ok()) return found.status();
  // The loss is half the squared distance from 1, so its gradient is the distance.
  std::vector<float> gradient;
  for (const float x : found->activations[0].values) gradient.push_back(x - 1);
  const auto samples = static_cast<int64_t>(words.size());
  return client.ApplyGradients(model, found->batch, {{"words", gradient, samples}}).status();
}

absl::Status Train(const std::string& address) {
  emberd::client::ClientOptions options;
  options.addresses = {address};
  const auto client = Client::Connect(options);
  if (!client.ok()) return client.status();
  const auto model = (*client)->DeclareModel(kModel);
  if (!model.ok()) return model.status();
  const std::vector<int64_t> words = {3, 14, 15, 92};
  for (int step = 0; step < kSteps; ++step) {
    if (absl::Status status = Step(**client, *model, words); !status.ok()) return status;
  }
  const auto rows = (*client)->ReadRows(*model, "word", words);
  if (!rows.ok()) return rows.status();
  for (const float x : rows->values) std::cout << x << "\n";
  return absl::OkStatus();
}

}  // namespace

int main(int, char** argv) {
  std::cout.precision(17);
  const absl::Status status = Train(argv[1]);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
