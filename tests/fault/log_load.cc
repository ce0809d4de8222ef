// Writes a log until it is killed, and tells which records the disk has:
//
//   log_load FOLDER ALWAYS|INTERVAL|NEVER
//
// A line "appended SEQUENCE NUMBER" for each record, and "durable SEQUENCE NUMBER" when it is. The
// number is random; the blob of the record begins with it and follows from it.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/log/testing/records.h"

namespace emberd::log {
namespace {

void Say(const std::string& line) {
  // In one piece, so that a line is whole or not there.
  if (write(STDOUT_FILENO, line.data(), line.size()) != static_cast<ssize_t>(line.size())) _exit(3);
}

[[noreturn]] void End(const absl::Status& status) {
  std::fprintf(stderr, "log_load: %s\n", status.ToString().c_str());
  _exit(2);
}

class Load {
 public:
  explicit Load(LogWriter& writer) : writer_(writer) {}
  void Run();

 private:
  void StartSegment(std::mt19937_64& random);

  LogWriter& writer_;
  absl::Mutex mutex_;  // a state stands where the caller says
};

void Load::StartSegment(std::mt19937_64& random) {
  absl::MutexLock lock(&mutex_);
  if (!writer_.SegmentFull()) return;
  const absl::StatusOr<uint64_t> segment = writer_.StartSegment(StateRecord(random() >> 1));
  if (!segment.ok()) End(segment.status());
  if (random() % 4 != 0 || *segment < 3) return;
  if (absl::Status status = writer_.DropBefore(*segment - 2); !status.ok()) End(status);
}

void Load::Run() {
  std::mt19937_64 random(std::random_device{}());
  while (true) {
    const uint64_t number = random() >> 1;
    const auto blob = AppendBytes(writer_, BlobBytes(number, number % 20'000));
    if (!blob.ok()) End(blob.status());
    const absl::StatusOr<uint64_t> sequence = writer_.Append(VoteRecord(number, *blob));
    if (!sequence.ok()) End(sequence.status());
    const std::string what = absl::StrCat(*sequence, " ", number, "\n");
    Say("appended " + what);
    writer_.WhenDurable(*sequence, [what](const absl::Status& status) {
      if (!status.ok()) End(status);
      Say("durable " + what);
    });
    if (writer_.SegmentFull()) StartSegment(random);
  }
}

int Main(const std::string& folder, const std::string& fsync) {
  LogOptions options;
  options.folder = folder;
  options.interval = absl::Milliseconds(2);
  options.segment_bytes = 1'000'000;
  options.reserve_bytes = 65536;
  if (!v1::StorageConfig::Fsync_Parse(fsync, &options.fsync)) return 1;
  const absl::StatusOr<WholeLog> before = ReadWhole(folder, SystemLogFiles());
  if (!before.ok()) End(before.status());
  options.older_blobs = before->end.older_blobs;
  const auto writer = LogWriter::Open(options, before->end.next_segment, before->end.next_sequence,
                                      StateRecord(std::random_device{}()));
  if (!writer.ok()) End(writer.status());
  Load load(**writer);
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back([&] { load.Run(); });
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // namespace
}  // namespace emberd::log

int main(int argc, char** argv) { return argc == 3 ? emberd::log::Main(argv[1], argv[2]) : 1; }
