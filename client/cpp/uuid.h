#pragma once

#include <string>

namespace emberd::client {

// A random UUID (version 4), for example "0f8fad5b-d9cb-469f-a165-70867728950e". From the system's
// random numbers, so that forked and cloned processes differ.
std::string RandomUuid();

}  // namespace emberd::client
