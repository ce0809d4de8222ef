// The calls of emberd.h about checkpoints.
#include <memory>

#include "base/status.h"
#include "client/c/arguments.h"
#include "client/c/describe.h"
#include "client/c/handles.h"

namespace {

using emberd::c::Call;
using emberd::c::KeepText;
using emberd::c::LastProgress;
using emberd::c::Text;
using emberd::client::CheckpointProgress;
using emberd::client::Client;

using Work = absl::StatusOr<emberd_call::Work>;

// `run` is a call of the client that tells how far it is, `read` gives its options.
template <typename Run, typename Read>
emberd_call* CallWithProgress(emberd_client* client, const char* model, Run run, const Read& read) {
  const auto progress = std::make_shared<LastProgress>();
  return Call(
      [&]() -> Work {
        auto options = read();
        options.progress = [progress](const CheckpointProgress& now) { progress->Set(now); };
        return [client = client->client, model = Text(model), options, run] {
          return KeepText(((*client).*run)(model, options));
        };
      },
      progress);
}

}  // namespace

extern "C" {

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
  return Call([&]() -> Work {
    return [client = client->client, model = Text(model)] {
      return KeepText(client->ListCheckpoints(model));
    };
  });
}

emberd_call* emberd_delete_checkpoint(emberd_client* client, const char* model, const char* name) {
  return Call([&]() -> Work {
    return [client = client->client, model = Text(model),
            name = Text(name)]() -> absl::StatusOr<emberd_call::Result> {
      ASSIGN_OR_RETURN(const int64_t bytes, client->DeleteCheckpoint(model, name));
      return emberd::c::Keep(absl::StrCat("{\"bytes\":", bytes, "}"));
    };
  });
}

}  // extern "C"
