#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/integration/bad_cases.h"

namespace emberd::testing {
namespace {

using Apply = v1::ApplyGradientsRequest;
using Assign = v1::AssignRowsRequest;

uint64_t LookUp(const BadCall& call) {
  v1::LookupResponse response;
  Call(&Stub::Lookup, call.api, GoodLookup(call.model_id), &response);
  return response.batch_handle();
}

grpc::Status Release(const BadCall& call, uint64_t handle) {
  v1::ReleaseBatchRequest request;
  request.set_model_id(call.model_id);
  request.set_batch_handle(handle);
  v1::ReleaseBatchResponse response;
  return Call(&Stub::ReleaseBatch, call.api, request, &response);
}

// A good update of a batch, with one fault. The batch must still be there afterwards.
BadCase ApplyCase(std::string name, grpc::StatusCode code, std::vector<std::string> words,
                  std::function<void(Apply*)> spoil) {
  return {std::move(name), code, std::move(words), [spoil = std::move(spoil)](const BadCall& call) {
            const uint64_t handle = LookUp(call);
            Apply request = GoodApply(call.model_id, handle, call.sequence);
            spoil(&request);
            v1::ApplyGradientsResponse response;
            const grpc::Status status = Call(&Stub::ApplyGradients, call.api, request, &response);
            const grpc::Status released = Release(call, handle);
            return released.ok() ? status : released;
          }};
}

BadCase AssignCase(std::string name, grpc::StatusCode code, std::vector<std::string> words,
                   std::function<void(Assign*)> spoil) {
  return {std::move(name), code, std::move(words), [spoil = std::move(spoil)](const BadCall& call) {
            Assign request = GoodAssign(call.model_id, call.sequence);
            spoil(&request);
            v1::AssignRowsResponse response;
            return Call(&Stub::AssignRows, call.api, request, &response);
          }};
}

BadCase ReadCase(std::string name, grpc::StatusCode code, std::vector<std::string> words,
                 std::function<void(v1::ReadRowsRequest*)> spoil) {
  return {std::move(name), code, std::move(words), [spoil = std::move(spoil)](const BadCall& call) {
            v1::ReadRowsRequest request;
            request.set_model_id(call.model_id);
            request.set_table("users");
            *request.mutable_ids() = MakeVector<int64_t>({1, 1, 19});
            spoil(&request);
            v1::ReadRowsResponse response;
            return Call(&Stub::ReadRows, call.api, request, &response);
          }};
}

BadCase ExportCase(std::string name, grpc::StatusCode code, std::vector<std::string> words,
                   std::function<void(v1::ExportTableRequest*)> spoil) {
  return {std::move(name), code, std::move(words), [spoil = std::move(spoil)](const BadCall& call) {
            v1::ExportTableRequest request;
            request.set_model_id(call.model_id);
            request.set_table("users");
            spoil(&request);
            grpc::ClientContext context;
            auto reader = call.api.embedding->ExportTable(&context, request);
            v1::ExportTableResponse part;
            while (reader->Read(&part)) {
            }
            return reader->Finish();
          }};
}

v1::Tensor* Gradient(Apply* r, int i) { return r->mutable_gradients(i)->mutable_gradient(); }

std::vector<BadCase> BadGradients() {
  return {
      ApplyCase("UnknownModel", grpc::INVALID_ARGUMENT, {"model_id"},
                [](Apply* r) { r->set_model_id(12345); }),
      ApplyCase("UnknownFeature", kInvalid, {"usr", "strict"},
                [](Apply* r) { r->mutable_gradients(0)->set_feature("usr"); }),
      ApplyCase("RepeatedFeature", kInvalid, {"'user'", "repeated"},
                [](Apply* r) { *r->add_gradients() = r->gradients(0); }),
      ApplyCase("TooFewSamples", kInvalid, {"user", "[2, 4]", "[3, 4]"},
                [](Apply* r) {
                  *Gradient(r, 0) = MakeTensor<float>({2, 4}, std::vector<float>(8));
                }),
      ApplyCase("WrongWidth", kInvalid, {"city", "[3, 4]", "[3, 3]"},
                [](Apply* r) {
                  *Gradient(r, 2) = MakeTensor<float>({3, 4}, std::vector<float>(12));
                }),
      ApplyCase("FlatShape", kInvalid, {"user", "[12]", "[3, 4]"},
                [](Apply* r) { *Gradient(r, 0) = MakeVector<float>(std::vector<float>(12)); }),
      ApplyCase("TooFewBytes", kInvalid, {"user", "47 bytes", "48"},
                [](Apply* r) { Gradient(r, 0)->mutable_data()->pop_back(); }),
      ApplyCase("IntegerGradient", kInvalid, {"user", "INT32", "FLOAT32 or BFLOAT16"},
                [](Apply* r) { Gradient(r, 0)->set_dtype(v1::INT32); }),
      ApplyCase("UnknownTypeOfAGradient", kInvalid, {"user", "dtype is 77", "FLOAT32 or BFLOAT16"},
                [](Apply* r) { Gradient(r, 0)->set_dtype(static_cast<v1::DataType>(77)); }),
      ApplyCase("AbsentGradient", kInvalid, {"user"},
                [](Apply* r) { r->mutable_gradients(0)->clear_gradient(); }),
      ApplyCase("Bfloat16InFloatBytes", kInvalid, {"user", "48 bytes", "24"},
                [](Apply* r) { Gradient(r, 0)->set_dtype(v1::BFLOAT16); }),
      ApplyCase("NanGradient", kInvalid, {"tag", "nan", "finite"},
                [](Apply* r) {
                  std::vector<float> values(12, 0.5f);
                  values[7] = kNan;
                  *Gradient(r, 1) = MakeTensor<float>({3, 4}, values);
                }),
      // Sample 1 of tag has no ids; its gradient reaches no row, and is checked all the same.
      ApplyCase("InfiniteGradientOfAnEmptySample", kInvalid, {"tag", "inf", "finite"},
                [](Apply* r) {
                  std::vector<float> values(12, 0.5f);
                  values[4] = kInfinity;
                  *Gradient(r, 1) = MakeTensor<float>({3, 4}, values);
                }),
      ApplyCase("NanInBfloat16", kInvalid, {"user", "nan", "finite"},
                [](Apply* r) {
                  Gradient(r, 0)->set_dtype(v1::BFLOAT16);
                  Gradient(r, 0)->set_data(absl::StrCat(std::string(22, '\0'), "\xc0\x7f"));
                }),
      ApplyCase("OneBadGradientAmongGoodOnes", kInvalid, {"city", "-inf"},
                [](Apply* r) {
                  std::vector<float> values(9, 0.5f);
                  values[8] = -kInfinity;
                  *Gradient(r, 2) = MakeTensor<float>({3, 3}, values);
                }),
  };
}

std::vector<BadCase> BadMutations() {
  return {
      ApplyCase("NoMutation", kInvalid, {"client_id"}, [](Apply* r) { r->clear_mutation(); }),
      ApplyCase("NoClientId", kInvalid, {"client_id"},
                [](Apply* r) { r->mutable_mutation()->clear_client_id(); }),
      ApplyCase("LongClientId", kInvalid, {"client_id", "64"},
                [](Apply* r) { r->mutable_mutation()->set_client_id(std::string(65, 'x')); }),
      ApplyCase("SequenceZero", kInvalid, {"sequence", "1"},
                [](Apply* r) { r->mutable_mutation()->set_sequence(0); }),
      ApplyCase("UnknownHandle", grpc::NOT_FOUND, {"batch_handle", "999"},
                [](Apply* r) { r->set_batch_handle(999); }),
      ApplyCase("ApplyWithoutLookup", grpc::NOT_FOUND, {"batch_handle", "0"},
                [](Apply* r) { r->set_batch_handle(0); }),
      {"ReleasedBatch",
       grpc::NOT_FOUND,
       {"batch_handle"},
       [](const BadCall& call) {
         const uint64_t handle = LookUp(call);
         Release(call, handle);
         v1::ApplyGradientsResponse response;
         return Call(&Stub::ApplyGradients, call.api,
                     GoodApply(call.model_id, handle, call.sequence), &response);
       }},
  };
}

std::vector<BadCase> BadHyperparameters() {
  const auto set = [](const char* table, const char* name, double value) {
    return [=](Apply* r) {
      v1::StepHyperparameters* step = r->add_hyperparameters();
      step->set_table(table);
      (*step->mutable_values())[name] = value;
    };
  };
  return {
      ApplyCase("UnknownName", kInvalid, {"hyperparameters", "lerning_rate"},
                set("users", "lerning_rate", 1)),
      ApplyCase("OfAnotherOptimizer", kInvalid, {"hyperparameters", "beta1", "adagrad"},
                set("users", "beta1", 0.5f)),
      ApplyCase("UnknownTable", kInvalid, {"hyperparameters", "usrs"},
                set("usrs", "learning_rate", 1)),
      ApplyCase("NanRate", kInvalid, {"learning_rate", "nan"}, set("", "learning_rate", kNan)),
      ApplyCase("InfiniteRate", kInvalid, {"learning_rate", "inf"},
                set("", "learning_rate", kInfinity)),
      ApplyCase("RateBeyondFloat", kInvalid, {"learning_rate", "1e+300"},
                set("", "learning_rate", 1e300)),
      ApplyCase("NegativeRate", kInvalid, {"learning_rate", "-1"}, set("", "learning_rate", -1)),
      ApplyCase("InitialValue", kInvalid, {"initial_accumulator"},
                set("users", "initial_accumulator", 1)),
      ApplyCase("ConflictInOneStack", kInvalid, {"learning_rate", "stack"},
                [set](Apply* r) {
                  set("users", "learning_rate", 1)(r);
                  set("tags", "learning_rate", 2)(r);
                }),
      ApplyCase("OneTableOfAStack", kInvalid, {"learning_rate", "users", "tags", "stack"},
                set("users", "learning_rate", 1)),
      ApplyCase("NegativeStep", kInvalid, {"step", "-1"}, [](Apply* r) { r->set_step(-1); }),
  };
}

std::vector<BadCase> BadAssigns() {
  return {
      AssignCase("UnknownModel", grpc::NOT_FOUND, {"model_id", "0000000000003039"},
                 [](Assign* r) { r->set_model_id(12345); }),
      AssignCase("UnknownTable", grpc::NOT_FOUND, {"usrs", "strict"},
                 [](Assign* r) { r->set_table("usrs"); }),
      AssignCase("UnknownSlot", kInvalid, {"slot", "momentum", "accumulator"},
                 [](Assign* r) { r->set_slot("momentum"); }),
      AssignCase("NoMutation", kInvalid, {"client_id"}, [](Assign* r) { r->clear_mutation(); }),
      AssignCase("RepeatedId", kInvalid, {"ids", "3", "repeated"},
                 [](Assign* r) {
                   *r->mutable_ids() = MakeVector<int64_t>({3, 3});
                 }),
      AssignCase("IdTooLarge", grpc::OUT_OF_RANGE, {"ids", "20", "19"},
                 [](Assign* r) {
                   *r->mutable_ids() = MakeVector<int64_t>({3, 20});
                 }),
      AssignCase("IdNegative", grpc::OUT_OF_RANGE, {"ids", "-1", "19"},
                 [](Assign* r) {
                   *r->mutable_ids() = MakeVector<int32_t>({-1, 3});
                 }),
      AssignCase("FloatIds", kInvalid, {"ids", "FLOAT32"},
                 [](Assign* r) {
                   *r->mutable_ids() = MakeVector<float>({3, 4});
                 }),
      AssignCase("IdsOfRankTwo", kInvalid, {"ids", "[2, 1]"},
                 [](Assign* r) {
                   *r->mutable_ids() = MakeTensor<int64_t>({2, 1}, {3, 4});
                 }),
      AssignCase("WrongShape", kInvalid, {"values", "[2, 3]", "[2, 4]"},
                 [](Assign* r) {
                   *r->mutable_values() = MakeTensor<float>({2, 3}, std::vector<float>(6));
                 }),
      AssignCase("TooFewBytes", kInvalid, {"values", "31 bytes", "32"},
                 [](Assign* r) { r->mutable_values()->mutable_data()->pop_back(); }),
      AssignCase("Bfloat16", kInvalid, {"values", "BFLOAT16", "FLOAT32"},
                 [](Assign* r) { r->mutable_values()->set_dtype(v1::BFLOAT16); }),
      AssignCase("NanValue", kInvalid, {"values", "nan", "finite"},
                 [](Assign* r) {
                   std::vector<float> values(8, 1.0f);
                   values[5] = kNan;
                   *r->mutable_values() = MakeTensor<float>({2, 4}, values);
                 }),
  };
}

std::vector<BadCase> BadReads() {
  using Read = v1::ReadRowsRequest;
  using Export = v1::ExportTableRequest;
  return {
      ReadCase("ReadUnknownModel", grpc::NOT_FOUND, {"model_id", "0000000000003039"},
               [](Read* r) { r->set_model_id(12345); }),
      ReadCase("ReadUnknownTable", grpc::NOT_FOUND, {"usrs", "strict"},
               [](Read* r) { r->set_table("usrs"); }),
      ReadCase("ReadUnknownSlot", kInvalid, {"slot", "velocity", "accumulator"},
               [](Read* r) { r->set_slot("velocity"); }),
      ReadCase("ReadSlotOfSgd", kInvalid, {"slot", "accumulator", "sgd"},
               [](Read* r) {
                 r->set_table("cities");
                 r->set_slot("accumulator");
               }),
      ReadCase("ReadIdTooLarge", grpc::OUT_OF_RANGE, {"ids", "20", "19"},
               [](Read* r) { *r->mutable_ids() = MakeVector<int64_t>({20}); }),
      ReadCase("ReadIdNegative", grpc::OUT_OF_RANGE, {"ids", "-1", "19"},
               [](Read* r) { *r->mutable_ids() = MakeVector<int64_t>({-1}); }),
      ReadCase("ReadWithoutIds", kInvalid, {"ids"}, [](Read* r) { r->clear_ids(); }),
      // 100,000 rows of 16 bytes are more than the 1 MiB that an answer may have.
      ReadCase("ReadTooMuch", grpc::RESOURCE_EXHAUSTED, {"1048576"},
               [](Read* r) {
                 *r->mutable_ids() = MakeVector<int32_t>(std::vector<int32_t>(100'000, 1));
               }),
      ExportCase("ExportUnknownTable", grpc::NOT_FOUND, {"usrs", "strict"},
                 [](Export* r) { r->set_table("usrs"); }),
      ExportCase("ExportUnknownSlot", kInvalid, {"slot", "velocity", "accumulator"},
                 [](Export* r) { r->set_slot("velocity"); }),
      ExportCase("ExportBeyondTheEnd", grpc::OUT_OF_RANGE, {"first_row", "21", "20"},
                 [](Export* r) { r->set_first_row(21); }),
      ExportCase("ExportBeforeTheBegin", grpc::OUT_OF_RANGE, {"first_row", "-1"},
                 [](Export* r) { r->set_first_row(-1); }),
      ExportCase("ExportTooMany", grpc::OUT_OF_RANGE, {"row_count", "17", "16"},
                 [](Export* r) {
                   r->set_first_row(4);
                   r->set_row_count(17);
                 }),
      ExportCase("ExportNegativeCount", grpc::OUT_OF_RANGE, {"row_count", "-1"},
                 [](Export* r) { r->set_row_count(-1); }),
      ExportCase("ExportCountOverflows", grpc::OUT_OF_RANGE, {"row_count"},
                 [](Export* r) {
                   r->set_first_row(4);
                   r->set_row_count(std::numeric_limits<int64_t>::max());
                 }),
  };
}

}  // namespace

std::vector<BadCase> BadApplies() {
  std::vector<BadCase> all;
  for (auto* some : {&BadGradients, &BadMutations, &BadHyperparameters}) {
    for (BadCase& one : some()) all.push_back(std::move(one));
  }
  return all;
}

std::vector<BadCase> BadRows() {
  std::vector<BadCase> all;
  for (auto* some : {&BadAssigns, &BadReads}) {
    for (BadCase& one : some()) all.push_back(std::move(one));
  }
  return all;
}

}  // namespace emberd::testing
