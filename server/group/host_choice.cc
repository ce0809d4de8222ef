#include "server/group/host_choice.h"

#include <array>

#include "base/sha256.h"

namespace emberd::server {

int HostOf(const GroupId& id, int shards) {
  std::string text;
  for (int shift = 0; shift < 64; shift += 8)
    text.push_back(static_cast<char>(id.model_id >> shift));
  const std::array<uint8_t, 32> digest = Sha256(text + id.group);
  uint64_t hash = 0;
  for (int i = 0; i < 8; ++i) hash = hash << 8 | digest[i];
  return static_cast<int>(hash % static_cast<uint64_t>(shards));
}

}  // namespace emberd::server
