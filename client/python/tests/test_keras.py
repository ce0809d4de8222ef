"""emberd.keras on a real cluster, against keras-rs's layer in this process. KERAS_BACKEND says on which backend.

What this would catch: a structure that is taken apart in one order and put together in another, a step that evaluation makes
or that fit makes twice, an optimizer that is another formula than Keras's, ids that fill ragged ones up and are trained, and an example that
learns something else than with tables in its own process.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
import types
import unittest
import unittest.mock
import warnings

from cluster import ClusterTest, emberd, main

os.environ.setdefault("KERAS_BACKEND", "jax")
try:
    import keras
except ImportError as error:
    print(f"SKIP: {error.name} is not installed, which Keras on {os.environ['KERAS_BACKEND']} needs")
    sys.exit(77)

import numpy as np

import emberd.keras  # noqa: E402

try:
    import keras_rs
except ImportError:
    keras_rs = None

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(HERE, "keras_rs_example.py")
MOVIELENS = os.path.join(HERE, "..", "examples", "movielens_keras.py")
TAGS = os.path.join(HERE, "..", "examples", "tags_keras.py")
RATINGS = os.path.join(HERE, "..", "..", "..", "tests", "data", "movielens")
os.environ["EMBERD_ADDRESS"] = ""


def module_of(path, **imports):
    """What a script defines. imports: lines that stand for others."""
    module = types.ModuleType("example")
    with open(path, encoding="utf-8") as file:
        source = file.read()
    exec(compile(source.replace("import keras_rs\n", imports["keras_rs"]) if imports else source, path, "exec"), module.__dict__)
    return module


def run_example(imports):
    module = module_of(EXAMPLE, keras_rs=imports)
    return module, module.run()


class Case(ClusterTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        os.environ["EMBERD_ADDRESS"] = cls.cluster.address

    def table(self, name="t", dim=4, rows=32, **options):
        options = {"initializer": "zeros", "optimizer": keras.optimizers.SGD(0.5), "combiner": "sum", **options}
        return emberd.keras.TableConfig(name, rows, dim, **options)

    def make(self, features=None, table=None, **options):
        table = table or self.table()
        features = features or emberd.keras.FeatureConfig("t", table, (8, 2), (8, table.embedding_dim))
        layer = emberd.keras.DistributedEmbedding(features, client=self.client, **{"model": self.id().split(".")[-1], **options})
        self.addCleanup(layer.finish)
        return layer

    def net(self, layer, power=1):
        """Its loss is the sum of what comes out, to this power."""

        class Sum(keras.losses.Loss):
            def call(self, label, found):
                return keras.ops.sum(found ** power)

        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = layer

            def call(self, inputs, training=False):
                return self.layer(inputs, training=training)

        net = Net()
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=Sum(reduction="sum"))
        return net

    def train(self, layer, ids, steps=1, weights=None, batch=8):
        """Steps with the same ids; the loss in each."""
        inputs, net = layer.preprocess(ids, weights), self.net(layer)
        return [float(net.train_on_batch(inputs, np.zeros((batch, 4), np.float32))) for _ in range(steps)]


class ExampleTest(Case):
    @unittest.skipUnless(keras_rs, "SKIP: keras-rs is not installed")
    def test_it_learns_by_changed_imports_what_keras_rs_learns(self):
        _, (_, before, after, losses, tables) = run_example("import keras_rs\n")
        module, (layer, ours_before, ours_after, ours_losses, ours_tables) = run_example("from emberd import keras as keras_rs\n")
        self.addCleanup(layer.finish)
        np.testing.assert_allclose(ours_before, before, atol=1e-6)
        np.testing.assert_allclose(ours_losses, losses, atol=1e-5)
        np.testing.assert_allclose(ours_after, after, atol=1e-5)
        self.assertEqual(sorted(ours_tables), ["items", "users", "words"])
        for name, values in tables.items():
            np.testing.assert_allclose(ours_tables[name], values, atol=1e-5)
        self.assertEqual(layer.next_step, 20)
        self.assertGreater(losses[0], losses[-1])

        with tempfile.TemporaryDirectory() as folder:  # the rows are not in it, but on the cluster
            path = os.path.join(folder, "model.keras")
            module.model_of(layer).save(path)
            loaded = keras.saving.load_model(path)
        found = loaded.predict(module.data(1)[0], batch_size=module.BATCH, verbose=0)
        again = next(one for one in loaded.layers if isinstance(one, emberd.keras.DistributedEmbedding))
        self.addCleanup(again.finish)
        self.assertEqual(again.name, layer.name)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(again.get_embedding_tables()["words"]), ours_tables["words"])
        self.assertEqual(found.shape, ours_after.shape)


    @unittest.skipIf(keras.backend.backend() == "jax", "JAX compiles it for 16 s of CPU; the other backends run it")
    def test_movielens_learns_what_it_learns_with_tables_of_its_own(self):
        module = module_of(MOVIELENS)
        ours, plain = (self.ends_with(module, *options) for options in (("--address", self.cluster.address), ("--plain",)))
        self.assertAlmostEqual(ours[0], plain[0], delta=1e-4)
        self.assertAlmostEqual(ours[1], plain[1], delta=1e-3)
        self.assertLess(ours[0], 0.65)

    def ends_with(self, module, *options):
        said = io.StringIO()
        with unittest.mock.patch("sys.argv", [MOVIELENS, RATINGS, *options]), contextlib.redirect_stdout(said):
            module.main()
        return [float(one) for one in re.search(r"movielens: loss=(\S+) auc=(\S+)", said.getvalue()).groups()]

    def test_tags_are_combined_by_their_maximum(self):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            module_of(TAGS).main()
        self.assertGreater(float(re.search(r"right=(\S+)", said.getvalue())[1]), 0.9)  # half of the items are liked


class LayerTest(Case):
    def test_ragged_ids_with_weights(self):
        layer = self.make()
        ids = [[1, 2, 4, 5], [], [3], [1], [], [], [], []]  # two were declared
        weights = [[1.0, 2.0, 3.0, 4.0], [], [0.5], [1.0], [], [], [], []]
        with self.assertRaisesRegex(ValueError, "weights: not allowed with what `preprocess` gave"):
            layer(layer.preprocess(ids), np.ones((8, 2), np.float32))
        self.assertEqual(self.train(layer, ids, 2, weights)[0], 0)
        rows = keras.ops.convert_to_numpy(layer.get_embedding_tables()["t"])
        self.assertEqual(rows[:7, 0].tolist(), [0, -2, -2, -0.5, -3, -4, 0])

    def test_ragged_weights_that_are_not_those_of_the_ids(self):
        layer, ids = self.make(), [[1, 2], [3]]
        kinds = [lambda rows: rows]
        if keras.backend.backend() == "tensorflow":
            import tensorflow

            kinds.append(tensorflow.ragged.constant)
            with self.assertRaisesRegex(ValueError, "feature 't': weights: a ndarray is not allowed for a RaggedTensor"):
                layer.preprocess(tensorflow.ragged.constant(ids), np.ones((2, 2)))
        for kind in kinds:
            for weights, said in (([[1.0], [1.0]], "1 weights in row 0 are not allowed for its 2 ids"),
                                  ([[1.0], [1.0, 1.0]], "1 weights in row 0"), ([[1.0, 1.0, 7.0], [1.0]], "3 weights in row 0"),
                                  ([[1.0, 1.0], [1.0, 6.0]], "2 weights in row 1 .* its 1 ids"),
                                  ([[1.0, 1.0]], "1 rows of weights are not allowed for 2 rows of ids")):
                with self.subTest(weights), self.assertRaisesRegex(ValueError, "feature 't': " + said):
                    layer.preprocess(kind(ids), kind(weights))
            prepared = layer.preprocess(kind(ids), kind([[1.0, 2.0], [3.0]]))["preprocessed_inputs_per_placement"]
            self.assertEqual(prepared["emberd"]["t"]["weights"].tolist(), [1, 2, 3, 0])

    def test_ids_that_are_no_integers_are_refused(self):
        layer = self.make()
        for ids, said in (([[1.9], [2.0, 3.7]], "float64"), (np.array([1.5, 2.0]), "float64"), ([[True]], "bool"),
                          (keras.ops.array([1.0, 2.0]), 'float32.*dtype="int32"'),
                          ([["a"], ["b"]], "<U1.*Texts are hashed first"), (np.array(["a"]), "<U1.*Texts are hashed first")):
            with self.subTest(said), self.assertRaisesRegex(TypeError, f"feature 't': {said}"):
                layer.preprocess(ids)
        class Sparse:  # as TensorFlow's
            dense_shape, dtype, shape = [2, 3], "int32", (2, 3)

        with self.assertRaisesRegex(TypeError, "feature 't': a Sparse is not allowed; give a list of ids for each sample"):
            layer.preprocess(Sparse())
        for ids in ([[1], []], [[], []], np.zeros((2, 0)), np.array([[1], [2]], np.uint8), keras.ops.array([1, 2])):
            found = keras.ops.convert_to_numpy(layer(layer.preprocess(ids)))
            self.assertEqual(found.shape, (2, 4))  # what is empty has no kind

    def test_weights_that_are_trained_are_refused(self):
        layer, label = self.make(), np.zeros((8, 4), np.float32)

        class Net(keras.Model):
            def __init__(self, shown):
                super().__init__()
                self.layer, self.shown = layer, shown
                self.scales = self.add_weight(shape=(8, 2), initializer="ones")

            def call(self, inputs, training=False):
                return self.layer(inputs, weights=self.shown(self.scales * 2.0), training=training) + keras.ops.sum(self.scales)

        for shown in (lambda weights: weights, keras.ops.stop_gradient):
            net = Net(shown)
            net.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
            if shown is keras.ops.stop_gradient:
                net.train_on_batch(np.ones((8, 2), np.int32), label)
            else:
                with self.assertRaisesRegex(ValueError, r"'t': weights: the loss is differentiated .*stop_gradient\(weights\)"):
                    net.train_on_batch(np.ones((8, 2), np.int32), label)
        self.assertLess(layer.tables.read_rows("t", [1])[0, 0], 0)
        self.assertLess(float(keras.ops.max(net.scales)), 1)

    def test_a_sequence_has_a_row_for_each_id(self):
        table = self.table(initializer=emberd.RowId())
        layer = self.make({"history": emberd.keras.FeatureConfig("history", table, (None, 3), (None, 3, 4)),
                           "tags": emberd.keras.FeatureConfig("tags", table, (None, 2), (None, 4))})
        ids = {"history": np.array([[1, 2, 3], [3, 3, 0]], np.int32), "tags": np.array([[1, 1], [5, 6]], np.int32)}
        scale = keras.ops.convert_to_tensor(np.array([[[1], [2], [3]], [[4], [5], [6]]], np.float32))

        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = layer

            def call(self, inputs, training=False):
                found = self.layer(inputs, training=training)
                return keras.ops.sum(found["history"] * scale, (1, 2)) + 0 * keras.ops.sum(found["tags"], 1)

        net = Net()
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=lambda _, found: found)
        found = net.predict(layer.preprocess(ids), verbose=0)
        self.assertEqual(found.tolist(), [4 * (1 + 4 + 9), 4 * (12 + 15)])
        net.train_on_batch(layer.preprocess(ids), np.zeros(2, np.float32))
        layer.finish()
        # The mean over 2 samples, at a rate of 0.5.
        self.assertEqual(layer.tables.table("t")[:4, 0].tolist(), [0 - 6 / 4, 1 - 1 / 4, 2 - 2 / 4, 3 - (3 + 4 + 5) / 4])
        self.assertEqual(tuple(layer(ids)["history"].shape), (2, 3, 4))
        for history, said in ((np.ones((2, 4), np.int32), r"history.*shape \(2, 4\) is not allowed.*\(samples, 3\)"), ([[1], [2, 3]], "a list is not allowed")):
            with self.assertRaisesRegex(ValueError, said):
                layer.preprocess({**ids, "history": history})
        with self.assertRaisesRegex(ValueError, r"history.*weights of the shape \(3, 2\) are not allowed"):
            layer.preprocess(ids, {"history": np.ones((3, 2)), "tags": np.ones((2, 2))})
        for shapes in (((8, 3), (8, 4, 4)), ((8, None), (8, None, 4))):
            with self.assertRaisesRegex(ValueError, "those of a sequence are"):
                self.make(emberd.keras.FeatureConfig("t", table, *shapes))

    def test_padding_of_sequences_is_masked(self):
        # As keras.layers.Embedding, but that the row of padding is zero and stays so.
        rows = np.random.default_rng(2).normal(size=(32, 4)).astype(np.float32)
        rows[0] = 0
        plain = keras.layers.Embedding(32, 4, weights=[rows], mask_zero=True)
        table = self.table()
        layer = self.make({"items": emberd.keras.FeatureConfig("items", table, (8, 3), (8, 3, 4), mask_zero=True),
                           "last": emberd.keras.FeatureConfig("last", table, (8,), (8, 4))})
        layer.set_embedding_tables({"t": rows})
        ids = np.array([[1, 2, 0], [3, 0, 0], [0, 0, 0], [1, 1, 1]] * 2, np.int32)
        last, label = np.ones(8, np.int32), np.arange(8, dtype=np.float32)[:, None]

        class Net(keras.Model):
            def __init__(self, embedding, given):
                super().__init__()
                self.embedding, self.given, self.pool = embedding, given, keras.layers.GlobalAveragePooling1D()

            def call(self, inputs, training=False):
                found = self.embedding(inputs, training=training) if self.given else self.embedding(inputs)
                return keras.ops.sum(self.pool(found["items"] if self.given else found), 1, keepdims=True)

        mask = layer.compute_mask({"items": ids, "last": last})
        self.assertEqual((keras.ops.convert_to_numpy(mask["items"]).tolist(), mask["last"]), ((ids != 0).tolist(), None))
        losses = []
        for embedding, inputs in ((layer, layer.preprocess({"items": ids, "last": last})), (plain, ids)):
            net = Net(embedding, embedding is layer)
            net.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
            losses.append([float(net.train_on_batch(inputs, label)) for _ in range(3)])
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
        found = keras.ops.convert_to_numpy(layer.get_embedding_tables()["t"])
        np.testing.assert_allclose(found, keras.ops.convert_to_numpy(plain.embeddings), atol=1e-5)
        self.assertEqual(np.abs(found - rows).max(1).nonzero()[0].tolist(), [1, 2, 3])
        again = emberd.keras.DistributedEmbedding.from_config({**layer.get_config(), "client": self.client})
        self.assertTrue(again._held.features["items"].mask_zero)
        for shapes in (((8,), (8, 4)), ((8, 3, 2), (8, 3, 4))):
            with self.assertRaisesRegex(ValueError, "mask_zero: True is not allowed for input_shape"):
                self.make(emberd.keras.FeatureConfig("t", self.table(), *shapes, mask_zero=True))
        for refused, weights in ((ids[..., None], None), (ids, {"items": np.ones((8, 3), np.float32), "last": None})):
            with self.assertRaisesRegex(ValueError, "not allowed with mask_zero, which takes one id for each position, without weights"):
                layer.preprocess({"items": refused, "last": last}, weights)

    def test_the_largest_of_the_rows_of_a_sample(self):
        """As Keras with a table of its own: fixed and ragged ids, ids of a sequence's positions, one id a sample, and ids that are sent ahead. Of equal rows
        the first gets the gradient."""
        random = np.random.default_rng(5)
        rows = random.normal(size=(32, 4)).astype(np.float32)
        rows[5:8] = rows[4]
        fixed = random.integers(8, 32, (8, 3)).astype(np.int32)
        fixed[0], fixed[1] = (7, 4, 5), (9, 9, 9)
        lists = [[1, 2, 3, 1, 9], [], [4], [6, 4], [7], [], [8, 8], [31, 30, 29]]
        of_positions = random.integers(0, 32, (8, 2, 3)).astype(np.int32)
        cases = {"fixed": (fixed, (8, 3), (8, 4)), "ragged": (lists, (8, None), (8, 4)), "none": (np.where(fixed > 20, -1, fixed), (8, 3), (8, 4)),
                 "one": (fixed[:, 0], (8,), (8, 4)), "positions": (of_positions, (8, 2, 3), (8, 2, 4)), "ahead": (fixed, (8, 3), (8, 4))}

        class Product(keras.losses.Loss):
            def call(self, label, found):
                return keras.ops.sum(found * label)

        for name, (ids, inputs, outputs) in cases.items():
            with self.subTest(name):
                layer = self.make(emberd.keras.FeatureConfig("t", self.table(combiner="max"), inputs, outputs), model=f"largest_{name}")
                layer.set_embedding_tables({"t": rows})
                net, scale = self.net(layer), random.normal(size=outputs).astype(np.float32)
                net.compile(optimizer=keras.optimizers.SGD(0.1), loss=Product(reduction="sum"))
                bags = [bag for bag in np.reshape(ids, (-1, 3))] if name in ("fixed", "none", "positions", "ahead") else lists if name == "ragged" else ids[:, None]
                expected, gradient = np.zeros((len(bags), 4), np.float32), np.zeros_like(rows)
                for bag, one, weight in zip(bags, expected, scale.reshape(-1, 4)):
                    kept = np.array([row for row in bag if row >= 0], np.int64)
                    if len(kept):
                        best = kept[rows[kept].argmax(0)]  # the first of equal ones
                        one[:] = rows[best, np.arange(4)]
                        np.add.at(gradient, (best, np.arange(4)), weight)
                np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer(layer.preprocess(ids))), expected.reshape(outputs))
                if name == "ahead":
                    (prepared, _), = layer.prefetch([(ids, None)])
                else:
                    prepared = layer.preprocess(ids)
                loss = float(net.train_on_batch(prepared, scale))
                self.assertAlmostEqual(loss, float((expected.reshape(outputs) * scale).sum()), places=3)
                found = keras.ops.convert_to_numpy(layer.get_embedding_tables()["t"])
                np.testing.assert_allclose(found, rows - 0.5 * gradient, atol=1e-5)
                self.assertEqual(layer.next_step, 1)
        with self.assertRaisesRegex(ValueError, "weights: not allowed with combiner 'max'"):
            layer.preprocess(fixed, np.ones((8, 3), np.float32))
        again = emberd.keras.DistributedEmbedding.from_config({**layer.get_config(), "client": self.client})
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(again(again.preprocess(fixed))), keras.ops.convert_to_numpy(layer(layer.preprocess(fixed))))

    def test_batches_of_the_largest_make_a_step_together(self):
        made = []
        batches = [[[1, 2, 3], [4], [], [5, 6]], [[1], [7], [8], [9]], [[3, 2], [], [1, 4], [4]]]
        label = np.arange(16, dtype=np.float32).reshape(4, 4)

        class Product(keras.losses.Loss):
            def call(self, label, found):
                return keras.ops.sum(found * label)

        for calls in (3, None):
            table = self.table(initializer=emberd.Normal(0, 1), optimizer=keras.optimizers.SGD(0.3, gradient_accumulation_steps=calls), combiner="max")
            layer = self.make(emberd.keras.FeatureConfig("t", table, (4, None), (4, 4)), model=f"together_{calls}")
            net = self.net(layer)
            net.compile(optimizer=keras.optimizers.SGD(0.1), loss=Product(reduction="sum"), loss_weights=None if calls else 1 / 3)
            for inputs, labels in zip(batches, [label] * 3) if calls else [(sum(batches, []), np.concatenate([label] * 3))]:
                net.train_on_batch(layer.preprocess(inputs), labels)
            layer.finish()
            made.append(layer.tables.table("t"))
        np.testing.assert_allclose(made[0], made[1], atol=1e-5)

    def test_callbacks_set_the_rates_of_tables(self):
        layer = self.make({name: emberd.keras.FeatureConfig(name, self.table(name, optimizer=optimizer), (8,), (8, 4)) for name, optimizer in (
            ("a", keras.optimizers.SGD(0.5)), ("b", keras.optimizers.SGD(0.25)), ("c", keras.optimizers.Adam(0.5, epsilon=1e-20)),
            ("d", keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5))))})
        self.assertEqual(layer.learning_rates, {"a": 0.5, "b": 0.25, "c": 0.5})

        class Sum(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = layer

            def call(self, inputs, training=False):
                return sum(self.layer(inputs, training=training).values())

        net = Sum()
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=lambda _, found: keras.ops.sum(found, 1))
        ids = {name: np.array([1] + [0] * 7, np.int32) for name in "abcd"}
        halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)
        net.fit(ids, np.zeros(8, np.float32), batch_size=8, epochs=3, verbose=0, callbacks=[emberd.keras.on_tables(halves, layer, ["a", "b"])])
        self.assertEqual(layer.learning_rates, {"a": 0.125, "b": 0.0625, "c": 0.5})
        self.assertAlmostEqual(float(net.optimizer.learning_rate), 0.1)
        # Of the mean of 8 samples: 1/8 each; Adam moves by its rate in each step.
        rows = {name: layer.tables.read_rows(name, [1])[0, 0] for name in "abcd"}
        np.testing.assert_allclose([rows["a"], rows["b"], rows["c"], rows["d"]], [-0.875 / 8, -0.4375 / 8, -1.5, -1.75 / 8], rtol=1e-5)
        plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, mode="max", min_delta=0)  # the loss only falls
        net.fit(ids, np.zeros(8, np.float32), batch_size=8, epochs=3, verbose=0, callbacks=[emberd.keras.on_tables(plateau, layer, ["c"])])
        self.assertAlmostEqual(layer.learning_rates["c"], 0.005)
        self.assertAlmostEqual(layer.tables.read_rows("c", [1])[0, 0], -1.5 - 0.5 - 0.5 - 0.05, places=4)
        layer.set_learning_rates({"a": 0})
        before = layer.tables.read_rows("a", [1])
        net.train_on_batch(ids, np.zeros(8, np.float32))
        layer.finish()
        np.testing.assert_array_equal(layer.tables.read_rows("a", [1]), before)
        for call in (lambda: layer.set_learning_rates({"d": 0.5}), lambda: emberd.keras.on_tables(plateau, layer, ["d"]).set_model(net)):
            with self.assertRaisesRegex(ValueError, "with a number above 0 as their rate: a, b, c"):
                call()
        with self.assertRaisesRegex(ValueError, "rates: 'a': -1.0 is not allowed; it must be >= 0"):
            layer.set_learning_rates({"a": -1})

    def test_rates_of_tables_are_saved_with_a_model(self):
        inputs = {name: keras.Input((), dtype="int32", name=name, batch_size=8) for name in "ab"}
        layer = self.make({name: emberd.keras.FeatureConfig(name, self.table(name, optimizer=keras.optimizers.SGD(rate)), (8,), (8, 4))
                           for name, rate in (("a", 0.5), ("b", 0.25))}, name="saved")
        net = keras.Model(inputs, keras.ops.sum(sum(layer(inputs).values()), 1))
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=lambda _, found: keras.ops.sum(found))
        plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, mode="max", min_delta=1e9)
        ids = {name: np.array([1] + [0] * 7, np.int32) for name in "ab"}
        net.fit(ids, np.zeros(8, np.float32), batch_size=8, epochs=2, verbose=0, callbacks=[emberd.keras.on_tables(plateau, layer)])
        layer.finish()
        self.assertEqual(layer.learning_rates, {"a": 0.25, "b": 0.125})
        with tempfile.TemporaryDirectory() as folder:
            net.save(os.path.join(folder, "net.keras"))
            net.save_weights(os.path.join(folder, "net.weights.h5"))
            loaded = keras.saving.load_model(os.path.join(folder, "net.keras"), compile=False)
            again = loaded.get_layer("saved")
            self.addCleanup(again.finish)
            self.assertEqual(again.learning_rates, {"a": 0.25, "b": 0.125})
            before = layer.tables.read_rows("a", [1])[0, 0]
            loaded.compile(optimizer=keras.optimizers.SGD(0.1), loss=lambda _, found: keras.ops.sum(found))
            loaded.train_on_batch(ids, np.zeros(8, np.float32))
            again.finish()
            self.assertEqual(layer.tables.read_rows("a", [1])[0, 0], before - 0.25)
            again.set_learning_rates({"a": 0.5, "b": 1.0})
            loaded.load_weights(os.path.join(folder, "net.weights.h5"))
            self.assertEqual(again.learning_rates, {"a": 0.25, "b": 0.125})
            store = {"0": np.zeros((), np.float32)}  # as it was saved before
            again.load_own_variables(store)
            self.assertEqual(again.learning_rates, {"a": 0.25, "b": 0.125})
            with self.assertRaisesRegex(ValueError, "3 learning rates of tables were saved; it has 2: a, b"):
                again.load_own_variables({**store, "learning_rates": np.ones(3)})

    def test_batches_make_a_step_together(self):
        random = np.random.default_rng(4)
        batches = [(random.integers(0, 32, (8, 2)).astype(np.int32), random.normal(size=(8, 4)).astype(np.float32)) for _ in range(7)]

        class Product(keras.losses.Loss):
            def call(self, label, found):
                return keras.ops.sum(found * label)

        made = {}
        for name, calls, size in (("parts", 3, 8), ("whole", None, 24)):
            optimizer = keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=calls)
            layer = emberd.keras.DistributedEmbedding(
                emberd.keras.FeatureConfig("t", self.table(initializer=emberd.RowId(), optimizer=optimizer), (size, 2), (size, 4)),
                client=self.client, model=name)
            net = self.net(layer)
            net.compile(optimizer=keras.optimizers.SGD(0.1), loss=Product(reduction="mean" if calls is None else "sum"))
            made[name] = layer, net
        parts, whole = made["parts"], made["whole"]
        whole[1].compile(optimizer=keras.optimizers.SGD(0.1), loss=Product(reduction="sum"), loss_weights=1 / 3)
        for step in (0, 3):
            three = batches[step:step + 3]
            for ids, label in three:
                before = parts[0].tables.table("t")
                parts[1].train_on_batch(ids, label)
            whole[1].train_on_batch(np.concatenate([ids for ids, _ in three]), np.concatenate([label for _, label in three]))
            parts[0]._wait()
            self.assertGreater(np.abs(parts[0].tables.table("t") - before).max(), 0.01)
        self.assertEqual([layer.next_step for layer, _ in (parts, whole)], [2, 2])
        np.testing.assert_allclose(parts[0].tables.table("t"), whole[0].tables.table("t"), atol=1e-5)
        parts[1].train_on_batch(*batches[6])
        with self.assertWarnsRegex(UserWarning, "the gradients of 1 calls, of the 3 that make a step, are dropped"):
            parts[0].finish()
        whole[0].finish()
        with self.assertRaisesRegex(ValueError, "prefetch: not allowed with gradient_accumulation_steps"):
            parts[0].prefetch(batches)
        tables = [self.table(name, optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=calls)) for name, calls in (("a", None), ("b", 2))]
        with self.assertRaisesRegex(ValueError, r"gradient_accumulation_steps: {'a': 1, 'b': 2} are not allowed"):
            self.make({one.name: emberd.keras.FeatureConfig(one.name, one, (8,), (8, 4)) for one in tables}).build()

    def test_ids_that_a_backend_would_cut_are_refused(self):
        layer = self.make()
        for ids in (np.full((8, 2), 2**32 + 5), [[2**32 + 5]] + [[]] * 7):
            if keras.backend.backend() == "jax":
                with self.assertRaisesRegex(IndexError, r"'t': 4294967301(.0)? does not fit in int32.*x64.*prefetch"):
                    layer.preprocess(ids)
            with self.assertRaisesRegex(IndexError, "4294967301"):
                for prepared, _ in layer.prefetch([ids], depth=1):  # as it is
                    layer._held.trainer.receive(int(prepared["preprocessed_inputs_per_placement"]["step"][0]))

    def test_evaluation_and_a_call_without_a_gradient_are_no_step(self):
        layer = self.make()
        ids = np.ones((8, 2), np.int32)
        layer(ids)
        layer(ids, training=False)
        self.assertEqual(layer.next_step, 0)
        self.train(layer, ids, 3)
        self.assertEqual(layer.next_step, 3)

    def test_an_update_that_is_refused_leaves_a_model_that_goes_on(self):
        class Product(keras.losses.Loss):
            def call(self, label, found):
                return keras.ops.sum(found * label)

        rates = [0.5] * 4 + [-1.0] + [0.5] * 4

        class Schedule(keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step):
                return keras.ops.take(keras.ops.array(rates, "float32"), step)

        layer = self.make(table=self.table(optimizer=keras.optimizers.SGD(Schedule())))
        net = self.net(layer)
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=Product(reduction="sum"))
        ids, refused = [[1]] + [[]] * 7, []
        for step in range(7):
            try:
                net.train_on_batch(layer.preprocess(ids), np.full((8, 4), np.nan if step == 2 else 1, np.float32))
                layer.next_step
            except Exception as error:  # each backend has its own
                refused.append((step, str(error)))
        self.assertEqual([step for step, _ in refused], [2, 4])
        self.assertIn("nan", refused[0][1])
        self.assertIn("learning_rate", refused[1][1])
        layer.finish()
        self.assertEqual(layer.next_step, 7)
        self.assertEqual(layer.tables.read_rows("t", [1, 2])[:, 0].tolist(), [-2.5, 0])

    def test_failures_keep_their_type_where_one_asks(self):
        layer = self.make()
        net, inputs = self.net(layer), np.full((8, 2), 32, np.int32)
        with self.assertRaisesRegex(IndexError, "feature 't': .* is 32") as raised, layer.typed_errors():
            net.train_on_batch(inputs, np.zeros((8, 4), np.float32))
        self.assertIsInstance(raised.exception, emberd.OutOfRange)
        with layer.typed_errors():
            net.train_on_batch(inputs - 1, np.zeros((8, 4), np.float32))
        self.assertEqual(layer.tables.read_rows("t", [31])[0, 0], -0.5 * 16)

    def test_a_model_that_calls_the_layer_twice_says_so(self):
        layer = self.make()

        class Twice(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = layer

            def call(self, inputs, training=False):
                return self.layer(inputs, training=training) + self.layer(inputs, training=training)

        net = Twice()
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=self.net(layer).loss)
        with self.assertRaisesRegex(Exception, "A step has one lookup, of all features"):
            net.train_on_batch(np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32))
            layer.next_step

    def test_ids_that_are_sent_ahead_change_nothing(self):
        random, label = np.random.default_rng(3), np.zeros((8, 4), np.float32)
        batches = [(random.integers(0, 32, (8, 2)).astype(np.int32), label) for _ in range(7)]
        learned = {}
        for kind in ("plain", "ahead", "far ahead", "fit"):
            table = self.table(initializer=emberd.Constant(0.25), optimizer=keras.optimizers.SGD(0.01))
            layer = emberd.keras.DistributedEmbedding(emberd.keras.FeatureConfig("t", table, (8, 2), (8, 4)), client=self.client,
                                                      model=kind.replace(" ", "_"))
            self.addCleanup(layer.finish)
            net = self.net(layer, power=2)
            if kind == "plain":
                for ids, _ in batches:
                    net.train_on_batch(layer.preprocess(ids), label)
            elif kind == "fit":
                net.fit(((prepared, label) for prepared, (_, label) in layer.prefetch(batches)), verbose=0)
            else:
                for prepared, (_, label) in layer.prefetch(batches, depth=2 if kind == "ahead" else 4):
                    net.train_on_batch(prepared, label)
            self.assertEqual(layer.next_step, 7)
            learned[kind] = keras.ops.convert_to_numpy(layer.get_embedding_tables()["t"]).tolist()
            net.train_on_batch(layer.preprocess(batches[0][0]), label)  # and on it goes without
            for prepared, _ in layer.prefetch(batches):
                net.train_on_batch(prepared, label)
                break  # and so does it where the loop is left
            net.train_on_batch(layer.preprocess(batches[0][0]), label)
            self.assertEqual(layer.next_step, 10)
        self.assertEqual([kind for kind in learned if learned[kind] != learned["plain"]], [])
        with self.assertRaisesRegex(ValueError, r"depth: 5 is not allowed; it must be in \[1, 4\]"):
            layer.prefetch(batches, depth=5)

    def test_a_loop_that_sends_ahead_is_left_before_a_step_is_made(self):
        layer, label, kept = self.make(), np.zeros((8, 4), np.float32), []
        net = self.net(layer)
        for _ in range(2):
            kept.append(layer.prefetch([(np.ones((8, 2), np.int32), label)] * 4))
            net.train_on_batch(next(kept[-1])[0], label)
            next(kept[-1])
        for prepared, (_, label) in layer.prefetch([(np.ones((8, 2), np.int32), label)] * 4):
            net.train_on_batch(prepared, label)
        self.assertEqual(layer.next_step, 6)

    def test_tables_are_set_and_read(self):
        layer = self.make(table=self.table(initializer=emberd.RowId()))
        table = keras.ops.convert_to_numpy(layer.get_embedding_tables()["t"])
        self.assertEqual(table[:, 1].tolist(), list(range(32)))
        layer.set_embedding_tables({"t": table * 2})
        found = keras.ops.convert_to_numpy(layer(np.full((8, 2), 3, np.int32)))
        self.assertEqual(found.tolist(), [[12] * 4] * 8)
        with self.assertRaisesRegex(ValueError, "'u' is not a table of this layer; they are t"):
            layer.set_embedding_tables({"t": table, "u": table})
        with self.assertRaisesRegex(ValueError, r"\(2, 4\) is not allowed; it must be \(32, 4\)"):
            layer.set_embedding_tables({"t": table[:2]})
        self.assertEqual(layer.tables.read_rows("t", [3])[0, 0], 6)
        self.assertTrue(0.5 < np.abs(self.make(table=self.table(initializer=None), model="drawn").tables.table("t")).max() <= 1)  # truncated, of 1/sqrt(4)

    def test_optimizers_may_have_names_where_fit_builds_the_layer(self):
        layer = self.make(table=self.table(optimizer="sgd"))
        self.net(layer).fit(np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32), batch_size=8, verbose=0)
        self.assertAlmostEqual(layer.tables.read_rows("t", [1])[0, 0], -16 * 0.01, places=6)

    def test_rates_are_those_of_when_the_layer_is_built(self):
        ids, label = np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32)
        for kind, by_fit in ((keras.optimizers.SGD, False), (keras.optimizers.SGD, True), (keras.optimizers.Adam, True)):
            optimizer = kind(0.5)
            layer = self.make(table=self.table(optimizer=optimizer), model=f"built_{kind.__name__}_{by_fit}")
            optimizer.learning_rate = 0.125
            net = self.net(layer)
            if not by_fit:
                layer.build()
                self.assertEqual(layer.learning_rates, {"t": 0.125})
            net.fit(ids, label, batch_size=8, verbose=0)
            layer.finish()
            self.assertEqual(layer.learning_rates, {"t": 0.125})
            np.testing.assert_allclose(layer.tables.read_rows("t", [1])[0], -0.125 * (16 if kind is keras.optimizers.SGD else 1), rtol=1e-5)

    def test_large_tables_are_made_stretch_by_stretch(self):
        """The same rows as one call makes them, where they depend on their place alone; where they are drawn, no row twice, and of the same spread."""
        shapes = []

        def ramp(offset, shape):
            shapes.append(shape)
            return np.arange(offset * 4, (offset + shape[0]) * 4, dtype=np.float32).reshape(shape)

        class Ramp(keras.initializers.Initializer):
            def __call__(self, shape, dtype=None):
                shapes.append(tuple(shape))
                return keras.ops.convert_to_tensor(ramp(0, tuple(shape)), dtype=dtype)

        drawn = [keras.initializers.RandomNormal(0.0, 0.5, seed=3), keras.initializers.RandomUniform(-0.5 * 3**0.5, 0.5 * 3**0.5, seed=3),
                 keras.initializers.TruncatedNormal(0.0, 0.5 / 0.8796, seed=3), keras.initializers.VarianceScaling(1.0, "fan_out", seed=3)]
        with unittest.mock.patch.multiple("emberd._filling", WHOLE_BYTES=0), unittest.mock.patch("emberd._loading.STRETCH_BYTES", 10 * 16):
            for number, initializer in enumerate((ramp, Ramp(), keras.initializers.Constant(0.75), *drawn)):
                table = self.table(initializer=initializer, rows=64)
                found = keras.ops.convert_to_numpy(self.make(table=table, model=f"stretches_{number}").get_embedding_tables()["t"])
                if initializer in drawn:
                    self.assertEqual(len({tuple(row) for row in found}), 64)
                    self.assertLess(abs(found.std() - 0.5), 0.08)
                else:
                    np.testing.assert_array_equal(found, np.full((64, 4), 0.75) if number == 2 else ramp(0, (64, 4)))
        # Of Keras's own nobody knows what a part would be: it is called once. The last one is this test's.
        self.assertEqual(shapes[:9], [(10, 4)] * 6 + [(4, 4), (64, 4), (64, 4)])

    def test_optimizers_are_those_of_keras(self):
        for name, optimizer, tolerance in (
                ("adam", keras.optimizers.Adam(0.1, beta_1=0.8, epsilon=1e-3), 5e-6),  # Keras rounds 1 - beta_2^step
                ("adagrad", keras.optimizers.Adagrad(0.1), 1e-6), ("adagrad_from_zero", keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.0), 1e-6),
                ("adagrad_epsilon", keras.optimizers.Adagrad(0.1, epsilon=0.5), 1e-6),
                ("ftrl", keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.01), 1e-6),
                ("schedule", keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)), 5e-6),
                ("sgd", keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)), 1e-6)):
            with self.subTest(name):
                table = self.table(name, optimizer=optimizer, initializer=keras.initializers.Constant(0.25))
                layer = emberd.keras.DistributedEmbedding(emberd.keras.FeatureConfig("f", table, (8,), (8, 4)),
                                                          client=self.client, model=f"optimizer_{name}")
                self.addCleanup(layer.finish)
                self.train(layer, np.arange(8, dtype=np.int32), 4)
                expected = keras.Variable(np.full((8, 4), 0.25, np.float32))
                plain = type(optimizer).from_config(optimizer.get_config())
                plain.build([expected])
                for _ in range(4):
                    plain.apply([keras.ops.ones((8, 4))], [expected])
                rows = keras.ops.convert_to_numpy(layer.get_embedding_tables()[name])
                np.testing.assert_allclose(rows[:8], keras.ops.convert_to_numpy(expected.value), atol=tolerance)
                self.assertEqual(rows[8, 0], 0.25)

    def test_what_is_refused(self):
        for options, text in (({"optimizer": keras.optimizers.SGD(0.1, momentum=0.9)}, "momentum: 0.9 is not allowed"),
                              ({"optimizer": keras.optimizers.Adam(clipnorm=1.0)}, "clipnorm: 1.0 is not allowed"),
                              ({"optimizer": keras.optimizers.SGD(lambda: 0.1)}, "table 't': optimizer: learning_rate: the function .* is not allowed; it must be a number or a"),
                              ({"optimizer": keras.optimizers.Lion()}, "Lion is not allowed; it must be SGD, Adagrad, Adam or Ftrl"),
                              ({"placement": "gpu"}, "table 't': placement: 'gpu' is not allowed; it must be one of auto, default_device, sparsecore")):
            with self.assertRaisesRegex(ValueError, text):
                self.make(table=self.table(**options)).build()
        layer = self.make({"a": emberd.keras.FeatureConfig("a", self.table(), (8,), (8, 4))})
        with self.assertRaisesRegex(ValueError, "the structure must be that of feature_configs, a dict of a"):
            layer({"b": np.ones(8, np.int32)})

    def test_a_model_that_is_there_is_the_one_that_the_layer_describes(self):
        def declared(name, optimizer):
            return self.client.declare(emberd.ModelConfig(name, [emberd.TableConfig("t", 32, 4, combiner="sum", initializer=emberd.RowId(), optimizer=optimizer)],
                                                          [emberd.FeatureConfig("t", "t")]))

        model, ids, label = declared("is_there", emberd.SGD(0.5)), np.ones((8, 2), np.int32), np.zeros((8, 4), np.float32)
        for options, said in (({"optimizer": "adam"}, "optimizer: 'adam' is not allowed, for that of model 'is_there' is 'sgd'"), ({"rows": 31}, "vocabulary_size: 31"),
                              ({"dim": 8}, "embedding_dim: 8"), ({"name": "u"}, "name: 'u'"), ({"combiner": "mean"}, "combiner: 'mean'")):
            with self.assertRaisesRegex(ValueError, f"feature 't': table: {said}"):
                self.make(table=self.table(**options), model=model).tables
        with self.assertRaisesRegex(ValueError, "there is no feature 'a'; model 'is_there' has t"):
            self.make({"a": emberd.keras.FeatureConfig("a", self.table(), (8,), (8, 4))}, model=model).tables
        for rate in (0.25, emberd.SGD(0.25)):
            before = model.read_rows("t", [1])[0, 0]
            layer = self.make(table=self.table(optimizer=rate if isinstance(rate, emberd.SGD) else keras.optimizers.SGD(rate)), model=model)
            self.net(layer).train_on_batch(ids, label)
            layer.finish()
            self.assertEqual(before - model.read_rows("t", [1])[0, 0], 16 * 0.25)
        there = self.make(table=self.table(optimizer=keras.optimizers.Adagrad(0.1, epsilon=1e-3)), model=declared("with_adagrad", emberd.Adagrad()))
        self.assertEqual(there.tables.tables["t"].optimizer, "adagrad")  # the epsilon is that of the model
        looked_up = self.make(table=self.table(optimizer="adam"), model=declared("only_looked_up", emberd.NoOptimizer()))
        self.assertEqual(float(keras.ops.max(looked_up(ids))), 2)

    def test_its_shapes_are_those_that_stacks_are_planned_for(self):
        def of(samples, **options):
            return self.make({name: emberd.keras.FeatureConfig(name, self.table(name), (samples,), (samples, 4)) for name in "ab"}, **options)

        small, large, again = of(8), of(1 << 20, model="large"), of(8, model="large")
        for layer, stacks in ((small, 1), (large, 2), (of(None, model="unknown"), 1), (again, 2)):
            layer.preprocess({name: np.zeros(8, np.int32) for name in "ab"})
            self.assertEqual(len(layer.tables.description["stacks"]), stacks)

    def test_its_config_makes_another(self):
        shared = self.table("shared", optimizer="adagrad", initializer=emberd.Normal(0.0, 0.1))
        layer = self.make({"a": emberd.keras.FeatureConfig("a", shared, (8,), (8, 4)),
                           "b": [emberd.keras.FeatureConfig("b", shared, (8, 2), (8, 4))]}, name="made")
        again = emberd.keras.DistributedEmbedding.from_config({**layer.get_config(), "client": self.client})
        self.addCleanup(again.finish)
        ids = {"a": np.arange(8, dtype=np.int32), "b": [np.ones((8, 2), np.int32)]}
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer(ids)["b"][0]),
                                      keras.ops.convert_to_numpy(again(ids)["b"][0]))
        self.assertEqual(list(again.tables.tables), ["shared"])

    def test_a_saved_layer_finds_its_tables_or_is_refused(self):
        with emberd.local(new=True) as cluster, cluster.connect() as client, unittest.mock.patch.dict(os.environ, EMBERD_ADDRESS=""):
            layer = emberd.keras.DistributedEmbedding(emberd.keras.FeatureConfig("t", self.table(), (8, 2), (8, 4)), client=client,
                                                      name="kept")
            self.assertNotIn("cluster", layer.get_config())
            self.train(layer, np.ones((8, 2), np.int32))
            layer.finish()
            config = layer.get_config()
            self.assertEqual((config["model"], config["cluster"]), ("kept", [cluster.address]))
            again = emberd.keras.DistributedEmbedding.from_config(config)
            self.assertEqual(keras.ops.convert_to_numpy(again.get_embedding_tables()["t"])[1, 0], -8)
        with self.assertRaisesRegex(ConnectionError, f"model 'kept' of the cluster at {cluster.address}.*EMBERD_ADDRESS"):
            with unittest.mock.patch.dict(os.environ, EMBERD_ADDRESS=""):
                emberd.keras.DistributedEmbedding.from_config(config)
        with self.assertRaisesRegex(LookupError, f"at {self.cluster.address} they cannot be found"):
            emberd.keras.DistributedEmbedding.from_config(config)

    def test_a_layer_that_was_never_built_declares_nothing_when_it_is_loaded(self):
        kept, trained = {}, self.make()
        self.train(trained, np.ones((8, 2), np.int32))
        trained.save_own_variables(kept)
        layer = self.make(model="never_built")
        with self.assertRaisesRegex(ValueError, "never built"):
            layer.load_own_variables(kept)
        self.assertNotIn("never_built", [one.name for one in self.client.models()])
        layer.build()
        layer.load_own_variables(kept)
        self.assertIn("never_built", [one.name for one in self.client.models()])

    def test_a_checkpoint_is_gone_back_to(self):
        with tempfile.TemporaryDirectory() as folder, emberd.local(data=folder) as cluster, cluster.connect() as client:
            layer = emberd.keras.DistributedEmbedding(emberd.keras.FeatureConfig("t", self.table(), (8, 2), (8, 4)), client=client,
                                                      model="best")
            ids = np.ones((8, 2), np.int32)
            layer.request_checkpoint("best")
            self.train(layer, ids)
            layer.wait_checkpoint("best")
            kept = {}
            layer.save_own_variables(kept)
            self.assertEqual(layer.checkpoints, {"best": ""})
            self.assertEqual({one.name: one.groups["train"] for one in client.checkpoints("best") if not one.automatic}, {"best": 1})
            self.train(layer, ids, 2)
            layer.finish()
            for finish in (True, False):
                layer.finish() if finish else self.train(layer, ids)
                with self.assertWarnsRegex(UserWarning, "weights of step 1 were loaded"):
                    layer.load_own_variables(kept)
                client.restore("best", "best")
                layer.restart(1)
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UserWarning)
                    layer.load_own_variables(kept)
                self.assertEqual((layer.next_step, self.train(layer, ids)[0]), (1, -8 * 4 * 16))
                self.assertEqual(layer.tables.read_rows("t", [1])[0, 0], -16)
            with self.assertRaisesRegex(emberd.RowsLost, "at step 1.*are at step 2"):
                layer.restart(1)
            layer.finish()

    def test_a_layer_that_is_not_trainable_does_not_train(self):
        layer = self.make(table=self.table(initializer=emberd.RowId()))
        ids = np.ones((8, 2), np.int32)
        layer.trainable = False
        self.assertEqual(self.train(layer, ids, 2), [64, 64])
        self.assertEqual(layer.next_step, 0)
        layer.trainable = True
        net = self.net(layer)
        net.trainable = False
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=net.loss)
        net.fit(ids, np.zeros((8, 4), np.float32), batch_size=8, verbose=0)
        self.assertEqual(layer.next_step, 0)
        net.trainable = True
        net.compile(optimizer=keras.optimizers.SGD(0.1), loss=net.loss)
        net.fit(ids, np.zeros((8, 4), np.float32), batch_size=8, verbose=0)
        self.assertEqual(layer.next_step, 1)


if __name__ == "__main__":
    main()
