// The calls of emberd.h: each reads its arguments at once, and runs on a thread of the library.
#include <memory>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "client/c/arguments.h"
#include "client/c/describe.h"
#include "client/c/handles.h"
#include "client/cpp/transport.h"

namespace {

using emberd::c::Array;
using emberd::c::Keep;
using emberd::c::KeepText;
using emberd::c::Text;
using emberd::client::Client;
using emberd::client::Model;
using Result = emberd_call::Result;
using Work = absl::StatusOr<emberd_call::Work>;

absl::StatusOr<Result> KeepModel(absl::StatusOr<Model> model) {
  RETURN_IF_ERROR(model.status());
  std::string json = emberd::c::Describe(*model);
  return std::make_unique<emberd_model>(
      emberd_model{std::make_shared<const Model>(*std::move(model)), std::move(json)});
}

// Of a call without a result.
absl::StatusOr<Result> Ended(const absl::Status& status) {
  RETURN_IF_ERROR(status);
  return Result();
}

// A call of `client`, which emberd_client_cancel ends from now on, though its thread may be late.
emberd_call* Call(emberd_client* client, absl::FunctionRef<Work()> begin,
                  std::shared_ptr<emberd::c::LastProgress> progress = nullptr) {
  const auto begin_now = [&, now = client->client->cancellations()]() -> Work {
    ASSIGN_OR_RETURN(emberd_call::Work work, begin());
    return [now, work = std::move(work)] {
      emberd::client::Transport::begun_at = now;
      const absl::Cleanup over = [] { emberd::client::Transport::begun_at.reset(); };
      return work();
    };
  };
  return emberd_call::Begin(begin_now, std::move(progress));
}

// `run` is a call of the client that tells how far it is, `read` gives its options.
template <typename Run, typename Read>
emberd_call* CallWithProgress(emberd_client* client, const char* model, Run run, const Read& read) {
  const auto progress = std::make_shared<emberd::c::LastProgress>();
  return Call(
      client,
      [&]() -> Work {
        auto options = read();
        options.progress = [progress](const emberd::client::CheckpointProgress& now) {
          progress->Set(now);
        };
        return [client = client->client, model = Text(model), options, run] {
          return KeepText(((*client).*run)(model, options));
        };
      },
      progress);
}

}  // namespace

extern "C" {

emberd_call* emberd_connect(const emberd_client_options* options) {
  emberd::client::LimitGrpcLog();
  return emberd_call::Begin([&]() -> Work {
    ASSIGN_OR_RETURN(emberd::client::ClientOptions read, emberd::c::ReadClientOptions(options));
    return [read = std::move(read)]() -> absl::StatusOr<Result> {
      ASSIGN_OR_RETURN(std::shared_ptr<Client> client, Client::Connect(read));
      return std::make_unique<emberd_client>(emberd_client{std::move(client)});
    };
  });
}

void emberd_client_cancel(emberd_client* client) { client->client->CancelCalls(); }
void emberd_client_free(emberd_client* client) { delete client; }

emberd_call* emberd_client_status(emberd_client* client) {
  return Call(client, [&]() -> Work {
    return [client = client->client] { return KeepText(client->GetStatus()); };
  });
}

emberd_call* emberd_declare(emberd_client* client, const char* config) {
  return emberd_declare_from(client, config, "");
}

emberd_call* emberd_declare_from(emberd_client* client, const char* config,
                                 const char* restore_from) {
  return Call(client, [&]() -> Work {
    return [client = client->client, config = Text(config), restore_from = Text(restore_from)] {
      return KeepModel(client->DeclareModel(config, {.restore_from = restore_from}));
    };
  });
}

emberd_call* emberd_declare_filled(emberd_client* client, const char* config, uint64_t unfilled) {
  return Call(client, [&]() -> Work {
    return [client = client->client, config = Text(config), unfilled] {
      return KeepModel(client->DeclareModel(config, {.filled = unfilled}));
    };
  });
}

emberd_call* emberd_describe(emberd_client* client, const char* name) {
  return Call(client, [&]() -> Work {
    return [client = client->client, name = Text(name)] {
      return KeepModel(client->DescribeModel(name));
    };
  });
}

emberd_call* emberd_lookup_begin(emberd_client* client, const emberd_model* model,
                                 const emberd_feature_ids* features, int32_t count,
                                 int32_t inference, int64_t deadline_ms) {
  return Call(client, [&]() -> Work {
    ASSIGN_OR_RETURN(auto read, emberd::c::ReadFeatures(features, count));
    const emberd::client::LookupOptions options = {inference != 0, absl::Milliseconds(deadline_ms)};
    return [client = client->client, model = model->model, names = emberd::c::CopyNames(&read),
            features = std::move(read), options]() -> absl::StatusOr<Result> {
      ASSIGN_OR_RETURN(emberd::client::LookupResult found,
                       client->Lookup(*model, features, options));
      auto lookup = std::make_unique<emberd_lookup>();
      lookup->batch = found.batch;
      lookup->activations = std::move(found.activations);
      lookup->statistics = std::move(found.statistics);
      lookup->memory = std::move(found.memory);
      return lookup;
    };
  });
}

emberd_call* emberd_apply(emberd_client* client, const emberd_model* model,
                          const emberd_lookup* lookup, const emberd_gradient* gradients,
                          int32_t count, const emberd_hyperparameter* hyperparameters,
                          int32_t hyperparameter_count, int64_t step, int64_t deadline_ms) {
  return Call(client, [&]() -> Work {
    ASSIGN_OR_RETURN(auto read, emberd::c::ReadGradients(gradients, nullptr, count));
    emberd::client::ApplyOptions options;
    ASSIGN_OR_RETURN(options.hyperparameters,
                     emberd::c::ReadHyperparameters(hyperparameters, hyperparameter_count));
    options.step = step;
    options.deadline = absl::Milliseconds(deadline_ms);
    return [client = client->client, model = model->model, batch = lookup->batch,
            names = emberd::c::CopyNames(&read), gradients = std::move(read),
            options = std::move(options)]() -> absl::StatusOr<Result> {
      ASSIGN_OR_RETURN(const emberd::client::ApplyResult applied,
                       client->ApplyGradients(*model, batch, gradients, options));
      return emberd_update{options.step, applied.rows_updated, applied.rows_skipped,
                           applied.replayed ? 1 : 0};
    };
  });
}

emberd_call* emberd_release(emberd_client* client, const emberd_model* model,
                            const emberd_lookup* lookup) {
  return Call(client, [&]() -> Work {
    return [client = client->client, model = model->model, batch = lookup->batch] {
      return Ended(client->ReleaseBatch(*model, batch));
    };
  });
}

emberd_call* emberd_read_rows(emberd_client* client, const emberd_model* model, const char* table,
                              const int64_t* ids, int64_t count, const char* slot) {
  return Call(client, [&]() -> Work {
    ASSIGN_OR_RETURN(auto span, Array("ids", ids, count));
    return [client = client->client, model = model->model, table = Text(table), ids = span,
            slot = Text(slot)]() -> absl::StatusOr<Result> {
      ASSIGN_OR_RETURN(auto rows, client->ReadRows(*model, table, ids, slot));
      return std::make_unique<emberd_rows>(emberd_rows{std::move(rows)});
    };
  });
}

emberd_call* emberd_export_rows(emberd_client* client, const emberd_model* model, const char* table,
                                int64_t first_row, int64_t row_count, const char* slot) {
  return Call(client, [&]() -> Work {
    emberd::client::ExportOptions options;
    options.slot = Text(slot);
    options.first_row = first_row;
    options.row_count = row_count;
    return [client = client->client, model = model->model, table = Text(table),
            options = std::move(options)]() -> absl::StatusOr<Result> {
      emberd::client::RowValues rows;
      const auto keep = [&rows](int64_t, absl::Span<const float> values, int64_t dim) {
        rows.dim = dim;
        rows.values.insert(rows.values.end(), values.begin(), values.end());
        return absl::OkStatus();
      };
      RETURN_IF_ERROR(client->ExportTable(*model, table, keep, options));
      return std::make_unique<emberd_rows>(emberd_rows{std::move(rows)});
    };
  });
}

emberd_call* emberd_assign_rows(emberd_client* client, const emberd_model* model, const char* table,
                                const int64_t* ids, int64_t count, const float* values,
                                int64_t value_count, const char* slot) {
  return Call(client, [&]() -> Work {
    ASSIGN_OR_RETURN(auto rows, Array("ids", ids, count));
    ASSIGN_OR_RETURN(auto floats, Array("values", values, value_count));
    emberd::client::AssignOptions options;
    options.slot = Text(slot);
    return [client = client->client, model = model->model, table = Text(table), rows, floats,
            options = std::move(options)]() -> absl::StatusOr<Result> {
      ASSIGN_OR_RETURN(const bool replayed,
                       client->AssignRows(*model, table, rows, floats, options));
      return emberd_update{-1, static_cast<int64_t>(rows.size()), 0, replayed ? 1 : 0};
    };
  });
}

emberd_call* emberd_train(emberd_client* client, const emberd_model* model,
                          const emberd_train_options* options) {
  return Call(client, [&]() -> Work {
    ASSIGN_OR_RETURN(emberd::client::TrainOptions read, emberd::c::ReadTrainOptions(options));
    return [client = client->client, model = model->model,
            read = std::move(read)]() -> absl::StatusOr<Result> {
      ASSIGN_OR_RETURN(std::shared_ptr<emberd::client::TrainStream> stream,
                       client->Train(*model, read));
      auto held = std::make_unique<emberd_stream>();
      held->client = client;
      held->stream = std::move(stream);
      return held;
    };
  });
}

emberd_call* emberd_stream_finish(emberd_stream* stream) {
  return emberd_call::Begin([&]() -> Work {
    // A pair's second goes first.
    return
        [held = std::pair(stream->client, stream->stream)] { return Ended(held.second->Finish()); };
  });
}

emberd_call* emberd_drop_group(emberd_client* client, const char* model, const char* group) {
  return Call(client, [&]() -> Work {
    return [client = client->client, model = Text(model),
            group = Text(group)]() -> absl::StatusOr<Result> {
      ASSIGN_OR_RETURN(const bool dropped, client->DropGroup(model, group));
      return Keep(dropped ? R"({"dropped":true})" : R"({"dropped":false})");
    };
  });
}

emberd_call* emberd_call_program(emberd_client* client, const char* method, const char* request,
                                 const emberd_bytes* tensors, int32_t count,
                                 const emberd_kept* at) {
  return Call(client, [&]() -> Work {
    ASSIGN_OR_RETURN(auto given, Array("tensors", tensors, count));
    std::vector<std::string_view> data;
    for (const emberd_bytes& one : given) {
      ASSIGN_OR_RETURN(auto bytes, Array("data", static_cast<const char*>(one.data), one.size));
      data.emplace_back(bytes.data(), bytes.size());
    }
    return [client = client->client, method = Text(method), request = Text(request),
            data = std::move(data),
            at = at == nullptr ? nullptr : at->kept]() -> absl::StatusOr<Result> {
      ASSIGN_OR_RETURN(auto answer, client->programs().Call(method, request, data, at.get()));
      auto held = std::make_unique<emberd_answer>();
      held->answer = std::move(answer);
      return held;
    };
  });
}

emberd_call* emberd_save_checkpoint(emberd_client* client, const char* model, const char* name,
                                    int32_t incremental) {
  return CallWithProgress(client, model, &Client::SaveCheckpoint, [&] {
    return emberd::client::SaveOptions{.name = Text(name), .incremental = incremental != 0};
  });
}

emberd_call* emberd_restore_checkpoint(emberd_client* client, const char* model, const char* name,
                                       const char* config) {
  return CallWithProgress(client, model, &Client::RestoreCheckpoint, [&] {
    return emberd::client::RestoreOptions{.name = Text(name), .config = Text(config)};
  });
}

emberd_call* emberd_serve_checkpoint(emberd_client* client, const char* model, const char* name,
                                     const char* serve_as, const char* storage_dtype) {
  return CallWithProgress(client, model, &Client::ServeCheckpoint, [&] {
    return emberd::client::ServeOptions{
        .name = Text(name), .serve_as = Text(serve_as), .storage_dtype = Text(storage_dtype)};
  });
}

emberd_call* emberd_list_checkpoints(emberd_client* client, const char* model) {
  return Call(client, [&]() -> Work {
    return [client = client->client, model = Text(model)] {
      return KeepText(client->ListCheckpoints(model));
    };
  });
}

emberd_call* emberd_delete_checkpoint(emberd_client* client, const char* model, const char* name) {
  return Call(client, [&]() -> Work {
    return [client = client->client, model = Text(model),
            name = Text(name)]() -> absl::StatusOr<Result> {
      ASSIGN_OR_RETURN(const int64_t bytes, client->DeleteCheckpoint(model, name));
      return Keep(absl::StrCat("{\"bytes\":", bytes, "}"));
    };
  });
}

}  // extern "C"
