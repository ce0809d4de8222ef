"""Shapes that do not fit, and such as others have. test_every_entry_point.py gives wrong things to every argument.

What this would catch: arrays that are flattened, cut or wrapped where they do not fit.
"""

import inspect
import unittest

from cluster import ClusterTest, counting_model, emberd, has_torch, main

import numpy as np


class ShapesTest(ClusterTest):
    def setUp(self):
        self.model = self.declare(initializer=emberd.RowId(), optimizer=emberd.Adagrad(learning_rate=1.0))
        self.before = self.model.table("t")

    def refused(self, call, *arguments, **named):
        with self.assertRaises((ValueError, TypeError, LookupError), msg=repr((arguments, named))) as raised:
            result = call(*arguments, **named)
            list(result) if inspect.isgenerator(result) else None
        self.assertNotIsInstance(raised.exception, UnicodeDecodeError)
        return str(raised.exception)

    def test_ids_that_do_not_fit(self):
        R, S, D = emberd.Ragged, emberd.Sparse, emberd.Dense
        for ids in (R([[1, 2]], [0, 2]), R([1, 2], [[0, 2]]), R([1, 2], [1, 2]), R([1, 2], [0, 1]), R([1, 2], [0, 3]),
                    R([1, 2], [0, 2, 1]), R([1, 2], [0, 2], [1.0, 2.0, 3.0]), R([1, 2], [0, 2], [[1.0, 2.0]]), R([1, 2], 2),
                    R([1, 2], []), S([[0, 0, 1]], [1, 2, 3], 2), S([[0, 0], [1, 0], [1, 1]], [[1, 2, 3]], 2),
                    S([[0, 0], [1, 0]], [1, 2, 3], 2), S([0, 1], [1, 2, 3], 2), S([[0, 0], [1, 0], [0, 1]], [1, 2, 3], 2),
                    D([1, 2], [1.0, 2.0, 3.0]), D([[1, 2], [3, 4]], [1.0, 2.0, 3.0, 4.0]), D([[1, 2], [3, 4]], [1.0, 2.0]),
                    D([[1, 2, 3]], [[1.0], [1.0], [1.0]]), D([1, 2], [[1.0], [2.0]]), np.ma.array([1, 2], mask=[0, 1]),
                    D(np.ma.array([1, 2], mask=[0, 1])), D([1, 2], np.ma.array([1.0, 2.0], mask=[0, 1])), [[[1]]], 5, [1.5]):
            with self.subTest(ids):
                self.assertIn("t", self.refused(self.model.lookup, {"t": ids}))
        for shape in ([[0, 0], [1, 0], [1, 1]], [[0, 1, 1], [0, 0, 1]], [0, 1, 1]):
            found = self.model.lookup({"t": emberd.Sparse(shape, [1, 2, 3], 2)})
            self.assertEqual(found["t"][:, 0].tolist(), [1, 5])

    def test_rows_that_do_not_fit(self):
        assign, read = self.model.assign_rows, self.model.read_rows
        ones = np.ones((4, 4), np.float32)
        for ids, values in (([1, 2, 3, 4], ones.reshape(2, 8)), ([1, 2, 3, 4], ones.reshape(16)), ([[1, 2], [3, 4]], ones),
                            ([1, 2, 3], ones), ([1, 2], ones.reshape(2, 2, 4)), (1, ones[0]), (1, ones[:1]), ([1, 2], ones[:, :2]),
                            ([1], np.ma.array(ones[:1], mask=ones[:1] > 0)), ([1, 1], ones[:2]), ([1.5], ones[:1])):
            with self.subTest(ids):
                self.refused(assign, "t", ids, values)
        for ids in ([[1, 2], [3, 4]], 1, [1.5], [[1]]):
            self.refused(read, "t", ids)
        np.testing.assert_array_equal(self.model.table("t"), self.before)

    def test_gradients_that_do_not_fit(self):
        ids = {"t": [1, 2, 3, 4, 5, 6]}
        with self.model.train("g") as stream:
            found = self.model.lookup(ids, train=True)
            stream.lookup(ids)
            for shape in ((4, 6), (24,), (2, 3, 4), (6, 4, 1), (1, 6, 4), (6, 2, 2), (12, 2), (3, 8), (5, 4)):
                for call in (found.apply, stream.send_update):
                    if shape != (5, 4) or call == found.apply:  # the samples of a stream: its server says so
                        with self.subTest(shape):
                            self.refused(call, {"t": np.zeros(shape, np.float32)})
            self.refused(stream.send_update, {"t": np.ma.array(np.zeros((6, 4)), mask=np.ones((6, 4)))})
            stream.skip()
            found.release()
        np.testing.assert_array_equal(self.model.table("t"), self.before)

    def test_samples_without_ids_give_zeros_and_change_no_row(self):
        none, splits, R, S, Q = np.zeros(0, np.int64), np.zeros(3, np.int64), emberd.Ragged, emberd.Sparse, emberd.Sequences
        empty = {"lists": [[], []], "array": np.zeros((2, 0), np.int32), "Dense": emberd.Dense(np.zeros((2, 0), np.int64), np.zeros((2, 0), np.float32)),
                 "Ragged": R(none, splits), "weighted": R(none, splits, np.zeros(0, np.float32)), "from_lists": R.from_lists([[], []]),
                 "Sparse": S(np.zeros((0, 2), np.int64), none, 2), "samples": S(none, none, 2), "sequences": Q.from_lists([[], []], 3), "short": Q(np.zeros((2, 0), np.int64))}
        some = {"Ragged": R(np.array([3]), np.array([0, 0, 1])), "from_lists": R.from_lists([[], [3]], [[], [1.0]]), "Sparse": S(np.array([1]), np.array([3]), 2),
                "sequences": Q.from_lists([[], [3]], 1)}
        for combiner, model in ((one, self.client.declare(emberd.ModelConfig(
                f"without_ids_{one}", [emberd.TableConfig("t", 8, 4, combiner=one, initializer=emberd.RowId(), optimizer=emberd.SGD(learning_rate=1.0))],
                [emberd.FeatureConfig("t", "t")]))) for one in ("sum", "mean", "sqrtn")):
            program = model.compile(samples=8, dynamic=True)
            with model.train("run") as stream:
                for name, ids in (*empty.items(), *some.items()):
                    with self.subTest(f"{combiner} {name}"):
                        rows, before = [] if ids is empty.get(name) else [3], model.table("t")
                        found = model.lookup({"t": ids}, train=True)
                        self.assertFalse(np.any(found["t"][:1]))
                        self.assertEqual((len(found["t"]), bool(np.any(found["t"]))), (2, bool(rows)))
                        np.testing.assert_array_equal(program({"t": ids})["t"], found["t"])
                        self.assertEqual(found.apply({"t": np.ones_like(found["t"])}).rows_updated, len(rows))
                        looked_up = stream.lookup({"t": ids})
                        self.assertEqual(looked_up["t"].shape, found["t"].shape)
                        self.assertEqual(stream.update({"t": np.ones_like(looked_up["t"])}).rows_updated, len(rows))
                        self.assertEqual(np.unique(np.nonzero(model.table("t") - before)[0]).tolist(), rows)
        for shape in ((2, 3, 0), (2, 0, 3)):
            self.assertIn("t", self.refused(self.model.lookup, {"t": np.zeros(shape, np.int64)}))
        self.assertIn("weights", self.refused(self.model.lookup, {"t": emberd.Dense(np.zeros((2, 0), np.int64), np.ones(3))}))

    def test_exports_beyond_the_table(self):
        for named in ({"first_row": 200}, {"row_count": -5}, {"first_row": -1}, {"first_row": 60, "row_count": 5}):
            with self.assertRaises(emberd.OutOfRange):
                self.model.export("t", **named)
        self.refused(self.model.export, "t", rows_at_a_time=0)
        self.assertEqual([begin for begin, _ in self.model.export("t", first_row=60, rows_at_a_time=3)], [60, 63])


@unittest.skipUnless(has_torch(), "SKIP: PyTorch is not installed")
class TorchShapesTest(ClusterTest):
    def test_jagged_tensors_that_do_not_fit(self):
        import torch
        from torch.overrides import TorchFunctionMode

        import emberd.torch
        from emberd.compat.torchrec import KeyedJaggedTensor

        class Meta(TorchFunctionMode):
            """As torch.set_default_device("meta"), which is of later versions."""

            def __torch_function__(self, function, types, args=(), kwargs=None):
                kwargs = dict(kwargs or {})
                if function in (torch.zeros, torch.tensor, torch.empty, torch.ones):
                    kwargs.setdefault("device", "meta")
                return function(*args, **kwargs)

        def kjt(keys, values, lengths, weights=None, **more):
            return KeyedJaggedTensor(keys, torch.tensor(values), None if weights is None else torch.tensor(weights),
                                     lengths=torch.tensor(lengths), **more)

        ebc = emberd.torch.EmbeddingBagCollection(counting_model("jagged", tables=("a", "b"), initializer=emberd.RowId()).tables,
                                                  client=self.client, model="jagged").eval()
        for given, said in ((kjt(["a", "b"], [1, 2, 3, 4, 5, 6], [1, 1, 1, 1]), "'b'.*6 values"),
                            (kjt(["a", "b"], [1, 2, 3], [1, 1, 1, 1]), "'b'.*3 values"), (kjt(["a", "a"], [1, 2], [1, 1]), "'a'.*twice"),
                            (kjt(["a", "b"], [1, 2], [3, -1]), "'a'|'b'"), (kjt(["a", "b"], [1, 2], [1, 1], [1.0]), "1 weights")):
            with self.assertRaisesRegex(ValueError, said):
                ebc(given)
        with self.assertRaisesRegex(ValueError, "offsets"):
            KeyedJaggedTensor(["a"], torch.tensor([1, 2]), offsets=torch.tensor([1, 2]))
        good = kjt(["a", "b"], [1, 2], [1, 1])
        with Meta():
            self.assertEqual(ebc(good)["b"].tolist(), [[2] * 4])

    def test_torch_has_sparse_indices_the_other_way_round(self):
        import torch

        import emberd.torch
        ebc = emberd.torch.EmbeddingBagCollection(counting_model("coo", initializer=emberd.RowId()).tables, client=self.client,
                                                  model="coo").eval()
        for places, ids in (([[0, 1, 1], [0, 0, 1]], [1, 2, 3]), ([[0, 1], [7, 3]], [1, 5])):
            t = torch.sparse_coo_tensor(torch.tensor(places), torch.tensor(ids), (2, 9)).coalesce()
            found = ebc({"t": emberd.Sparse(t.indices(), t.values(), 2)})["t"]
            self.assertEqual(found[:, 0].tolist(), [1, 5])
        with self.assertRaisesRegex(ValueError, "samples alone"):
            ebc({"t": emberd.Sparse(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1, 5]), 2)})

    def test_bags_without_ids_give_zeros_and_change_no_row(self):
        import torch

        import emberd.torch
        from emberd.compat.jagged import KeyedJaggedTensor
        none = torch.zeros(0, dtype=torch.long)
        ebc = emberd.torch.EmbeddingBagCollection(counting_model("bags_without_ids", ("a", "b"), initializer=emberd.Constant(1.0)).tables, client=self.client,
                                                  model="bags_without_ids")
        self.addCleanup(ebc.finish)
        sparse = ebc.optimizer()
        expected = 1.0
        for ids, found_of_b in ((KeyedJaggedTensor(["a", "b"], none, lengths=torch.zeros(4, dtype=torch.long)), 0),
                                (KeyedJaggedTensor(["a", "b"], torch.tensor([1]), lengths=torch.tensor([0, 0, 0, 1])), 1),
                                ({"a": torch.zeros(2, 0, dtype=torch.long), "b": emberd.Ragged(torch.tensor([1]), torch.tensor([0, 0, 1]))}, 1),
                                ({"a": [[], []], "b": emberd.Ragged(torch.tensor([1]), torch.tensor([0, 0, 1]), torch.ones(1, requires_grad=True))}, 1)):
            found = ebc(ids)
            self.assertEqual((found["a"].tolist(), found["b"][:, 0].tolist()), ([[0] * 4] * 2, [0, found_of_b * expected]))
            (found["a"].sum() + found["b"].sum()).backward()
            sparse.step()
            expected -= found_of_b
            self.assertEqual((ebc.model.table("a").min(), ebc.model.table("b")[:, 0].tolist()), (1, [1, expected] + [1] * 62))
        for mode in ("sum", "mean", "max"):
            ours = emberd.torch.EmbeddingBag(20, 3, client=self.client, model=f"bag_without_ids_{mode}", mode=mode)
            self.addCleanup(ours.finish)
            optimizer = ours.optimizer()
            before = ours.weight.tolist()
            for given in ((none, torch.tensor([0, 0])), (torch.zeros(2, 0, dtype=torch.long),)):
                found = ours(*given)
                self.assertEqual(found.tolist(), [[0] * 3] * 2)
                found.sum().backward()
                optimizer.step()
            self.assertEqual(ours.weight.tolist(), before)

    def test_a_bag_refuses_offsets_for_a_matrix(self):
        import torch

        import emberd.torch
        bag = emberd.torch.EmbeddingBag(20, 3, client=self.client, model="bag_shapes", mode="sum").eval()
        for given in ((torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 1])), (torch.tensor([1, 2]), torch.tensor([[0, 1]])),
                      (torch.tensor([1, 2]), torch.tensor([1])), (torch.tensor([1, 2]), None, torch.ones(3)),
                      (torch.tensor([[1, 2]]), None, torch.ones(2))):
            with self.assertRaises(ValueError):
                bag(*given)


if __name__ == "__main__":
    main()
