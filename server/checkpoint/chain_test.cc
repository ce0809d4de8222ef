// Random tables of random layouts, changed and saved as chains of checkpoints: what is read, by any
// ids and on any number of partitions, is what a plain copy of the tables holds; also after
// merging.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/sanitized.h"
#include "base/testing/seed.h"
#include "server/checkpoint/chain_work.h"
#include "server/checkpoint/store.h"
#include "server/checkpoint/testing/tables.h"

namespace emberd::checkpoint {
namespace chain_test {

using testing::HasSubstr;

absl::Status GoOn(int64_t, int64_t) { return absl::OkStatus(); }

std::vector<float> ReadAll(const CheckpointChain& chain, const TestTables::Array& array) {
  auto reader = TableReader::Open(&chain, array.table, array.slot);
  EXPECT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->rows(), array.rows);
  EXPECT_EQ((*reader)->columns(), array.columns);
  std::vector<float> values(array.rows * array.columns);
  const absl::Status status = (*reader)->Read({.count = array.rows}, values.data());
  EXPECT_TRUE(status.ok()) << status;
  return values;
}

// In random pieces, at random strides.
void ExpectRuns(const CheckpointChain& chain, const TestTables::Array& array,
                std::mt19937_64& random) {
  auto reader = *TableReader::Open(&chain, array.table, array.slot, /*verify=*/false);
  for (int i = 0; i < 20; ++i) {
    IdRun ids{.first = static_cast<int64_t>(random() % array.rows),
              .stride = 1 + static_cast<int64_t>(random() % 40)};
    ids.count = static_cast<int64_t>(random() % ((array.rows - 1 - ids.first) / ids.stride + 2));
    std::vector<float> values(ids.count * array.columns);
    const absl::Status status = reader->Read(ids, values.data());
    ASSERT_TRUE(status.ok()) << status;
    for (int64_t n = 0; n < ids.count; ++n) {
      const int64_t id = ids.first + n * ids.stride;
      ASSERT_TRUE(std::equal(values.begin() + n * array.columns,
                             values.begin() + (n + 1) * array.columns,
                             array.values.begin() + id * array.columns))
          << array.table << " " << array.slot << " row " << id;
    }
  }
}

void ExpectTables(const CheckpointChain& chain, const std::vector<TestTables::Array>& arrays) {
  for (const TestTables::Array& array : arrays) {
    EXPECT_EQ(ReadAll(chain, array), array.values) << array.table << " " << array.slot;
  }
}

v1::ArrayDiff NaiveDiff(const TestTables::Array& before, const TestTables::Array& after) {
  v1::ArrayDiff diff;
  diff.set_table(after.table);
  diff.set_slot(after.slot);
  diff.set_rows(after.rows);
  for (int64_t id = 0; id < after.rows; ++id) {
    bool changed = false;
    for (int64_t i = id * after.columns; i < (id + 1) * after.columns; ++i) {
      changed = changed || before.values[i] != after.values[i];
      const double difference = std::abs(static_cast<double>(before.values[i]) - after.values[i]);
      diff.set_max_difference(std::max(diff.max_difference(), difference));
    }
    if (changed) diff.set_rows_changed(diff.rows_changed() + 1);
  }
  return diff;
}

TEST(ChainTest, HoldsWhatThePlainCopyHolds) {
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < Rounds(25); ++i) {
    const TempDir dir = *TempDir::Create();
    const CheckpointStore store(dir.path());
    TestTables tables(RandomTables(random), 1 << random() % 5);
    SCOPED_TRACE(absl::StrCat("case ", i, ", P ", tables.plan().partitions(), ", ",
                              tables.config().ShortDebugString()));
    std::vector<std::vector<TestTables::Array>> saved;
    const int length = 1 + static_cast<int>(random() % 4);
    for (int n = 0; n < length; ++n) {
      if (i % 5 != 0 || n > 0) tables.Change(random);
      const absl::Status status =
          tables.Save(store, absl::StrCat("c", n), n == 0 ? "" : absl::StrCat("c", n - 1));
      ASSERT_TRUE(status.ok()) << status;
      saved.push_back(tables.arrays());
    }
    for (int n = 0; n < length; ++n) {
      const CheckpointChain chain = *store.Chain("m", absl::StrCat("c", n));
      ASSERT_EQ(chain.size(), n + 1u);
      ExpectTables(chain, saved[n]);
      for (const auto& array : saved[n]) ExpectRuns(chain, array, random);
      EXPECT_TRUE(VerifyChain(chain, GoOn).ok());
    }
    const auto diff = DiffCheckpoints(*store.Chain("m", "c0"),
                                      *store.Chain("m", absl::StrCat("c", length - 1)), GoOn);
    ASSERT_TRUE(diff.ok()) << diff.status();
    ASSERT_EQ(diff->arrays_size(), static_cast<int>(saved[0].size()));
    EXPECT_EQ(diff->config_difference(), "");
    for (size_t a = 0; a < saved[0].size(); ++a) {
      EXPECT_EQ(diff->arrays(static_cast<int>(a)).DebugString(),
                NaiveDiff(saved[0][a], saved.back()[a]).DebugString());
    }

    // One in the middle, and what builds on it, stay the same.
    const std::string merged = absl::StrCat("c", random() % length);
    const auto info = MergeCheckpoint(store, "m", merged, GoOn);
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(info->parent(), "");
    EXPECT_EQ(store.Chain("m", merged)->size(), 1u);
    for (int n = 0; n < length; ++n) {
      const CheckpointChain chain = *store.Chain("m", absl::StrCat("c", n));
      EXPECT_TRUE(VerifyChain(chain, GoOn).ok());
      ExpectTables(chain, saved[n]);
    }
    // What it was made of may go, if nobody else needs it.
    if (merged == absl::StrCat("c", length - 1)) {
      for (int n = length - 2; n >= 0; --n) {
        EXPECT_TRUE(store.Delete("m", absl::StrCat("c", n)).ok());
      }
      ExpectTables(*store.Chain("m", merged), saved.back());
    }
  }
}

TEST(ChainTest, TellsWhichRowsWereTouched) {
  std::mt19937_64 random(TestSeed());
  const TempDir dir = *TempDir::Create();
  const CheckpointStore store(dir.path());
  TestTables tables(RandomTables(random), 4);
  ASSERT_TRUE(tables.Save(store, "a").ok());
  tables.Change(random);
  const int64_t changed = tables.rows_changed();
  ASSERT_TRUE(tables.Save(store, "b", "a").ok());
  const CheckpointChain chain = *store.Chain("m", "b");
  int64_t found = 0;
  for (const TestTables::Array& array : tables.arrays()) {
    if (!array.slot.empty()) continue;
    auto reader = *TableReader::Open(&chain, array.table, "");
    std::vector<float> values(array.rows * array.columns, -1);
    std::vector<bool> held;
    ASSERT_TRUE(reader->ReadHeld({.count = array.rows}, values.data(), &held).ok());
    for (int64_t id = 0; id < array.rows; ++id) {
      found += held[id];
      EXPECT_TRUE(held[id] || values[id * array.columns] == -1);
    }
  }
  EXPECT_EQ(found, changed);
}

TEST(ChainTest, RefusesWhatIsNotThere) {
  std::mt19937_64 random(TestSeed(3));
  const TempDir dir = *TempDir::Create();
  const CheckpointStore store(dir.path());
  TestTables tables(RandomTables(random), 2);
  ASSERT_TRUE(tables.Save(store, "a").ok());
  const CheckpointChain chain = *store.Chain("m", "a");
  EXPECT_THAT(std::string(TableReader::Open(&chain, "x", "").status().message()),
              HasSubstr("checkpoint \"a\" of model \"m\" has no table \"x\""));
  EXPECT_THAT(std::string(TableReader::Open(&chain, "t0", "momentum").status().message()),
              HasSubstr("table \"t0\" has no slot \"momentum\""));
  auto reader = *TableReader::Open(&chain, "t0", "");
  float value = 0;
  const int64_t rows = reader->rows();
  for (const IdRun& ids : {IdRun{.first = -1, .count = 1}, IdRun{.first = rows, .count = 1},
                           IdRun{.first = 0, .count = rows + 1},
                           IdRun{.first = rows - 1, .count = 2, .stride = int64_t{1} << 62},
                           IdRun{.first = 0, .count = 1, .stride = 0}}) {
    EXPECT_EQ(reader->Read(ids, &value).code(), absl::StatusCode::kOutOfRange);
  }
}

TEST(ChainTest, ProgressEndsTheWork) {
  std::mt19937_64 random(TestSeed(4));
  const TempDir dir = *TempDir::Create();
  const CheckpointStore store(dir.path());
  TestTables tables(RandomTables(random), 2);
  tables.Change(random);
  ASSERT_TRUE(tables.Save(store, "a").ok());
  tables.Change(random);
  ASSERT_TRUE(tables.Save(store, "b", "a").ok());
  const CheckpointChain chain = *store.Chain("m", "b");
  int64_t last = 0;
  int64_t all = 0;
  const auto hear = [&](int64_t bytes, int64_t total) {
    EXPECT_GE(bytes, last);
    last = bytes;
    all = total;
    return absl::OkStatus();
  };
  ASSERT_TRUE(VerifyChain(chain, hear).ok());
  EXPECT_EQ(last, all);
  EXPECT_EQ(all, BytesOf(chain));
  const auto end = [](int64_t, int64_t) { return absl::CancelledError("enough"); };
  EXPECT_EQ(VerifyChain(chain, end).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(MergeCheckpoint(store, "m", "b", end).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(DiffCheckpoints(chain, chain, end).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(store.Chain("m", "b")->size(), 2u);
  for (const auto& entry : std::filesystem::directory_iterator(dir.Path("m"))) {
    EXPECT_FALSE(entry.is_directory() && entry.path().filename().string()[0] == '.') << entry;
  }
}

}  // namespace chain_test
}  // namespace emberd::checkpoint
