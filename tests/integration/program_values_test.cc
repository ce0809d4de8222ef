// Results of lookups that updates donate, and tuples of tuples: their handles read what they ought
// to, programs take their parts, and nothing is left behind.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/program_cluster.h"

namespace emberd::testing {
namespace program_values_test {

using v1::ElementwiseOutput;
using v1::ProgramSpec;

class DonatingUpdateTest : public ProgramsTest {
 protected:
  void SetUp() override {
    ProgramsTest::SetUp();
    if (HasFatalFailure()) return;
    lookup_ = Compile(Spec(ProgramSpec::LOOKUP));
    ProgramSpec spec = Spec(ProgramSpec::UPDATE);
    spec.add_aliases();
    update_ = Compile(spec);
  }
  // The handle of what a lookup of a handle found.
  uint64_t LookUpBatch(uint64_t batch) {
    const auto found = api_->Execute(lookup_, {batch});
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->results(0).handle() : 0;
  }
  absl::StatusOr<v1::ExecuteResponse> Update(uint64_t found, const v1::Literal& gradients,
                                             uint64_t sequence) {
    v1::ExecuteRequest request;
    request.set_program_handle(update_);
    request.add_arguments()->set_handle(found);
    *request.add_arguments()->mutable_literal() = gradients;
    SetKey(sequence, request.mutable_config());
    return api_->Execute(request);
  }
  std::vector<v1::NamedTensor> ReadAll(uint64_t handle) {
    const auto read = api_->Read(handle);
    EXPECT_TRUE(read.ok()) << read.status();
    if (!read.ok()) return {};
    return {read->values().begin(), read->values().end()};
  }
  // Whether the handle reads what another lookup of the batch would find.
  void ExpectReadsTheRows(uint64_t handle, uint64_t seed) {
    const auto read = api_->Read(handle);
    ASSERT_TRUE(read.ok()) << read.status();
    ExpectSameTensors(read->values(), PlainLookup(model_.id, seed, nullptr));
  }
  // The tables after `steps` of the batch of seed 1, each with the gradients of what it has found.
  std::string DigestOfPlainSteps(int steps) {
    const client::Model plain = Declare(absl::StrCat("plain", steps));
    const uint64_t lookup = Compile(Spec(ProgramSpec::LOOKUP, plain.name));
    const uint64_t update = Compile(Spec(ProgramSpec::UPDATE, plain.name));
    for (int step = 0; step < steps; ++step) {
      const v1::ProgramResult found = LookUp(api_.get(), lookup, 1);
      v1::ExecuteRequest request;
      request.set_program_handle(update);
      request.add_arguments()->set_handle(found.handle());
      *request.add_arguments()->mutable_literal() = GradientLiteral(found.values());
      EXPECT_TRUE(api_->Execute(request).ok());
    }
    return DigestOf(plain);
  }

  uint64_t lookup_ = 0;
  uint64_t update_ = 0;  // donates
};

TEST_F(DonatingUpdateTest, TheOldHandleReadsTheNewRowsAndIsUpdatedAgain) {
  const uint64_t batch = Prepare(lookup_, Batch(1)).handle();
  const uint64_t found = LookUpBatch(batch);
  const std::vector<v1::NamedTensor> before = ReadAll(found);
  for (uint64_t step = 1; step <= 3; ++step) {
    const auto updated = Update(found, GradientLiteral(ReadAll(found)), step);
    ASSERT_TRUE(updated.ok()) << updated.status();
    EXPECT_EQ(updated->results_size(), 0);
    EXPECT_FALSE(updated->updates(0).replayed());
    ExpectReadsTheRows(found, 1);
  }
  EXPECT_NE(ReadAll(found)[0].SerializeAsString(), before[0].SerializeAsString());
  const std::string once = TableDigest();
  EXPECT_EQ(once, DigestOfPlainSteps(3));

  // A repeat changes nothing, and leaves a result that can be updated.
  const auto repeated = Update(found, GradientLiteral(before), 3);
  ASSERT_TRUE(repeated.ok()) << repeated.status();
  EXPECT_TRUE(repeated->updates(0).replayed());
  EXPECT_EQ(TableDigest(), once);
  ExpectReadsTheRows(found, 1);
  ASSERT_TRUE(Update(found, GradientLiteral(ReadAll(found)), 4).ok());
  EXPECT_EQ(TableDigest(), DigestOfPlainSteps(4));

  // Nothing is left when the handles are gone: neither here, nor on shards.
  ASSERT_TRUE(api_->ReleaseAll().ok());
  EXPECT_TRUE(Eventually([&] {
    const auto status = client_->GetStatus();
    return status.ok() && status->batch_bytes == 0 && status->shards[0].batch_bytes == 0;
  }));
}

TEST_F(DonatingUpdateTest, WhatComesLaterInAChainReadsTheNewRows) {
  const uint64_t found = LookUpBatch(Prepare(lookup_, Batch(1)).handle());
  const v1::Literal gradients = GradientLiteral(ReadAll(found));
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::SUBTRACT, 1));
  v1::ExecuteChainedRequest plan;
  const int data = AddData(&plan, found);
  const int values = AddLiteral(&plan, gradients);
  // What a chain has looked up itself is donated, too, with the results that name it.
  const int own = AddProgram(&plan, lookup_, {AddLiteral(&plan, Batch(2))}, /*result=*/0);
  plan.mutable_ops(own)->add_outputs()->set_result_index(1);
  plan.mutable_ops(own)->mutable_outputs(1)->set_output_index(3);
  AddProgram(&plan, update_, {data, values});
  AddProgram(&plan, update_, {own, values});
  AddProgram(&plan, update_, {data, values});
  AddProgram(&plan, sum, {data, own}, /*result=*/2);
  plan.mutable_config()->set_return_values(true);
  SetKey(1, plan.mutable_config());
  // Its first try ends after the updates, and donates nothing.
  v1::ExecuteChainedRequest failing = plan;
  v1::Literal other;
  for (int i = 0; i < 8; ++i) AddTensor("x", MakeVector<float>({1}), &other);
  AddProgram(&failing, sum, {data, AddLiteral(&failing, other)}, /*result=*/3);
  const std::vector<v1::NamedTensor> before = ReadAll(found);
  EXPECT_THAT(std::string(api_->Chain(failing).status().message()),
              ::testing::HasSubstr("updates that were applied before it: op 4, op 5, op 6"));
  EXPECT_EQ(ReadAll(found)[0].SerializeAsString(), before[0].SerializeAsString());
  const std::string once = TableDigest();

  const auto ran = api_->Chain(plan);
  ASSERT_TRUE(ran.ok()) << ran.status();
  EXPECT_EQ(TableDigest(), once);
  ASSERT_EQ(ran->updates_size(), 3);
  for (const v1::MadeUpdate& made : ran->updates()) EXPECT_TRUE(made.replayed());
  ExpectReadsTheRows(found, 1);
  const std::vector<v1::NamedTensor> second = PlainLookup(model_.id, 2, nullptr);
  // It was looked up after the other update of the same rows by then: as a repeat sees them.
  ExpectSameTensors(ran->results(0).values(), second);
  ExpectSameTensors(ran->results(1).values(), {second[2]});
  const std::vector<float> a = Floats(ReadAll(found)[0].tensor()), b = Floats(second[0].tensor());
  const std::vector<float> difference = Floats(ran->results(2).values(0).tensor());
  for (size_t i = 0; i < a.size(); ++i) ASSERT_EQ(difference[i], a[i] - b[i]);
  // Both go on, but the other's batch was there for the chain alone.
  ASSERT_TRUE(Update(found, gradients, 2).ok());
  const uint64_t other_found = ran->results(0).handle();
  EXPECT_EQ(Update(other_found, gradients, 3).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  const uint64_t kept = Prepare(update, gradients).handle();
  EXPECT_TRUE(api_->Execute(update, {other_found, kept}).ok());
}

TEST_F(DonatingUpdateTest, AValueKeepsItsTensorsWhenItsBatchIsLookedUpAgain) {
  const uint64_t batch = Prepare(lookup_, Batch(1)).handle();
  const uint64_t found = LookUpBatch(batch);
  const std::vector<v1::NamedTensor> before = ReadAll(found);
  const v1::Literal gradients = GradientLiteral(before);
  ProgramSpec spec;  // puts its argument 1 into the first place of argument 0
  spec.set_kind(ProgramSpec::ELEMENTWISE);
  spec.add_inputs()->set_feature("found");
  spec.add_inputs()->set_feature("other");
  spec.add_outputs()->set_operation(ElementwiseOutput::COPY);
  spec.mutable_outputs(0)->mutable_a()->set_argument(1);
  spec.add_aliases();
  v1::Literal other;
  AddTensor("other", MakeVector<float>({1, 2}), &other);
  v1::ExecuteChainedRequest plan;
  const int data = AddData(&plan, found);
  AddProgram(&plan, Compile(spec), {data, AddLiteral(&plan, other)});
  AddProgram(&plan, update_, {data, AddLiteral(&plan, gradients)});
  SetKey(1, plan.mutable_config());
  const auto ran = api_->Chain(plan);
  ASSERT_TRUE(ran.ok()) << ran.status();

  ASSERT_TRUE(Update(found, gradients, 2).ok());
  std::vector<v1::NamedTensor> expected = PlainLookup(model_.id, 1, nullptr);
  expected[0] = other.tensors(0);
  const auto now = api_->Read(found);
  ASSERT_TRUE(now.ok()) << now.status();
  ExpectSameTensors(now->values(), expected);
}

// Before the update it is as long as a tuple of none.
TEST_F(DonatingUpdateTest, ABatchAloneIsAllOfItsLookupAfterItsUpdate) {
  v1::ExecutionConfig config;
  config.set_return_values(true);
  const auto found = api_->Execute(lookup_, {Prepare(lookup_, Batch(1)).handle()}, config);
  ASSERT_TRUE(found.ok()) << found.status();
  v1::ExecuteChainedRequest plan;
  const int alone = AddData(&plan, found->results(0).handle());
  AddProgram(&plan, update_,
             {alone, AddLiteral(&plan, GradientLiteral(PlainLookup(model_.id, 1, nullptr)))});
  AddProgram(&plan, Compile(SumProgram(ElementwiseOutput::ADD, 1)),
             {alone, AddLiteral(&plan, v1::Literal())}, /*result=*/0);
  SetKey(1, plan.mutable_config());
  EXPECT_TRUE(absl::IsInvalidArgument(api_->Chain(plan).status()));
}

// Taken for no gradients at all, it would update all rows of the batch with zero ones, and the
// batch would be gone.
TEST_F(DonatingUpdateTest, WhatHoldsNoGradientsIsRefusedInTheirPlace) {
  v1::ExecutionConfig config;
  config.set_return_values(true);
  const auto found = api_->Execute(lookup_, {Prepare(lookup_, Batch(1)).handle()}, config);
  ASSERT_TRUE(found.ok()) << found.status();
  const uint64_t alone = found->results(0).handle();
  const auto compiled = api_->Compile(Spec(ProgramSpec::UPDATE), api_->client());
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  const uint64_t update = compiled->program_handle();  // one of the client's own handles
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  v1::ExecuteChainedRequest computed;
  const int data = AddData(&computed, alone);
  const int none = AddProgram(&computed, sum, {data, data});
  AddProgram(&computed, update, {data, none});
  const std::string before = TableDigest();
  for (const absl::Status& refused :
       {api_->Execute(update, {alone, alone}).status(),
        api_->Execute(update, {alone, update}).status(), api_->Chain(computed).status()}) {
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                ::testing::HasSubstr("argument[1] of an UPDATE is not a tuple of gradients"));
  }
  // By itself: its result would be a tuple of none, for whichever UPDATE takes it later.
  const absl::Status by_itself = api_->Execute(sum, {alone, alone}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(by_itself)) << by_itself;
  EXPECT_THAT(std::string(by_itself.message()),
              ::testing::HasSubstr("argument[0] is the batch of a LOOKUP alone"));
  EXPECT_EQ(TableDigest(), before);
  // The batch is still there. Whoever means zero gradients says so with a tuple of none.
  EXPECT_TRUE(api_->Execute(update, {alone, Prepare(update, v1::Literal()).handle()}).ok());
}

class NestedTuplesTest : public DonatingUpdateTest {
 protected:
  // {batch, what it has found, {gradients, {x, y}}}; of the parts, no handle is left.
  uint64_t Pack() {
    const uint64_t batch = Prepare(lookup_, Batch(1)).handle();
    const uint64_t found = LookUpBatch(batch);
    v1::Literal pair, inner, outer;
    AddTensor("x", MakeVector<float>({1, 2}), &pair);
    AddTensor("y", MakeVector<float>({3}), &pair);
    *inner.add_elements()->mutable_literal() = GradientLiteral(ReadAll(found));
    *inner.add_elements()->mutable_literal() = pair;
    outer.add_elements()->set_handle(batch);
    outer.add_elements()->set_handle(found);
    *outer.add_elements()->mutable_literal() = inner;
    v1::ExecuteChainedRequest plan;
    AddLiteral(&plan, outer);
    plan.mutable_ops(0)->add_outputs();
    const auto packed = api_->Chain(plan);
    EXPECT_TRUE(packed.ok()) << packed.status();
    EXPECT_TRUE(api_->Release({}, {batch, found}).ok());
    return packed.ok() ? packed->results(0).handle() : 0;
  }
  static v1::ProgramArgument Part(uint64_t handle, int output_index,
                                  const std::vector<int>& inner = {}) {
    v1::ProgramArgument part;
    part.set_handle(handle);
    part.set_output_index(output_index);
    part.mutable_inner()->Assign(inner.begin(), inner.end());
    return part;
  }
  absl::StatusOr<v1::ExecuteResponse> Run(uint64_t program,
                                          const std::vector<v1::ProgramArgument>& arguments) {
    v1::ExecuteRequest request;
    request.set_program_handle(program);
    for (const v1::ProgramArgument& argument : arguments) *request.add_arguments() = argument;
    request.mutable_config()->set_return_values(true);
    return api_->Execute(request);
  }
};

TEST_F(NestedTuplesTest, HoldWhatTheyWereMadeOfAndGiveItToPrograms) {
  const uint64_t packed = Pack();
  const auto whole = api_->Read(packed);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->values_size(), 0);
  ASSERT_EQ(whole->elements_size(), 3);
  EXPECT_GT(whole->elements(0).statistics().stacks_size(), 0);
  const std::vector<v1::NamedTensor> before = PlainLookup(model_.id, 1, nullptr);
  ExpectSameTensors(whole->elements(1).values(), before);
  ASSERT_EQ(whole->elements(2).elements_size(), 2);
  EXPECT_EQ(whole->elements(2).elements(1).values(0).name(), "x");
  EXPECT_GT(whole->bytes(), whole->elements(1).bytes() + whole->elements(2).bytes());
  const auto y = api_->Read(packed, 3, /*csr=*/false, /*inner=*/{2, 2});
  ASSERT_TRUE(y.ok()) << y.status();
  ASSERT_EQ(y->values_size(), 1);
  EXPECT_EQ(Floats(y->values(0).tensor()), std::vector<float>{3});
  EXPECT_TRUE(api_->Read(packed, 1, /*csr=*/true).ok());

  const auto found = Run(lookup_, {Part(packed, 1)});
  ASSERT_TRUE(found.ok()) << found.status();
  ExpectSameTensors(found->results(0).values(), before);
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  const auto updated = Run(update, {Part(packed, 2), Part(packed, 3, {1})});
  ASSERT_TRUE(updated.ok()) << updated.status();
  EXPECT_EQ(TableDigest(), DigestOfPlainSteps(1));
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  const auto added = Run(sum, {Part(packed, 3, {2, 1}), Part(packed, 3, {2, 1})});
  ASSERT_TRUE(added.ok()) << added.status();
  EXPECT_EQ(Floats(added->results(0).values(0).tensor()), (std::vector<float>{2, 4}));

  // Inside of a chain, too, and out of it; a tuple of tuples is never in the answer.
  v1::ExecuteChainedRequest plan;
  AddData(&plan, packed);
  v1::ChainedOp* op = plan.mutable_ops(AddProgram(&plan, sum, {0, 0}, /*result=*/0));
  for (v1::ChainedInput& input : *op->mutable_inputs()) {
    input.set_output_index(3);
    input.add_inner(2);
  }
  v1::ChainedOutput* output = plan.mutable_ops(0)->add_outputs();
  output->set_output_index(3);
  output->set_result_index(1);
  plan.mutable_config()->set_return_values(true);
  const auto ran = api_->Chain(plan);
  ASSERT_TRUE(ran.ok()) << ran.status();
  EXPECT_EQ(Floats(ran->results(0).values(1).tensor()), std::vector<float>{6});
  const auto inner = api_->Read(ran->results(1).handle(), 2, false, {1});
  ASSERT_TRUE(inner.ok()) << inner.status();
  EXPECT_EQ(Floats(inner->values(0).tensor()), (std::vector<float>{1, 2}));
  ASSERT_TRUE(api_->ReleaseAll().ok());
  EXPECT_TRUE(Eventually([&] {
    const auto status = client_->GetStatus();
    return status.ok() && status->batch_bytes == 0 && status->shards[0].batch_bytes == 0;
  }));
}

TEST_F(NestedTuplesTest, ReadTheNewRowsOfALookupThatIsDonated) {
  const uint64_t packed = Pack();
  for (int step = 1; step <= 2; ++step) {
    const auto updated = Run(update_, {Part(packed, 2), Part(packed, 3, {1})});
    ASSERT_TRUE(updated.ok()) << updated.status();
    const auto now = api_->Read(packed);
    ASSERT_TRUE(now.ok()) << now.status();
    ASSERT_EQ(now->elements_size(), 3);
    ExpectSameTensors(now->elements(1).values(), PlainLookup(model_.id, 1, nullptr));
    EXPECT_EQ(now->elements(2).elements_size(), 2);
  }
}

TEST_F(NestedTuplesTest, AHandleThatAChainIsDoneWithReadsTheNewRowsToo) {
  const uint64_t packed = Pack();
  v1::ExecuteChainedRequest plan;
  const int early = AddData(&plan, packed);
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  const int copied = AddProgram(&plan, sum, {early, early});
  for (v1::ChainedInput& input : *plan.mutable_ops(copied)->mutable_inputs()) {
    input.set_output_index(2);
  }
  v1::Literal outer;
  outer.add_elements()->set_handle(packed);
  outer.mutable_elements(0)->set_output_index(2);
  const uint64_t other = Prepare(sum, outer).handle();
  const int updated =
      AddProgram(&plan, update_,
                 {AddData(&plan, other),
                  AddLiteral(&plan, GradientLiteral(PlainLookup(model_.id, 1, nullptr)))});
  plan.mutable_ops(updated)->mutable_inputs(0)->set_output_index(1);
  const auto ran = api_->Chain(plan);
  ASSERT_TRUE(ran.ok()) << ran.status();
  for (const auto& [handle, element] : {std::pair(packed, 2), std::pair(other, 1)}) {
    const auto now = api_->Read(handle, element);
    ASSERT_TRUE(now.ok()) << now.status();
    ExpectSameTensors(now->values(), PlainLookup(model_.id, 1, nullptr));
  }
}

TEST_F(NestedTuplesTest, APartOfATupleIsNotDonated) {
  v1::Literal values, outer;
  AddTensor("x", MakeVector<float>({1, 2}), &values);
  ProgramSpec spec;
  spec.set_kind(ProgramSpec::ELEMENTWISE);
  spec.add_inputs()->set_feature("x");
  spec.add_outputs()->set_operation(ElementwiseOutput::ADD);
  spec.add_aliases();
  const uint64_t doubled = Compile(spec);
  *outer.add_elements()->mutable_literal() = values;
  const uint64_t tuple = Prepare(doubled, outer).handle();
  for (const v1::ProgramArgument& part : {Part(tuple, 0, {1}), Part(tuple, 1)}) {
    const auto ran = Run(doubled, {part});
    ASSERT_TRUE(ran.ok()) << ran.status();
    EXPECT_EQ(Floats(ran->results(0).values(0).tensor()), (std::vector<float>{2, 4}));
    const auto now = api_->Read(tuple, 1);
    ASSERT_TRUE(now.ok()) << now.status();
    EXPECT_EQ(Floats(now->values(0).tensor()), (std::vector<float>{1, 2}));
  }
}

TEST_F(NestedTuplesTest, WhatIsNotThereIsSaid) {
  const uint64_t packed = Pack();
  const uint64_t sum = Compile(SumProgram(ElementwiseOutput::ADD, 1));
  const uint64_t update = Compile(Spec(ProgramSpec::UPDATE));
  const auto message = [](const auto& result) { return std::string(result.status().message()); };
  EXPECT_EQ(message(api_->Read(packed, 4)),
            absl::StrCat("output_index 4 of ", packed, " is not in 0 .. 3"));
  EXPECT_EQ(message(api_->Read(packed, 3, false, {2, 3})),
            absl::StrCat("output_index 3 of an element of ", packed, " is not in 0 .. 2"));
  EXPECT_EQ(
      message(api_->Read(packed, 1, false, {1})),
      absl::StrCat("output_index 1 of an element of ", packed, ", which is a batch, is not 0"));
  EXPECT_EQ(message(Run(sum, {Part(packed, 3), Part(packed, 3)})),
            "argument[0] is not a tuple of tensors");
  EXPECT_EQ(message(Run(lookup_, {Part(packed, 0)})),
            "argument[0] of a LOOKUP is not a batch; PrepareBatch makes one");
  EXPECT_EQ(message(Run(update, {Part(packed, 2), Part(packed, 3)})),
            "argument[1] of an UPDATE is not a tuple of gradients");
  const auto refused = [&](const v1::Literal& literal) {
    v1::ExecuteChainedRequest plan;
    AddLiteral(&plan, literal);
    return message(api_->Chain(plan));
  };
  v1::Literal literal;
  literal.add_elements()->set_handle(packed);
  literal.add_elements()->set_handle(17);
  EXPECT_EQ(refused(literal), "op 0: elements[1]: memory handle not found: 17");
  *literal.mutable_elements(1) = Part(packed, 5);
  EXPECT_EQ(refused(literal), "op 0: elements[1]: output_index 5 of it is not in 0 .. 3");
  *literal.mutable_elements(1)->mutable_literal() = Batch(1);
  EXPECT_EQ(refused(literal), "op 0: elements[1]: a tuple has tensors; it was given features");
  AddTensor("x", MakeVector<float>({1}), &literal);
  EXPECT_EQ(refused(literal), "op 0: a tuple has tensors or elements; it was given both");

  // Each holds the one before `times` over; of the last that can be made, the reason why.
  const auto wrap = [&](int times) -> std::string {
    uint64_t inner = packed;
    for (int level = 0; level < 32; ++level) {
      v1::Literal outer;
      for (int i = 0; i < times; ++i) outer.add_elements()->set_handle(inner);
      v1::ExecuteChainedRequest plan;
      AddLiteral(&plan, outer);
      plan.mutable_ops(0)->add_outputs();
      const auto wrapped = api_->Chain(plan);
      if (!wrapped.ok()) {
        const absl::Status read = api_->Read(inner).status();
        EXPECT_EQ(read.code(),
                  times > 1 ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kOk)
            << read;
        return absl::StrCat(level, ": ", message(wrapped));
      }
      inner = wrapped->results(0).handle();
    }
    return "it has no end";
  };
  const std::string most = ": a tuple has at most 16 levels of elements, and 65536 parts in all";
  EXPECT_EQ(wrap(1), "14: op 0: elements[0]" + most);
  EXPECT_EQ(wrap(10000), "1: op 0: elements[1]" + most);
}

TEST_F(DonatingUpdateTest, APartOfALookupReadsItsPart) {
  v1::ExecutionConfig config;
  config.set_return_exploded(true);
  const uint64_t batch = Prepare(lookup_, Batch(1)).handle();
  const auto parts = api_->Execute(lookup_, {batch}, config);
  ASSERT_TRUE(parts.ok()) << parts.status();
  const uint64_t second = parts->results(1).handle();
  const v1::Literal gradients = GradientLiteral(PlainLookup(model_.id, 1, nullptr));
  ASSERT_TRUE(Update(second, gradients, 1).ok());
  const std::vector<v1::NamedTensor> now = ReadAll(second);
  ASSERT_EQ(now.size(), 1u);
  EXPECT_EQ(now[0].SerializeAsString(), PlainLookup(model_.id, 1, nullptr)[1].SerializeAsString());
}

TEST_F(DonatingUpdateTest, WhatCannotBeDonatedIsRefusedBeforeAnythingRuns) {
  const uint64_t batch = Prepare(lookup_, Batch(1)).handle();
  const uint64_t found = LookUpBatch(batch);
  const v1::Literal gradients = GradientLiteral(ReadAll(found));
  const std::string before = TableDigest();
  ASSERT_TRUE(api_->Release({}, {batch}).ok());
  const absl::Status gone = Update(found, gradients, 1).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(gone.message()),
              ::testing::HasSubstr("its batch, which would be looked up again, is gone"));
  EXPECT_EQ(TableDigest(), before);
  ProgramSpec spec = Spec(ProgramSpec::UPDATE);
  spec.add_aliases()->set_argument(1);
  EXPECT_EQ(api_->Compile(spec).status().message(),
            "spec.aliases[0].argument is 1; allowed: [0, 0]");
  spec = Spec(ProgramSpec::LOOKUP);
  spec.add_aliases();
  EXPECT_EQ(api_->Compile(spec).status().message(),
            "spec.aliases is not for programs of the kind LOOKUP");
}

}  // namespace program_values_test
}  // namespace emberd::testing
