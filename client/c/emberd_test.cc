// Covers: arguments.cc calls.cc describe.cc handles.cc stream.cc
#include "client/c/emberd.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cpp/testing/fake_service.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd_test {

using ::emberd::client::testing::FakeService;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int kDim = 4;
constexpr char kConfig[] =
    R"({"name": "m", "tables": [{"name": "a", "vocabulary_size": 10, "embedding_dim": 4},
                                {"name": "b", "vocabulary_size": 10, "embedding_dim": 4}],
        "features": [{"name": "a", "table": "a"}, {"name": "b", "table": "b"}]})";

struct Free {
  void operator()(emberd_error* handle) const { emberd_error_free(handle); }
  void operator()(emberd_call* handle) const { emberd_call_free(handle); }
  void operator()(emberd_client* handle) const { emberd_client_free(handle); }
  void operator()(emberd_model* handle) const { emberd_model_free(handle); }
  void operator()(emberd_lookup* handle) const { emberd_lookup_free(handle); }
  void operator()(emberd_rows* handle) const { emberd_rows_free(handle); }
  void operator()(emberd_text* handle) const { emberd_text_free(handle); }
  void operator()(emberd_stream* handle) const { emberd_stream_free(handle); }
  void operator()(emberd_lease* handle) const { emberd_lease_free(handle); }
  void operator()(emberd_answer* handle) const { emberd_answer_free(handle); }
};
template <typename T>
using Held = std::unique_ptr<T, Free>;

// "code: message" of a call that has ended.
std::string Outcome(emberd_call* call) {
  Held<emberd_error> error(emberd_call_error(call));
  return std::to_string(emberd_error_code(error.get())) + ": " + emberd_error_message(error.get());
}
std::string Message(emberd_error* error) {
  const Held<emberd_error> held(error);
  return std::to_string(emberd_error_code(error)) + ": " + emberd_error_message(error);
}
Held<emberd_call> Done(emberd_call* call) {
  EXPECT_EQ(emberd_call_wait(call, -1), 1);
  return Held<emberd_call>(call);
}

class CInterfaceTest : public ::testing::Test {
 protected:
  void SetUp() override { Connect({}); }
  void Connect(emberd_client_options options) {
    const char* address = service_.address().c_str();
    options.size = sizeof(options);
    options.addresses = &address;
    options.address_count = 1;
    const Held<emberd_call> connected = Done(emberd_connect(&options));
    client_.reset(emberd_call_take_client(connected.get()));
    ASSERT_NE(client_, nullptr) << Outcome(connected.get());
    const Held<emberd_call> declared = Done(emberd_declare(client_.get(), kConfig));
    model_.reset(emberd_call_take_model(declared.get()));
    ASSERT_NE(model_, nullptr) << Outcome(declared.get());
  }

  Held<emberd_call> Lookup(const std::vector<emberd_feature_ids>& features) {
    return Done(emberd_lookup_begin(client_.get(), model_.get(), features.data(),
                                    static_cast<int32_t>(features.size()), 0, 0));
  }
  Held<emberd_stream> Open() {
    emberd_train_options options = {};
    options.size = sizeof(options);
    options.group = "run";
    const Held<emberd_call> call = Done(emberd_train(client_.get(), model_.get(), &options));
    EXPECT_EQ(Outcome(call.get()), "0: ");
    return Held<emberd_stream>(emberd_call_take_stream(call.get()));
  }

  const std::vector<int64_t> ids_ = {1, 2, 3};
  const std::vector<int32_t> splits_ = {0, 3};
  const emberd_feature_ids dense_ = {"a", EMBERD_DENSE, 8, ids_.data(), 3, 1, nullptr, 0, 0, 0,
                                     0,   nullptr,      0};
  const emberd_feature_ids ragged_ = {
      "b", EMBERD_RAGGED, 8, ids_.data(), 3, 0, splits_.data(), 2, 4, 0, 0, nullptr, 0};
  FakeService service_;
  Held<emberd_client> client_;
  Held<emberd_model> model_;
};

TEST_F(CInterfaceTest, SaysWhichItIs) {
  EXPECT_EQ(emberd_abi_version(), EMBERD_ABI_VERSION);
  EXPECT_THAT(emberd_version(), ::testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
  EXPECT_THAT(emberd_model_json(model_.get()), HasSubstr(R"("id":"42")"));
  EXPECT_THAT(emberd_model_json(model_.get()), HasSubstr(R"("row_offset":0,"shard_rotation":0)"));
  const Held<emberd_call> call = Done(emberd_client_status(client_.get()));
  const Held<emberd_text> text(emberd_call_take_text(call.get()));
  EXPECT_THAT(emberd_text_string(text.get()), HasSubstr(R"("shards":[)"));
  EXPECT_THAT(emberd_text_string(text.get()), HasSubstr(R"("lost":"")"));
}

TEST_F(CInterfaceTest, AStepGoesThrough) {
  const Held<emberd_call> looked_up = Lookup({dense_, ragged_});
  const Held<emberd_lookup> lookup(emberd_call_take_lookup(looked_up.get()));
  ASSERT_NE(lookup, nullptr) << Outcome(looked_up.get());
  EXPECT_EQ(emberd_call_take_lookup(looked_up.get()), nullptr) << "given twice";
  emberd_activation activations[2];
  ASSERT_EQ(emberd_lookup_activations(lookup.get(), activations, 2), 2);
  EXPECT_STREQ(activations[1].feature, "b");
  EXPECT_EQ(activations[0].samples, 3);
  EXPECT_EQ(activations[0].dim, kDim);
  EXPECT_EQ(activations[0].values[2 * kDim], 2);
  EXPECT_EQ(activations[1].values[0], 100);

  const std::vector<float> values(3 * kDim, 0.5f);
  const emberd_gradient gradient = {"a", values.data(), 3, kDim};
  const emberd_hyperparameter rate = {nullptr, "learning_rate", 0.25};
  const Held<emberd_call> applied =
      Done(emberd_apply(client_.get(), model_.get(), lookup.get(), &gradient, 1, &rate, 1, 11, 0));
  emberd_update update;
  ASSERT_EQ(emberd_call_update(applied.get(), &update), 1) << Outcome(applied.get());
  EXPECT_EQ(update.rows_updated, 1);
  ASSERT_EQ(service_.applies().size(), 1);
  EXPECT_EQ(service_.applies()[0].step(), 11);
  EXPECT_EQ(service_.applies()[0].hyperparameters(0).values().at("learning_rate"), 0.25);
  const emberd_hyperparameter twice[] = {rate, {"b", "learning_rate", 0.5}, rate};
  EXPECT_THAT(Outcome(Done(emberd_apply(client_.get(), model_.get(), lookup.get(), &gradient, 1,
                                        twice, 3, 12, 0))
                          .get()),
              HasSubstr("\"learning_rate\" of table \"\" is repeated"));
}

TEST_F(CInterfaceTest, DenseIdsMayHaveAShape) {
  const int32_t shape[] = {3, 1};
  emberd_feature_ids shaped = dense_;
  shaped.ids_per_sample = 7;  // not looked at
  shaped.index = shape;
  shaped.index_count = 2;
  shaped.index_bytes = 4;
  EXPECT_EQ(Outcome(Lookup({shaped, ragged_}).get()), "0: ");
  const auto lookups = service_.lookups();
  ASSERT_EQ(lookups.size(), 1);
  const auto& sent = lookups[0].features(0).dense().ids().shape();
  EXPECT_EQ(std::vector<int64_t>(sent.begin(), sent.end()), (std::vector<int64_t>{3, 1}));
  shaped.index_count = 1;
  shaped.index_bytes = 8;
  EXPECT_THAT(Outcome(Lookup({shaped, ragged_}).get()),
              HasSubstr("3: feature \"a\": ids: 3 are given; shape [4294967299] needs 4294967299"));
}

// What this would catch: a wrong argument that is read past its end, or that ends the process.
TEST_F(CInterfaceTest, WrongArgumentsAreRefusedByName) {
  emberd_feature_ids wrong = dense_;
  wrong.id_bytes = 2;
  EXPECT_THAT(Outcome(Lookup({wrong, ragged_}).get()),
              HasSubstr("3: feature \"a\": ids: integers"));
  wrong = dense_;
  wrong.id_count = -1;
  EXPECT_THAT(Outcome(Lookup({wrong, ragged_}).get()), HasSubstr("3: feature \"a\": ids: -1"));
  wrong = dense_;
  wrong.ids = nullptr;
  EXPECT_THAT(Outcome(Lookup({wrong, ragged_}).get()), HasSubstr("at NULL"));
  wrong = ragged_;
  wrong.layout = 7;
  EXPECT_THAT(Outcome(Lookup({dense_, wrong}).get()), HasSubstr("3: feature \"b\": layout: 7"));
  wrong = dense_;
  wrong.feature = nullptr;
  EXPECT_THAT(Outcome(Lookup({wrong, ragged_}).get()), HasSubstr("NULL"));
  EXPECT_THAT(service_.lookups(), ::testing::IsEmpty());

  EXPECT_THAT(Outcome(Done(emberd_connect(nullptr)).get()), HasSubstr("3: emberd_client_options"));
  emberd_client_options plain = {};
  plain.size = sizeof(plain);
  plain.server_name = "emberd";
  EXPECT_EQ(Outcome(Done(emberd_connect(&plain)).get()),
            "3: tls: 0 is not allowed with ca_file, certificate_file, key_file or server_name; it "
            "must be 1");
  emberd_train_options train = {};
  train.size = sizeof(train);
  train.consistency = 9;
  EXPECT_THAT(Outcome(Done(emberd_train(client_.get(), model_.get(), &train)).get()),
              HasSubstr("3: consistency: 9"));
  train.consistency = EMBERD_SYNC;
  train.group = "run";
  train.step_timeout_ms = std::numeric_limits<int64_t>::min();
  EXPECT_THAT(Outcome(Done(emberd_train(client_.get(), model_.get(), &train)).get()),
              HasSubstr("3: step_timeout: -"));
  EXPECT_THAT(
      Outcome(Done(emberd_read_rows(client_.get(), model_.get(), "a", nullptr, 5, "")).get()),
      HasSubstr("3: ids: 5 elements at NULL"));
}

// What this would catch: an option of a newer program that is off without a word.
TEST_F(CInterfaceTest, OptionsThatANewerProgramSetsAreRefused) {
  struct {
    emberd_client_options known = {};
    int64_t newer = 0;
  } options;
  const char* address = service_.address().c_str();
  options.known.size = sizeof(options);
  options.known.addresses = &address;
  options.known.address_count = 1;
  const auto connect = [&] {
    return Outcome(
        Done(emberd_connect(reinterpret_cast<const emberd_client_options*>(&options))).get());
  };
  EXPECT_EQ(connect(), "0: ");
  options.newer = 1;
  EXPECT_EQ(connect(),
            "3: emberd_client_options: a field is set that this library, which is older, does not "
            "have");
  options.known.size = UINT64_MAX;
  EXPECT_THAT(connect(), HasSubstr("3: emberd_client_options.size: it must be sizeof("));
}

// What this would catch: a call that reads names when its caller has other uses for them. Its
// thread may be quick, once.
TEST_F(CInterfaceTest, NamesAreCopied) {
  const std::vector<float> values(3 * kDim, 0.5f);
  for (int i = 0; i < 50; ++i) {
    char names[][2] = {"a", "b"};
    emberd_feature_ids features[] = {dense_, ragged_};
    for (int f = 0; f < 2; ++f) features[f].feature = names[f];
    emberd_call* const begun = emberd_lookup_begin(client_.get(), model_.get(), features, 2, 0, 0);
    names[0][0] = names[1][0] = 'x';
    const Held<emberd_call> looked_up = Done(begun);
    const Held<emberd_lookup> lookup(emberd_call_take_lookup(looked_up.get()));
    ASSERT_NE(lookup, nullptr) << Outcome(looked_up.get());

    names[0][0] = 'a';
    const emberd_gradient gradient = {names[0], values.data(), 3, kDim};
    emberd_call* const applying =
        emberd_apply(client_.get(), model_.get(), lookup.get(), &gradient, 1, nullptr, 0, i, 0);
    names[0][0] = 'x';
    ASSERT_EQ(Outcome(Done(applying).get()), "0: ");
  }
}

// What this would catch, under ThreadSanitizer or by a second free: a result that two threads get.
TEST_F(CInterfaceTest, OneOfTwoThreadsTakesTheResult) {
  const Held<emberd_call> call = Done(emberd_describe(client_.get(), "m"));
  Held<emberd_model> other;
  std::thread taker([&] { other.reset(emberd_call_take_model(call.get())); });
  const Held<emberd_model> model(emberd_call_take_model(call.get()));
  taker.join();
  EXPECT_NE(model == nullptr, other == nullptr);
}

TEST_F(CInterfaceTest, ErrorsKeepCodeAndText) {
  service_.AddFault({.status = {grpc::StatusCode::RESOURCE_EXHAUSTED, "too \"much\""}});
  EXPECT_EQ(Outcome(Lookup({dense_, ragged_}).get()), "8: too \"much\"");
}

// What this would catch: a wait that holds its caller until the server answers.
TEST_F(CInterfaceTest, WaitsEndAndCancelledCallsToo) {
  service_.AddFault({.delay = absl::Hours(1)});
  const Held<emberd_call> call(emberd_describe(client_.get(), "m"));
  EXPECT_EQ(emberd_call_wait(call.get(), 10), 0);
  EXPECT_EQ(Outcome(call.get()), "0: ") << "it has not ended";
  EXPECT_EQ(emberd_call_take_model(call.get()), nullptr);
  emberd_client_cancel(client_.get());
  EXPECT_EQ(emberd_call_wait(call.get(), -1), 1);
  EXPECT_THAT(Outcome(call.get()), HasSubstr("1: "));
}

// What this would catch: a call or stream that outlives a cancellation because its thread began to
// work only afterwards. That thread may be quick, once.
TEST_F(CInterfaceTest, CallsThatHaveJustBegunAreCancelled) {
  constexpr int kTimes = 50;
  for (int i = 0; i < kTimes; ++i) service_.AddFault({.delay = absl::Hours(1)});
  const auto go_on = std::make_shared<absl::Notification>();
  service_.damage_train = [go_on](emberd::v1::TrainResponse*) { go_on->WaitForNotification(); };
  emberd_train_options options = {};
  options.size = sizeof(options);
  options.group = "run";
  for (int i = 0; i < kTimes; ++i) {
    const Held<emberd_call> call(emberd_describe(client_.get(), "m"));
    const Held<emberd_call> stream(emberd_train(client_.get(), model_.get(), &options));
    emberd_client_cancel(client_.get());
    for (emberd_call* begun : {call.get(), stream.get()}) {
      EXPECT_EQ(emberd_call_wait(begun, -1), 1);
      EXPECT_THAT(Outcome(begun), HasSubstr("1: ")) << i;
    }
  }
  go_on->Notify();
  service_.ClearFaults();
  EXPECT_EQ(Outcome(Done(emberd_describe(client_.get(), "m")).get()), "0: ");
}

TEST_F(CInterfaceTest, AHandleKeepsWhatItNeeds) {
  const Held<emberd_stream> stream = Open();
  client_.reset();
  model_.reset();
  const emberd_feature_ids features[] = {dense_, ragged_};
  ASSERT_EQ(emberd_stream_send_lookup(stream.get(), 7, features, 2), nullptr);
  emberd_lookup* lookup = nullptr;
  emberd_error* error = nullptr;
  ASSERT_EQ(emberd_stream_receive_lookup(stream.get(), -1, &lookup, &error), 1);
  ASSERT_NE(lookup, nullptr) << Message(error);
  emberd_lookup_free(lookup);
}

TEST_F(CInterfaceTest, AStreamOfSteps) {
  const Held<emberd_stream> stream = Open();
  EXPECT_EQ(emberd_stream_next_step(stream.get()), 7);
  EXPECT_EQ(emberd_stream_generation(stream.get()), 5);
  EXPECT_EQ(emberd_stream_made_generation(stream.get()), 4);
  const emberd_feature_ids features[] = {dense_, ragged_};
  ASSERT_EQ(emberd_stream_send_lookup(stream.get(), 7, features, 2), nullptr);
  emberd_lookup* raw = nullptr;
  emberd_error* error = nullptr;
  ASSERT_EQ(emberd_stream_receive_lookup(stream.get(), -1, &raw, &error), 1);
  const Held<emberd_lookup> lookup(raw);
  ASSERT_NE(lookup, nullptr) << Message(error);
  EXPECT_EQ(emberd_lookup_step(lookup.get()), 7);
  EXPECT_THAT(emberd_lookup_statistics_json(lookup.get()), HasSubstr("times_us"));
  emberd_activation activations[2];
  emberd_lookup_activations(lookup.get(), activations, 2);
  for (const emberd_activation& activation : activations) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(activation.values) % 64, 0) << activation.feature;
  }
  EXPECT_EQ(activations[1].values[0], 7100);

  const std::vector<float> values(3 * kDim, 0.5f);
  const emberd_gradient gradient = {"a", values.data(), 3, kDim};
  emberd_lease* lease = nullptr;
  ASSERT_EQ(emberd_stream_send_update(stream.get(), 7, &gradient, 1, nullptr, 0, &lease), nullptr);
  emberd_update update;
  ASSERT_EQ(emberd_stream_receive_update(stream.get(), -1, &update, &error), 1);
  EXPECT_EQ(error, nullptr);
  EXPECT_EQ(update.step, 7);
  // gRPC may give the memory back a moment after the answer has come.
  while (emberd_lease_released(lease) == 0) absl::SleepFor(absl::Milliseconds(1));
  emberd_lease_free(lease);
  EXPECT_EQ(Outcome(Done(emberd_stream_finish(stream.get())).get()), "0: ");

  ASSERT_EQ(emberd_stream_receive_update(stream.get(), 0, &update, &error), 1);
  EXPECT_THAT(Message(error), HasSubstr("9: no update awaits its answer"));
  EXPECT_EQ(update.step, -1);
}

// What this would catch: a finish that waits for a silent server when nobody wants it any more.
TEST_F(CInterfaceTest, FreeingAStreamEndsItsFinish) {
  const auto go_on = std::make_shared<absl::Notification>();
  service_.damage_train = [go_on](emberd::v1::TrainResponse* response) {
    if (response->has_update()) go_on->WaitForNotification();
  };
  Held<emberd_stream> stream = Open();
  ASSERT_EQ(emberd_stream_send_skip(stream.get(), 7, nullptr), nullptr);
  emberd_call* const finish = emberd_stream_finish(stream.get());
  stream.reset();
  EXPECT_EQ(emberd_call_wait(finish, 120'000), 1);
  EXPECT_THAT(Outcome(finish), HasSubstr("1: "));
  go_on->Notify();
  emberd_call_free(finish);
}

TEST_F(CInterfaceTest, MemoryForGradients) {
  const Held<emberd_stream> stream = Open();
  emberd_floats* floats = nullptr;
  ASSERT_EQ(emberd_stream_allocate_gradients(stream.get(), 3 * kDim, &floats), nullptr);
  float* const values = emberd_floats_data(floats);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(values) % 64, 0);
  std::fill_n(values, 3 * kDim, 0.5f);
  const emberd_feature_ids features[] = {dense_, ragged_};
  ASSERT_EQ(emberd_stream_send_lookup(stream.get(), 7, features, 2), nullptr);
  const emberd_gradient gradient = {"a", values, 3, kDim};
  emberd_lease* lease = nullptr;
  ASSERT_EQ(emberd_stream_send_update(stream.get(), 7, &gradient, 1, nullptr, 0, &lease), nullptr);
  emberd_lookup* lookup = nullptr;
  emberd_error* error = nullptr;
  ASSERT_EQ(emberd_stream_receive_lookup(stream.get(), -1, &lookup, &error), 1);
  emberd_lookup_free(lookup);
  emberd_update update;
  ASSERT_EQ(emberd_stream_receive_update(stream.get(), -1, &update, &error), 1);
  emberd_lease_free(lease);
  emberd_floats_free(floats);
  const std::vector<float> expected(3 * kDim, 0.5f);
  EXPECT_EQ(service_.train_requests().back().update().gradients(0).gradient().data(),
            std::string(reinterpret_cast<const char*>(expected.data()), 3 * kDim * sizeof(float)));

  EXPECT_THAT(Message(emberd_stream_allocate_gradients(stream.get(), -1, &floats)),
              HasSubstr("3: count: -1 is not allowed"));
  EXPECT_EQ(floats, nullptr);
}

TEST_F(CInterfaceTest, FeaturesSideBySideAndTheirGradients) {
  const Held<emberd_stream> stream = Open();
  emberd_feature_ids features[] = {dense_, dense_};
  features[1].feature = "b";
  ASSERT_EQ(emberd_stream_send_lookup_concat(stream.get(), 7, features, 2), nullptr);
  emberd_lookup* raw = nullptr;
  emberd_error* error = nullptr;
  ASSERT_EQ(emberd_stream_receive_lookup(stream.get(), -1, &raw, &error), 1);
  const Held<emberd_lookup> lookup(raw);
  ASSERT_NE(lookup, nullptr) << Message(error);
  emberd_activation all;
  ASSERT_EQ(emberd_lookup_concat(lookup.get(), &all), 1);
  emberd_block block;
  EXPECT_EQ(emberd_lookup_block(lookup.get(), &block), 0);
  EXPECT_EQ(all.samples, 3);
  EXPECT_EQ(all.dim, 2 * kDim);
  emberd_activation activations[2];
  emberd_lookup_activations(lookup.get(), activations, 2);
  EXPECT_EQ(activations[1].values, all.values + kDim);
  EXPECT_EQ(all.values[2 * all.dim + kDim], 7102);

  // The gradient of the whole, of which the features are columns.
  std::vector<float> values(3 * all.dim, 0.5f);
  values[2 * all.dim + kDim] = 0.25f;
  emberd_gradient gradients[] = {{"a", values.data(), 3, kDim},
                                 {"b", values.data() + kDim, 3, kDim}};
  const int64_t strides[] = {all.dim, all.dim};
  emberd_lease* lease = nullptr;
  ASSERT_EQ(emberd_stream_send_update_strided(stream.get(), 7, gradients, strides, 2, nullptr, 0,
                                              nullptr, &lease),
            nullptr);
  emberd_update update;
  ASSERT_EQ(emberd_stream_receive_update(stream.get(), -1, &update, &error), 1);
  emberd_lease_free(lease);
  const emberd::v1::TrainUpdate sent = service_.train_requests().back().update();
  ASSERT_EQ(sent.gradients_size(), 2);
  std::vector<float> expected(3 * kDim, 0.5f);
  expected[2 * kDim] = 0.25f;
  EXPECT_EQ(sent.gradients(1).gradient().data(),
            std::string(reinterpret_cast<const char*>(expected.data()), 3 * kDim * sizeof(float)));

  const int64_t narrow[] = {all.dim, kDim - 1};
  EXPECT_THAT(Message(emberd_stream_send_update_strided(stream.get(), 8, gradients, narrow, 2,
                                                        nullptr, 0, nullptr, nullptr)),
              HasSubstr("row stride"));
}

TEST_F(CInterfaceTest, ReceivingHasATimeOut) {
  const auto go_on = std::make_shared<absl::Notification>();
  service_.damage_train = [go_on](emberd::v1::TrainResponse* response) {
    if (response->has_lookup()) go_on->WaitForNotification();
  };
  const Held<emberd_stream> stream = Open();
  const emberd_feature_ids features[] = {dense_, ragged_};
  ASSERT_EQ(emberd_stream_send_lookup(stream.get(), 7, features, 2), nullptr);
  emberd_lookup* lookup = nullptr;
  emberd_error* error = nullptr;
  int waits = 0;
  while (emberd_stream_receive_lookup(stream.get(), 1, &lookup, &error) == 0) {
    if (++waits == 1) go_on->Notify();
  }
  if (waits == 0) go_on->Notify();
  EXPECT_GT(waits, 0);
  ASSERT_NE(lookup, nullptr) << Message(error);
  emberd_lookup_free(lookup);
}

TEST_F(CInterfaceTest, RowsAreReadAssignedAndExported) {
  const std::vector<float> values(3 * kDim, 9);
  emberd_update update;
  ASSERT_EQ(
      emberd_call_update(Done(emberd_assign_rows(client_.get(), model_.get(), "a", ids_.data(), 3,
                                                 values.data(), 3 * kDim, nullptr))
                             .get(),
                         &update),
      1);
  EXPECT_EQ(update.rows_updated, 3);
  for (emberd_call* call :
       {emberd_read_rows(client_.get(), model_.get(), "a", ids_.data(), 3, nullptr),
        emberd_export_rows(client_.get(), model_.get(), "a", 1, 3, "")}) {
    const Held<emberd_call> done = Done(call);
    const Held<emberd_rows> rows(emberd_call_take_rows(done.get()));
    ASSERT_NE(rows, nullptr) << Outcome(done.get());
    EXPECT_EQ(emberd_rows_count(rows.get()), 3);
    EXPECT_EQ(emberd_rows_dim(rows.get()), kDim);
    EXPECT_THAT(std::vector<float>(emberd_rows_values(rows.get()),
                                   emberd_rows_values(rows.get()) + 3 * kDim),
                Each(9));
  }
}

TEST_F(CInterfaceTest, CheckpointsAreSavedWithProgress) {
  emberd::v1::CheckpointProgress saving, done;
  saving.set_phase("saving");
  saving.set_bytes(1);
  saving.set_total_bytes(3);
  saving.set_elapsed_ms(20);
  done.set_done(true);
  done.set_pause_us(1500);
  done.mutable_checkpoint()->set_name("a");
  done.mutable_checkpoint()->set_saved_at_ms(1'700'000'000'123);
  done.mutable_checkpoint()->add_groups()->set_group("run");
  done.mutable_checkpoint()->mutable_groups(0)->set_next_step(7);
  service_.checkpoints.progress = {saving, done};
  const Held<emberd_call> save = Done(emberd_save_checkpoint(client_.get(), "m", nullptr, 1));
  const Held<emberd_text> progress(emberd_call_take_progress(save.get()));
  ASSERT_NE(progress, nullptr);
  EXPECT_STREQ(emberd_text_string(progress.get()),
               R"({"bytes":1,"elapsed_ms":20,"phase":"saving","total_bytes":3})");
  EXPECT_EQ(emberd_call_take_progress(save.get()), nullptr) << "given twice";
  const Held<emberd_text> saved(emberd_call_take_text(save.get()));
  ASSERT_NE(saved, nullptr) << Outcome(save.get());
  for (const char* part : {R"("name":"a")", R"("pause_us":1500)", R"("groups":{"run":7})",
                           R"("saved_at_ms":1700000000123)"}) {
    EXPECT_THAT(emberd_text_string(saved.get()), HasSubstr(part));
  }

  const Held<emberd_call> restore =
      Done(emberd_restore_checkpoint(client_.get(), "m", "a", nullptr));
  const Held<emberd_text> restored(emberd_call_take_text(restore.get()));
  ASSERT_NE(restored, nullptr) << Outcome(restore.get());
  EXPECT_THAT(emberd_text_string(restored.get()), HasSubstr(R"("name":"a")"));
  EXPECT_THAT(service_.checkpoints.calls(),
              ::testing::ElementsAre("SaveCheckpoint model: \"m\" incremental: true",
                                     "RestoreCheckpoint model: \"m\" name: \"a\""));
}

TEST_F(CInterfaceTest, ACheckpointIsServed) {
  emberd::v1::CheckpointProgress done;
  done.set_done(true);
  done.mutable_checkpoint()->set_name("a");
  service_.checkpoints.progress = {done};
  const Held<emberd_call> serve =
      Done(emberd_serve_checkpoint(client_.get(), "m", nullptr, "live", "FLOAT16"));
  const Held<emberd_text> served(emberd_call_take_text(serve.get()));
  ASSERT_NE(served, nullptr) << Outcome(serve.get());
  EXPECT_THAT(emberd_text_string(served.get()), HasSubstr(R"("name":"a")"));
  EXPECT_THAT(service_.checkpoints.calls(),
              ::testing::ElementsAre("ServeCheckpoint model: \"m\" serve_as: \"live\" "
                                     "storage_dtype: FLOAT16"));
  EXPECT_THAT(
      Outcome(Done(emberd_serve_checkpoint(client_.get(), "m", nullptr, nullptr, "FLOAT8")).get()),
      HasSubstr("3: storage_dtype: \"FLOAT8\""));
}

TEST_F(CInterfaceTest, CheckpointsAreListedAndDeleted) {
  service_.checkpoints.list.add_checkpoints()->set_name("a");
  service_.checkpoints.list.add_damaged("m/b: cut off");
  const Held<emberd_call> list = Done(emberd_list_checkpoints(client_.get(), nullptr));
  const Held<emberd_text> listed(emberd_call_take_text(list.get()));
  ASSERT_NE(listed, nullptr) << Outcome(list.get());
  EXPECT_THAT(emberd_text_string(listed.get()), HasSubstr(R"("damaged":["m/b: cut off"])"));
  EXPECT_EQ(emberd_call_take_progress(list.get()), nullptr);
  const Held<emberd_call> gone = Done(emberd_delete_checkpoint(client_.get(), "m", "a"));
  const Held<emberd_text> freed(emberd_call_take_text(gone.get()));
  ASSERT_NE(freed, nullptr) << Outcome(gone.get());
  EXPECT_STREQ(emberd_text_string(freed.get()), R"({"bytes":3145728})");
}

TEST_F(CInterfaceTest, AStreamAsksForACheckpoint) {
  service_.damage_train = [](emberd::v1::TrainResponse* response) {
    if (!response->has_update()) return;
    response->mutable_update()->set_checkpoint("k7");
    response->mutable_update()->set_checkpoint_step(7);
  };
  const Held<emberd_stream> stream = Open();
  ASSERT_EQ(emberd_stream_send_update_and_checkpoint(stream.get(), 7, nullptr, 0, nullptr, 0, "k7",
                                                     nullptr),
            nullptr);
  EXPECT_EQ(emberd_stream_take_checkpoint(stream.get()), nullptr);
  emberd_update update;
  emberd_error* error = nullptr;
  ASSERT_EQ(emberd_stream_receive_update(stream.get(), -1, &update, &error), 1);
  const Held<emberd_text> end(emberd_stream_take_checkpoint(stream.get()));
  ASSERT_NE(end, nullptr);
  EXPECT_STREQ(emberd_text_string(end.get()), R"({"checkpoint":"k7","error":"","step":7})");
  EXPECT_EQ(emberd_stream_take_checkpoint(stream.get()), nullptr) << "given twice";
  EXPECT_EQ(service_.train_requests().back().update().checkpoint(), "k7");
}

TEST_F(CInterfaceTest, SkipsAStep) {
  const Held<emberd_stream> stream = Open();
  ASSERT_EQ(emberd_stream_send_skip(stream.get(), 7, "k7"), nullptr);
  ASSERT_EQ(emberd_stream_send_skip(stream.get(), 8, nullptr), nullptr);
  emberd_update update;
  emberd_error* error = nullptr;
  for (const int64_t step : {7, 8}) {
    ASSERT_EQ(emberd_stream_receive_update(stream.get(), -1, &update, &error), 1);
    EXPECT_EQ(update.step, step);
    const emberd::v1::TrainUpdate sent = service_.train_requests()[step - 6].update();
    EXPECT_TRUE(sent.skip());
    EXPECT_EQ(sent.checkpoint(), step == 7 ? "k7" : "");
  }
}

TEST_F(CInterfaceTest, DropsAGroup) {
  const Held<emberd_call> drop = Done(emberd_drop_group(client_.get(), "m", "run-7"));
  EXPECT_EQ(Outcome(drop.get()), "0: ");
  const Held<emberd_text> said(emberd_call_take_text(drop.get()));
  EXPECT_STREQ(emberd_text_string(said.get()), R"({"dropped":true})");
  EXPECT_EQ(service_.dropped_group.model(), "m");
  EXPECT_EQ(service_.dropped_group.group(), "run-7");
}

TEST_F(CInterfaceTest, AdministersByNameInJson) {
  const auto call = [this](const char* method, const char* request) {
    return Held<emberd_call>(
        Done(emberd_call_program(client_.get(), method, request, nullptr, 0, nullptr)));
  };
  const Held<emberd_call> drop = call("DropGroup", R"({"model": "m", "group": "run-7"})");
  EXPECT_EQ(Outcome(drop.get()), "0: ");
  const Held<emberd_answer> said(emberd_call_take_answer(drop.get()));
  EXPECT_STREQ(emberd_answer_json(said.get()), R"({"dropped":true})");
  EXPECT_EQ(service_.dropped_group.group(), "run-7");
  for (const auto& [method, request, wanted] :
       {std::tuple("Burn", "", "method: 'Burn'"), std::tuple("DropGroup", R"({"nam": "x"})", "nam"),
        std::tuple("DropGroup", "{", "request: "), std::tuple("", "", "method: ''")}) {
    const Held<emberd_call> refused = call(method, request);
    const Held<emberd_error> error(emberd_call_error(refused.get()));
    EXPECT_EQ(emberd_error_code(error.get()), 3);
    EXPECT_THAT(emberd_error_message(error.get()), HasSubstr(wanted));
  }
}

TEST_F(CInterfaceTest, DeclaresFromACheckpoint) {
  const Held<emberd_call> declared = Done(emberd_declare_from(client_.get(), kConfig, "newest"));
  EXPECT_EQ(Outcome(declared.get()), "0: ");
  EXPECT_EQ(service_.declares().back().restore_from(), "newest");
}

}  // namespace emberd_test
