#include "server/checkpoint/verify.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/manifest.h"

namespace emberd::server {
namespace {

constexpr size_t kMostNamed = 10;

absl::Status VerifyRows(const internal::v1::CheckpointSource& source,
                        const v1::CheckpointFile& file,
                        absl::FunctionRef<absl::Status(int64_t)> read) {
  ASSIGN_OR_RETURN(const PartitionArray array, FindPartitionArray(source.manifest(), file.stack(),
                                                                  file.array(), file.partition()));
  ASSIGN_OR_RETURN(const auto reader, PartitionFileReader::Open(source.folder(), file, array));
  return reader->Verify(read);
}

}  // namespace

int64_t BytesOf(const CheckpointChain& chain) {
  int64_t bytes = 0;
  for (const auto& source : chain) bytes += InfoOf(source.manifest()).bytes();
  return bytes;
}

absl::Status VerifyChain(const CheckpointChain& chain, TransferProgress progress) {
  const int64_t total = BytesOf(chain);
  int64_t bytes = 0;
  absl::Status ended;
  std::vector<std::string> damages;
  const auto read = [&](int64_t more) {
    bytes += more;
    return ended = progress(bytes, total);
  };
  // Goes on after damage: all of it counts to whoever must find another copy.
  const auto note = [&](const absl::Status& status) {
    if (!status.ok() && damages.size() < kMostNamed) damages.emplace_back(status.message());
  };
  for (const internal::v1::CheckpointSource& source : chain) {
    for (const v1::CheckpointFile& file : source.manifest().states()) {
      note(ReadListedFile(source.folder(), file).status());
      RETURN_IF_ERROR(read(file.bytes()));
    }
    for (const v1::CheckpointFile& file : source.manifest().files()) {
      const absl::Status status = VerifyRows(source, file, read);
      RETURN_IF_ERROR(ended);
      note(status);
    }
  }
  if (damages.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrJoin(damages, "; "));
}

}  // namespace emberd::server
