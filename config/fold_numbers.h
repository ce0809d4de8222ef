// Sums and differences of statistics, whatever fields they have.
#pragma once

#include <google/protobuf/message.h>

namespace emberd::config {

enum class Fold {
  kAdd,       // what two processes have counted
  kSubtract,  // leaves what was counted since `from`; of what has restarted, all
};

// Folds the numbers of `from` into those of `to`, a message of the same kind, and so on in the
// messages within. Of lists, the elements with the same texts, `index` and `upper` belong together,
// and of maps those with the same key; those that `to` lacks are added to it, or nothing is done.
// What begins with largest_ becomes the larger one, or stays; texts, flags, unsigned numbers and
// limits (max_) stay.
void FoldNumbers(const google::protobuf::Message& from, google::protobuf::Message* to, Fold fold);

}  // namespace emberd::config
