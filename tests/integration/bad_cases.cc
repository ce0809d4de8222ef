#include "tests/integration/bad_cases.h"

#include <limits>

#include <google/protobuf/text_format.h>

namespace emberd::testing {
namespace {

constexpr char kModel[] = R"(
    name: "strict" seed: 3
    tables { name: "users" vocabulary_size: 20 embedding_dim: 4 optimizer { adagrad {} } }
    tables { name: "tags" vocabulary_size: 12 embedding_dim: 4 optimizer { adagrad {} } }
    tables { name: "cities" vocabulary_size: 9 embedding_dim: 3 optimizer { sgd {} } }
    features { name: "user" table: "users" }
    features { name: "tag" table: "tags" }
    features { name: "city" table: "cities" })";

}  // namespace

v1::ModelConfig StrictModel() {
  v1::ModelConfig config;
  google::protobuf::TextFormat::ParseFromString(kModel, &config);
  return config;
}

v1::LookupRequest GoodLookup(uint64_t model_id) {
  v1::LookupRequest request;
  request.set_model_id(model_id);
  v1::FeatureIds* user = request.add_features();
  user->set_feature("user");
  *user->mutable_dense()->mutable_ids() = MakeVector<int64_t>({1, 2, 19});
  v1::FeatureIds* tag = request.add_features();
  tag->set_feature("tag");
  *tag->mutable_ragged()->mutable_row_splits() = MakeVector<int32_t>({0, 2, 2, 4});
  *tag->mutable_ragged()->mutable_values() = MakeVector<int32_t>({5, 6, 7, 11});
  *tag->mutable_ragged()->mutable_weights() = MakeVector<float>({1, 0.5f, 2, -1});
  v1::FeatureIds* city = request.add_features();
  city->set_feature("city");
  *city->mutable_sparse()->mutable_indices() = MakeTensor<int64_t>({3, 2}, {0, 0, 0, 1, 2, 0});
  *city->mutable_sparse()->mutable_values() = MakeVector<int64_t>({1, 2, 8});
  city->mutable_sparse()->set_sample_count(3);
  return request;
}

v1::ApplyGradientsRequest GoodApply(uint64_t model_id, uint64_t batch_handle, uint64_t sequence) {
  v1::ApplyGradientsRequest request;
  request.set_model_id(model_id);
  request.set_batch_handle(batch_handle);
  request.mutable_mutation()->set_client_id("bad-input");
  request.mutable_mutation()->set_sequence(sequence);
  for (const auto& [name, dim] :
       {std::pair("user", 4), std::pair("tag", 4), std::pair("city", 3)}) {
    v1::FeatureGradient* gradient = request.add_gradients();
    gradient->set_feature(name);
    *gradient->mutable_gradient() = MakeTensor<float>({3, dim}, std::vector<float>(3 * dim, 0.5f));
  }
  return request;
}

v1::AssignRowsRequest GoodAssign(uint64_t model_id, uint64_t sequence) {
  v1::AssignRowsRequest request;
  request.set_model_id(model_id);
  request.mutable_mutation()->set_client_id("bad-input");
  request.mutable_mutation()->set_sequence(sequence);
  request.set_table("users");
  *request.mutable_ids() = MakeVector<int64_t>({3, 4});
  *request.mutable_values() = MakeTensor<float>({2, 4}, std::vector<float>(8, 1.0f));
  return request;
}

}  // namespace emberd::testing
