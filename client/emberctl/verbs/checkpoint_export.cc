// emberctl checkpoint export: every table and slot of a checkpoint as files that others read.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/command_line.h"
#include "base/status.h"
#include "client/cpp/coordinator.h"
#include "client/emberctl/output.h"
#include "client/emberctl/progress.h"
#include "client/emberctl/tensor_file.h"
#include "client/emberctl/verbs/checkpoint.h"

namespace emberd::emberctl {
namespace {

namespace fs = std::filesystem;
using client::Coordinator;

constexpr char kEnd[] = ".safetensors";
constexpr char kPartial[] = ".partial";

struct ExportJob {
  CheckpointTarget target;
  std::string folder;
  int64_t file_bytes = int64_t{4} << 30;
};

// A table, or a slot of one.
struct Array {
  std::string table;
  std::string slot;  // empty: the weights
  int64_t rows = 0;
  int64_t columns = 0;  // of a slot, maybe 1 instead

  std::string name() const { return slot.empty() ? table : absl::StrCat(table, ".", slot); }
};

std::vector<Array> ArraysOf(const v1::CheckpointManifest& manifest) {
  std::vector<Array> arrays;
  for (const v1::StackPlan& stack : manifest.plan().stacks()) {
    for (const v1::TablePlan& table : stack.tables()) {
      arrays.push_back({table.name(), "", table.vocabulary_size(), table.embedding_dim()});
      for (const std::string& slot : stack.slots()) {
        arrays.push_back({table.name(), slot, table.vocabulary_size(), table.embedding_dim()});
      }
    }
  }
  return arrays;
}

absl::Status CannotWrite(const std::string& path) {
  return absl::PermissionDeniedError(
      absl::StrCat(path, ": cannot be written; check permissions and free space"));
}

// Writes one array, to one file or several with an index. Files get their names when all are
// complete; what is not finished is removed.
class ArrayWriter {
 public:
  ArrayWriter(const ExportJob& job, const Array& array, std::map<std::string, std::string> metadata)
      : job_(job), array_(array), metadata_(std::move(metadata)) {}
  ~ArrayWriter() {
    file_.close();
    std::error_code ignored;
    for (const std::string& name : names_) fs::remove(Path(name) + kPartial, ignored);
  }
  ArrayWriter(const ArrayWriter&) = delete;
  ArrayWriter& operator=(const ArrayWriter&) = delete;

  absl::Status Append(const v1::ExportCheckpointResponse& part) {
    const int64_t row_bytes = part.columns() * static_cast<int64_t>(sizeof(float));
    if (next_ == 0 &&
        (part.columns() == array_.columns || (part.columns() == 1 && !array_.slot.empty()))) {
      array_.columns = part.columns();
      rows_per_file_ = std::max<int64_t>(1, job_.file_bytes / row_bytes);
    }
    absl::string_view values = part.values();
    const auto bytes = static_cast<int64_t>(values.size());
    if (part.columns() != array_.columns || part.first_row() != next_ || bytes % row_bytes != 0 ||
        bytes / row_bytes > array_.rows - next_) {
      return absl::InternalError(absl::StrCat(
          "the server sent ", bytes, " bytes from row ", part.first_row(), " on; rows in [", next_,
          ", ", array_.rows, ") of ", array_.columns, " columns were expected"));
    }
    while (!values.empty()) {
      if (next_ % rows_per_file_ == 0) RETURN_IF_ERROR(BeginFile());
      const int64_t rows = std::min(static_cast<int64_t>(values.size()) / row_bytes,
                                    rows_per_file_ - next_ % rows_per_file_);
      file_.write(values.data(), rows * row_bytes);
      if (!file_) return CannotWrite(Path(names_.back()));
      values.remove_prefix(static_cast<size_t>(rows * row_bytes));
      next_ += rows;
    }
    return absl::OkStatus();
  }

  absl::Status Finish() {
    if (next_ != array_.rows) {
      return absl::InternalError(
          absl::StrCat("the server ended the export at row ", next_, " of ", array_.rows));
    }
    RETURN_IF_ERROR(EndFile());
    for (const std::string& name : names_) {
      std::error_code error;
      fs::rename(Path(name) + kPartial, Path(name), error);
      if (error) return CannotWrite(Path(name));
    }
    return names_.size() > 1 ? WriteIndex() : absl::OkStatus();
  }

  int64_t bytes() const { return next_ * array_.columns * static_cast<int64_t>(sizeof(float)); }
  int64_t total_bytes() const {
    return array_.rows * array_.columns * static_cast<int64_t>(sizeof(float));
  }
  std::vector<std::string> paths() const {
    std::vector<std::string> paths;
    for (const std::string& name : names_) paths.push_back(Path(name));
    return paths;
  }

 private:
  // `name` is that of the tensor in the file.
  std::string Path(const std::string& name) const {
    return absl::StrCat(job_.folder, "/", name, kEnd);
  }

  absl::Status BeginFile() {
    RETURN_IF_ERROR(EndFile());
    const int64_t files = (array_.rows + rows_per_file_ - 1) / rows_per_file_;
    std::map<std::string, std::string> metadata = metadata_;
    if (files == 1) {
      names_ = {array_.name()};
    } else {
      names_.push_back(absl::StrFormat("%s-%05d-of-%05d", array_.name(),
                                       static_cast<int>(names_.size()) + 1, files));
      metadata["first_row"] = absl::StrCat(next_);
    }
    file_.open(Path(names_.back()) + kPartial, std::ios::binary);
    file_ << SafetensorsStart(names_.back(), metadata,
                              std::min(rows_per_file_, array_.rows - next_), array_.columns);
    return file_ ? absl::OkStatus() : CannotWrite(Path(names_.back()));
  }

  absl::Status EndFile() {
    if (!file_.is_open()) return absl::OkStatus();
    file_.close();
    return file_ ? absl::OkStatus() : CannotWrite(Path(names_.back()));
  }

  // Which tensor is in which file, as the tools around safetensors have it.
  absl::Status WriteIndex() const {
    nlohmann::ordered_json index;
    index["metadata"] = {{"total_size", total_bytes()}};
    for (const std::string& name : names_) index["weight_map"][name] = name + kEnd;
    const std::string path = Path(array_.name()) + ".index.json";
    std::ofstream file(path);
    file << index.dump(2) << "\n";
    file.close();
    return file ? absl::OkStatus() : CannotWrite(path);
  }

  const ExportJob& job_;
  Array array_;
  const std::map<std::string, std::string> metadata_;
  int64_t rows_per_file_ = 1;
  int64_t next_ = 0;  // row
  std::vector<std::string> names_;
  std::ofstream file_;
};

class Exporter {
 public:
  Exporter(Session& session, const ExportJob& job, v1::CheckpointManifest manifest)
      : session_(session), job_(job), manifest_(std::move(manifest)), progress_(session) {}

  absl::StatusOr<std::vector<std::string>> Run() {
    const std::vector<Array> arrays = ArraysOf(manifest_);
    std::set<std::string> names;
    for (const Array& array : arrays) {
      if (!names.insert(array.name()).second) {
        return absl::FailedPreconditionError(
            absl::StrCat("two tables or slots would be written to ", array.name(), kEnd,
                         ": a table has the name of another one's slot"));
      }
      total_ += array.rows * array.columns * static_cast<int64_t>(sizeof(float));
    }
    for (const Array& array : arrays) RETURN_IF_ERROR(Export(array));
    return std::move(paths_);
  }

 private:
  // One try of the call; a failure of our own ends the tries.
  grpc::Status Try(const Coordinator& coordinator, grpc::ClientContext* context, const Array& array,
                   absl::Status* failure) {
    v1::ExportCheckpointRequest request;
    request.set_model(manifest_.model());
    request.set_name(manifest_.name());
    request.set_table(array.table);
    request.set_slot(array.slot);
    ArrayWriter writer(job_, array,
                       {{"format", "emberd"},
                        {"model", manifest_.model()},
                        {"checkpoint", manifest_.name()},
                        {"table", array.table},
                        {"slot", array.slot}});
    const auto reader = coordinator.Read<v1::ExportCheckpointResponse>(
        "/emberd.v1.CheckpointService/ExportCheckpoint", request, context);
    v1::ExportCheckpointResponse part;
    while (failure->ok() && reader->Read(&part)) {
      *failure = writer.Append(part);
      progress_.Show(array.name(), done_ + writer.bytes(), total_, absl::Now() - begin_);
    }
    if (!failure->ok()) context->TryCancel();
    const grpc::Status status = reader->Finish();
    if (failure->ok() && !status.ok()) return status;
    if (failure->ok()) *failure = writer.Finish();
    const std::vector<std::string> paths = writer.paths();
    paths_.insert(paths_.end(), paths.begin(), paths.end());
    done_ += writer.bytes();
    // A slot may have fewer columns than was thought.
    total_ +=
        writer.total_bytes() - array.rows * array.columns * static_cast<int64_t>(sizeof(float));
    return grpc::Status::OK;
  }

  absl::Status Export(const Array& array) {
    absl::Status failure;
    const absl::Status status = session_.Call(
        [&](const Coordinator& coordinator, grpc::ClientContext* context) {
          return Try(coordinator, context, array, &failure);
        },
        kLong);
    return failure.ok() ? status : failure;
  }

  Session& session_;
  const ExportJob& job_;
  const v1::CheckpointManifest manifest_;
  Progress progress_;
  const absl::Time begin_ = absl::Now();
  int64_t done_ = 0;
  int64_t total_ = 0;
  std::vector<std::string> paths_;
};

absl::Status MakeFolder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return absl::PermissionDeniedError(absl::StrCat(folder, ": ", error.message()));
  if (fs::is_empty(folder, error)) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat(folder, ": is not empty; name a new or empty folder"));
}

absl::Status Export(Session& session, const ExportJob& job) {
  v1::GetCheckpointRequest request;
  request.set_model(job.target.model);
  if (job.target.name != "newest") request.set_name(job.target.name);
  ASSIGN_OR_RETURN(auto manifest, session.Call<v1::CheckpointManifest>(
                                      "/emberd.v1.CheckpointService/GetCheckpoint", request));
  RETURN_IF_ERROR(MakeFolder(job.folder));
  const std::string name = manifest.name();
  ASSIGN_OR_RETURN(const std::vector<std::string> paths,
                   Exporter(session, job, std::move(manifest)).Run());
  if (session.json) {
    session.out << Json{{"checkpoint", name}, {"files", paths}}.dump(1) << "\n";
  } else {
    for (const std::string& path : paths) session.out << path << "\n";
  }
  return absl::OkStatus();
}

}  // namespace

void AddCheckpointExport(CLI::App& checkpoint, Session& session, Command& command) {
  const auto job = std::make_shared<ExportJob>();
  CLI::App* verb = checkpoint.add_subcommand(
      "export",
      "Write all tables and slots of a checkpoint to a folder, as TABLE.safetensors and "
      "TABLE.SLOT.safetensors: float32, in the order of ids");
  verb->add_option("MODEL", job->target.model, "Name of the model")->required();
  verb->add_option("NAME", job->target.name, "Name of the checkpoint, or: newest")->required();
  verb->add_option("DIR", job->folder, "A new or empty folder")->required();
  verb->add_option("--file-bytes", job->file_bytes,
                   "Split larger tables into files with at most this many bytes of rows, and write "
                   "TABLE.safetensors.index.json")
      ->check(Within(int64_t{1}, int64_t{1} << 50))
      ->capture_default_str();
  SetExample(verb, "emberctl checkpoint export my_model newest tables/");
  verb->callback(
      [job, &session, &command] { command = [job, &session] { return Export(session, *job); }; });
}

}  // namespace emberd::emberctl
