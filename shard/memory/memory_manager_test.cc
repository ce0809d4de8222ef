// What leaves an emulated SparseCore, when, to where, and what happens when it cannot.
#include "shard/memory/memory_manager.h"

#include <atomic>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/temp_dir.h"
#include "shard/testing/spilled_files.h"

namespace emberd::shard {
namespace memory_manager_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Rows that note where they are.
class FakeRows : public Evictable {
 public:
  explicit FakeRows(std::string bytes) : bytes(std::move(bytes)), was(this->bytes) {}
  absl::Status Spill(SpillFile& file) override { return file.Write(bytes); }
  void DropRows() override { bytes.assign(bytes.size(), '\0'); }
  absl::Status Fetch(SpillFile& file) override {
    file.Rewind();
    ++fetches;
    absl::Status status = file.Read(absl::MakeSpan(bytes));
    if (damaged) status = absl::DataLossError("the file is damaged");
    if (status.ok()) status = file.CheckRead();
    if (!status.ok()) DropRows();
    return status;
  }

  int fetches = 0;
  bool damaged = false;
  std::string bytes;
  const std::string was;
};

struct FakeModel {
  std::shared_ptr<MemoryManager> manager;
  std::shared_ptr<FakeRows> rows;
  std::shared_ptr<MemoryManager::Room> room;
  ~FakeModel() {
    if (room != nullptr) manager->Return(*room);
  }
  MemoryManager::Use Hold() {
    auto use = manager->Hold(room);
    EXPECT_TRUE(use.ok()) << use.status();
    return use.ok() ? *std::move(use) : MemoryManager::Use();
  }
  absl::Status Touch() { return manager->Hold(room).status(); }
};
using FakeModelPtr = std::unique_ptr<FakeModel>;

class MemoryManagerTest : public ::testing::Test {
 protected:
  void Start(int64_t bytes, int64_t host_bytes = 0, int64_t spill_bytes = 0) {
    MemoryOptions options;
    options.bytes = bytes;
    options.folder = dir_.path() + "/spill";
    options.host_bytes = host_bytes;
    options.spill_bytes = spill_bytes;
    options.wait = std::chrono::milliseconds(0);
    options.watch = [this](absl::string_view event) { events_.emplace_back(event); };
    manager_ = *MemoryManager::Create(options);
  }
  absl::StatusOr<FakeModelPtr> TryAdd(const std::string& name, std::vector<int64_t> stacks) {
    auto model = std::make_unique<FakeModel>();
    model->manager = manager_;
    std::vector<MemoryManager::Table> tables;
    for (const int64_t bytes : stacks) tables.push_back({"stack", bytes});
    auto room = manager_->Take(name, std::move(tables));
    if (!room.ok()) return room.status();
    model->room = *std::move(room);
    model->rows = std::make_shared<FakeRows>(name + " has these rows");
    manager_->MayEvict(*model->room, model->rows);
    return model;
  }
  FakeModelPtr Add(const std::string& name, std::vector<int64_t> stacks) {
    auto model = TryAdd(name, std::move(stacks));
    EXPECT_TRUE(model.ok()) << model.status();
    return model.ok() ? *std::move(model) : nullptr;
  }
  v1::MemoryTable::Place PlaceOf(const std::string& name) const {
    const v1::MemoryStatus figures = manager_->Figures();
    for (const v1::MemoryTable& table : figures.tables()) {
      if (table.model() == name) return table.place();
    }
    ADD_FAILURE() << name << " is not there";
    return v1::MemoryTable::SPILLED;
  }
  std::vector<std::string> OnSparseCore() const {
    std::vector<std::string> names;
    const v1::MemoryStatus figures = manager_->Figures();
    for (const v1::MemoryTable& table : figures.tables()) {
      if (table.address() >= 0) names.push_back(table.model());
    }
    return names;
  }

  const TempDir dir_ = *TempDir::Create();
  std::vector<std::string> events_;
  std::shared_ptr<MemoryManager> manager_;
};

TEST_F(MemoryManagerTest, EvictsTheLeastRecentlyUsedAndBringsItBack) {
  Start(200);
  auto a = Add("a", {100}), b = Add("b", {60, 40});
  EXPECT_TRUE(a->Touch().ok());
  auto c = Add("c", {100});
  EXPECT_THAT(OnSparseCore(), ElementsAre("a", "c"));
  EXPECT_EQ(PlaceOf("b"), v1::MemoryTable::SPILLED);
  EXPECT_NE(b->rows->bytes, b->rows->was);  // its memory is given back
  EXPECT_EQ(manager_->Figures().spilled_bytes(), static_cast<int64_t>(b->rows->was.size()));
  EXPECT_TRUE(b->Touch().ok());
  EXPECT_EQ(b->rows->bytes, b->rows->was);
  EXPECT_THAT(OnSparseCore(), ElementsAre("b", "b", "c"));
  const v1::MemoryStatus figures = manager_->Figures();
  EXPECT_EQ(figures.evictions(), 2);
  EXPECT_EQ(figures.returns(), 1);
  EXPECT_EQ(figures.free_bytes(), 0);
}

// Rows give their room back when the last who holds them lets go. Would catch: a refused pin that
// is the last, and holds the mutex then, for which all wait from then on.
TEST_F(MemoryManagerTest, ARefusedPinMayBeTheLastToHoldRows) {
  struct OwningRows final : FakeRows {
    using FakeRows::FakeRows;
    ~OwningRows() {
      if (room != nullptr) manager->Return(*room);
    }
    std::shared_ptr<MemoryManager> manager;
    std::shared_ptr<MemoryManager::Room> room;
  };
  Start(200, /*host_bytes=*/200);
  const auto pinned = Add("a", {150}), stays = Add("b", {30});
  ASSERT_TRUE(manager_->SetPinned("a", true).ok());
  std::atomic<bool> over = false;
  std::thread pins([&] {
    while (!over) manager_->SetPinned("b", true).IgnoreError();
  });
  int shared = 0;
  for (int i = 0; i < 20'000; ++i) {
    manager_->SetPinned("b", false).IgnoreError();
    auto rows = std::make_shared<OwningRows>("b");
    auto room = manager_->Take("b", {{"stack", 30}});
    if (!room.ok()) continue;  // the other one is pinned
    rows->manager = manager_;
    rows->room = *std::move(room);
    manager_->MayEvict(*rows->room, rows);
    ++shared;
    rows = nullptr;  // or in the refused pin
  }
  over = true;
  pins.join();
  EXPECT_GT(shared, 0);
}

TEST_F(MemoryManagerTest, RowsInUseAndPinnedRowsStay) {
  Start(200);
  auto a = Add("a", {100}), b = Add("b", {100});
  auto use = a->Hold();
  ASSERT_TRUE(manager_->SetPinned("b", true).ok());
  const auto refused = TryAdd("c", {100}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("model c: needs 100 bytes"));
  EXPECT_THAT(events_, ElementsAre("compact"));
  ASSERT_TRUE(manager_->SetPinned("b", false).ok());
  auto c = Add("c", {100});
  EXPECT_THAT(OnSparseCore(), ElementsAre("a", "c"));
  EXPECT_EQ(b->Touch().ok(), true);  // at c's cost, for a is in use
  EXPECT_THAT(OnSparseCore(), ElementsAre("a", "b"));
  EXPECT_EQ(manager_->SetPinned("d", true).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(MemoryManagerTest, APinBringsAModelInAndSaysWhatLeftForIt) {
  Start(200);
  auto a = Add("a", {60, 40}), b = Add("b", {100}), c = Add("c", {100});
  ASSERT_EQ(PlaceOf("a"), v1::MemoryTable::SPILLED);
  const v1::ShardMemoryChange pinned = *manager_->SetPinned("a", true);
  EXPECT_TRUE(pinned.changed());
  EXPECT_TRUE(pinned.returned());
  EXPECT_THAT(pinned.evicted(), ElementsAre("b"));
  EXPECT_EQ(pinned.evicted_bytes(), 100);
  EXPECT_EQ(a->rows->bytes, a->rows->was);
  const v1::ShardMemoryChange again = *manager_->SetPinned("a", true);
  EXPECT_FALSE(again.changed());
  EXPECT_FALSE(again.returned());
  EXPECT_TRUE(b->Touch().ok());
  EXPECT_TRUE(c->Touch().ok());
  EXPECT_EQ(PlaceOf("a"), v1::MemoryTable::SPARSECORE);
  EXPECT_EQ(manager_->Figures().pinned_bytes(), 100);
  EXPECT_TRUE(manager_->SetPinned("a", false)->changed());
  EXPECT_EQ(PlaceOf("a"), v1::MemoryTable::SPARSECORE);  // until others need its memory
  EXPECT_TRUE(b->Touch().ok());
  EXPECT_EQ(PlaceOf("a"), v1::MemoryTable::SPILLED);
}

TEST_F(MemoryManagerTest, APinThatDoesNotFitChangesNothing) {
  Start(200);
  auto a = Add("a", {60, 60}), b = Add("b", {100});
  ASSERT_TRUE(manager_->SetPinned("a", true).ok());
  const absl::Status beside_pins = manager_->SetPinned("b", true).status();
  EXPECT_EQ(beside_pins.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(beside_pins.message()),
              HasSubstr("model 'b' cannot be pinned: it needs 100 bytes in every partition; 120 of "
                        "the budget of 200 (budgets.bytes_per_sparsecore) belong to pinned models, "
                        "so 20 do not fit"));
  ASSERT_TRUE(manager_->SetPinned("a", false).ok());
  ASSERT_EQ(PlaceOf("b"), v1::MemoryTable::SPILLED);
  {
    const auto use = a->Hold();
    EXPECT_EQ(manager_->SetPinned("b", true).status().code(), absl::StatusCode::kResourceExhausted);
  }
  // No trace of the attempts: b comes when it is used, and leaves when others are.
  EXPECT_EQ(manager_->Figures().pinned_bytes(), 0);
  EXPECT_TRUE(b->Touch().ok());
  EXPECT_TRUE(a->Touch().ok());
  EXPECT_EQ(PlaceOf("b"), v1::MemoryTable::SPILLED);
}

// A dropped model gives its room back a moment after its rows have gone: here, as soon as another
// one has left for it. What it would have been given then would be nobody's for good.
TEST_F(MemoryManagerTest, APinBringsInNothingThatIsOnItsWayOut) {
  FakeModelPtr a;
  bool goes = false;
  MemoryOptions options;
  options.bytes = 100;
  options.folder = dir_.path();
  options.host_bytes = 100;
  options.wait = std::chrono::milliseconds(0);
  options.watch = [&](absl::string_view) {
    if (goes) a = nullptr;
  };
  manager_ = *MemoryManager::Create(options);
  a = Add("a", {100});
  auto b = Add("b", {100});
  ASSERT_EQ(PlaceOf("a"), v1::MemoryTable::HOST);
  a->rows = nullptr;
  goes = true;
  const auto pinned = manager_->SetPinned("a", true);
  ASSERT_TRUE(pinned.ok()) << pinned.status();
  EXPECT_FALSE(pinned->returned());
  EXPECT_THAT(pinned->evicted(), IsEmpty());
  EXPECT_THAT(OnSparseCore(), ElementsAre("b"));
  a = nullptr;
  b = nullptr;
  EXPECT_EQ(manager_->Figures().free_bytes(), 100);
  EXPECT_EQ(manager_->Figures().host_bytes(), 0);
}

TEST_F(MemoryManagerTest, SaysWhatPinnedModelsTake) {
  Start(200);
  auto a = Add("a", {150});
  ASSERT_TRUE(manager_->SetPinned("a", true).ok());
  const absl::Status refused = TryAdd("b", {100}).status();
  EXPECT_THAT(
      std::string(refused.message()),
      HasSubstr("150 of the budget of 200 (budgets.bytes_per_sparsecore) are in use, 150 of "
                "them by pinned models, so 50 do not fit"));
}

// Models that would leave take nothing from the one that asks.
TEST_F(MemoryManagerTest, SaysWhatIsMissingBesideWhatStays) {
  Start(200);
  auto a = Add("a", {100}), b = Add("b", {100});
  EXPECT_THAT(std::string(TryAdd("c", {250}).status().message()),
              HasSubstr("needs 250 bytes in every partition; 0 of the budget of 200 "
                        "(budgets.bytes_per_sparsecore) are in use, so 50 do not fit"));
  EXPECT_THAT(events_, IsEmpty());
  const auto use = a->Hold();
  EXPECT_THAT(std::string(TryAdd("c", {150}).status().message()),
              HasSubstr("needs 150 bytes in every partition; 100 of the budget of 200 "
                        "(budgets.bytes_per_sparsecore) are in use, so 50 do not fit"));
}

TEST_F(MemoryManagerTest, WhatDoesNotFitBesideWhatStaysDrivesNobodyOut) {
  Start(200);
  auto b = Add("b", {100}), a = Add("a", {120}), c = Add("c", {40});
  ASSERT_TRUE(manager_->SetPinned("a", true).ok());
  const auto use = a->Hold();  // the end of which helps nobody
  ASSERT_EQ(PlaceOf("b"), v1::MemoryTable::SPILLED);
  events_.clear();
  EXPECT_EQ(b->Touch().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(TryAdd("d", {81}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(manager_->Keep(a->room, 81).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(events_, IsEmpty());
  EXPECT_THAT(OnSparseCore(), ElementsAre("a", "c"));
  auto d = Add("d", {20});
  EXPECT_EQ(manager_->Keep(d->room, 61).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(OnSparseCore(), ElementsAre("a", "c", "d"));
  EXPECT_TRUE(manager_->Keep(d->room, 60).ok());
  EXPECT_EQ(PlaceOf("c"), v1::MemoryTable::SPILLED);
}

TEST_F(MemoryManagerTest, ModelsThatAreNotUsedLeaveForABatchWhichStays) {
  Start(200);
  auto a = Add("a", {100}), b = Add("b", {60});
  auto first = manager_->Keep(b->room, 30);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT(OnSparseCore(), ElementsAre("a", "b", "b"));
  EXPECT_THAT(events_, IsEmpty());
  auto second = manager_->Keep(b->room, 30);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(PlaceOf("a"), v1::MemoryTable::SPILLED);
  const v1::MemoryStatus figures = manager_->Figures();
  EXPECT_EQ(figures.batch_bytes(), 60);
  EXPECT_EQ(figures.free_bytes(), 80);
  EXPECT_EQ(figures.tables(0).stack(), "");
  EXPECT_EQ(figures.tables(0).bytes(), 30);
  // Neither an operator nor another model drives a batch out, and a pin is not about batches.
  EXPECT_TRUE(manager_->SetPinned("b", true).ok());
  EXPECT_EQ(manager_->Figures().pinned_bytes(), 60);
  EXPECT_FALSE(manager_->ReleaseAll()->changed());
  EXPECT_EQ(a->Touch().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(manager_->Figures().batch_bytes(), 60);
  EXPECT_TRUE(manager_->SetPinned("b", false).ok());
  const absl::Status refused =
      manager_->Keep(b->room, 90).status();  // b does not leave for its own
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("a batch of model b: needs 90 bytes in every partition; 120 of the budget "
                        "of 200 (budgets.bytes_per_sparsecore) are in use"));
  // The gaps that batches leave are one piece again when that is needed.
  *first = nullptr;
  EXPECT_TRUE(a->Touch().ok());
  *second = nullptr;
  EXPECT_EQ(manager_->Figures().batch_bytes(), 0);
  EXPECT_EQ(manager_->Figures().free_bytes(), 40);
}

// Rows that are moved while a batch is kept, and a model made, where there is room.
class BusyRows : public FakeRows {
 public:
  explicit BusyRows(std::shared_ptr<MemoryManager> manager)
      : FakeRows("rows"), manager_(std::move(manager)) {}
  std::shared_ptr<MemoryManager::Room> other;
  absl::Status Spill(SpillFile& file) override {
    const auto batch = manager_->Keep(other, 10);
    EXPECT_TRUE(batch.ok()) << batch.status();
    return FakeRows::Spill(file);
  }

 private:
  const std::shared_ptr<MemoryManager> manager_;
};

// Would hang if it did.
TEST_F(MemoryManagerTest, ABatchForWhichThereIsRoomWaitsForNoRowsThatMove) {
  Start(200);
  auto a = Add("a", {100}), c = Add("c", {10});
  const auto rows = std::make_shared<BusyRows>(manager_);
  rows->other = c->room;
  auto use = c->Hold();
  a->rows = rows;
  manager_->MayEvict(*a->room, a->rows);
  auto b = Add("b", {150});
  EXPECT_EQ(PlaceOf("a"), v1::MemoryTable::SPILLED);
  EXPECT_EQ(manager_->Figures().free_bytes(), 40);
}

TEST_F(MemoryManagerTest, CompactsAndReleasesForOperators) {
  Start(400);
  auto a = Add("a", {100}), b = Add("b", {100}), c = Add("c", {100}), d = Add("d", {100});
  b = nullptr;
  ASSERT_TRUE(c->Touch().ok());
  EXPECT_EQ(manager_->Compact().moved_tables(), 3);  // c, d, a now
  EXPECT_THAT(OnSparseCore(), ElementsAre("c", "d", "a"));
  EXPECT_FALSE(manager_->Compact().changed());
  EXPECT_EQ(manager_->Figures().largest_gap_bytes(), 100);
  ASSERT_TRUE(manager_->SetPinned("d", true).ok());
  auto use = a->Hold();
  const v1::ShardMemoryChange released = *manager_->ReleaseAll();
  EXPECT_TRUE(released.changed());
  EXPECT_THAT(released.evicted(), ElementsAre("c"));
  EXPECT_THAT(OnSparseCore(), ElementsAre("d", "a"));
  use = nullptr;
  EXPECT_THAT(manager_->ReleaseAll()->evicted(), ElementsAre("a"));
  EXPECT_FALSE(manager_->ReleaseAll()->changed());
  // What left for others is not told again.
  EXPECT_THAT(manager_->Compact().evicted(), IsEmpty());
}

TEST_F(MemoryManagerTest, WaitsForAUseToEnd) {
  MemoryOptions options;
  options.bytes = 100;
  options.folder = dir_.path();
  options.wait = std::chrono::minutes(5);
  manager_ = *MemoryManager::Create(options);
  auto a = Add("a", {100});
  auto use = a->Hold();
  FakeModelPtr b;
  std::thread other([&] { b = Add("b", {100}); });
  EXPECT_THAT(OnSparseCore(), ElementsAre("a"));
  use = nullptr;
  other.join();
  ASSERT_NE(b, nullptr);
  EXPECT_THAT(OnSparseCore(), ElementsAre("b"));
}

TEST_F(MemoryManagerTest, CompactsWhereTheFreeBytesLieInPieces) {
  Start(300);
  auto a = Add("a", {100}), b = Add("b", {100}), c = Add("c", {100});
  a = nullptr;
  c = nullptr;
  EXPECT_EQ(manager_->Figures().largest_gap_bytes(), 100);
  auto d = Add("d", {200});
  EXPECT_THAT(events_, ElementsAre("compact"));
  EXPECT_THAT(OnSparseCore(), ElementsAre("b", "d"));
  EXPECT_EQ(manager_->Figures().evictions(), 0);
}

TEST_F(MemoryManagerTest, KeepsEvictedRowsInMemoryAsLongAsTheBudgetAllows) {
  Start(100, /*host_bytes=*/100);
  auto a = Add("a", {100}), b = Add("b", {100});
  EXPECT_EQ(PlaceOf("a"), v1::MemoryTable::HOST);
  EXPECT_EQ(a->rows->bytes, a->rows->was);
  auto c = Add("c", {100});
  EXPECT_EQ(PlaceOf("a"), v1::MemoryTable::SPILLED);
  EXPECT_EQ(PlaceOf("b"), v1::MemoryTable::HOST);
  EXPECT_TRUE(b->Touch().ok());  // changes places with c
  EXPECT_EQ(PlaceOf("c"), v1::MemoryTable::HOST);
  EXPECT_EQ(manager_->Figures().host_bytes(), 100);
  EXPECT_TRUE(a->Touch().ok());
  EXPECT_EQ(a->rows->bytes, a->rows->was);
  EXPECT_EQ(PlaceOf("c"), v1::MemoryTable::SPILLED);
  EXPECT_TRUE(manager_->ReleaseAll().ok());
  EXPECT_THAT(OnSparseCore(), IsEmpty());
  EXPECT_EQ(manager_->Figures().host_bytes(), 100);
  ASSERT_EQ(PlaceOf("a"), v1::MemoryTable::HOST);
  a = nullptr;
  EXPECT_EQ(manager_->Figures().host_bytes(), 0);
}

TEST_F(MemoryManagerTest, RowsInMemoryStayThereWhenThereIsNoRoomForThem) {
  Start(100, /*host_bytes=*/100);
  auto a = Add("a", {100}), b = Add("b", {100});
  {
    const auto use = b->Hold();
    EXPECT_EQ(a->Touch().code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(PlaceOf("a"), v1::MemoryTable::HOST);
  EXPECT_EQ(manager_->Figures().host_bytes(), 100);
  EXPECT_EQ(manager_->Figures().failures(), 1);
  EXPECT_TRUE(a->Touch().ok());
  EXPECT_EQ(manager_->Figures().host_bytes(), 100);  // b's
}

TEST_F(MemoryManagerTest, LosesNothingWhenTheDiskIsFull) {
  Start(100, /*host_bytes=*/0, /*spill_bytes=*/20);
  auto a = Add("a", {100});
  auto b = Add("b", {100});  // a's 16 bytes are on disk now
  const auto refused = TryAdd("c", {100}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("eviction.spill_bytes"));
  EXPECT_EQ(b->rows->bytes, b->rows->was);
  EXPECT_EQ(a->Touch().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(OnSparseCore(), ElementsAre("b"));
  EXPECT_EQ(manager_->Figures().spilled_bytes(), static_cast<int64_t>(a->rows->was.size()));
  b = nullptr;
  EXPECT_TRUE(a->Touch().ok());
  EXPECT_EQ(a->rows->bytes, a->rows->was);
  EXPECT_EQ(manager_->Figures().spilled_bytes(), 0);
}

TEST_F(MemoryManagerTest, DamagedRowsAreLostForGoodAndTakeNobodysPlace) {
  Start(100);
  auto a = Add("a", {100}), b = Add("b", {100});
  a->rows->damaged = true;
  EXPECT_EQ(a->Touch(), absl::DataLossError("model a: the file is damaged"));
  EXPECT_EQ(manager_->DamageOf(*a->room), absl::DataLossError("the file is damaged"));
  EXPECT_TRUE(manager_->DamageOf(*b->room).ok());
  EXPECT_TRUE(b->Touch().ok());
  EXPECT_EQ(b->rows->bytes, b->rows->was);
  a->rows->damaged = false;
  events_.clear();
  EXPECT_EQ(a->Touch().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(manager_->SetPinned("a", true).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(manager_->Figures().pinned_bytes(), 0);
  EXPECT_EQ(a->rows->fetches, 1);
  EXPECT_THAT(events_, IsEmpty());
  EXPECT_THAT(OnSparseCore(), ElementsAre("b"));
  a = nullptr;
  EXPECT_EQ(manager_->Figures().spilled_bytes(), 0);
}

TEST_F(MemoryManagerTest, AModelThatIsTooLargeDrivesNobodyOut) {
  Start(200);
  auto a = Add("a", {100});
  EXPECT_EQ(TryAdd("b", {150, 100}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(OnSparseCore(), ElementsAre("a"));
  EXPECT_THAT(events_, IsEmpty());
}

TEST_F(MemoryManagerTest, AModelThatGoesWhileItIsSpilledGivesItsRoomBack) {
  Start(100);
  auto a = Add("a", {100}), b = Add("b", {100});
  a = nullptr;
  EXPECT_EQ(manager_->Figures().spilled_bytes(), 0);
  b = nullptr;
  EXPECT_EQ(manager_->Figures().free_bytes(), 100);
  EXPECT_THAT(manager_->Figures().tables(), IsEmpty());
}

TEST_F(MemoryManagerTest, ManyThreadsUseMoreModelsThanFit) {
  MemoryOptions options;
  options.bytes = 250;
  options.folder = dir_.path();
  options.host_bytes = 100;
  options.wait = std::chrono::minutes(5);
  manager_ = *MemoryManager::Create(options);
  std::vector<FakeModelPtr> models;
  for (int i = 0; i < 5; ++i) models.push_back(Add(std::string(1, 'a' + i), {60, 40}));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        FakeModel& model = *models[(i * (t + 1)) % models.size()];
        const auto batch = manager_->Keep(model.room, 1 + i % 10);
        if (!batch.ok()) ++wrong;
        const MemoryManager::Use use = model.Hold();
        if (model.rows->bytes != model.rows->was) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_LE(OnSparseCore().size(), 4u);
  EXPECT_EQ(manager_->Figures().batch_bytes(), 0);
}

TEST(AddressMapTest, TheLargestGapIsThatOfOnePiece) {
  AddressMap map(100);
  EXPECT_EQ(map.largest_gap(), 100);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(map.Place(10), 10 * i);
  EXPECT_EQ(map.largest_gap(), 0);
  for (const int64_t address : {0, 20, 30, 80}) map.Free(address);
  EXPECT_EQ(map.free_bytes(), 40);
  EXPECT_EQ(map.largest_gap(), 20);
}

TEST(SpillFileTest, SaysWhatIsWrong) {
  EXPECT_EQ(SpillFile::Create("/nowhere/at/all").status().code(),
            absl::StatusCode::kFailedPrecondition);
  const TempDir dir = *TempDir::Create();
  SpillFile file = *SpillFile::Create(dir.path());
  ASSERT_TRUE(file.Write(std::string("12345678")).ok());
  std::string bytes(8, '\0');
  EXPECT_EQ(file.CheckRead().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(file.Read(absl::MakeSpan(bytes)).ok());
  EXPECT_TRUE(file.CheckRead().ok());
  EXPECT_EQ(bytes, "12345678");
  const absl::Status end = file.Read(absl::MakeSpan(bytes));
  EXPECT_EQ(end.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(end.message()), HasSubstr("rows spilled to " + dir.path() + "/spill-"));
}

TEST(SpillFileTest, IsReadAsOftenAsNeeded) {
  const TempDir dir = *TempDir::Create();
  SpillFile file = *SpillFile::Create(dir.path());
  ASSERT_TRUE(file.Write(std::string("12345678")).ok());
  for (int i = 0; i < 2; ++i) {
    std::string bytes(8, '\0');
    file.Rewind();
    ASSERT_TRUE(file.Read(absl::MakeSpan(bytes)).ok());
    EXPECT_TRUE(file.CheckRead().ok());
    EXPECT_EQ(bytes, "12345678");
  }
}

TEST(SpillFileTest, KeepsToItsLimit) {
  const TempDir dir = *TempDir::Create();
  SpillFile file = *SpillFile::Create(dir.path());
  file.set_limit(10);
  ASSERT_TRUE(file.Write(std::string("12345678")).ok());
  const absl::Status more = file.Write(std::string("abc"));
  EXPECT_EQ(more.code(), absl::StatusCode::kResourceExhausted);
  // How many more rows would have come is not known here.
  EXPECT_THAT(std::string(more.message()),
              HasSubstr("of eviction.spill_bytes, 10 bytes are left, and at least 11 are needed"));
}

TEST(SpillFileTest, NoticesWhatOthersDoToIt) {
  const TempDir dir = *TempDir::Create();
  const auto read_back = [&](const std::function<void(int file)>& damage) {
    SpillFile file = *SpillFile::Create(dir.path());
    EXPECT_TRUE(file.Write(std::string("12345678")).ok());
    const auto files = testing::SpilledFiles();
    EXPECT_EQ(files.size(), 1u);
    damage(files.at(0).Open().get());
    std::string bytes(8, '\0');
    const absl::Status read = file.Read(absl::MakeSpan(bytes));
    return read.ok() ? file.CheckRead() : read;
  };
  EXPECT_TRUE(read_back([](int) {}).ok());
  const absl::Status flipped = read_back([](int file) { EXPECT_EQ(pwrite(file, "q", 1, 3), 1); });
  EXPECT_EQ(flipped.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(flipped.message()), HasSubstr(dir.path() + "/spill-"));
  const absl::Status cut = read_back([](int file) { EXPECT_EQ(ftruncate(file, 3), 0); });
  EXPECT_EQ(cut.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(cut.message()), HasSubstr("the file ends after 3 of 8 bytes"));
  // It cannot be taken away, for it is in no folder.
  const SpillFile file = *SpillFile::Create(dir.path());
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

}  // namespace memory_manager_test
}  // namespace emberd::shard
