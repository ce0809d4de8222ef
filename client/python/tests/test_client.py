"""Lookups, updates, rows and errors of the Python client on a real cluster, against NumPy.

What this would catch: ids in a form that is read wrongly, activations or gradients that are copied or freed too early, an
error that loses its code or its text, and a wait that does not hear Ctrl-C.
"""

import array
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
import warnings

from cluster import ClusterTest, counting_model, emberd, has_torch, main

import numpy as np


def look_up(model, ids, **options):
    return model.lookup({"t": ids}, **options)["t"]


def use_in_child(client, pipe):
    try:
        client.status()
        pipe.send("it answered")
    except emberd.ForkedProcess as error:
        pipe.send(str(error))


def use_pickled(data, pipe):
    pipe.send(pickle.loads(data).read_rows("t", [3]).tolist())


class LookupTest(ClusterTest):
    def setUp(self):
        self.model = self.declare(initializer=emberd.RowId(), dim=2)

    def test_ids_in_every_form(self):
        expected = [[3, 3], [5, 5]]
        for ids in (np.array([3, 5]), np.array([3, 5], np.int32), [3, 5], np.array([3, 5], np.uint8),
                    array.array("q", [3, 5]), np.array([3, 9, 5, 9])[::2], np.array([[3], [5]])):
            self.assertEqual(look_up(self.model, ids).tolist(), expected, ids)

    def test_several_ids_of_a_sample(self):
        expected = [[1 + 2 + 2] * 2, [0] * 2, [7] * 2]
        splits = np.array([0, 3, 3, 4])
        values = np.array([1, 2, 2, 7], np.int32)
        indices = np.array([[0, 0], [0, 1], [0, 2], [2, 0]], np.int32)
        for ids in (emberd.Ragged(values, splits), emberd.Ragged.from_lists([[1, 2, 2], [], [7]]),
                    emberd.Sparse(indices, values, 3)):
            self.assertEqual(look_up(self.model, ids).tolist(), expected, ids)
        self.assertEqual(look_up(self.model, np.array([[1, 2], [3, 4]])).tolist(), [[3, 3], [7, 7]])

    def test_weights(self):
        weights = np.array([1, 0.5, 2, 4], np.float32)
        for ids in (emberd.Ragged([1, 2, 3, 4], [0, 2, 4], weights),
                    emberd.Ragged.from_lists([[1, 2], [3, 4]], [[1, 0.5], [2, 4]]),
                    emberd.Dense(np.array([[1, 2], [3, 4]]), weights.reshape(2, 2)),
                    emberd.Sparse([[0, 0], [0, 1], [1, 0], [1, 1]], [1, 2, 3, 4], 2, weights.astype(np.float64))):
            self.assertEqual(look_up(self.model, ids).tolist(), [[2, 2], [22, 22]], ids)
        self.assertEqual(look_up(self.model, emberd.Dense([[1, 2]], 3.0)).tolist(), [[9, 9]])

    def test_batches_one_after_the_other(self):
        parts = [np.array([3, 5], np.int32), np.array([[1, 2], [3, 4]]), emberd.Dense([[1, 2]], 3.0),
                 emberd.Ragged([1, 2, 3], [0, 2, 2, 3], [1, 2, 3]), emberd.Sparse([[1, 0], [1, 1]], [6, 7], 3)]
        whole = look_up(self.model, emberd.arrays.concatenate(parts, "t"))
        np.testing.assert_array_equal(whole, np.concatenate([look_up(self.model, part) for part in parts]))

    def test_empty_batches(self):
        self.assertEqual(look_up(self.model, []).shape, (0, 2))
        self.assertEqual(look_up(self.model, emberd.Ragged([], [0, 0, 0])).tolist(), [[0, 0], [0, 0]])

    def test_what_is_no_id_is_refused_by_name(self):
        for ids, error, text in ((np.array([1.5]), TypeError, 'feature "t": float64'),
                                 (np.zeros((2, 2, 2), int), ValueError, r"\[2, 2, 2\]"),
                                 (np.array([True]), TypeError, "bool"),
                                 (np.array([63, 64]), IndexError, r"^feature 't': id at position 1 is 64; allowed: \[0, 64\)$"),
                                 (emberd.Ragged([1, 2], [0, 1]), emberd.InvalidArgument, "row_splits"),
                                 (emberd.Sparse([[1, 0], [0, 0]], [1, 2], 2), emberd.InvalidArgument, "indices")):
            with self.assertRaisesRegex(error, text):
                look_up(self.model, ids)
        with self.assertRaisesRegex(emberd.InvalidArgument, "no such feature"):
            self.model.lookup({"t": [1], "other": [1]})

    def test_a_mapping_and_statistics(self):
        found = self.model.lookup({"t": [1, 1, 2]})
        self.assertEqual((list(found), len(found), found["t"].dtype), (["t"], 1, np.float32))
        self.assertEqual(found.concat.tolist(), [[1, 1], [1, 1], [2, 2]])
        self.assertEqual(found.statistics["stacks"][0]["ids"], 3)
        self.assertEqual(found.statistics["stacks"][0]["unique_ids"], 2)
        self.assertEqual(found.step, -1)

    def test_activations_are_not_copied_and_outlive_everything(self):
        model = self.client.model(self.model.name)
        found = model.lookup({"t": [5, 6]})
        rows = found["t"]
        self.assertFalse(rows.flags.owndata)
        self.assertTrue(np.shares_memory(rows, found["t"]))
        part = rows[1:]
        del found, rows, model
        gc.collect()
        for _ in range(20):  # what was freed would be written over
            self.model.lookup({"t": [1] * 64})
        self.assertEqual(part.tolist(), [[6, 6]])

    def test_bfloat16_on_the_way(self):
        with self.cluster.connect(wire="bfloat16") as client:
            model = client.declare(counting_model("bfloat16", initializer=emberd.Constant(1 + 2 ** -10)))
            self.assertEqual(look_up(model, [1]).tolist(), [[1, 1, 1, 1]])
            found = model.lookup({"t": [1]}, train=True)
            found.apply({"t": np.full((1, 4), 1 + 2 ** -10, np.float32)})
            self.assertEqual(model.read_rows("t", [1]).tolist(), [[2 ** -10] * 4])


class UpdateTest(ClusterTest):
    def test_updates_are_those_of_numpy(self):
        model = self.declare(tables=("a", "b"), rows=16)
        random = np.random.default_rng(7)
        tables = {name: np.zeros((16, 4), np.float32) for name in "ab"}
        for _ in range(20):
            ids = {name: random.integers(0, 16, (6, 2)) for name in "ab"}
            found = model.lookup(ids, train=True)
            gradients = {}
            for name in "ab":
                np.testing.assert_array_equal(found[name], tables[name][ids[name]].sum(1))
                gradients[name] = random.integers(-3, 4, (6, 4)).astype(np.float32)
                np.subtract.at(tables[name], ids[name], gradients[name][:, None])
            found.apply(gradients)
        for name in "ab":
            np.testing.assert_array_equal(model.table(name), tables[name])

    def test_gradients_in_every_form(self):
        model = self.declare()
        ones = np.ones((1, 4))
        for gradient in (ones.astype(np.float32), ones, ones.astype(np.int64), ones.tolist(),
                         np.ones((4, 1), np.float32).T, np.ones((1, 8), np.float32)[:, ::2]):
            before = model.read_rows("t", [2])
            self.assertEqual(model.lookup({"t": [2]}, train=True).apply({"t": gradient}).rows_updated, 1)
            np.testing.assert_array_equal(model.read_rows("t", [2]), before - 1)
        model.lookup({"t": [2]}, train=True).apply({"t": None})
        np.testing.assert_array_equal(model.read_rows("t", [2]), before - 1)
        with self.assertRaisesRegex(emberd.InvalidArgument, r"\[1, 3\]|shape"):
            model.lookup({"t": [2]}, train=True).apply({"t": np.ones((1, 3))})
        with self.assertRaisesRegex(ValueError, r"\[4\]"):
            model.lookup({"t": [2]}, train=True).apply({"t": np.ones(4)})

    def test_the_models_of_the_cluster(self):
        self.client.declare(counting_model("b_listed", tables=("x", "y")))
        self.client.declare(counting_model("a_listed", rows=128, dim=8))
        with self.cluster.connect() as other:  # which has declared none of them
            found = {one.name: one for one in other.models()}
        self.assertEqual([name for name in found if name.endswith("_listed")], ["a_listed", "b_listed"])
        self.assertEqual((found["b_listed"].tables, found["b_listed"].stacks), (2, 1))
        self.assertGreaterEqual(found["a_listed"].table_bytes, 128 * 8 * 4)

    def test_learning_rate_of_a_step(self):
        model = self.declare(tables=("a", "b"), optimizer=emberd.SGD(learning_rate=1.0))
        one = np.ones((1, 4), np.float32)
        for hyper in ({"learning_rate": 0.5}, {"a": {"learning_rate": 0.25}, "b": {"learning_rate": 0.25}}):
            model.lookup({"a": [0], "b": [0]}, train=True).apply({"a": one, "b": one}, hyper=hyper)
        self.assertEqual(model.read_rows("a", [0]).tolist(), [[-0.75] * 4])
        with self.assertRaisesRegex(emberd.InvalidArgument, "'learning_rate' is given for table 'a', but not for table 'b' of the same stack 'a_b'"):
            model.lookup({"a": [0], "b": [0]}, train=True).apply({"a": one, "b": one}, hyper={"a": {"learning_rate": 0.25}})
        self.assertEqual([model.read_rows(name, [0])[0, 0] for name in ("a", "b")], [-0.75] * 2)

    def test_hyper_parameters_in_a_wrong_container_are_refused(self):
        model = self.declare(tables=("a", "b"))
        one = {"a": np.ones((1, 4), np.float32)}
        with model.train("run") as stream:
            for value in ({}, {"a": 0.5}, {"learning_rate": 0.5}, [], [0.5], (0.5,), "0.5", {0.5}):
                for hyper, what in (({"learning_rate": value}, "learning_rate"), ({"a": {"learning_rate": value}}, "a: learning_rate")):
                    for call in (lambda hyper: model.lookup({"a": [0], "b": [0]}, train=True).apply(one, hyper=hyper),
                                 lambda hyper: stream.send_update(one, hyper=hyper)):
                        with self.assertRaisesRegex((ValueError, TypeError), f"hyper: {what}: .* is not allowed; it must be a number"):
                            call(hyper)
            with self.assertRaisesRegex(ValueError, "'c' one of the tables, a, b"):
                stream.send_update(one, hyper={"c": {"learning_rate": 0.5}})
        self.assertEqual(model.read_rows("a", [0]).tolist(), [[0] * 4])

    def test_a_step_number_where_the_optimizer_counts(self):
        model = self.declare(optimizer=emberd.AdamW(learning_rate=0.1))
        one = {"t": np.ones((1, 4), np.float32)}
        found = model.lookup({"t": [0]}, train=True)
        with self.assertRaisesRegex(emberd.InvalidArgument, "step"):
            found.apply(one)
        self.assertEqual(found.apply(one, step=0).rows_updated, 1)

    def test_a_batch_is_used_once_or_given_back(self):
        model = self.declare()
        one = {"t": np.ones((1, 4), np.float32)}
        found = model.lookup({"t": [0]}, train=True)
        found.apply(one)
        with self.assertRaises(emberd.NotFound):
            found.apply(one)
        released = model.lookup({"t": [0]}, train=True)
        released.release()
        with self.assertRaises(LookupError):
            released.apply(one)
        with self.assertRaises(emberd.InvalidArgument):
            model.lookup({"t": [0]}).apply(one)


class RowsTest(ClusterTest):
    def test_rows_are_read_assigned_and_exported(self):
        model = self.declare(optimizer=emberd.Adagrad(initial_accumulator=0.5))
        values = np.arange(8, dtype=np.float32).reshape(2, 4)
        model.assign_rows("t", [9, 3], values)
        np.testing.assert_array_equal(model.read_rows("t", [3, 9, 3]), values[[1, 0, 1]])
        self.assertEqual(model.read_rows("t", [1], slot="accumulator").tolist(), [[0.5] * 4])
        runs = list(model.export("t", rows_at_a_time=10))
        self.assertEqual([first for first, _ in runs], list(range(0, 64, 10)))
        np.testing.assert_array_equal(np.concatenate([rows for _, rows in runs])[[9, 3]], values)
        self.assertEqual([rows.shape for _, rows in model.export("t", first_row=60)], [(4, 4)])
        with self.assertRaisesRegex(emberd.NotFound, "has no table"):
            list(model.export("other"))
        with self.assertRaises(emberd.OutOfRange):
            model.read_rows("t", [64])
        with self.assertRaises(emberd.InvalidArgument):
            model.assign_rows("t", [1], [[float("nan")] * 4])
        self.assertEqual(model.read_rows("t", []).shape, (0, 4))


class LoadingTest(ClusterTest):
    """Whole tables: those of other libraries, and those of models with other tables."""

    def setUp(self):
        patch = unittest.mock.patch("emberd._loading.STRETCH_BYTES", 10 * 16)  # 10 rows of 4 columns
        patch.start()
        self.addCleanup(patch.stop)

    def model(self, name, tables, optimizer=emberd.Adagrad(), **options):
        described = [emberd.TableConfig(table, rows, dim, initializer=emberd.RowId(), optimizer=optimizer, **options) for table, (rows, dim) in tables.items()]
        return self.client.declare(emberd.ModelConfig(name, described, [emberd.FeatureConfig(one, one) for one in tables]))

    def test_weights_and_slots_in_one_call(self):
        model, heard = self.model("loaded", {"t": (64, 4), "u": (64, 4)}), []
        weights, sums = np.random.default_rng(1).normal(size=(2, 55, 4)).astype(np.float32) ** 2
        model.load_table("t", weights, {"accumulator": sums}, first_row=5, progress=heard.append)
        np.testing.assert_array_equal(model.table("t"), np.concatenate([np.arange(5)[:, None] * np.ones((1, 4)), weights, np.arange(60, 64)[:, None] * np.ones((1, 4))]))
        np.testing.assert_array_equal(model.table("t", slot="accumulator")[5:60], sums)
        self.assertEqual([(one.phase, one.bytes, one.total_bytes) for one in heard],
                         [("loading", 880 * part + min(160 * number, 880), 1760) for part in range(2) for number in range(1, 7)])
        # Would catch: loading that prints no rate, or another one than that of all its bytes.
        for one in heard:
            self.assertAlmostEqual(one.bytes_per_second * one.elapsed, one.bytes, places=6)
            self.assertRegex(str(one), r"^loading: .*B of 1.7 KiB, .*B/s$")
        self.assertEqual(str(emberd.Progress("loading", 3 << 20, 6 << 20, 2.0)), "loading: 3.0 MiB of 6.0 MiB, 1.5 MiB/s")
        self.assertEqual(emberd.Progress("saving", 5, 5, 0.0).bytes_per_second, 0)
        given = [weights, weights.astype(np.float64), weights.tolist(), np.asfortranarray(weights)]
        if has_torch():
            import torch
            parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
            given += [parameter, torch.from_numpy(weights).T.contiguous().T]
            embedding = torch.nn.Embedding(64, 4)
            optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.5)
            embedding(torch.arange(64)).square().sum().backward()
            optimizer.step()
            model.load_table("u", embedding.weight, {"accumulator": optimizer.state[embedding.weight]["sum"]})
            np.testing.assert_array_equal(model.table("u"), embedding.weight.detach().numpy())
            np.testing.assert_array_equal(model.table("u", slot="accumulator"), optimizer.state[embedding.weight]["sum"].numpy())
            model.assign_rows("u", range(55), parameter)
            np.testing.assert_array_equal(model.table("u")[:55], weights)
            coarse = torch.nn.Parameter(torch.arange(8).reshape(2, 4).to(torch.bfloat16))
            model.load_table("u", coarse)
            model.assign_rows("u", [2, 3], coarse)
            self.assertEqual(model.table("u")[:4].ravel().tolist(), [*range(8), *range(8)])
        for one in given:
            model.load_table("t", 0 * weights)
            model.load_table("t", one)
            np.testing.assert_array_equal(model.table("t")[:55], weights)
        rowwise = self.model("rowwise", {"t": (64, 4)}, emberd.RowwiseAdagrad())
        rowwise.load_table("t", weights, {"accumulator": sums[:, :1]})
        np.testing.assert_array_equal(rowwise.table("t", slot="accumulator")[:55], sums[:, :1])

    def test_what_is_wrong_changes_nothing(self):
        model = self.model("refused", {"t": (64, 4)})
        rows, before = np.ones((20, 4), np.float32), model.table("t")
        late = rows.copy()
        late[13, 2] = np.inf
        for error, said, given in ((LookupError, "model 'refused' has no table 'x'; it has t", ("x", rows)),
                                   (LookupError, "model 'refused' has no table ''; it has t", ("", rows)),
                                   (ValueError, r"weights: the shape \[20, 3\] is not allowed; it must be \[rows, 4\]", ("t", rows[:, :3])),
                                   (ValueError, r"weights\[13, 2\] is not finite", ("t", late)), (TypeError, "weights: <U1 is not allowed", ("t", np.full((2, 4), "a"))),
                                   (ValueError, "slots: 'momentum' is not allowed; the optimizer adagrad of table 't' has accumulator", ("t", rows, {"momentum": rows})),
                                   (ValueError, r"weights, slots: 'accumulator': the shape \[5, 4\] is not allowed; it must be \[20, 4\], or \[20, 1\]", ("t", rows, {"accumulator": rows[:5]})),
                                   (ValueError, r"slots: 'accumulator'\[13, 2\] is not finite", ("t", rows, {"accumulator": late})),
                                   (ValueError, r"slots: 'accumulator': the shape \[20, 1\] is not allowed; it must be \[20, 4\]",
                                    ("t", rows, {"accumulator": rows[:, :1]})),
                                   (IndexError, "0 and 65 rows are not allowed; table 't' has 64 rows", ("t", np.ones((65, 4))))):
            with self.assertRaisesRegex(error, said):
                model.load_table(*given)
        np.testing.assert_array_equal(model.table("t"), before)
        self.assertTrue(np.all(model.table("t", slot="accumulator") == np.float32(0.1)))
        rowwise = self.model("refused_rowwise", {"t": (64, 4)}, emberd.RowwiseAdagrad())
        with self.assertRaisesRegex(ValueError, r"slots: 'accumulator': the shape \[20, 4\] is not allowed; it must be \[20, 1\]"):
            rowwise.load_table("t", rows, {"accumulator": rows})
        np.testing.assert_array_equal(rowwise.table("t"), before)

    def test_a_model_goes_on_with_other_tables(self):
        """A table is added, another one grows, one becomes smaller, and one is dropped; weights alone, and those of a checkpoint that is served."""
        old, adagrad = self.model("old", {"grows": (25, 4), "shrinks": (30, 8), "goes": (8, 4), "wide": (8, 4)}), emberd.Adagrad()
        for name, table in old.tables.items():
            shape = (table.vocabulary_size, table.embedding_dim)
            old.load_table(name, np.random.default_rng(2).normal(size=shape), {"accumulator": np.random.default_rng(3).uniform(size=shape)})
        new, heard = self.model("new", {"grows": (40, 4), "shrinks": (12, 8), "comes": (8, 4), "wide": (8, 8)}, adagrad), []
        left = ["table 'goes' of the source", "table 'grows': rows 25 to 39, which the source does not have", "table 'shrinks': rows 12 to 29 of the source",
                "table 'comes': the source has none", "table 'wide': the source has embedding_dim 4, not 8"]
        with self.assertRaises(ValueError) as raised:
            new.copy_from(old)
        self.assertIn("; ".join(left), str(raised.exception))
        np.testing.assert_array_equal(new.table("grows")[:, 0], np.arange(40))
        self.assertEqual(new.copy_from(old, strict=False, progress=heard.append), left)
        self.assertEqual((heard[-1].bytes, heard[-1].total_bytes), (2 * 4 * (25 * 4 + 12 * 8),) * 2)
        for name, rows in (("grows", 25), ("shrinks", 12)):
            for slot in ("", "accumulator"):
                np.testing.assert_array_equal(new.table(name, slot=slot)[:rows], old.table(name, slot=slot)[:rows])
        np.testing.assert_array_equal(new.table("grows")[25:, 0], np.arange(25, 40))
        np.testing.assert_array_equal(new.table("comes")[:, 0], np.arange(8))
        same = self.model("same", {name: (one.vocabulary_size, one.embedding_dim) for name, one in old.tables.items()}, storage_dtype="bfloat16")
        self.assertEqual(same.copy_from(old), [])
        other = self.model("sgd", {name: (one.vocabulary_size, one.embedding_dim) for name, one in old.tables.items()}, emberd.SGD())
        self.assertEqual(other.copy_from(old, strict=False)[0], "table 'grows': slots, for its optimizer is sgd, and that of the source adagrad")
        np.testing.assert_array_equal(other.table("goes"), old.table("goes"))
        with self.assertRaisesRegex(TypeError, "source"):
            new.copy_from("old")

    def test_a_part_of_a_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster, cluster.connect() as client:
            saved = client.declare(counting_model("run", tables=("t", "u"), optimizer=emberd.Adagrad(), initializer=emberd.RowId()))
            saved.load_table("t", np.full((64, 4), 7), {"accumulator": np.full((64, 4), 3)})
            saved.save_checkpoint("seven")
            saved.load_table("t", np.zeros((64, 4)))
            weights = client.serve("run", "seven", serve_as="seven")
            part = client.declare(counting_model("part", tables=("t", "v"), optimizer=emberd.Adagrad()))
            self.assertEqual(part.copy_from(weights, strict=False), ["table 'u' of the source", "table 't': slots, for its optimizer is adagrad, and that of the source none",
                                                                     "table 'v': the source has none"])
            self.assertEqual((part.table("t").min(), part.table("v").max()), (7, 0))
            self.assertEqual(part.copy_from(client.restore("run", "seven"), strict=False), ["table 'u' of the source", "table 'v': the source has none"])
            self.assertEqual(part.table("t", slot="accumulator").min(), 3)


class ClientTest(ClusterTest):
    def test_models_are_declared_once_and_found(self):
        config = counting_model("once")
        self.assertTrue(self.client.declare(config).created)
        self.assertFalse(self.client.declare(config.to_json()).created)
        self.assertEqual(self.client.model("once").tables["t"].vocabulary_size, 64)
        with self.assertRaisesRegex(emberd.AlreadyExists, "embedding_dim"):
            self.client.declare(counting_model("once", dim=8))
        with self.assertRaises(emberd.NotFound):
            self.client.model("never")
        with self.assertRaisesRegex(emberd.InvalidArgument, "vocabulary_size"):
            self.client.declare(counting_model("bad", rows=-1))

    def test_samples_are_planned_once(self):
        planned = [emberd.ModelConfig("planned", [emberd.TableConfig("t", 64, 8)], [emberd.FeatureConfig("t", "t", batch)]) for batch in (64, 128)]
        first, again = (self.client.declare(one) for one in planned)
        self.assertEqual((first.created, again.created, again.id), (True, False, first.id))

    def test_rows_that_were_not_declared_are_warned_of_once_where_they_take_memory(self):
        with self.assertWarnsRegex(UserWarning, r"model 'narrow': 't' of 100000 x 4 is stored as 1\d+ x 8; rows of a partition and columns come in eights") as caught:
            self.client.declare(counting_model("narrow", rows=100000))
        self.assertEqual(caught.filename, __file__)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.client.declare(counting_model("narrow", rows=100000))
            self.client.declare(counting_model("usual", dim=8))
            tiny = self.client.declare(counting_model("tiny", rows=3))
        self.assertEqual(tiny.description["warnings"], ["SMALL TABLE: 't' of 3 x 4 is stored as 32 x 8; it has less than 8 rows for each of 4 partitions"])

    def test_status(self):
        status = self.client.status()
        self.assertEqual([shard["reachable"] for shard in status["shards"]], [True, True])

    def test_every_code_has_its_class(self):
        for code, kind in emberd.errors.BY_CODE.items():
            error = emberd.errors.make(code, "why")
            self.assertEqual((type(error), error.code, str(error)), (kind, code, "why"))
            self.assertIsInstance(pickle.loads(pickle.dumps(error)), kind)
        self.assertEqual(sorted(emberd.errors.BY_CODE), list(range(1, 17)))
        self.assertIs(type(emberd.errors.make(99, "?")), emberd.Unknown)
        for kind, builtin in ((emberd.InvalidArgument, ValueError), (emberd.NotFound, LookupError),
                              (emberd.Unavailable, ConnectionError), (emberd.DeadlineExceeded, TimeoutError),
                              (emberd.PermissionDenied, PermissionError), (emberd.OutOfRange, IndexError)):
            self.assertTrue(issubclass(kind, builtin), kind)

    def test_a_module_that_was_not_imported_is_named(self):
        done = subprocess.run([sys.executable, "-B", "-c", "import emberd; emberd.ray.Cluster"], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertIn("AttributeError: emberd.ray is not imported by default; with ray installed: import emberd.ray", done.stderr)

    def test_nobody_there(self):
        with self.assertRaisesRegex(ConnectionError, "127.0.0.1:1"):
            emberd.connect("127.0.0.1:1", connect_timeout=0.3)
        with self.assertRaises(ValueError):
            emberd.connect("127.0.0.1:1", wire="float64")
        with self.assertRaises(ValueError):
            emberd.connect("127.0.0.1:1", transport="pigeon")
        with self.assertRaises(emberd.InvalidArgument):
            emberd.connect([])
        with self.assertRaisesRegex(emberd.InvalidArgument, r'"127.0.0.1:99999" is not allowed.*port in \[1, 65535\]'):
            emberd.connect("127.0.0.1:99999")

    def test_many_threads(self):
        model = self.declare(initializer=emberd.RowId(), rows=1000)
        wrong = []

        def work(k):
            for i in range(50):
                rows = model.lookup({"t": [k * 100 + i]})["t"]
                if rows[0, 0] != k * 100 + i:
                    wrong.append(rows)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_ctrl_c_ends_a_wait(self):
        model = self.declare()
        joining = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        began = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            joining.start()
            model.train("alone", size=2)  # the other rank never comes
        self.assertLess(time.monotonic() - began, 30)  # it would be 60 s; the aim is 0.5 s
        self.client.cancel()
        self.assertEqual(model.lookup({"t": [1]})["t"].tolist(), [[0] * 4], "the client goes on")
        while emberd._native.held():
            time.sleep(0.01)

    def test_a_forked_child_is_told(self):
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        child = context.Process(target=use_in_child, args=(self.client, there))
        child.start()
        self.assertIn("spawn", here.recv())
        child.join()
        self.assertEqual(child.exitcode, 0)
        self.client.status()

    def test_a_pickled_model_connects_anew(self):
        model = self.declare(initializer=emberd.RowId())
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        child = context.Process(target=use_pickled, args=(pickle.dumps(model), there))
        child.start()
        self.assertEqual(here.recv(), [[3] * 4])
        child.join()

    def test_a_closed_client_says_so(self):
        client = self.cluster.connect()
        client.close()
        client.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            client.status()


if __name__ == "__main__":
    main()
