// The C interface of emberd's client, for other languages: C types only, no exception comes out (a
// process without memory for a handle ends), and no function of the caller is called. Only
// functions whose names begin with emberd_ are exported.
//
// Whatever may wait is a call: the function that begins it returns at once, a thread of the library
// does the work, and emberd_call_wait waits with a time-out, so that a program can look after
// signals in between:
//
//   emberd_call* call = emberd_connect(&options);
//   while (!emberd_call_wait(call, 100)) {
//     ...
//   }
//   emberd_client* client = emberd_call_take_client(call);  // NULL: see emberd_call_error
//   emberd_call_free(call);
//
// Handles belong to the caller, who frees each once; freeing NULL does nothing. A handle keeps what
// it needs alive, so that the order of freeing does not matter. Everything is thread-safe, except
// that only one thread at a time may receive lookups of a stream, and one its updates; and a handle
// may be freed only when no thread uses it. After a fork, the child may neither use nor free one.
//
// Strings are UTF-8 and end with a zero byte. Those that are given are copied; those that are
// returned live as long as their handle. Arrays that are given must live until the call has ended,
// or, where there is no call, until the function returns. NULL is allowed for an empty array and
// for an empty string.
//
// The structs begin with `size`, which is sizeof of the struct that the caller was compiled with:
// fields that are added later are off for callers compiled without them, and 3 INVALID_ARGUMENT if
// they are set and the library is older than the caller. All other fields may be 0.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define EMBERD_API __attribute__((visibility("default")))
#else
#define EMBERD_API
#endif

// Grows with every change that a program compiled earlier would notice.
#define EMBERD_ABI_VERSION 1
EMBERD_API int32_t emberd_abi_version(void);
// Of the library, "0.1.0".
EMBERD_API const char* emberd_version(void);

typedef struct emberd_error emberd_error;
typedef struct emberd_call emberd_call;
typedef struct emberd_client emberd_client;
typedef struct emberd_model emberd_model;
typedef struct emberd_lookup emberd_lookup;
typedef struct emberd_rows emberd_rows;
typedef struct emberd_text emberd_text;
typedef struct emberd_stream emberd_stream;
typedef struct emberd_lease emberd_lease;
typedef struct emberd_floats emberd_floats;
typedef struct emberd_answer emberd_answer;
typedef struct emberd_kept emberd_kept;

// ---- Errors. NULL: all went well.

// gRPC's numbers: 3 INVALID_ARGUMENT, 5 NOT_FOUND, 14 UNAVAILABLE, ... 0 for NULL.
EMBERD_API int32_t emberd_error_code(const emberd_error* error);
// What the server said, unchanged, or what the client found wrong. "" for NULL.
EMBERD_API const char* emberd_error_message(const emberd_error* error);
EMBERD_API void emberd_error_free(emberd_error* error);

// ---- Calls

// 1: the call has ended; 0: not within so many milliseconds. Negative: waits for its end.
EMBERD_API int32_t emberd_call_wait(emberd_call* call, int64_t milliseconds);
// Of a call that has ended; NULL if it went well, or has not ended. The caller frees it.
EMBERD_API emberd_error* emberd_call_error(emberd_call* call);
// Waits for the end of the call: emberd_client_cancel makes it come soon.
EMBERD_API void emberd_call_free(emberd_call* call);

// The result of a call that has ended, once; NULL if the call failed, or has another result.
EMBERD_API emberd_client* emberd_call_take_client(emberd_call* call);
EMBERD_API emberd_model* emberd_call_take_model(emberd_call* call);
EMBERD_API emberd_lookup* emberd_call_take_lookup(emberd_call* call);
EMBERD_API emberd_rows* emberd_call_take_rows(emberd_call* call);
EMBERD_API emberd_text* emberd_call_take_text(emberd_call* call);
EMBERD_API emberd_stream* emberd_call_take_stream(emberd_call* call);
EMBERD_API emberd_answer* emberd_call_take_answer(emberd_call* call);

// How far a call about a checkpoint is: a JSON object with phase, bytes, total_bytes (as far as it
// is known) and elapsed_ms. NULL: nothing new since the last time.
EMBERD_API emberd_text* emberd_call_take_progress(emberd_call* call);

// ---- Connecting

enum { EMBERD_FLOAT32 = 0, EMBERD_BFLOAT16 = 1 };  // how floats travel; in memory they are float32

// Whether large arrays go through shared memory where the coordinator is on this machine, or all by
// TCP.
enum { EMBERD_AUTO = 0, EMBERD_TCP = 1 };

typedef struct emberd_client_options {
  uint64_t size;
  const char* const* addresses;  // "host:port" of the coordinators; the first that answers is used
  int32_t address_count;
  int32_t tls;                   // 1: encrypted, as the four fields below say; 0: they are empty
  const char* ca_file;           // PEM; empty: this system's authorities
  const char* certificate_file;  // mutual TLS: both of them
  const char* key_file;
  const char* server_name;     // that certificates must have instead of the host
  const char* token;           // at most one of them
  const char* token_file;      // holds the token in one line
  int64_t connect_timeout_ms;  // 0: 10 s
  // Of every call, all retries included; 0: 30 s. But to save, restore or serve a checkpoint, or to
  // declare a model from one, may take a day; to delete one, an hour; emberd_export_rows, half an
  // hour.
  int64_t deadline_ms;
  int32_t activation_type;  // EMBERD_FLOAT32 or EMBERD_BFLOAT16
  int32_t gradient_type;    // the same
  int32_t transport;        // EMBERD_AUTO or EMBERD_TCP
} emberd_client_options;

// Result: client.
EMBERD_API emberd_call* emberd_connect(const emberd_client_options* options);
// Ends all calls and streams of this client that are in progress with CANCELLED. Later calls are
// not affected.
EMBERD_API void emberd_client_cancel(emberd_client* client);
EMBERD_API void emberd_client_free(emberd_client* client);
// Result: text, a JSON object: version, uptime_ms, models, shards, batches, batch_bytes.
EMBERD_API emberd_call* emberd_client_status(emberd_client* client);

// ---- Models

// Makes the tables of a model, or finds them. `config` is a ModelConfig of model.proto as text
// proto or as JSON. Result: model.
EMBERD_API emberd_call* emberd_declare(emberd_client* client, const char* config);
// The same, but a model that is not there yet begins with the rows of the checkpoint `restore_from`
// of a model of its name, or of the newest one ("newest"). Result: model.
EMBERD_API emberd_call* emberd_declare_from(emberd_client* client, const char* config,
                                            const char* restore_from);
// A model with a table whose initializer is `assigned` waits for its rows: emberd_assign_rows gives
// them, and this says that all are there, with `unfilled` of that model's JSON. Result: model.
EMBERD_API emberd_call* emberd_declare_filled(emberd_client* client, const char* config,
                                              uint64_t unfilled);
// A model that somebody declared. Result: model.
EMBERD_API emberd_call* emberd_describe(emberd_client* client, const char* name);
// A JSON object: id (as a string), name, created, unfilled (as a string; "0": it is not), tables,
// features, stacks, shards, sparsecores_per_shard, table_bytes, warnings.
EMBERD_API const char* emberd_model_json(const emberd_model* model);
EMBERD_API void emberd_model_free(emberd_model* model);

// ---- Lookups and updates

enum { EMBERD_DENSE = 0, EMBERD_RAGGED = 1, EMBERD_SPARSE = 2 };

// The ids of one feature. It has no field `size`: elements of an array cannot grow.
typedef struct emberd_feature_ids {
  const char* feature;
  int32_t layout;    // EMBERD_DENSE, ...
  int32_t id_bytes;  // 4: int32_t, 8: int64_t
  const void* ids;   // [id_count]
  int64_t id_count;
  int64_t ids_per_sample;  // dense: `ids` is row-major [samples, ids_per_sample]
  // Ragged: [samples + 1] row splits; sample i has the ids from index[i] to index[i + 1] - 1.
  // Sparse: row-major [id_count, 2], (sample, position), samples non-decreasing. Dense: the shape
  // of `ids`, to be read as FeatureConfig.output_shape says; NULL: ids_per_sample counts.
  const void* index;
  int64_t index_count;   // numbers in `index`
  int32_t index_bytes;   // as id_bytes
  int32_t reserved;      // 0
  int64_t samples;       // sparse
  const float* weights;  // one per id, or a single one for all; NULL: all 1
  int64_t weight_count;
} emberd_feature_ids;

// Activations of one feature: row-major [samples, dim].
typedef struct emberd_activation {
  const char* feature;
  const float* values;
  int64_t samples;
  int64_t dim;
} emberd_activation;

// Activations of several features of one shape at even distances: those of feature f, row-major
// [samples, dim], begin `distance` floats after those of feature f - 1.
typedef struct emberd_block {
  const float* values;
  int64_t features;
  int64_t samples;
  int64_t dim;
  int64_t distance;
} emberd_block;

// The gradient of one feature's activations, of their shape.
typedef struct emberd_gradient {
  const char* feature;
  const float* values;
  int64_t samples;
  int64_t dim;
} emberd_gradient;

// A new value for one step, by its name in OptimizerConfig, e.g. "learning_rate".
typedef struct emberd_hyperparameter {
  const char* table;  // empty: every table; those of one stack need the same value
  const char* name;
  double value;
} emberd_hyperparameter;

typedef struct emberd_update {
  int64_t step;
  int64_t rows_updated;
  int64_t rows_skipped;  // left as they were: their gradient was not finite
  int64_t replayed;      // 1: it had been applied before, and nothing was done now
} emberd_update;

// `features` holds every feature of the model once. `inference`: no update follows, and nothing
// stays on the server. deadline_ms 0: the client's. Result: lookup.
EMBERD_API emberd_call* emberd_lookup_begin(emberd_client* client, const emberd_model* model,
                                            const emberd_feature_ids* features, int32_t count,
                                            int32_t inference, int64_t deadline_ms);
// Activations in the order of the request; they live as long as `lookup`. Writes at most `capacity`
// of them, and returns how many there are.
EMBERD_API int32_t emberd_lookup_activations(const emberd_lookup* lookup,
                                             emberd_activation* activations, int32_t capacity);
// Of a lookup that was sent by emberd_stream_send_lookup_concat: all features side by side,
// [samples, sum of their dims], in `all` without a name. The activations above are columns of it:
// their rows begin all->dim floats after one another. 0: it is no such lookup, or has no samples.
EMBERD_API int32_t emberd_lookup_concat(const emberd_lookup* lookup, emberd_activation* all);
// The activations of all features at once, if they are such a block, as those of a stream often
// are. 0: they are not, or they lie side by side.
EMBERD_API int32_t emberd_lookup_block(const emberd_lookup* lookup, emberd_block* block);
// On a training stream: the number of the step. Otherwise -1.
EMBERD_API int64_t emberd_lookup_step(const emberd_lookup* lookup);
// A JSON object: num_minibatches, and stacks as in statistics.proto; on a training stream times_us
// and slowest_rank, too. Made at the first call.
EMBERD_API const char* emberd_lookup_statistics_json(emberd_lookup* lookup);
EMBERD_API void emberd_lookup_free(emberd_lookup* lookup);

// Updates every row that the lookup touched, once. step: 0-based; -1: not given. Result: see
// emberd_call_update.
EMBERD_API emberd_call* emberd_apply(emberd_client* client, const emberd_model* model,
                                     const emberd_lookup* lookup, const emberd_gradient* gradients,
                                     int32_t count, const emberd_hyperparameter* hyperparameters,
                                     int32_t hyperparameter_count, int64_t step,
                                     int64_t deadline_ms);
// What emberd_apply or emberd_assign_rows did, if its call has ended well. 0: it is no such call.
EMBERD_API int32_t emberd_call_update(emberd_call* call, emberd_update* update);
// Gives back a lookup that will not be applied.
EMBERD_API emberd_call* emberd_release(emberd_client* client, const emberd_model* model,
                                       const emberd_lookup* lookup);

// ---- Rows. `slot` is a slot of the optimizer; empty: the weights.

// Rows by id, which may repeat. Result: rows.
EMBERD_API emberd_call* emberd_read_rows(emberd_client* client, const emberd_model* model,
                                         const char* table, const int64_t* ids, int64_t count,
                                         const char* slot);
// `row_count` rows from `first_row` on, read as a stream; 0: to the end. Result: rows.
EMBERD_API emberd_call* emberd_export_rows(emberd_client* client, const emberd_model* model,
                                           const char* table, int64_t first_row, int64_t row_count,
                                           const char* slot);
// Overwrites rows; ids may not repeat; values are row-major [count, dim]. Result: see
// emberd_call_update.
EMBERD_API emberd_call* emberd_assign_rows(emberd_client* client, const emberd_model* model,
                                           const char* table, const int64_t* ids, int64_t count,
                                           const float* values, int64_t value_count,
                                           const char* slot);
// Row-major [count, dim].
EMBERD_API const float* emberd_rows_values(const emberd_rows* rows);
EMBERD_API int64_t emberd_rows_count(const emberd_rows* rows);
EMBERD_API int64_t emberd_rows_dim(const emberd_rows* rows);
EMBERD_API void emberd_rows_free(emberd_rows* rows);

EMBERD_API const char* emberd_text_string(const emberd_text* text);
EMBERD_API void emberd_text_free(emberd_text* text);

// ---- Checkpoints: see checkpoint_service.proto, and client/cpp/checkpoints.h. A checkpoint is a
// JSON object: model, name, saved_at_ms, bytes, rows, parent, chain, groups, automatic, changes.

// Saves a model while training goes on. `name` empty: the cluster chooses one. `incremental`: only
// what has changed since the newest checkpoint. Result: text, the checkpoint, and pause_us.
EMBERD_API emberd_call* emberd_save_checkpoint(emberd_client* client, const char* model,
                                               const char* name, int32_t incremental);
// Gives a model the rows and groups of a checkpoint, or declares it with them. `name` empty: of the
// newest. `config`: a ModelConfig with the same tables, but another storage type or optimizer;
// empty: that of the checkpoint. Result: text, the checkpoint.
EMBERD_API emberd_call* emberd_restore_checkpoint(emberd_client* client, const char* model,
                                                  const char* name, const char* config);
// Has a model serve the weights of a checkpoint, for lookups alone. `name` empty: of the newest;
// `serve_as` empty: the model of the checkpoint's name; `storage_dtype`: "FLOAT32", "BFLOAT16",
// "FLOAT16" or empty: as now, or as in the checkpoint. No lookup of what was served fails. Result:
// text, the checkpoint.
EMBERD_API emberd_call* emberd_serve_checkpoint(emberd_client* client, const char* model,
                                                const char* name, const char* serve_as,
                                                const char* storage_dtype);
// Of one model; empty: of all. Result: text, an object with checkpoints, the newest first, and
// damaged: the folders that cannot be read, with the reason.
EMBERD_API emberd_call* emberd_list_checkpoints(emberd_client* client, const char* model);
// Result: text, an object with bytes: the number of bytes freed.
EMBERD_API emberd_call* emberd_delete_checkpoint(emberd_client* client, const char* model,
                                                 const char* name);

// Forgets a group of trainers whose run is over. Result: text, an object with dropped: false if
// no shard knows the group.
EMBERD_API emberd_call* emberd_drop_group(emberd_client* client, const char* model,
                                          const char* group);

// ---- Programs: see program_service.proto, and client/cpp/programs.h

typedef struct emberd_bytes {
  const void* data;
  int64_t size;
} emberd_bytes;

// A method of ProgramService or AdminService by its name, "Execute". `request` is its message as
// protobuf's JSON, or empty: no fields; the data of a tensor there is its place in `tensors`: a
// text of digits, in base64 as all bytes. `at`: the coordinator that keeps this has to answer;
// NULL: any may. Result: answer.
EMBERD_API emberd_call* emberd_call_program(emberd_client* client, const char* method,
                                            const char* request, const emberd_bytes* tensors,
                                            int32_t count, const emberd_kept* at);
// The message as JSON, by the names of its fields, 64-bit integers as strings; of ProgramService
// without those that are not set. Tensors are as in a request.
EMBERD_API const char* emberd_answer_json(const emberd_answer* answer);
// Writes at most `capacity` of the tensors' data, which live as long as `answer`, and returns how
// many there are.
EMBERD_API int32_t emberd_answer_tensors(const emberd_answer* answer, emberd_bytes* tensors,
                                         int32_t capacity);
// Takes what a coordinator keeps for the client: the program of Compile, the batch of PrepareBatch,
// or what stays of the result at `place`. NULL: nothing, or it was taken before. The coordinator
// keeps it until it is freed, or the answer is if nobody has taken it.
EMBERD_API emberd_kept* emberd_answer_take_kept(emberd_answer* answer, int32_t place);
EMBERD_API void emberd_answer_free(emberd_answer* answer);
EMBERD_API void emberd_kept_free(emberd_kept* kept);

// ---- Training on a stream: see train.proto, and client/cpp/train_stream.h

enum { EMBERD_SYNC = 0, EMBERD_ASYNC = 1, EMBERD_BOUNDED = 2 };

typedef struct emberd_train_options {
  uint64_t size;
  const char* group;  // 1 to 128 letters, digits and _-.:/
  int32_t rank;
  int32_t ranks;            // of the group; 0: 1
  int32_t consistency;      // EMBERD_SYNC, ...
  int32_t pipelined;        // EMBERD_SYNC only
  int64_t staleness_bound;  // EMBERD_BOUNDED only
  int64_t first_step;       // of a group that is new
  int64_t step_timeout_ms;  // how long a step waits for another rank; 0: 60 s
} emberd_train_options;

// Ends when all ranks are there. Result: stream.
EMBERD_API emberd_call* emberd_train(emberd_client* client, const emberd_model* model,
                                     const emberd_train_options* options);
// The step to begin with: all before it have been applied.
EMBERD_API int64_t emberd_stream_next_step(const emberd_stream* stream);
EMBERD_API uint64_t emberd_stream_generation(const emberd_stream* stream);
// The generation in which the step before that was made. Where no stream of the caller had it,
// somebody else has made the step. 0: not known.
EMBERD_API uint64_t emberd_stream_made_generation(const emberd_stream* stream);

// Sending does not wait for the server, except for half a second at most, when that has to give
// more shared memory and is silent. Ids are copied before the function returns.
EMBERD_API emberd_error* emberd_stream_send_lookup(emberd_stream* stream, int64_t step,
                                                   const emberd_feature_ids* features,
                                                   int32_t count);
// The same; the activations of all features, which have the same number of samples, are received
// side by side: see emberd_lookup_concat.
EMBERD_API emberd_error* emberd_stream_send_lookup_concat(emberd_stream* stream, int64_t step,
                                                          const emberd_feature_ids* features,
                                                          int32_t count);
// `lease` NULL: gradients are copied. Else float32 gradients are sent from where they lie, and
// *lease becomes a handle: they must stay there until emberd_lease_released says 1, which is when
// the update has been answered, unless the stream fails. Until then they must not change.
EMBERD_API emberd_error* emberd_stream_send_update(emberd_stream* stream, int64_t step,
                                                   const emberd_gradient* gradients, int32_t count,
                                                   const emberd_hyperparameter* hyperparameters,
                                                   int32_t hyperparameter_count,
                                                   emberd_lease** lease);
// The same, and saves a checkpoint of this name (not empty) that holds exactly the steps up to this
// one, of all ranks; any one rank asks. It is written while training goes on.
EMBERD_API emberd_error* emberd_stream_send_update_and_checkpoint(
    emberd_stream* stream, int64_t step, const emberd_gradient* gradients, int32_t count,
    const emberd_hyperparameter* hyperparameters, int32_t hyperparameter_count,
    const char* checkpoint, emberd_lease** lease);
// The same for gradients whose rows do not lie one after the other: row_strides[i] floats from one
// row of gradients[i] to the next; 0: its dim. NULL: all 0. `checkpoint` may be empty.
EMBERD_API emberd_error* emberd_stream_send_update_strided(
    emberd_stream* stream, int64_t step, const emberd_gradient* gradients,
    const int64_t* row_strides, int32_t count, const emberd_hyperparameter* hyperparameters,
    int32_t hyperparameter_count, const char* checkpoint, emberd_lease** lease);
// Memory for so many floats of gradients, with any contents, at 64 bytes. If the coordinator is on
// this machine, it reads them where they lie: float32 gradients there are sent without a copy, if
// there is a lease. They must not change until their update has been answered. It may be freed at
// any time, and outlive the stream. A negative number is INVALID_ARGUMENT.
EMBERD_API emberd_error* emberd_stream_allocate_gradients(emberd_stream* stream, int64_t count,
                                                          emberd_floats** floats);
EMBERD_API float* emberd_floats_data(emberd_floats* floats);
EMBERD_API void emberd_floats_free(emberd_floats* floats);
// Counts the step without changing a row: for a step that is given up after its lookup. Every rank
// of a synchronous group does the same. Its answer is an update's. `checkpoint`: as above; NULL or
// empty: none.
EMBERD_API emberd_error* emberd_stream_send_skip(emberd_stream* stream, int64_t step,
                                                 const char* checkpoint);
// The outcome of a checkpoint that this stream has asked for: a JSON object with checkpoint, its
// name; error, which is empty if it has been saved; and step, which has asked for it. It comes with
// the answer to this or a later update. NULL: no answer so far has brought one that was not taken.
EMBERD_API emberd_text* emberd_stream_take_checkpoint(emberd_stream* stream);
// 1: the memory of the update is no longer read.
EMBERD_API int32_t emberd_lease_released(const emberd_lease* lease);
EMBERD_API void emberd_lease_free(emberd_lease* lease);

// The answer to the oldest lookup, or update, that has not been received. 1: here it is, or *error
// says why there is none; 0: not within this many milliseconds (negative: waits without limit).
// While it waits, *lookup is null, and the step of *update is -1.
EMBERD_API int32_t emberd_stream_receive_lookup(emberd_stream* stream, int64_t milliseconds,
                                                emberd_lookup** lookup, emberd_error** error);
EMBERD_API int32_t emberd_stream_receive_update(emberd_stream* stream, int64_t milliseconds,
                                                emberd_update* update, emberd_error** error);
// No more requests: ends when those sent are answered, with the final status of the stream. Answers
// can still be received.
EMBERD_API emberd_call* emberd_stream_finish(emberd_stream* stream);
// Cancels what is in progress.
EMBERD_API void emberd_stream_free(emberd_stream* stream);

// For Python, where asking 26 arrays for their addresses takes longer than sending them. It says
// what an array of NumPy has to be. Objects are given by their addresses, as id() in CPython does.
typedef struct emberd_numpy_kind {
  const void* type;   // numpy.ndarray
  const void* dtype;  // this very object
  int64_t dims;       // 1 or 2
  int64_t shape[2];
  int64_t alignment;  // of its values, in bytes
} emberd_numpy_kind;
// Writes where the values of `count` arrays lie: of array i, 8 bytes at records + i * record_bytes
// + offset. 0: an array is not of its kind, or not in one piece; records may have changed then.
EMBERD_API int32_t emberd_numpy_addresses(const void* const* arrays, const emberd_numpy_kind* kinds,
                                          int32_t count, void* records, int64_t record_bytes,
                                          int64_t offset);

#ifdef __cplusplus
}  // extern "C"
#endif
