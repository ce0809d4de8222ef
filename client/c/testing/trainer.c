// A trainer in plain C, linked against the shared library alone. Ten steps of SGD move every row
// halfway from 0 to 1, which float32 does without rounding; prints the last values of row 3.
//
// usage: emberd_c_trainer HOST:PORT
#include <stdio.h>
#include <stdlib.h>

#include "client/c/emberd.h"

enum { kRows = 4, kDim = 8 };

static const char kConfig[] =
    "name: 'c' tables { name: 't' vocabulary_size: 4 embedding_dim: 8 combiner: SUM"
    " initializer { zeros {} } optimizer { learning_rate: 0.5 sgd {} } }"
    " features { name: 'f' table: 't' batch_size: 4 }";

// The call, once it has ended well; otherwise the program ends.
static emberd_call* done(emberd_call* call) {
  while (!emberd_call_wait(call, 100)) {
  }
  emberd_error* error = emberd_call_error(call);
  if (error != NULL) {
    fprintf(stderr, "%d: %s\n", emberd_error_code(error), emberd_error_message(error));
    exit(1);
  }
  return call;
}

static void check(emberd_error* error) {
  if (error == NULL) return;
  fprintf(stderr, "%d: %s\n", emberd_error_code(error), emberd_error_message(error));
  exit(1);
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const char* addresses[] = {argv[1]};
  emberd_client_options options = {.size = sizeof(options), .addresses = addresses, .address_count = 1};
  emberd_call* call = done(emberd_connect(&options));
  emberd_client* client = emberd_call_take_client(call);
  emberd_call_free(call);
  call = done(emberd_declare(client, kConfig));
  emberd_model* model = emberd_call_take_model(call);
  emberd_call_free(call);

  emberd_train_options train = {.size = sizeof(train), .group = "c"};
  call = done(emberd_train(client, model, &train));
  emberd_stream* stream = emberd_call_take_stream(call);
  emberd_call_free(call);

  const int32_t ids[kRows] = {0, 1, 2, 3};
  const emberd_feature_ids features = {.feature = "f", .layout = EMBERD_DENSE, .id_bytes = 4, .ids = ids,
                                       .id_count = kRows, .ids_per_sample = 1};
  const int64_t first = emberd_stream_next_step(stream);
  for (int64_t step = first; step < first + 10; ++step) {
    emberd_error* error = NULL;
    emberd_lookup* lookup = NULL;
    emberd_activation activation;
    check(emberd_stream_send_lookup(stream, step, &features, 1));
    emberd_stream_receive_lookup(stream, -1, &lookup, &error);
    check(error);
    emberd_lookup_activations(lookup, &activation, 1);
    float values[kRows * kDim];
    for (int i = 0; i < kRows * kDim; ++i) values[i] = activation.values[i] - 1;
    emberd_lookup_free(lookup);
    const emberd_gradient gradient = {"f", values, kRows, kDim};
    check(emberd_stream_send_update(stream, step, &gradient, 1, NULL, 0, NULL));
    emberd_update update;
    emberd_stream_receive_update(stream, -1, &update, &error);
    check(error);
  }
  emberd_call_free(done(emberd_stream_finish(stream)));
  emberd_stream_free(stream);

  const int64_t row = 3;
  call = done(emberd_read_rows(client, model, "t", &row, 1, ""));
  emberd_rows* rows = emberd_call_take_rows(call);
  emberd_call_free(call);
  for (int i = 0; i < kDim; ++i) printf("%.17g\n", emberd_rows_values(rows)[i]);
  emberd_rows_free(rows);
  emberd_model_free(model);
  emberd_client_free(client);
  return 0;
}
