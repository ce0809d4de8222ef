// A small log with a record of each common kind.
#pragma once

#include <string>

namespace emberd::log {

// Records 1 to 5: the state; model "ads" (id 7) made; the vote of attempt 12ab on change 17 of
// client "trainer", with a blob of 5000 bytes; its decision; rank 0's part of step 3 of group "run"
// of a model that the log does not name (id 8). Ends the process if it cannot be written.
void WriteSampleLog(const std::string& folder, int shard, int shards);

}  // namespace emberd::log
