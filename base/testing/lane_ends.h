// Both ends of lanes, for tests.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/lanes.h"
#include "base/local_server.h"

namespace emberd::lane_ends {

inline constexpr absl::Duration kLong = absl::Minutes(2);

// Answers with what it was asked.
inline LaneAnswer Echo(LaneCall* call) {
  return {.body = absl::StrCat(call->request().method, " ", call->request().authorization, " ",
                               call->request().trace, " ", call->request().body, " ",
                               call->peer().address)};
}

// Lanes behind a socket.
struct Server {
  Server(LaneServer::Handler handler, int max_lanes, LocalServer::Options options)
      : lanes(std::move(handler), max_lanes),
        local(*LocalServer::Start(std::move(options), nullptr, &lanes)) {}
  LocalInvitation Invite(LocalPeer peer = {}) { return local->Invite(std::move(peer)); }

  LaneServer lanes;
  const std::unique_ptr<LocalServer> local;
};

inline std::unique_ptr<Server> Serve(LaneServer::Handler handler, int max_lanes = 256,
                                     LocalServer::Options options = {.name = "lane-test",
                                                                     .ticket_life = kLong}) {
  return std::make_unique<Server>(std::move(handler), max_lanes, std::move(options));
}

inline std::unique_ptr<LanePool> PoolTo(Server& server, int max_lanes = 8,
                                        absl::Duration watch = absl::ZeroDuration()) {
  return std::make_unique<LanePool>(
      max_lanes,
      [&server](absl::Time) {
        return server.Invite({.address = "somewhere", .certificate = {}, .agent = {}});
      },
      watch, kLong);
}

inline absl::Time Late() { return absl::Now() + kLong; }

// A call that may take long; the lane is opened where there is none. Null: that did not work.
inline std::unique_ptr<LaneClientCall> SendTo(LanePool& pool, absl::string_view body = "body") {
  const lanes::Request request = {
      .method = 7, .patience = kLong, .authorization = "Bearer me", .trace = "trace", .body = body};
  std::unique_ptr<LaneClientCall> call = pool.Send(request);
  if (call != nullptr) return call;
  pool.Grow(Late());
  return pool.Send(request);
}

// "" if there is no answer.
inline std::string Ask(LanePool& pool, absl::string_view body = "body") {
  const auto call = SendTo(pool, body);
  if (call == nullptr) return "";
  const auto answer = call->Receive(Late());
  return answer.has_value() ? std::string(answer->body) : "";
}

}  // namespace emberd::lane_ends
