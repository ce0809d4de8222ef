// The calls of emberd.h about checkpoints.
#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "client/c/arguments.h"
#include "client/c/describe.h"
#include "client/c/handles.h"

namespace {

using emberd::c::Call;
using emberd::c::LastProgress;
using emberd::c::Text;
using emberd::client::CheckpointProgress;
using Result = emberd_call::Result;

using Work = absl::StatusOr<emberd_call::Work>;

absl::Status Keep(std::string text, Result* result) {
  *result = std::make_unique<emberd_text>(emberd_text{std::move(text)});
  return absl::OkStatus();
}

}  // namespace

extern "C" {

emberd_call* emberd_save_checkpoint(emberd_client* client, const char* model, const char* name,
                                    int32_t incremental) {
  const auto progress = std::make_shared<LastProgress>();
  return Call(
      [&]() -> Work {
        emberd::client::SaveOptions options;
        options.name = Text(name);
        options.incremental = incremental != 0;
        options.progress = [progress](const CheckpointProgress& now) { progress->Set(now); };
        return [client = client->client, model = Text(model),
                options](Result* result) -> absl::Status {
          ASSIGN_OR_RETURN(const auto saved, client->SaveCheckpoint(model, options));
          return Keep(emberd::c::Describe(saved), result);
        };
      },
      progress);
}

emberd_call* emberd_restore_checkpoint(emberd_client* client, const char* model, const char* name,
                                       const char* config) {
  const auto progress = std::make_shared<LastProgress>();
  return Call(
      [&]() -> Work {
        emberd::client::RestoreOptions options;
        options.name = Text(name);
        options.config = Text(config);
        options.progress = [progress](const CheckpointProgress& now) { progress->Set(now); };
        return [client = client->client, model = Text(model),
                options](Result* result) -> absl::Status {
          ASSIGN_OR_RETURN(const auto restored, client->RestoreCheckpoint(model, options));
          return Keep(emberd::c::Describe(restored), result);
        };
      },
      progress);
}

emberd_call* emberd_serve_checkpoint(emberd_client* client, const char* model, const char* name,
                                     const char* serve_as, const char* storage_dtype) {
  const auto progress = std::make_shared<LastProgress>();
  return Call(
      [&]() -> Work {
        emberd::client::ServeOptions options;
        options.name = Text(name);
        options.serve_as = Text(serve_as);
        options.storage_dtype = Text(storage_dtype);
        options.progress = [progress](const CheckpointProgress& now) { progress->Set(now); };
        return [client = client->client, model = Text(model),
                options](Result* result) -> absl::Status {
          ASSIGN_OR_RETURN(const auto served, client->ServeCheckpoint(model, options));
          return Keep(emberd::c::Describe(served), result);
        };
      },
      progress);
}

emberd_call* emberd_list_checkpoints(emberd_client* client, const char* model) {
  return Call([&]() -> Work {
    return [client = client->client, model = Text(model)](Result* result) -> absl::Status {
      ASSIGN_OR_RETURN(const auto list, client->ListCheckpoints(model));
      return Keep(emberd::c::Describe(list), result);
    };
  });
}

emberd_call* emberd_delete_checkpoint(emberd_client* client, const char* model, const char* name) {
  return Call([&]() -> Work {
    return [client = client->client, model = Text(model),
            name = Text(name)](Result* result) -> absl::Status {
      ASSIGN_OR_RETURN(const int64_t bytes, client->DeleteCheckpoint(model, name));
      return Keep(absl::StrCat("{\"bytes\":", bytes, "}"), result);
    };
  });
}

}  // extern "C"
