"""A model that torchrec trained goes on with the state of its fused optimizer.

What this would catch: a slot under another name or of another meaning, as a sum of squares for their mean, and a state that is left out in silence.
"""

import sys

import numpy as np

from cluster import ClusterTest, has_torch, main

if not has_torch():
    print("SKIP: PyTorch is not installed (deploy/packages.txt: python3-torch)")
    sys.exit(77)

import torch  # noqa: E402

import emberd.compat.torchrec as compat  # noqa: E402

ROWS, DIM, LR, STEPS = 8, 4, 0.1, 5
IDS = [1, 6, 6]


def adagrad(weight, slots, gradient, eps):
    slots["momentum1"] = slots["momentum1"] + gradient ** 2
    return weight - LR * gradient / (np.sqrt(slots["momentum1"]) + eps)


def row_wise_adagrad(weight, slots, gradient, eps):
    slots["momentum1"] = slots["momentum1"] + (gradient ** 2).mean(1)
    return weight - LR * gradient / (np.sqrt(slots["momentum1"]) + eps)[:, None]


def adam(weight, slots, gradient, eps):
    slots["momentum1"] = 0.9 * slots["momentum1"] + 0.1 * gradient
    slots["exp_avg_sq"] = 0.999 * slots["exp_avg_sq"] + 0.001 * gradient ** 2
    mean, square = slots["momentum1"] / (1 - 0.9 ** (STEPS + 1)), slots["exp_avg_sq"] / (1 - 0.999 ** (STEPS + 1))
    return weight - LR * mean / (np.sqrt(square) + eps)


class SlotsTest(ClusterTest):
    def make(self, kind, name, pooled=True, first_step=STEPS, **options):
        compat.use(self.client, model=name, **({} if first_step is None else {"first_step": first_step}))
        table = {"name": "t", "embedding_dim": DIM, "num_embeddings": ROWS, "feature_names": ["f"]}
        made = compat.EmbeddingBagCollection([compat.EmbeddingBagConfig(**table)]) if pooled else compat.EmbeddingCollection([compat.EmbeddingConfig(**table)])
        compat.apply_optimizer_in_backward(kind, made.parameters(), {"lr": LR, **options})
        return made

    def saved(self, slots, key="embedding_bags.t.weight", prefix=""):
        """As torchrec saves them; slots: by name, one value for each row or each weight."""
        values = {name: torch.rand(*([ROWS] if by_row else [ROWS, DIM])) * 0.5 + 0.1 for name, by_row in slots.items()}
        return {prefix + key: torch.randn(ROWS, DIM)}, {"state": {prefix + key: {f"t.{name}": one for name, one in values.items()}}}

    def check(self, collection, formula, state, optimizer_state, eps, **names):
        (weight,), (slots,) = state.values(), optimizer_state["state"].values()
        collection.load_with_slots(state, optimizer_state, **names)
        found = collection(compat.KeyedJaggedTensor(["f"], torch.tensor(IDS), lengths=torch.tensor([1] * len(IDS))))["f"]
        found = found if torch.is_tensor(found) else found.values()
        factors = torch.arange(1.0, DIM + 1)
        (found * factors).sum().backward()
        rows = sorted(set(IDS))
        gradient = np.array([[IDS.count(row)] for row in rows]) * factors.numpy().astype(np.float64)
        expected = weight.numpy().astype(np.float64)
        expected[rows] = formula(expected[rows], {name[2:]: one.numpy().astype(np.float64)[rows] for name, one in slots.items()}, gradient, eps)
        (after,) = collection.state_dict().values()
        np.testing.assert_allclose(after.numpy(), expected, rtol=1e-5, atol=1e-6)
        collection.finish()

    def test_the_next_step_is_that_of_torchrec(self):
        for number, (kind, formula, slots, options) in enumerate((
                (torch.optim.SGD, lambda weight, slots, gradient, eps: weight - LR * gradient, {}, {}),
                (torch.optim.Adagrad, adagrad, {"momentum1": False}, {"eps": 1e-10}),
                (torch.optim.Adagrad, adagrad, {"momentum1": False}, {"eps": 0.01}),
                (torch.optim.Adagrad, adagrad, {"momentum1": False}, {"eps": 1e-10, "initial_accumulator_value": 0.5}),
                (compat.RowWiseAdagrad, row_wise_adagrad, {"momentum1": True}, {"eps": 0.01, "initial_accumulator_value": 0.5}),
                (torch.optim.Adam, adam, {"momentum1": False, "exp_avg_sq": False}, {"eps": 1e-4}))):
            with self.subTest(kind=kind.__name__, **options):
                self.check(self.make(kind, f"next_{number}", **options), formula, *self.saved(slots), options.get("eps"))

    def test_a_prefix_and_rows_that_are_not_pooled(self):
        state, optimizer_state = self.saved({"momentum1": True}, "embeddings.t.weight", "sparse.")
        others = {"dense.weight": torch.zeros(3)}
        collection = self.make(compat.RowWiseAdagrad, "prefix", pooled=False, eps=0.01)
        with self.assertRaisesRegex(ValueError, "state: 'dense.weight' is not allowed; there must be embeddings.t.weight, and there are sparse.embed"):
            collection.load_with_slots({**state, **others}, optimizer_state)
        collection.load_with_slots({**state, **others}, optimizer_state, prefix="sparse.")
        self.check(collection, row_wise_adagrad, state, optimizer_state, 0.01, prefix="sparse.")

    def test_earlier_names_of_adam(self):
        state, optimizer_state = self.saved({"momentum1": False, "momentum2": False})
        collection = self.make(torch.optim.Adam, "earlier")
        collection.load_with_slots(state, optimizer_state)
        np.testing.assert_array_equal(self.client.model("earlier").table("t", slot="velocity"), optimizer_state["state"]["embedding_bags.t.weight"]["t.momentum2"])

    def test_what_is_not_known_is_refused_before_anything_has_changed(self):
        adagrad_of = self.make(torch.optim.Adagrad, "refused")
        before = adagrad_of.state_dict()["embedding_bags.t.weight"]
        state, right = self.saved({"momentum1": False})
        key = "embedding_bags.t.weight"
        for wrong, said in ((self.saved({"momentum1": False, "prev_iter": True})[1], r"with the table's optimizer \w+: 't.prev_iter' is not allowed; there must be t.momentum1"),
                            (self.saved({})[1], "'t.momentum1' is missing; there must be t.momentum1, and there are none"),
                            (self.saved({"momentum1": True})[1], r"'t.momentum1': the shape \[8\] is not allowed; it must be \[8, 4\] .*apply the optimizer"),
                            (self.saved({"momentum1": False}, "embedding_bags.u.weight")[1], "optimizer_state: 'embedding_bags.t.weight' is missing"),
                            ({"momentum1": 1}, "no mapping 'state'")):
            with self.assertRaisesRegex(ValueError, said):
                adagrad_of.load_with_slots(state, wrong)
        with self.assertRaisesRegex(ValueError, r"state: 'embedding_bags.t.weight': the shape \[2\] is not allowed; it must be \[8, 4\]$"):
            adagrad_of.load_with_slots({key: torch.zeros(2)}, right)
        with self.assertRaisesRegex(TypeError, "'t.momentum1': a list is not allowed; give a whole tensor, as ShardedTensor.gather"):
            adagrad_of.load_with_slots(state, {"state": {key: {"t.momentum1": [1.0]}}})
        with self.assertRaisesRegex(ValueError, r"Adam's bias correction counts steps.*first_step"):
            self.make(torch.optim.Adam, "uncounted", first_step=None).load_with_slots(*self.saved({"momentum1": False, "exp_avg_sq": False}))
        with self.assertRaisesRegex(RuntimeError, "has no optimizer"):
            compat.EmbeddingBagCollection([compat.EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS)]).load_with_slots(state, right)
        self.assertTrue(torch.equal(adagrad_of.state_dict()[key], before))
        self.assertTrue((self.client.model("refused").table("t", slot="accumulator") == 0).all())


if __name__ == "__main__":
    main()
