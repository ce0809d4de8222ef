// What both servers of Unix sockets need to let in only whom they have invited: RegionServer and
// LaneServer.
#pragma once

#include <cstddef>
#include <string>

namespace emberd {

// Bytes that nobody can guess: tickets, and the names of sockets.
std::string RandomBytes(size_t size);

// Whether the other end of a connected Unix socket is a process of this process's user.
bool IsOfThisUser(int socket);

}  // namespace emberd
