#include "server/coordinator/unary_service.h"

#include <google/protobuf/descriptor.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace emberd::server {
namespace {

// `rpc` is declared in a .proto that this program knows.
const google::protobuf::MethodDescriptor& MethodOf(ops::Rpc rpc) {
  return *google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(absl::StrCat(
      "emberd.v1.", absl::StrReplaceAll(std::string(ops::RpcName(rpc)), {{"/", "."}})));
}

}  // namespace

int MethodIndex(ops::Rpc rpc) { return MethodOf(rpc).index(); }

std::string SampleName(ops::Rpc rpc) {
  std::string name;
  for (const char c : MethodOf(rpc).name()) {
    if (absl::ascii_isupper(c) && !name.empty()) name.push_back('_');
    name.push_back(absl::ascii_tolower(c));
  }
  return name;
}

}  // namespace emberd::server
