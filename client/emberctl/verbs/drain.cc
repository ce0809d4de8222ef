#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/command_line.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "client/emberctl/output.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

struct DrainOptions {
  bool undo = false;
  double wait_seconds = 0;
};

std::string Left(const v1::DrainResponse& response) {
  return absl::StrCat(Counted(response.in_flight_requests(), "request"), ", ",
                      Counted(response.train_streams(), "training stream"), ", ",
                      Counted(response.batches(), "batch", "batches"));
}

bool NothingLeft(const v1::DrainResponse& response) {
  return response.in_flight_requests() + response.train_streams() + response.batches() == 0;
}

void PrintProgress(const v1::DrainResponse& response, Session& session) {
  if (session.json) return;
  session.out << "draining; left: " << Left(response) << std::endl;
}

absl::Status Drain(Session& session, const DrainOptions& options) {
  if (session.addresses.size() != 1) {
    return WrongUsage(absl::StrCat("--address: ", session.addresses.size(),
                                   " are given; give one, that of the coordinator to drain"));
  }
  v1::DrainRequest request;
  request.set_undo(options.undo);
  const auto call = [&] { return session.Call<v1::DrainResponse>(request); };
  ASSIGN_OR_RETURN(v1::DrainResponse response, call());
  const absl::Time until = SteadyNow() + absl::Seconds(options.wait_seconds);
  if (!options.undo) PrintProgress(response, session);
  std::string shown = Left(response);
  while (!options.undo && !NothingLeft(response) && SteadyNow() < until) {
    absl::SleepFor(std::min(absl::Milliseconds(200), until - SteadyNow()));
    ASSIGN_OR_RETURN(response, call());
    if (Left(response) != shown) PrintProgress(response, session);
    shown = Left(response);
  }
  if (session.json) {
    RETURN_IF_ERROR(PrintJson(response, session.out));
  } else if (options.undo) {
    session.out << "in service\n";
  } else if (NothingLeft(response)) {
    session.out << "drained\n";
  }
  if (options.wait_seconds > 0 && !options.undo && !NothingLeft(response)) {
    return Unfinished(absl::StrCat("not drained within --wait ", options.wait_seconds,
                                   " seconds; left: ", Left(response)));
  }
  return absl::OkStatus();
}

}  // namespace

void AddDrain(CLI::App& app, Session& session) {
  auto [drain, options] = AddVerb(
      app, session, "drain",
      "Take a coordinator out of service: it finishes what has begun and refuses everything new, "
      "so that clients use another one. Its process runs until it is stopped. Exit status 4 if "
      "something is left after --wait seconds",
      "emberctl drain --address 10.0.0.7:7400 --wait 60", Drain);
  CLI::Option* undo =
      drain->add_flag("--undo", options->undo, "Put the coordinator back into service");
  drain
      ->add_option("--wait", options->wait_seconds,
                   "Seconds to wait until nothing is left; progress is printed")
      ->check(Within(0.0, 86400.0))
      ->excludes(undo);
}

}  // namespace emberd::emberctl
