// What a run of the demo leaves so that it can go on after everything has died: a folder with
//
//   options        the command line of the run, one argument a line
//   dense/step-40  where the trainers stood after 40 steps, with the dense part of the model
//   data/          what belongs to emberd (`emberd up --data`); its checkpoints, of the same names,
//                  are the folders data/checkpoints/MODEL/step-40
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/bench/demo/group.h"

namespace emberd::demo {

// Of the checkpoint after so many steps.
std::string CheckpointName(int64_t steps);

// Not thread-safe.
class SavedRun {
 public:
  explicit SavedRun(std::string folder) : folder_(std::move(folder)) {}

  const std::string& folder() const { return folder_; }
  std::string data_folder() const { return folder_ + "/data"; }

  // Begins anew: removes what an earlier run has left. FAILED_PRECONDITION: the folder holds
  // something else.
  absl::Status Begin(const std::vector<std::string>& arguments) const;
  // NOT_FOUND: no run has saved anything here.
  absl::StatusOr<std::vector<std::string>> Arguments() const;

  // The file is there as a whole or not at all, also after a crash.
  absl::Status SaveDense(const std::string& checkpoint, const Position& position) const;
  // NOT_FOUND, or DATA_LOSS if it is not what was written; with the file's name.
  absl::StatusOr<Position> LoadDense(const std::string& checkpoint) const;

 private:
  std::string OptionsPath() const { return folder_ + "/options"; }
  std::string DensePath(const std::string& checkpoint) const {
    return folder_ + "/dense/" + checkpoint;
  }

  std::string folder_;
};

}  // namespace emberd::demo
