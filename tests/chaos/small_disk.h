// A disk that can be full.
#pragma once

#include <string>

namespace emberd::chaos {

// Gives the folder a small file system of its own in memory, which this process, the children that
// it starts from now on, and nobody else see. False: that is not allowed here. Before any thread is
// started.
bool MountDisk(const std::string& folder);

void UnmountDisk(const std::string& folder);

// Takes all the room that there is left.
void Fill(const std::string& path);

}  // namespace emberd::chaos
