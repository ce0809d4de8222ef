// Which shard hosts a group: the same on every coordinator, in every process and release.
#pragma once

#include "server/group/collective.h"

namespace emberd::server {

// 0 .. shards - 1: the first 64 bits of the SHA-256 of the model id (8 bytes, little-endian) and
// the name, big-endian, modulo `shards`.
int HostOf(const GroupId& id, int shards);

}  // namespace emberd::server
