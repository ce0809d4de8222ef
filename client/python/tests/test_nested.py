"""Nested features: flattened in order, packed again, with errors that show the path; and a step with them on a cluster."""

import collections
import unittest

from cluster import SGD, ClusterTest, emberd, main

import numpy as np

from emberd import nested

Pair = collections.namedtuple("Pair", "left right")


class NestedTest(unittest.TestCase):
    def test_order_and_structure(self):
        tree = {"user": {"id": 1, "history": [2, (3, 4)]}, "pair": Pair(5, 6)}
        flat = nested.flatten(tree)
        self.assertEqual(list(flat.items()), [("pair/0", 5), ("pair/1", 6), ("user/history/0", 2), ("user/history/1/0", 3),
                                              ("user/history/1/1", 4), ("user/id", 1)])
        packed = nested.pack(tree, {path: value * 10 for path, value in flat.items()})
        self.assertEqual(packed, {"user": {"id": 10, "history": [20, (30, 40)]}, "pair": Pair(50, 60)})
        self.assertEqual(list(packed), ["user", "pair"])
        self.assertIsInstance(packed["pair"], Pair)

    def test_errors_show_the_path(self):
        like = {"user": {"history": [1, 2]}}
        for tree, message in (
                ({"user": {"history": [1]}}, "user/history: got a list of 1; it must be like a list of 2"),
                ({"user": [1]}, 'user: got a list of 1; it must be like a mapping with the keys "history"'),
                ({"user": {"history": 3}}, "user/history: got a int; it must be like a list of 2"),
                ({"item": 1}, 'the structure: got a mapping with the keys "item"; it must be like a mapping with the keys "user"')):
            with self.assertRaises(ValueError) as caught:
                nested.flatten(tree, like=like)
            self.assertEqual(str(caught.exception), message)
        self.assertEqual(nested.flatten({"user": None}, like=like), {"user": None})
        for call, message in (
                (lambda: nested.flatten({"a/b": 1}), "the key 'a/b' is not allowed"),
                (lambda: nested.flatten({"a": {1: 2}}), "a: the key 1 is not allowed"),
                (lambda: nested.flatten(7), "a structure is a mapping, a list or a tuple; got a int"),
                (lambda: nested.pack(like, {"user/history/0": 1}), '"user/history/1" is missing'),
                (lambda: nested.pack([1], {"0": 1, "x": 2}), '"x" is not in the structure, which has "0"')):
            with self.assertRaises(ValueError) as caught:
                call()
            self.assertIn(message, str(caught.exception))


class NestedStepTest(ClusterTest):
    def test_a_step(self):
        ids = {"user": {"history": [np.array([1, 2]), np.array([3, 3])]}, "time": np.array([0, 1])}
        names = list(nested.flatten(ids))
        model = self.client.declare(emberd.ModelConfig(
            "nested", [emberd.TableConfig("t", 8, 4, combiner="sum", initializer=emberd.RowId(), optimizer=SGD)],
            [emberd.FeatureConfig(name, "t") for name in names]))
        found = model.lookup(nested.flatten(ids), train=True)
        activations = nested.pack(ids, found)
        np.testing.assert_array_equal(activations["user"]["history"][1], np.full((2, 4), 3))
        gradients = {"user": {"history": [np.ones((2, 4), np.float32), None]}, "time": None}
        # A part without a gradient is left out: of its features it is zero.
        flat = {path: value for path, value in nested.flatten(gradients, like=ids).items() if value is not None}
        self.assertEqual(list(flat), ["user/history/0"])
        found.apply(flat)
        np.testing.assert_array_equal(model.read_rows("t", [0, 1, 2, 3])[:, 0], [0, 0, 1, 3])

    def test_output_shapes_are_checked(self):
        model = self.client.declare(emberd.ModelConfig(
            "sequences", [emberd.TableConfig("t", 8, 4, combiner="sum", initializer=emberd.RowId(), optimizer=SGD)],
            [emberd.FeatureConfig("seen", "t", output_shape=[2, 3])]))
        self.assertEqual(model.features["seen"].output_shape, (2, 3))
        found = model.lookup({"seen": np.arange(6)})
        np.testing.assert_array_equal(found["seen"], np.repeat(np.arange(6), 4).reshape(2, 3, 4))
        self.assertEqual(model.lookup({"seen": np.arange(3)})["seen"].shape, (1, 3, 4))
        self.assertEqual(model.lookup({"seen": []})["seen"].shape, (0, 3, 4))
        with self.assertRaisesRegex(emberd.InvalidArgument, r"has 7 samples; its output_shape \[2, 3\] needs a multiple of 3"):
            model.lookup({"seen": np.arange(7)})

    def test_sequences_are_trained_in_their_shape(self):
        """Activations and gradients have the output_shape of their feature, alone and beside features without one."""
        table = emberd.TableConfig("t", 12, 4, combiner="sum", initializer=emberd.RowId(), optimizer=SGD)
        model = self.client.declare(emberd.ModelConfig(
            "shapes", [table], [emberd.FeatureConfig("seen", "t", output_shape=[2, 3]), emberd.FeatureConfig("user", "t")]))
        rows = np.repeat(np.arange(12, dtype=np.float32), 4).reshape(12, 4)
        gradient = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

        def expect_and_step(found, seen, update):
            np.testing.assert_array_equal(found["seen"], rows[:6].reshape(2, 3, 4))
            np.testing.assert_array_equal(found["user"], rows[6:12])
            update({"seen": seen, "user": np.ones((6, 4), np.float32)})
            rows[:6] -= gradient.reshape(6, 4)
            rows[6:] -= 1

        ids = {"seen": np.arange(6), "user": np.arange(6, 12)}
        found = model.lookup(ids, train=True)
        np.testing.assert_array_equal(found.concat, np.concatenate([rows[:6], rows[6:]], axis=1))
        expect_and_step(found, gradient, found.apply)
        with model.train("shapes") as stream:
            found = stream.lookup(ids)
            in_place = stream.empty_gradients(found)
            in_place["seen"][:] = gradient
            expect_and_step(found, in_place["seen"], stream.update)
            expect_and_step(stream.lookup(ids, concat=True), np.repeat(gradient, 2, axis=2)[:, :, ::2], stream.update)
            expect_and_step(stream.lookup(ids), gradient.astype(np.float64), stream.update)
        np.testing.assert_array_equal(model.table("t"), rows)


if __name__ == "__main__":
    main()
