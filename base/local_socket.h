// What both servers of Unix sockets need to let in only whom they have invited: RegionServer and
// LaneServer.
#pragma once

#include <cstddef>
#include <string>

#include "absl/time/time.h"
#include "base/file_descriptor.h"

namespace emberd {

// Who connects shows a ticket at once. Strangers cost a descriptor each: they are not waited for,
// and not many of them are kept.
inline constexpr absl::Duration kStrangerPatience = absl::Seconds(10);
inline constexpr size_t kMaxStrangers = 64;

// Bytes that nobody can guess: tickets, and the names of sockets.
std::string RandomBytes(size_t size);

// Whether the other end of a connected Unix socket is a process of this process's user.
bool IsOfThisUser(int socket);

// The connection that waits at `listener`. None (-1) if it is another user's and `any_user` is not
// set, or if there is none; after a short pause where the system gives none, or else whoever waits
// would have the caller try again at once, and again.
FileDescriptor AcceptLocal(int listener, bool any_user);

}  // namespace emberd
