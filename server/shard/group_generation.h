// Which generation of a group a shard is in, and how shards and coordinators agree on the next.
//
// Whenever the ranks of a group begin anew, they do so under a generation: a number that no others
// of the group have had or will have, so that what is left on its way of an earlier one (parts,
// words, openings) is known and refused. It needs no clock and no place that must live:
//
//   1. Who begins asks every shard for the newest generation that it knows (OpenGroup with
//      generation 0), and takes the number after the largest.
//   2. Under a random name of its own, the opener, it opens that number on every shard.
//   3. A shard takes a number that is larger than its own, and its own again from the same opener,
//      for an answer may be lost. It says ABORTED to all else, and whoever hears that has lost:
//      it begins again at 1, or gives up.
//
// A number is used only once all shards have taken it, and a shard takes a number from one opener,
// so two cannot use the same. From then on every shard knows it, so whoever begins later asks for
// more. A shard that has missed openings makes no difference: the largest answer counts, and its
// own number only grows. A shard may forget a group, but not how far the numbers of forgotten ones
// went (GroupSteps), nor does a checkpoint. A shard that has lost its memory has lost its rows: all
// calls name the history of the rows, and those of before are refused.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace emberd::server {

// Not thread-safe.
class GroupGeneration {
 public:
  GroupGeneration() = default;
  // Of a group that is new here, or comes from a checkpoint: numbers up to `newest` may have been
  // used, and nobody can open them any more.
  explicit GroupGeneration(uint64_t newest) : number_(newest) {}
  // As it was before a restart.
  GroupGeneration(uint64_t number, uint64_t opener) : number_(number), opener_(opener) {}

  uint64_t number() const { return number_; }  // 0: there was none
  uint64_t opener() const { return opener_; }
  // The number that has been opened here, and by this opener, which is not 0.
  bool Is(uint64_t number, uint64_t opener) const;
  // What the shard says to those who ask.
  uint64_t Newest() const;
  // Neither is 0. ABORTED as above.
  absl::Status Open(uint64_t number, uint64_t opener);

 private:
  uint64_t number_ = 0;
  uint64_t opener_ = 0;  // 0: nobody can open it again
};

}  // namespace emberd::server
