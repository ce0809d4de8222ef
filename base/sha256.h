// SHA-256 of a string, for names and fingerprints that must be equal on every machine.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace emberd {

std::array<uint8_t, 32> Sha256(const std::string& text);

}  // namespace emberd
