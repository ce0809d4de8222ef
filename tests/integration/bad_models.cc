#include <string>

#include "tests/integration/bad_cases.h"

namespace emberd::testing {
namespace {

using Config = v1::ModelConfig;

// The declared model under another name, with one fault; the name may be set back.
BadCase DeclareCase(std::string name, grpc::StatusCode code, std::vector<std::string> words,
                    std::function<void(Config*)> spoil) {
  return {std::move(name), code, std::move(words), [spoil = std::move(spoil)](const BadCall& call) {
            v1::DeclareModelRequest request;
            *request.mutable_config() = StrictModel();
            request.mutable_config()->set_name("other");
            spoil(request.mutable_config());
            v1::DeclareModelResponse response;
            return Call(&Stub::DeclareModel, call.api, request, &response);
          }};
}

}  // namespace

std::vector<BadCase> BadModels() {
  return {
      DeclareCase("NoConfig", kInvalid, {"name"}, [](Config* c) { c->Clear(); }),
      DeclareCase("NoTables", kInvalid, {"tables"}, [](Config* c) { c->clear_tables(); }),
      DeclareCase("BadName", kInvalid, {"name", "a b"}, [](Config* c) { c->set_name("a b"); }),
      DeclareCase("DuplicateTable", kInvalid, {"tables[3].name", "users"},
                  [](Config* c) { *c->add_tables() = c->tables(0); }),
      DeclareCase("DanglingTable", kInvalid, {"features[0].table", "usrs"},
                  [](Config* c) { c->mutable_features(0)->set_table("usrs"); }),
      DeclareCase("UnusedTable", kInvalid, {"tables[2]"},
                  [](Config* c) { c->mutable_features()->RemoveLast(); }),
      DeclareCase("ZeroVocabulary", kInvalid, {"tables[1].vocabulary_size", "0"},
                  [](Config* c) { c->mutable_tables(1)->set_vocabulary_size(0); }),
      DeclareCase(
          "HugeVocabulary", kInvalid, {"tables[1].vocabulary_size", "1099511627777"},
          [](Config* c) { c->mutable_tables(1)->set_vocabulary_size((int64_t{1} << 40) + 1); }),
      DeclareCase("NegativeDim", kInvalid, {"tables[0].embedding_dim", "-4"},
                  [](Config* c) { c->mutable_tables(0)->set_embedding_dim(-4); }),
      DeclareCase(
          "UnknownCombiner", kInvalid, {"tables[0].combiner", "9"},
          [](Config* c) { c->mutable_tables(0)->set_combiner(static_cast<v1::Combiner>(9)); }),
      DeclareCase("OverTheBudget", grpc::RESOURCE_EXHAUSTED, {"4194304"},
                  [](Config* c) { c->mutable_tables(0)->set_vocabulary_size(10'000'000); }),
      DeclareCase("AnotherModelOfThisName", grpc::ALREADY_EXISTS,
                  {"strict", "tables[1].vocabulary_size", "12", "13"},
                  [](Config* c) {
                    c->set_name("strict");
                    c->mutable_tables(1)->set_vocabulary_size(13);
                  }),
      {"DescribeUnknownName",
       grpc::NOT_FOUND,
       {"nobody"},
       [](const BadCall& call) {
         v1::DescribeModelRequest request;
         request.set_name("nobody");
         v1::DescribeModelResponse response;
         return Call(&Stub::DescribeModel, call.api, request, &response);
       }},
      {"DescribeNoName",
       kInvalid,
       {"name is empty"},
       [](const BadCall& call) {
         v1::DescribeModelResponse response;
         return Call(&Stub::DescribeModel, call.api, v1::DescribeModelRequest(), &response);
       }},
      {"DescribeUnknownId",
       grpc::NOT_FOUND,
       {"0000000000003039"},
       [](const BadCall& call) {
         v1::DescribeModelRequest request;
         request.set_model_id(12345);
         request.set_name("strict");  // model_id wins
         v1::DescribeModelResponse response;
         return Call(&Stub::DescribeModel, call.api, request, &response);
       }},
      {"ReleaseUnknownBatch",
       grpc::NOT_FOUND,
       {"batch_handle", "999"},
       [](const BadCall& call) {
         v1::ReleaseBatchRequest request;
         request.set_model_id(call.model_id);
         request.set_batch_handle(999);
         v1::ReleaseBatchResponse response;
         return Call(&Stub::ReleaseBatch, call.api, request, &response);
       }},
  };
}

}  // namespace emberd::testing
