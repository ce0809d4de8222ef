// emberctl serve: a checkpoint as a model that is only looked up.
#include <memory>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/verbs/checkpoint.h"

namespace emberd::emberctl {
namespace {

absl::Status Serve(Session& session, const v1::ServeCheckpointRequest& request) {
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result,
                   RunCall(session, "/emberd.v1.CheckpointService/ServeCheckpoint", request));
  const v1::CheckpointInfo& info = result.checkpoint();
  const std::string& name = request.serve_as().empty() ? request.model() : request.serve_as();
  return PrintDone(session, result,
                   absl::StrCat("model '", name, "' serves checkpoint '", info.name(),
                                "' of model '", info.model(), "' on all shards, with id ",
                                HexId(result.model_id()), ": ", Work(result)));
}

}  // namespace

void AddServe(CLI::App& app, Session& session, Command& command) {
  const auto request = std::make_shared<v1::ServeCheckpointRequest>();
  const auto model = std::make_shared<CheckpointTarget>();
  const auto serve_as = std::make_shared<std::string>();
  const auto storage = std::make_shared<std::string>();
  CLI::App* serve = app.add_subcommand(
      "serve",
      "Serve the weights of a checkpoint for lookups only. What is served under the name now "
      "stays in service until the new rows are loaded, so that no lookup fails");
  serve->add_option("MODEL", model->model, "Name of the model of the checkpoint")->required();
  serve->add_option("NAME", model->name, "Name of the checkpoint; default: the newest");
  serve
      ->add_option("--as", *serve_as,
                   "Name of the model that serves it; default: MODEL, which must then not be "
                   "trained on this cluster")
      ->type_name("MODEL");
  serve
      ->add_option(
          "--storage", *storage,
          "How rows are stored; default: as those served under the name now, or else as in the "
          "checkpoint")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}));
  SetExample(serve, "emberctl serve my_model step-1000 --as my_model-live --storage bfloat16");
  serve->callback([request, model, serve_as, storage, &session, &command] {
    command = [request, model, serve_as, storage, &session] {
      request->set_model(model->model);
      request->set_name(model->name);
      request->set_serve_as(*serve_as);
      v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
      if (!storage->empty()) v1::DataType_Parse(absl::AsciiStrToUpper(*storage), &dtype);
      request->set_storage_dtype(dtype);
      return Serve(session, *request);
    };
  });
}

}  // namespace emberd::emberctl
