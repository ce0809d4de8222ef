// The file of the log under its name again, after somebody has moved it (as logrotate does).
#pragma once

namespace emberd::ops {

// Makes a new file under the name of logging.file, if there is one, and goes on in it. If that
// fails, the old one stays, and says why. Thread-safe.
void ReopenLog();

}  // namespace emberd::ops
