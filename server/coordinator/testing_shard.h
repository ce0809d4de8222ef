// A shard that can do nothing but what tests of coordinators give it answers for.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/host/shard_backend.h"

namespace emberd::coordinator {

class TestingShard : public host::ShardBackend {
 public:
  explicit TestingShard(int index) : index_(index), name_(absl::StrCat("shard ", index)) {}

  int index() const { return index_; }
  const std::string& name() const override { return name_; }
  const std::string& address() const override { return name_; }

  std::unique_ptr<host::GatherCall> Gather(host::GatherCommand, rpc::CallContext*) override {
    return nullptr;
  }
  std::unique_ptr<host::ApplyCall> Apply(host::ApplyCommand, rpc::CallContext*) override {
    return nullptr;
  }

 protected:
  // From now on, `answer` answers the verb. For constructors.
  template <typename Shard, typename Request, typename Response>
  void Answer(host::ShardVerb verb,
              absl::StatusOr<Response> (Shard::*answer)(const Request& request)) {
    answers_[verb] = [this, answer](const google::protobuf::Message& request,
                                    google::protobuf::Message* response) {
      auto result = (static_cast<Shard*>(this)->*answer)(static_cast<const Request&>(request));
      if (result.ok()) *static_cast<Response*>(response) = *std::move(result);
      return result.status();
    };
  }

 private:
  absl::Status Control(host::ShardVerb verb, const google::protobuf::Message& request,
                       google::protobuf::Message* response, rpc::CallContext*) override {
    const auto answer = answers_.find(verb);
    return answer == answers_.end() ? No() : answer->second(request, response);
  }
  absl::Status No() const { return absl::UnimplementedError(name_); }

  const int index_;
  const std::string name_;
  std::map<host::ShardVerb, std::function<absl::Status(const google::protobuf::Message&,
                                                       google::protobuf::Message*)>>
      answers_;
};

}  // namespace emberd::coordinator
