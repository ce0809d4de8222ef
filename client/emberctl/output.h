// Output for people (aligned columns, sizes, durations) and for programs (JSON).
#pragma once

#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include <google/protobuf/message.h>
#include <nlohmann/json.hpp>

namespace emberd::emberctl {

// Numbers are floats, so that they are written with as few digits as a float needs.
using Json =
    nlohmann::basic_json<std::map, std::vector, std::string, bool, int64_t, uint64_t, float>;

// Lines of cells, the first of them the headings, in columns as wide as their widest cell.
void PrintColumns(const std::vector<std::vector<std::string>>& lines, std::ostream& out);
// A message as JSON, with its own field names and all fields written.
void PrintJson(const google::protobuf::Message& message, std::ostream& out);

// "1.5 GiB"
std::string Bytes(int64_t bytes);
// "2h 3m", "3m 12s", "12s"
std::string Uptime(int64_t milliseconds);
// The shortest text that reads back as the same float.
std::string Float(float value);

}  // namespace emberd::emberctl
