#include <limits>
#include <string>

#include "tests/integration/bad_cases.h"

namespace emberd::testing {
namespace {

using Request = v1::LookupRequest;

// A good lookup with one fault.
BadCase Case(std::string name, grpc::StatusCode code, std::vector<std::string> words,
             std::function<void(Request*)> spoil) {
  return {std::move(name), code, std::move(words), [spoil = std::move(spoil)](const BadCall& call) {
            Request request = GoodLookup(call.model_id);
            spoil(&request);
            v1::LookupResponse response;
            return Call(&Stub::Lookup, call.api, request, &response);
          }};
}

v1::DenseIds* User(Request* r) { return r->mutable_features(0)->mutable_dense(); }
v1::RaggedIds* Tag(Request* r) { return r->mutable_features(1)->mutable_ragged(); }
v1::SparseIds* City(Request* r) { return r->mutable_features(2)->mutable_sparse(); }

std::vector<BadCase> BadNames() {
  return {
      Case("UnknownModel", grpc::NOT_FOUND, {"model_id", "0000000000003039"},
           [](Request* r) { r->set_model_id(12345); }),
      Case("UnknownFeature", kInvalid, {"usr", "strict"},
           [](Request* r) { r->mutable_features(0)->set_feature("usr"); }),
      Case("MissingFeature", kInvalid, {"'city'", "missing"},
           [](Request* r) { r->mutable_features()->RemoveLast(); }),
      Case("RepeatedFeature", kInvalid, {"'user'", "repeated"},
           [](Request* r) { *r->add_features() = r->features(0); }),
      Case("NoFeatures", kInvalid, {"'user'", "missing"}, [](Request* r) { r->clear_features(); }),
      Case("NoIds", kInvalid, {"user", "dense, sparse or ragged"},
           [](Request* r) { r->mutable_features(0)->clear_ids(); }),
      Case("ActivationDtype", kInvalid, {"activation_dtype is INT32", "FLOAT32 or BFLOAT16"},
           [](Request* r) { r->set_activation_dtype(v1::INT32); }),
      Case("ActivationDtypeUnknown", kInvalid, {"activation_dtype", "77"},
           [](Request* r) { r->set_activation_dtype(static_cast<v1::DataType>(77)); }),
  };
}

std::vector<BadCase> BadTensors() {
  return {
      Case("FloatIds", kInvalid, {"user", "ids", "FLOAT32", "INT32 or INT64"},
           [](Request* r) { User(r)->mutable_ids()->set_dtype(v1::FLOAT32); }),
      Case("IdsWithoutDtype", kInvalid, {"user", "ids", "DATA_TYPE_UNSPECIFIED", "INT32 or INT64"},
           [](Request* r) { User(r)->mutable_ids()->clear_dtype(); }),
      Case("UnknownDtype", kInvalid, {"user", "ids", "77"},
           [](Request* r) { User(r)->mutable_ids()->set_dtype(static_cast<v1::DataType>(77)); }),
      Case("TooFewBytes", kInvalid, {"user", "ids", "23 bytes", "24"},
           [](Request* r) { User(r)->mutable_ids()->mutable_data()->pop_back(); }),
      Case("TooManyBytes", kInvalid, {"user", "ids", "25 bytes", "24"},
           [](Request* r) { User(r)->mutable_ids()->mutable_data()->push_back('x'); }),
      Case("NoBytes", kInvalid, {"user", "ids", "0 bytes"},
           [](Request* r) { User(r)->mutable_ids()->clear_data(); }),
      Case("NegativeExtent", kInvalid, {"user", "ids", "shape", "-3"},
           [](Request* r) { User(r)->mutable_ids()->set_shape(0, -3); }),
      Case("TwoNegativeExtents", kInvalid, {"user", "ids", "shape", "-3"},
           [](Request* r) {
             User(r)->mutable_ids()->set_shape(0, -3);
             User(r)->mutable_ids()->add_shape(-1);
           }),
      // 2^62 x 8 elements are 0 in 64 bits.
      Case("ShapeOverflows", kInvalid, {"user", "ids", "4611686018427387904, 8"},
           [](Request* r) {
             *User(r)->mutable_ids() = MakeTensor<int64_t>({int64_t{1} << 62, 8}, {});
           }),
      // 2^61 elements of 8 bytes are 0 bytes in 64 bits.
      Case("BytesOverflow", kInvalid, {"user", "ids", "2305843009213693952"},
           [](Request* r) {
             *User(r)->mutable_ids() = MakeTensor<int64_t>({int64_t{1} << 61}, {});
           }),
      Case("RankThree", kInvalid, {"user", "ids", "shape", "[3, 1, 1]"},
           [](Request* r) {
             *User(r)->mutable_ids() = MakeTensor<int64_t>({3, 1, 1}, {1, 2, 3});
           }),
      Case("RankZero", kInvalid, {"user", "ids", "shape", "[]"},
           [](Request* r) { *User(r)->mutable_ids() = MakeTensor<int64_t>({}, {1}); }),
      Case("AbsentIds", kInvalid, {"user", "ids"}, [](Request* r) { User(r)->clear_ids(); }),
      Case("HugeSampleCount", grpc::RESOURCE_EXHAUSTED, {"city", "4611686018427387904"},
           [](Request* r) { City(r)->set_sample_count(int64_t{1} << 62); }),
      // Samples without ids take no bytes in the request, but do in the answer.
      Case("HugeEmptyDense", grpc::RESOURCE_EXHAUSTED, {"user", "1099511627776"},
           [](Request* r) {
             *User(r)->mutable_ids() = MakeTensor<int64_t>({int64_t{1} << 40, 0}, {});
           }),
  };
}

std::vector<BadCase> BadIds() {
  return {
      Case("IdTooLarge", kRange, {"user", "position 1", "20", "[0, 20)"},
           [](Request* r) {
             *User(r)->mutable_ids() = MakeVector<int64_t>({1, 20, 2});
           }),
      Case("IdNegative", kRange, {"user", "position 2", "-1", "[0, 20)"},
           [](Request* r) {
             *User(r)->mutable_ids() = MakeVector<int64_t>({1, 2, -1});
           }),
      Case("IdNegative32", kRange, {"tag", "-7", "[0, 12)"},
           [](Request* r) {
             *Tag(r)->mutable_values() = MakeVector<int32_t>({5, -7, 7, 11});
           }),
      // Its lower 32 bits are a good id.
      Case("IdBeyond32Bits", kRange, {"user", "4294967297"},
           [](Request* r) {
             *User(r)->mutable_ids() = MakeVector<int64_t>({1, 4294967297, 2});
           }),
      Case("IdLowest", kRange, {"city", "-9223372036854775808"},
           [](Request* r) {
             *City(r)->mutable_values() =
                 MakeVector<int64_t>({1, std::numeric_limits<int64_t>::min(), 2});
           }),
      Case("IdWithZeroWeight", kRange, {"tag", "12"},
           [](Request* r) {
             *Tag(r)->mutable_values() = MakeVector<int32_t>({5, 12, 7, 11});
             *Tag(r)->mutable_weights() = MakeVector<float>({1, 0, 1, 1});
           }),
  };
}

std::vector<BadCase> BadRagged() {
  const auto splits = [](std::vector<int32_t> values) {
    return [values](Request* r) { *Tag(r)->mutable_row_splits() = MakeVector<int32_t>(values); };
  };
  return {
      Case("SplitsStartAtOne", kInvalid, {"tag", "row_splits", "1", "0"}, splits({1, 2, 2, 4})),
      Case("SplitsDecrease", kInvalid, {"tag", "row_splits", "1"}, splits({0, 2, 1, 4})),
      Case("SplitsNegative", kInvalid, {"tag", "row_splits", "-2"}, splits({0, -2, 2, 4})),
      Case("SplitsEndEarly", kInvalid, {"tag", "row_splits", "3", "4"}, splits({0, 2, 2, 3})),
      Case("SplitsEndLate", kInvalid, {"tag", "row_splits", "5", "4"}, splits({0, 2, 2, 5})),
      Case("SplitsBeyondInTheMiddle", kInvalid, {"tag", "row_splits"}, splits({0, 400, 2, 4})),
      Case("SplitsEmpty", kInvalid, {"tag", "row_splits"}, splits({})),
      Case("SplitsAbsent", kInvalid, {"tag", "row_splits"},
           [](Request* r) { Tag(r)->clear_row_splits(); }),
      Case("SplitsHuge", kInvalid, {"tag", "row_splits"},
           [](Request* r) {
             *Tag(r)->mutable_row_splits() = MakeVector<int64_t>(
                 {0, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min(), 4});
           }),
      Case("SplitsOfRankTwo", kInvalid, {"tag", "row_splits", "[2, 2]"},
           [](Request* r) {
             *Tag(r)->mutable_row_splits() = MakeTensor<int32_t>({2, 2}, {0, 2, 2, 4});
           }),
      Case("ValuesOfRankTwo", kInvalid, {"tag", "values", "[2, 2]"},
           [](Request* r) {
             *Tag(r)->mutable_values() = MakeTensor<int32_t>({2, 2}, {5, 6, 7, 11});
           }),
  };
}

std::vector<BadCase> BadSparse() {
  const auto indices = [](std::vector<int64_t> values) {
    return [values](Request* r) {
      *City(r)->mutable_indices() =
          MakeTensor<int64_t>({static_cast<int64_t>(values.size() / 2), 2}, values);
    };
  };
  return {
      Case("SamplesDecrease", kInvalid, {"city", "indices", "1"}, indices({0, 0, 2, 0, 1, 0})),
      Case("SampleTooLarge", kRange, {"city", "indices", "3"}, indices({0, 0, 1, 0, 3, 0})),
      Case("SampleNegative", kRange, {"city", "indices", "-1"}, indices({-1, 0, 1, 0, 2, 0})),
      Case("ColumnNegative", kInvalid, {"city", "indices", "-4"}, indices({0, 0, 1, -4, 2, 0})),
      Case("IndicesTooFew", kInvalid, {"city", "indices", "[2, 2]"}, indices({0, 0, 1, 0})),
      Case("IndicesOfRankOne", kInvalid, {"city", "indices", "[6]"},
           [](Request* r) {
             *City(r)->mutable_indices() = MakeVector<int64_t>({0, 0, 0, 1, 2, 0});
           }),
      Case("SampleCountNegative", kInvalid, {"city", "sample_count", "-1"},
           [](Request* r) { City(r)->set_sample_count(-1); }),
      Case("SampleCountZero", kRange, {"city", "indices"},
           [](Request* r) { City(r)->set_sample_count(0); }),
  };
}

std::vector<BadCase> BadWeights() {
  const auto weights = [](std::vector<float> values) {
    return [values](Request* r) { *Tag(r)->mutable_weights() = MakeVector<float>(values); };
  };
  return {
      Case("WeightNan", kInvalid, {"tag", "weight", "nan", "finite"}, weights({1, kNan, 1, 1})),
      Case("WeightInfinite", kInvalid, {"tag", "weight", "inf", "finite"},
           weights({1, 1, 1, kInfinity})),
      Case("WeightMinusInfinite", kInvalid, {"tag", "weight", "-inf", "finite"},
           weights({-kInfinity, 1, 1, 1})),
      Case("OneWeightForAllNan", kInvalid, {"tag", "weight", "nan"}, weights({kNan})),
      Case("WeightsTooFew", kInvalid, {"tag", "weights", "[3]", "[4]"}, weights({1, 1, 1})),
      Case("WeightsTooMany", kInvalid, {"tag", "weights", "[5]", "[4]"}, weights({1, 1, 1, 1, 1})),
      Case("WeightsOfInts", kInvalid, {"tag", "weights", "INT32", "FLOAT32"},
           [](Request* r) {
             *Tag(r)->mutable_weights() = MakeVector<int32_t>({1, 1, 1, 1});
           }),
      Case("WeightsOfBfloat16", kInvalid, {"tag", "weights", "BFLOAT16", "FLOAT32"},
           [](Request* r) {
             Tag(r)->mutable_weights()->set_dtype(v1::BFLOAT16);
             Tag(r)->mutable_weights()->set_data(std::string(8, '\0'));
           }),
      Case("DenseWeightsOfAnotherShape", kInvalid, {"user", "weights", "[3, 1]", "[3]"},
           [](Request* r) {
             *User(r)->mutable_weights() = MakeTensor<float>({3, 1}, {1, 1, 1});
           }),
  };
}

std::vector<BadCase> BadSizes() {
  return {
      // The cluster takes messages of up to 1 MiB.
      Case("OversizedMessage", grpc::RESOURCE_EXHAUSTED, {"1048576"},
           [](Request* r) {
             *User(r)->mutable_ids() = MakeVector<int64_t>(std::vector<int64_t>(1 << 18));
           }),
      {"TooManyBatches",
       grpc::RESOURCE_EXHAUSTED,
       {"max_batches", "8"},
       [](const BadCall& call) {
         std::vector<uint64_t> handles;
         grpc::Status status;
         for (int i = 0; i < 9 && status.ok(); ++i) {
           v1::LookupResponse response;
           status = Call(&Stub::Lookup, call.api, GoodLookup(call.model_id), &response);
           if (status.ok()) handles.push_back(response.batch_handle());
         }
         for (const uint64_t handle : handles) {
           v1::ReleaseBatchRequest release;
           release.set_model_id(call.model_id);
           release.set_batch_handle(handle);
           v1::ReleaseBatchResponse released;
           Call(&Stub::ReleaseBatch, call.api, release, &released);
         }
         return status;
       }},
  };
}

}  // namespace

std::vector<BadCase> BadLookups() {
  std::vector<BadCase> all;
  for (auto* some :
       {&BadNames, &BadTensors, &BadIds, &BadRagged, &BadSparse, &BadWeights, &BadSizes}) {
    for (BadCase& one : some()) all.push_back(std::move(one));
  }
  return all;
}

}  // namespace emberd::testing
