#include "client/cpp/testing/fake_service.h"
#include "client/emberctl/output.h"
#include "client/emberctl/testing_emberctl.h"
#include "gmock/gmock.h"

namespace emberd::emberctl {
namespace plan_test {

using ::emberd::client::testing::FakeService;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Two tables in one stack, padded from 12 to 16 columns, with an accumulator for every weight.
constexpr char kModel[] = R"(name: "m"
tables { name: "t" vocabulary_size: 60 embedding_dim: 12 max_ids_per_partition: 64 }
tables { name: "u" vocabulary_size: 64 embedding_dim: 12 }
features { name: "x" table: "t" batch_size: 32 }
features { name: "y" table: "u" batch_size: 32 })";

// 2 shards x 2 SparseCores.
constexpr char kCluster[] = R"(
shards { address: "a:1" } shards { address: "a:2" } coordinators { address: "a:3" }
budgets { bytes_per_sparsecore: 17179869184 })";

TEST(PlanTest, TellsMemoryAndPaddingOfAFile) {
  const std::string model = WriteTestFile("model", kModel);
  const std::string cluster = WriteTestFile("cluster", kCluster);
  const Outcome plan = Emberctl({"plan", "--model", model, "--cluster", cluster});
  ASSERT_EQ(plan.code, kOk) << plan.err;
  // 128 rows x 16 columns x 4 bytes x (weight and accumulator) = 16 KiB over 4 partitions.
  EXPECT_EQ(
      plan.out,
      R"(m: 16.0 KiB on 2 shards x 2 SparseCores = 4 partitions; 1488 weights, 27% of the cells are padding

MEMORY OF    SIZE      BUDGET    USED
a partition  4.0 KiB   16.0 GiB  0.0%
a shard      8.0 KiB   32.0 GiB  0.0%
the cluster  16.0 KiB  64.0 GiB  0.0%

STACK  WIDTH  ROWS/PARTITION  SIZE/PARTITION  ACTIVATIONS  MAX IDS  MAX UNIQUE IDS  TABLES (row offset, rotation)
t_u    16     32              4.0 KiB         1.0 KiB      64       none            t (0, 0), u (16, 3)

STACK  TABLE  ROWS  PADDED  DIM  PADDED  WEIGHTS  PADDING
t_u    t      60    64      12   16      720      30%
t_u    u      64    64      12   16      768      25%

FEATURE  TABLE  STACK  BATCH SIZE  ROW OFFSET  COL OFFSET  COL SHIFT
x        t      t_u    32          0           0           0
y        u      t_u    32          32          64          3
warning: the cluster's sparsecores_per_shard is not given: 2 are assumed, and where rows lie rests on it
)");
}

TEST(PlanTest, SaysThatAModelDoesNotFit) {
  const std::string model = WriteTestFile("model", kModel);
  const std::string cluster = WriteTestFile("cluster", R"(
      shards { address: "a:1" } coordinators { address: "a:2" } sparsecores_per_shard: 4
      budgets { bytes_per_sparsecore: 4000 })");
  const Outcome plan = Emberctl({"plan", "--model", model, "--cluster", cluster});
  EXPECT_EQ(plan.code, kRefused);
  EXPECT_THAT(plan.out, HasSubstr("the cluster  16.0 KiB  15.6 KiB  102%"));
  EXPECT_EQ(plan.err,
            "emberctl: RESOURCE_EXHAUSTED: m: a partition needs 4096 bytes; "
            "budgets.bytes_per_sparsecore is 4000, so 96 bytes do not fit if every row is "
            "touched. Raise the budget if the machines have the memory, add shards, or store rows "
            "in 16 bits\n");
}

// Would catch: a laptop's memory taken for that of the cluster's machines.
TEST(PlanTest, SaysWhoseMemoryTheBudgetIs) {
  const std::string model = WriteTestFile("model", kModel);
  const std::string cluster = WriteTestFile(
      "cluster", "shards { address: 'a:1' } coordinators { address: 'a:2' } budgets {}");
  constexpr char kNote[] =
      "\nbudgets.bytes_per_sparsecore is that by default, from the memory of this machine "
      "(--cluster FILE may give another)\n";
  EXPECT_THAT(Emberctl({"plan", "--model", model, "--cluster", cluster}).out, HasSubstr(kNote));
  EXPECT_THAT(Emberctl({"plan", "--model", model, "--shards", "2"}).out, HasSubstr(kNote));
  const std::string large = WriteTestFile("large", R"(name: "m"
      tables { name: "t" vocabulary_size: 2000000000 embedding_dim: 8192 }
      features { name: "x" table: "t" })");
  const Outcome plan = Emberctl({"plan", "--model", large});
  EXPECT_EQ(plan.code, kRefused);
  EXPECT_THAT(plan.err, HasSubstr(" by default, from the memory of this machine (--cluster FILE "
                                  "may give another), so "));
}

TEST(PlanTest, WritesJson) {
  const std::string model = WriteTestFile("model", kModel);
  const Outcome plan =
      Emberctl({"plan", "--model", model, "--shards", "2", "--sparsecores", "2", "--json"});
  ASSERT_EQ(plan.code, kOk) << plan.err;
  const Json json = Json::parse(plan.out);
  EXPECT_EQ(json["model"], "m");
  EXPECT_EQ(json["memory"]["shard_bytes"], 8192);
  EXPECT_GT(json["memory"]["partition_budget_bytes"], 1 << 20);  // a share of this machine
  EXPECT_EQ(json["padding"]["weights"], 1488);
  EXPECT_EQ(json["plan"]["stacks"][0]["embedding_dim"], 16);
}

TEST(PlanTest, ShowsADeclaredModel) {
  FakeService service;
  const std::string model = WriteTestFile("model", kModel);
  const Outcome declared = Emberctl({"declare", model, "-a", service.address()});
  ASSERT_EQ(declared.code, kOk);
  EXPECT_THAT(declared.out, HasSubstr("\nwarning: what a plan warns of\n"));
  const Outcome plan = Emberctl({"plan", "m", "-a", service.address()});
  EXPECT_EQ(plan.code, kOk) << plan.err;
  EXPECT_THAT(plan.out, StartsWith("m: 0 B on 1 shard x 2 SparseCores = 2 partitions"));
  EXPECT_THAT(plan.out, HasSubstr("the cluster  0 B   ?       -"));  // no shard says its budget
  EXPECT_EQ(Emberctl({"plan", "other", "-a", service.address()}).code, kRefused);
}

}  // namespace plan_test
}  // namespace emberd::emberctl
