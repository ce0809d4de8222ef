"""emberd.compat.tpu_embedding: a model written for tf.tpu.experimental.embedding trains by changed imports, to the numbers of plain TensorFlow.

What this would catch: an optimizer, a combiner or a weight that is another formula, a kind of input whose ids become those of other samples, an
update that is lost or made twice in tf.function, and a default that differs.
"""

import inspect
import math
import os
import sys
import unittest
import unittest.mock

from cluster import ClusterTest, main, parts_of_rows

try:
    import tensorflow as tf
except ImportError as error:
    print(f"SKIP: {error.name} is not installed")
    sys.exit(77)

import keras
import numpy as np
from emberd.compat import tpu_embedding as tpu
from emberd.errors import NotFound

BATCH, STEPS, DIM = 64, 20, 8
REFUSED = (ValueError, IndexError, RuntimeError, tf.errors.OpError)  # eagerly, errors come as they are
USERS, ITEMS, GENRES, WORDS = 50, 80, 18, 60
THERE = tf.tpu.experimental.embedding


class Case(ClusterTest):
    def setUp(self):
        tpu.use(self.client, model=self.id().split(".")[-1])


def batches():
    """As MovieLens has them: a user, an item, its genres, the words of its title with weights, and whether the user liked it."""
    random = np.random.default_rng(5)
    for _ in range(STEPS):
        genres = [np.unique(random.integers(0, GENRES, random.integers(0, 4))) for _ in range(BATCH)]
        words = np.sort(random.integers(0, WORDS, (BATCH, 3)), axis=1)
        yield {"user": tf.constant(random.integers(0, USERS, BATCH), tf.int32),
               "item": tf.constant(random.integers(0, ITEMS, BATCH)),
               "about": (tf.ragged.constant(genres, dtype=tf.int64),
                         tf.sparse.from_dense(np.where(random.random((BATCH, 3)) < 0.8, words + 1, 0)))}, \
            tf.constant(random.uniform(0.5, 2, 3 * BATCH), tf.float32), tf.constant(random.integers(0, 2, (BATCH, 1)), tf.float32)


def table(name, rows, combiner="mean", optimizer=None):
    return tpu.TableConfig(vocabulary_size=rows, dim=DIM, initializer=tf.initializers.RandomNormal(stddev=0.3, seed=rows), combiner=combiner,
                           name=name, optimizer=optimizer)


def features(optimizers=(None, None, None, None)):
    """One output_shape is given, and the others are those of the ids."""
    users, items, genres, words = (table(*one, optimizer=optimizer) for one, optimizer in zip(
        (("users", USERS), ("items", ITEMS), ("genres", GENRES), ("words", WORDS + 1, "sqrtn")), optimizers))
    return {"user": tpu.FeatureConfig(table=users, output_shape=[BATCH]), "item": tpu.FeatureConfig(table=items),
            "about": (tpu.FeatureConfig(table=genres), tpu.FeatureConfig(table=words, output_shape=[BATCH]))}


def net():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4 * DIM,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    return model, keras.optimizers.Adagrad(0.05, epsilon=1e-12)


def loss_of(model, activations, labels):
    logits = model(tf.concat([tf.ensure_shape(one, [BATCH, DIM]) for one in tf.nest.flatten(activations)], 1))
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


def scaled(ids, scales):
    return tf.SparseTensor(ids.indices, scales[:tf.shape(ids.values)[0]], ids.dense_shape)


class Plain:
    """tf.nn.embedding_lookup over variables, and optimizers of Keras and TensorFlow."""

    def __init__(self, configs, optimizers):
        self.configs = configs
        self.tables = {one.table.name: tf.Variable(one.table.initializer([one.table.vocabulary_size, one.table.dim], dtype=tf.float32))
                       for one in tf.nest.flatten(configs)}
        self.optimizers = dict(zip(("users", "items", "genres", "words"), optimizers))
        self.model, self.dense = net()

    def look_up(self, ids, scales):
        genres, words = ids["about"]
        return {"user": tf.nn.embedding_lookup(self.tables["users"], ids["user"]),
                "item": tf.nn.embedding_lookup(self.tables["items"], ids["item"]),
                "about": (tf.math.divide_no_nan(tf.reduce_sum(tf.nn.embedding_lookup(self.tables["genres"], genres), 1),
                                                tf.cast(genres.row_lengths(), tf.float32)[:, None]),
                          tf.nn.safe_embedding_lookup_sparse(self.tables["words"], words, scaled(words, scales), combiner="sqrtn"))}

    def step(self, ids, scales, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(self.model, self.look_up(ids, scales), labels)
        names = list(self.tables)
        gradients = tape.gradient(loss, [self.tables[name] for name in names] + self.model.trainable_variables)
        for name, gradient in zip(names, gradients):
            # Of the rows of the batch, each once.
            rows, places = tf.unique(gradient.indices)
            summed = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
            self.optimizers[name].apply_gradients([(tf.IndexedSlices(summed, rows), self.tables[name])])
        self.dense.apply_gradients(zip(gradients[len(names):], self.model.trainable_variables))
        return loss


def optimizers():
    """Of each table: as it is declared, and as there."""
    return ([tpu.SGD(2.0), tpu.Adagrad(0.1), tpu.FTRL(0.1, l1_regularization_strength=0.001, l2_regularization_strength=0.01), None],
            [keras.optimizers.SGD(2.0), keras.optimizers.Adagrad(0.1, epsilon=1e-12),
             tf.compat.v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.001, l2_regularization_strength=0.01),
             keras.optimizers.SGD(2.0)])


class MovieLensTest(Case):
    def train(self, embedding, step):
        plain = Plain(features(), optimizers()[1])
        seen = []
        for ids, scales, labels in batches():
            seen.append(float(step(ids, scales, labels)))
            self.assertAlmostEqual(seen[-1], float(plain.step(ids, scales, labels)), delta=1e-6)
        for name, variable in plain.tables.items():
            there = variable.numpy()
            np.testing.assert_allclose(self.table(embedding, name), there, atol=1e-6)
            self.assertGreater(np.abs(there - features_rows(name)).max(), 0.005)  # it has been trained
        np.testing.assert_allclose(np.asarray(self.model.trainable_variables[0]), np.asarray(plain.model.trainable_variables[0]), atol=1e-6)

    def table(self, embedding, name):
        tables = embedding.embedding_tables
        return next(one for key, one in tables.items() if name in (key, getattr(key, "name", None))).numpy()

    def trainer(self, embedding):
        self.model, dense = net()

        def step(ids, scales, labels):
            weights = {"user": None, "item": None, "about": (None, scaled(ids["about"][1], scales))}
            activations, kept = embedding.embedding_lookup(ids, weights)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(activations)
                loss = loss_of(self.model, activations, labels)
            embedding.apply_gradients(tape.gradient(loss, activations), kept)
            dense.apply_gradients(zip(tape.gradient(loss, self.model.trainable_variables), self.model.trainable_variables))
            return loss

        return step

    def test_in_a_function(self):
        embedding = tpu.TPUEmbeddingV2(features(optimizers()[0]), tpu.SGD(2.0))
        self.train(embedding, tf.function(self.trainer(embedding)))
        slots = embedding.variables["genres"]
        self.assertEqual((list(slots), slots["accumulators"].shape), (["parameters", "accumulators", "linears"], [GENRES, DIM]))

    def test_eagerly(self):
        embedding = tpu.TPUEmbeddingV2(features(optimizers()[0]), tpu.SGD(2.0))
        self.train(embedding, self.trainer(embedding))

    def test_through_the_queue(self):
        embedding = tpu.TPUEmbedding(features(optimizers()[0]), tpu.SGD(2.0))
        embedding.build()
        self.model, dense = net()

        @tf.function
        def enqueue(ids, weights, training):
            embedding.enqueue(ids, weights, training=training)

        @tf.function
        def compute(labels):
            activations = embedding.dequeue()
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(activations)
                loss = loss_of(self.model, activations, labels)
            embedding.apply_gradients(tape.gradient(loss, activations))
            dense.apply_gradients(zip(tape.gradient(loss, self.model.trainable_variables), self.model.trainable_variables))
            return loss

        def step(ids, scales, labels):
            weights = {"user": None, "item": None, "about": (None, scaled(ids["about"][1], scales))}
            enqueue(ids, weights, False)
            seen = embedding.dequeue()  # to evaluate
            enqueue(ids, weights, True)
            loss = compute(labels)
            self.assertAlmostEqual(float(loss_of(self.model, embedding(ids, weights), labels)), float(loss), delta=0.5)
            self.assertEqual(seen["user"].shape, [BATCH, DIM])
            return loss

        self.train(embedding, step)


class PrintedExampleTest(Case):
    """The example of TensorFlow's page about TPUEmbedding in our words: the same calls in its order, with another strategy."""

    def test_steps_in_a_loop_of_the_graph(self):
        strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
        one, two = (tpu.TableConfig(vocabulary_size=rows, dim=4, initializer=tf.initializers.Constant(1.0)) for rows in (40, 50))
        config = {"feature_one": tpu.FeatureConfig(table=one), "feature_two": tpu.FeatureConfig(table=one), "feature_three": tpu.FeatureConfig(table=two)}
        with strategy.scope():
            embedding = tpu.TPUEmbedding(feature_config=config, optimizer=tpu.SGD(0.1))
        batches = tf.data.Dataset.from_tensors(({name: tf.range(8) for name in config}, tf.fill([8, 4], 3.0))).repeat()
        iterator = iter(strategy.experimental_distribute_dataset(batches, options=tf.distribute.InputOptions(experimental_fetch_to_device=False)))

        @tf.function
        def training_step(iterator, steps):
            def tpu_step(features):
                with tf.GradientTape() as tape:
                    activations = embedding.dequeue()
                    tape.watch(activations)
                    loss = tf.reduce_sum((tf.add_n(tf.nest.flatten(activations)) - features) ** 2) / 2
                embedding.apply_gradients(tape.gradient(loss, activations))

            for _ in tf.range(steps):
                embedding_features, features = next(iterator)
                embedding.enqueue(embedding_features, training=True)
                strategy.run(tpu_step, args=(features + 1,))

        @tf.function
        def evaluation_step(iterator, steps):
            total = 0.0
            for _ in tf.range(steps):
                embedding_features, features = next(iterator)
                embedding.enqueue(embedding_features, training=False)
                total += tf.reduce_sum(strategy.run(embedding.dequeue)["feature_three"])
            return total

        training_step(iterator, 3)
        # Each of the two tables gets the gradient 2a + b - 4, the first twice.
        a = b = 1.0
        for _ in range(3):
            error = 2 * a + b - 4
            a, b = a - 0.2 * error, b - 0.1 * error
        tables = embedding.embedding_tables
        for table, expected in ((one, a), (two, b)):
            np.testing.assert_allclose(tables[table].numpy()[[0, 7, 8]], np.tile([[expected], [expected], [1]], 4), atol=1e-6)
        self.assertAlmostEqual(float(evaluation_step(iterator, 2)), 2 * 32 * b, places=3)


def placed(tables, chips, cores):
    """The blocks of the chips, as TensorFlow places row after row. tables: in the order of the stack."""
    shards = chips * cores
    heights = [-(-len(rows) // (8 * shards)) * 8 for rows in tables]
    blocks = np.zeros((shards, sum(heights), 8), np.float32)
    for position, rows in enumerate(tables):
        for row, values in enumerate(rows):
            blocks[(row + position * cores) % shards, sum(heights[:position]) + row // shards, :len(values)] = values
    return blocks.reshape(chips, cores * sum(heights), 8)


class OnChipsTest(Case):
    """Would catch rows, columns or chips in another order than those of TensorFlow's variables, and padding that reaches a table."""

    def setUp(self):
        super().setUp()
        items, users = (tpu.TableConfig(rows, dim, tf.initializers.RandomUniform(seed=rows), name=name)
                        for name, rows, dim in (("items", 2, 5), ("users", 83, 6)))
        self.embedding = tpu.TPUEmbeddingV2({"a": tpu.FeatureConfig(users), "b": tpu.FeatureConfig(items)}, tpu.Adagrad(0.1))
        self.embedding.build()
        self.stack = self.embedding.stacked_variables["items_users"]

    def rows(self, slot="parameters"):
        return [self.embedding.variables[name][slot].numpy() for name in ("items", "users")]

    def test_shards_of_a_stack(self):
        self.assertEqual(list(self.embedding.stacked_variables), ["items_users"])
        self.assertEqual(self.stack["accumulators"].name, "items_users/accumulators")
        for slot, variable in self.stack.items():
            expected = placed(self.rows(slot), 2, 2)
            self.assertEqual(variable.shape, [2 * expected.shape[1], 8])
            np.testing.assert_array_equal(variable.numpy(), np.concatenate(expected))
            for chip, device in enumerate(variable.devices):
                np.testing.assert_array_equal(variable.read_from_device(device), expected[chip])
                for name in ("items", "users"):
                    np.testing.assert_array_equal(self.embedding.variables[name][slot].read_from_device(f"TPU:{chip}"), expected[chip])
        shards = self.embedding.embedding_table_shards
        self.assertEqual([device for device, _ in shards["items_users"]], self.stack["parameters"].devices)
        np.testing.assert_array_equal([rows for _, rows in shards["items_users"]], placed(self.rows(), 2, 2))

    def test_assigning_the_rows_of_a_chip(self):
        random = np.random.default_rng(2)
        for slot, variable in self.stack.items():
            before = placed(self.rows(slot), 2, 2)
            kept = placed([np.ones_like(one) for one in self.rows(slot)], 2, 2)
            value = random.uniform(1, 2, before[1].shape).astype(np.float32)
            value[kept[1] == 0] = np.nan  # padding may be anything
            variable.assign_on_device("TPU:1", tf.constant(value))
            expected = np.stack([before[0], np.where(kept[1] == 0, 0, value)])
            np.testing.assert_array_equal(placed(self.rows(slot), 2, 2), expected)
            np.testing.assert_array_equal(np.stack([variable.read_from_device(one) for one in variable.devices]), expected)
            with parts_of_rows(10, 6):
                variable.assign(variable.numpy()[::-1] + 1)
            np.testing.assert_array_equal(variable.numpy(), np.where(np.concatenate(kept) == 0, 0, np.concatenate(expected)[::-1] + 1))

    def test_what_is_refused_changes_nothing(self):
        table = self.embedding.embedding_tables["users"]
        before, (height, width) = self.stack["parameters"].numpy(), table.read_from_device("TPU:0").shape
        last = np.zeros((height, width), np.float32)
        last[self.stack["parameters"].numpy()[:height, 0].nonzero()[0][-1], 0] = np.inf
        for device, value, message in (
                ("TPU:2", last, r"device: 'TPU:2' is not allowed; it must be one of /job:localhost/replica:0/task:0/device:TPU:0, .*TPU:1"),
                ("CPU:0", last, "device: 'CPU:0'"), ("/task:1/device:TPU:0", last, "device: "), ("TPU", last, "device: "),
                ("TPU:0", last[:-1], rf"value: the shape \[{height - 1}, 8\] is not allowed for 'items_users'; it must be \[{height}, 8\]"),
                ("TPU:0", last, "value: a number that is not finite is not allowed; row 79 of table 'users' has one")):
            with self.assertRaisesRegex(ValueError, message):
                table.assign_on_device(device, value)
        for assign, value in ((table.assign, table.numpy()), (lambda value: table.assign_on_device("TPU:0", value), last)):
            with self.assertRaisesRegex(TypeError, "value: a masked array is not allowed"):
                assign(np.ma.array(value, mask=np.isfinite(value)))
        np.testing.assert_array_equal(self.stack["parameters"].numpy(), before)

    def test_the_arrays_of_a_batch(self):
        items, users = (tpu.TableConfig(rows, 8, name=name, combiner="sum") for name, rows in (("items", 60), ("users", 64)))
        config = {"a": tpu.FeatureConfig(users, output_shape=[8]), "b": (tpu.FeatureConfig(items, output_shape=[8]),)}
        ids = {"a": np.array([0, 8, 16, 24, 1, 1, 2, 63]), "b": [[5, 5, 13]] + [[]] * 5 + [[59], [3, 59]]}
        weights = {"a": None, "b": (tf.ragged.constant([[1.0, 2.0, 0.5]] + [[]] * 5 + [[4.0], [1.5, 0.25]], dtype=tf.float32),)}
        found = tpu.TPUEmbeddingV2.compute_partitioned_csr(
            {"a": tf.constant(ids["a"]), "b": (tf.ragged.constant(ids["b"], dtype=tf.int64),)}, config, 2, 2, tpu.SGD(), weights=weights)
        self.assertEqual(list(found), ["items_users"])
        # The samples are those of a, then those of b, 8 for each SparseCore; users are second in the stack, from row 64 / 4 on, and shifted by 2.
        entries = [(sample, (row + 2) % 4, 16 + row // 4, 1.0) for sample, row in enumerate(ids["a"])]
        entries += [(8, 1, 1, 3.0), (8, 1, 3, 0.5), (14, 3, 14, 4.0), (15, 3, 0, 1.5), (15, 3, 14, 0.25)]
        pointers, cells = [], []
        for core in range(2):
            for owner in range(4):
                cells += sorted((token, sample % 8, gain) for sample, part, token, gain in entries if sample // 8 == core and part == owner)
                pointers.append(len(cells))
                cells += [(2**31 - 1, 2**31 - 1, 2.0**31)] * (-len(cells) % 8)
            pointers += [len(cells)] * 4
        one = found["items_users"]
        self.assertEqual((one.sample_count, one.num_minibatches_per_physical_sparse_core, one.row_pointers.tolist()), (16, 1, pointers))
        self.assertEqual(list(zip(one.sorted_token_ids.tolist(), one.sorted_sample_ids.tolist(), one.sorted_gains.tolist())), cells)
        self.assertEqual([array.dtype for array in one[:4]], [np.int32] * 3 + [np.float32])


def features_rows(name):
    """What a table began with."""
    one = next(one.table for one in tf.nest.flatten(features()) if one.table.name == name)
    return one.initializer([one.vocabulary_size, one.dim], dtype=tf.float32).numpy()


def simple(optimizer=None, combiner="sum", rows=32, initializer=tpu.RowIdInitializer(), **options):
    return tpu.FeatureConfig(tpu.TableConfig(rows, 4, initializer, optimizer, combiner, "t"), **options)


class FormulasTest(Case):
    """Against TensorFlow's own words on its optimizers, as NumPy."""

    def run_steps(self, optimizer, steps=3):
        embedding = tpu.TPUEmbeddingV2(simple(optimizer, initializer=tf.initializers.Constant(1.0)))
        for step in range(steps):
            _, kept = embedding(tf.constant([3, 5]))
            embedding.apply_gradients(tf.constant([[0.5] * 4, [-2.0] * 4]) * (step + 1), kept)
        rows = embedding.embedding_tables["t"].numpy()
        np.testing.assert_array_equal(rows[4], np.ones(4))
        return rows[[3, 5], 0]

    def gradients(self, steps=3):
        return [np.array([0.5, -2.0]) * (step + 1) for step in range(steps)]

    def test_adam_without_bias_correction(self):
        for inside in (True, False):
            tpu.use(self.client, model=f"adam_{inside}")
            w, m, v = np.ones(2), np.zeros(2), np.zeros(2)
            for g in self.gradients():
                m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
                w = w - 0.1 * m / (np.sqrt(v + 0.25) if inside else np.sqrt(v) + 0.5)
            np.testing.assert_allclose(self.run_steps(tpu.Adam(0.1, 0.8, 0.9, 0.5, True, inside)), w, atol=1e-6)

    def test_adagrad_with_momentum_begins_at_zero(self):
        w, a, m = np.ones(2), np.zeros(2), np.zeros(2)
        for g in self.gradients():
            a = a + g * g
            m = 0.5 * m + g * (a + 1e-10) ** -0.5
            w = w - 0.1 * (0.5 * m + g * (a + 1e-10) ** -0.5)
        np.testing.assert_allclose(self.run_steps(tpu.AdagradMomentum(0.1, 0.5, True)), w, atol=1e-6)

    def test_clipping_and_decay(self):
        w = np.ones(2)
        for g in self.gradients():
            w = np.clip(w * (1 - 0.25 * 0.5) - 0.5 * np.clip(g, -1, 1), -0.5, 0.75)
        np.testing.assert_allclose(self.run_steps(tpu.SGD(0.5, clip_weight_min=-0.5, clip_weight_max=0.75, weight_decay_factor=0.25,
                                                          multiply_weight_decay_factor_by_learning_rate=True, clipvalue=1.0)), w, atol=1e-6)

    def test_a_rate_that_is_asked_for_at_each_step(self):
        rate = tf.Variable(1.0)
        for place, given in enumerate((lambda: rate, rate)):
            tpu.use(self.client, model=f"asked_{place}")
            embedding = tpu.TPUEmbeddingV2(simple(), tpu.SGD(given))

            def step():
                _, kept = embedding(tf.constant([3]))
                embedding.apply_gradients(tf.ones([1, 4]), kept)

            for made, call in enumerate((step, tf.function(step)), 1):
                rate.assign(1.0)
                call()
                rate.assign(0.25)
                call()
                self.assertEqual(embedding.embedding_tables["t"].numpy()[3, 0], 3 - made * 1.25)

    def test_tables_with_different_functions_have_rates_of_their_own(self):
        def half():
            return tf.constant(0.5)

        dims = {"a": 8, "b": 5, "c": 8}  # which are equally wide with their padding
        for place, (rates, moves, stacks) in enumerate((((half, 0.01, 0.01), [0.5, 0.01, 0.01], ["a", "b_c"]),  # TensorFlow's default rate
                                                        ((half, lambda: tf.constant(0.25), half), [0.5, 0.25, 0.5], ["a", "b", "c"]),
                                                        ((half, half, half), [0.5, 0.5, 0.5], ["a_b_c"]))):
            tpu.use(self.client, model=f"rates_{place}")
            embedding = tpu.TPUEmbeddingV2({name: tpu.FeatureConfig(tpu.TableConfig(32, dims[name], tf.initializers.Ones(), tpu.SGD(rate), "sum", name))
                                            for name, rate in zip("abc", rates)})
            _, kept = embedding({name: tf.constant([3]) for name in "abc"})
            embedding.apply_gradients({name: tf.ones([1, dim]) for name, dim in dims.items()}, kept)
            self.assertEqual(sorted(one["name"] for one in embedding.model.description["stacks"]), stacks)
            np.testing.assert_allclose([1 - embedding.model.read_rows(name, [3])[0, 0] for name in "abc"], moves, atol=1e-6)

    def test_quantized_rows(self):
        one = tpu.FeatureConfig(tpu.TableConfig(32, 4, tf.initializers.Constant(0.4), name="t", combiner="sum",
                                                quantization_config=tpu.QuantizationConfig(num_buckets=3, lower=0.0, upper=2.0)))
        found, _ = tpu.TPUEmbeddingV2(one, tpu.SGD())(tf.constant([1]))
        self.assertEqual(found.numpy()[0, 0], 0)


class InputsTest(Case):
    def look_up(self, ids, weights=None, embedding=None, **options):
        embedding = embedding or tpu.TPUEmbeddingV2(simple(**options), tpu.SGD(1.0))
        found, _ = embedding(ids, weights)
        self.assertEqual(found.shape[-1], 4)
        return found.numpy()[..., 1].tolist()

    def test_kinds_of_ids(self):
        ragged = tf.ragged.constant([[1, 2], [], [3]])
        sparse = tf.SparseTensor([[0, 0], [0, 5], [2, 1]], [1, 2, 3], [3, 8])
        weights = tf.constant([1.0, 2.0, 4.0])
        self.assertEqual(self.look_up(tf.constant([[[1], [2]], [[3], [4]]])), [[1, 2], [3, 4]])
        self.assertEqual(self.look_up(tf.constant([[1, 2], [3, 4]]), output_shape=[2, 2]), [[1, 2], [3, 4]])
        self.assertEqual(self.look_up(tf.constant([[1, 2], [3, 4]]), output_shape=[4]), [1, 2, 3, 4])
        self.assertEqual(self.look_up(tf.constant([1, 2, 3]), weights), [1, 4, 12])
        for one_for_all in (2.0, [2.0]):
            self.assertEqual(self.look_up(tf.constant([1, 2, 3]), tf.constant(one_for_all)), [2, 4, 6])
        for ids in (ragged, sparse):
            scales = ids.with_values(weights) if isinstance(ids, tf.RaggedTensor) else tf.SparseTensor(ids.indices, weights, ids.dense_shape)
            self.assertEqual(self.look_up(ids), [3, 0, 3])
            self.assertEqual(self.look_up(ids, scales), [5, 0, 12])
        for ids in (tf.concat([ragged, tf.ragged.constant([[]], dtype=tf.int32)], 0), sparse):
            self.assertEqual(self.look_up(ids, output_shape=[2, 2]), [[3, 0], [3, 0]])
        self.assertEqual(self.look_up(ragged, max_sequence_length=2), [[1, 2], [0, 0], [3, 0]])
        self.assertEqual(self.look_up(ragged, max_sequence_length=1), [[1], [0], [3]])
        self.assertEqual(self.look_up(sparse, max_sequence_length=2), [[1, 0], [0, 0], [0, 3]])  # a sparse id has a place

    def test_gradients_of_sequences_and_none(self):
        structure = {"a": simple(max_sequence_length=2), "b": simple(output_shape=[3])}
        structure["b"].table = structure["a"].table
        embedding = tpu.TPUEmbeddingV2(structure, tpu.SGD(1.0))
        found, kept = embedding({"a": tf.ragged.constant([[1, 2], [3]]), "b": tf.constant([5, 5, 6])})
        gradient = tf.reshape(tf.range(1.0, 5), [2, 2, 1]) * tf.ones([2, 2, 4])
        embedding.apply_gradients({"a": gradient, "b": None}, kept)
        self.assertEqual(embedding.embedding_tables["t"].numpy()[:7, 0].tolist(), [0, 0, 0, 0, 4, 5, 6])
        embedding.apply_gradients({"a": None, "b": tf.ones([3, 4])}, kept)  # ids may be used again, in whatever order
        self.assertEqual(embedding.embedding_tables["t"].numpy()[:7, 0].tolist(), [0, 0, 0, 0, 4, 3, 5])

    def test_weights_of_other_places_than_those_of_the_ids_are_refused(self):
        ragged, weights = tf.ragged.constant([[1, 2], [], [3]]), tf.constant([1.0, 2.0, 4.0])
        sparse = tf.SparseTensor([[0, 0], [0, 5], [2, 1]], [1, 2, 3], [3, 8])
        dense = tpu.TPUEmbeddingV2(simple(output_shape=[2, 3]), tpu.SGD(1.0))
        embedding = tpu.TPUEmbeddingV2(simple(), tpu.SGD(1.0))
        for one, ids, good, bad, what in (
                (embedding, ragged, tf.ragged.constant([[1.0, 2.0], [], [4.0]], row_splits_dtype=tf.int32),
                 tf.ragged.constant([[1.0], [2.0], [4.0]]), "row splits"),
                (embedding, ragged, ragged.with_values(weights), tf.ragged.constant([[1.0], [], []]), "row splits"),
                (embedding, sparse, tf.SparseTensor([[0, 0], [0, 5], [2, 1]], weights, [3, 8]),
                 tf.SparseTensor([[0, 0], [0, 5], [1, 1]], weights, [3, 8]), "indices"),
                (embedding, sparse, tf.SparseTensor(sparse.indices, weights, [3, 8]), tf.SparseTensor([[0, 0]], [1.0], [3, 8]), "indices"),
                (dense, tf.ones([2, 3], tf.int32), tf.ones([2, 3]), tf.ones([3, 2]), "shape"),
                (dense, tf.ones([2, 3], tf.int32), tf.ones([2, 3]), tf.ones([6]), "shape")):
            for look_up in (one, tf.function(one), tpu.TPUEmbeddingForServing(one._structure, None)):
                tpu.use(self.client, model=f"{self.id().split('.')[-1]}_{what}_serving".replace(" ", "_"))
                look_up(ids, good)
                with self.subTest(what), self.assertRaisesRegex(REFUSED, f"feature .*feature.*: the {what} of the weights must equal the {what} of the ids"):
                    look_up(ids, bad)

    def test_gradients_of_another_shape_than_that_of_the_activations_are_refused(self):
        embedding = tpu.TPUEmbeddingV2({"a": simple()}, tpu.SGD(1.0))
        queue = tpu.TPUEmbedding({"a": simple()}, tpu.SGD(1.0))
        ids = {"a": tf.constant([1, 2])}

        def through_the_queue(gradient):
            queue.enqueue(ids)
            queue.dequeue()
            queue.apply_gradients({"a": gradient})

        def update(gradient):
            embedding.apply_gradients({"a": gradient}, embedding(ids)[1])

        for shape in ([4, 2], [8], [1, 2, 4], [2, 2, 2], [4, 4]):
            unknown = tf.function(update, input_signature=[tf.TensorSpec(None)])
            some = tf.function(update, input_signature=[tf.TensorSpec([None] * len(shape))])
            for call in (update, tf.function(update), unknown, some, through_the_queue, tf.function(through_the_queue)):
                with self.subTest(shape), self.assertRaisesRegex(REFUSED, "(?s)feature .{1,2}a.* shape .*activations"):
                    call(tf.ones(shape))
        for call in (update, unknown, tf.function(update, input_signature=[tf.TensorSpec([None, None])])):
            call(tf.ones([2, 4]))
        self.assertEqual(embedding.embedding_tables["t"].numpy()[:4, 0].tolist(), [0, -2, -1, 3])
        batches = tf.function(lambda ids, gradient: embedding.apply_gradients({"a": gradient}, embedding({"a": ids})[1]),
                              input_signature=[tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, 4])])
        batches(tf.constant([3]), tf.ones([1, 4]))
        with self.assertRaisesRegex(REFUSED, "feature .{1,2}a.*: the shape of the gradient must be that of the activations"):
            batches(tf.constant([3]), tf.ones([2, 4]))
        self.assertEqual(embedding.embedding_tables["t"].numpy()[:4, 0].tolist(), [0, -2, -1, 2])

    def test_batches_of_other_sizes_go_through_the_queue(self):
        queue = tpu.TPUEmbedding({"a": simple()}, tpu.SGD(1.0))
        enqueue = tf.function(lambda ids: queue.enqueue({"a": ids}, training=False), input_signature=[tf.TensorSpec([None], tf.int64)])

        def mean():  # TensorFlow takes the number of samples for a constant where it knows one
            rows = queue.dequeue()["a"]
            return tf.reduce_sum(rows[:, 0]) / tf.cast(tf.shape(rows)[0], tf.float32)

        queue.enqueue({"a": tf.constant([1, 2, 3, 6])}, training=False)
        queue.enqueue({"a": tf.constant([1, 2])}, training=False)
        self.assertEqual([mean().numpy() for _ in range(2)], [3, 1.5])
        traced = tf.function(mean)
        for ids in ([1, 2, 3, 6], [1, 2, 3, 7]):
            queue.enqueue({"a": tf.constant(ids)}, training=False)
            self.assertEqual(traced().numpy(), sum(ids) / 4)
        queue.enqueue({"a": tf.constant([1, 2])}, training=False)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"\[2,4\] is not compatible with expected shape \[4,4\]"):
            traced()
        traced = tf.function(mean)
        for ids in ([1, 2], [1, 2, 3, 6]):
            enqueue(tf.constant(ids, tf.int64))
            self.assertEqual(traced().numpy(), sum(ids) / len(ids))

    def test_evaluation_begins_no_step(self):
        """One that began would count, and the ranks of a group would have to evaluate the same batches."""
        queue, evaluated, ids = tpu.TPUEmbedding({"a": simple()}, tpu.SGD(1.0)), {"a": tf.constant([5])}, {"a": tf.constant([1, 2])}
        for step in range(2):
            self.assertEqual(queue(evaluated)["a"].numpy()[0, 0], 5)
            queue.enqueue(evaluated, training=False)
            queue.enqueue(ids)
            self.assertEqual(queue.dequeue()["a"].numpy()[0, 0], 5)
            self.assertEqual(queue.dequeue()["a"].numpy()[:, 0].tolist(), [1 - step, 2 - step])
            self.assertEqual(queue(ids)["a"].numpy()[:, 0].tolist(), [1 - step, 2 - step])
            queue.apply_gradients({"a": tf.ones([2, 4])})
            self.assertEqual(queue._built().trainer.next_step, step + 1)

    def test_a_batch_that_could_not_be_dequeued_has_no_update(self):
        for kind in (lambda function: function, tf.function):
            queue = tpu.TPUEmbedding({"a": simple()}, tpu.SGD(1.0))
            queue.enqueue({"a": tf.constant([1, 2])})
            dequeue, before = kind(queue.dequeue), queue.model.table("t")
            dequeue()
            queue.apply_gradients({"a": tf.ones([2, 4])})
            for ids in ([3, 32], [3]):
                queue.enqueue({"a": tf.constant(ids)})
                if len(ids) == 1 and kind is not tf.function:  # of any number of samples
                    dequeue()
                    queue.apply_gradients({"a": tf.zeros([1, 4])})
                else:
                    with self.assertRaisesRegex(REFUSED, "32|not compatible with expected shape"):
                        dequeue()
            for ids in ([4, 4], [5, 6]):
                queue.enqueue({"a": tf.constant(ids)})
                dequeue()  # the first batch is given up
                with self.assertRaisesRegex(REFUSED, "nan"):
                    queue.apply_gradients({"a": tf.fill([2, 4], math.nan)})
            queue.apply_gradients({"a": 2 * tf.ones([2, 4])})  # again, of the second one
            self.assertEqual((before - queue.model.table("t"))[:8, 0].tolist(), [0, 1, 1, 0, 0, 2, 2, 0])

    def test_what_is_refused(self):
        embedding = tpu.TPUEmbeddingV2({"a": simple(output_shape=[3])}, tpu.SGD(1.0))
        with self.assertRaisesRegex(RuntimeError, "nothing to update yet; look up before, or call build"):
            embedding.apply_gradients({"a": None}, {"a": None})
        embedding.build()
        before = embedding.embedding_tables["t"].numpy()
        for ids, weights, error in (
                ({"b": tf.constant([1, 2, 3])}, None, "structure"),
                ({"a": tf.constant([1, 2])}, None, r"feature 'a': the shape \[2\] is not allowed for output_shape \[3\]"),
                ({"a": tf.constant([1.0, 2, 3])}, None, "feature 'a': float32 is not allowed; ids are whole numbers"),
                ({"a": tf.constant([1, 2, 32])}, None, "feature .*a.*32"),
                ({"a": tf.constant([1, 2, 2**32 + 1])}, None, "4294967297"),
                ({"a": tf.SparseTensor([[0, 0], [3, 0]], [1, 2], [4, 1])}, None, "feature 'a': there are more samples than"),
                ({"a": tf.ragged.constant([[1], [2], [3], [4]])}, None, "feature .*a.*: ragged ids must have a sample for each activation of output_shape"),
                ({"a": tf.ragged.constant([[1], [2]])}, None, "feature .*a.*: ragged ids must have a sample for each activation of output_shape"),
                ({"a": tf.ragged.constant([[1], [2], [3], []])}, None, "feature .*a.*: ragged ids must have a sample for each activation of output_shape"),
                ({"a": tf.SparseTensor([[1, 0], [0, 0]], [1, 2], [3, 1])}, None, "feature 'a': samples must be in order"),
                ({"a": tf.ragged.constant([[[1]]])}, None, "feature 'a': the rank 3 is not allowed"),
                ({"a": tf.ragged.constant([[1]])}, {"a": tf.constant([1.0])}, "feature 'a': weights: a .*Tensor is not allowed; it must be a RaggedTensor"),
                ({"a": tf.constant([1, 2, 3])}, {"a": tf.constant([1.0, 2.0])}, "feature 'a': the shape of the weights must equal the shape of the ids")):
            with self.subTest(error), self.assertRaisesRegex(REFUSED, error):
                embedding(ids, weights)
        with self.assertRaisesRegex(tf.errors.OpError, r"feature 'a': id at position 2 is 32; allowed: \[0, 32\)"):
            tf.function(lambda ids: embedding({"a": ids})[0])(tf.constant([1, 2, 32]))
        with self.assertRaisesRegex(IndexError, r"feature 'a': id at position 2 is 32; allowed: \[0, 32\)") as raised, tpu.typed_errors():
            tf.function(lambda ids: embedding({"a": ids})[0])(tf.constant([1, 2, 32]))
        self.assertIsInstance(raised.exception.__cause__, tf.errors.OpError)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "mine"), tpu.typed_errors():  # not of ours, behind one that was caught
            with self.assertRaises(tf.errors.OpError):
                tf.function(lambda ids: embedding({"a": ids})[0])(tf.constant([1, 2, 32]))
            tf.debugging.Assert(False, ["mine"])
        with self.assertRaises(tf.errors.InvalidArgumentError), tpu.typed_errors():  # not of ours
            tf.function(lambda place: tf.gather([1, 2], place))(tf.constant(5))
        _, kept = embedding({"a": tf.constant([1, 2, 3])})
        for gradients, outputs, error in (({"a": tf.ones([2, 4])}, kept, "a"), ({"a": 1.0}, kept, "gradients: a float is not allowed for feature 'a'"),
                                          ({"a": tf.ones([3, 4]) * float("nan")}, kept, "finite|nan|NaN"),
                                          ({"a": tf.ones([3, 4])}, {}, "preserved_outputs: it must be the second output")):
            with self.subTest(error), self.assertRaisesRegex(REFUSED, error):
                embedding.apply_gradients(gradients, outputs)
        np.testing.assert_array_equal(embedding.embedding_tables["t"].numpy(), before)
        queue = tpu.TPUEmbedding({"a": simple()}, tpu.SGD())
        with self.assertRaisesRegex(ValueError, r"feature 'a': the shape \(2, 3\) is not allowed without output_shape"):
            queue.enqueue({"a": tf.constant([[1, 2, 3], [4, 5, 6]])})
        with self.assertRaisesRegex(RuntimeError, "nothing has been enqueued"):
            queue.dequeue()
        queue.enqueue({"a": tf.constant([1])}, training=False)
        queue.dequeue()
        for call, error in ((queue.dequeue, "the queue is empty"), (lambda: queue.apply_gradients({"a": tf.ones([1, 4])}), "nothing was dequeued")):
            with self.assertRaisesRegex(REFUSED, error):
                call()

    def test_devices_that_are_no_tpu_or_another_replica_are_refused(self):
        embedding, queue = (kind({"a": simple()}, tpu.SGD()) for kind in (tpu.TPUEmbeddingV2, tpu.TPUEmbedding))
        ids = {"a": tf.constant([1])}
        for one, device, error in ((embedding, "/device:CPU:0", "device: '/device:CPU:0' is not allowed; it must be a TPU, or None"),
                                   (queue, "/device:GPU:0", "device: '/device:GPU:0' is not allowed; it must be a TPU, or None"),
                                   (queue, "/device:TPU:1", "device: '/device:TPU:1' is not allowed; it must be the first TPU, or None: a process is one replica")):
            with self.assertRaisesRegex(ValueError, error):
                one.enqueue(ids, device=device)
        queue.enqueue(ids, device="/device:TPU:0")
        found, _ = embedding.dequeue(embedding.enqueue(ids, device="/device:TPU:1"))
        self.assertEqual(queue.dequeue()["a"].numpy().tolist(), found["a"].numpy().tolist())
        with self.assertRaisesRegex(REFUSED, "the queue is empty"):  # nothing that was refused is in it
            queue.dequeue()


class ConfigTest(Case):
    def test_arguments_and_defaults_are_those_of_tensorflow(self):
        for name in ("SGD", "Adagrad", "AdagradMomentum", "FTRL", "Adam", "QuantizationConfig", "TableConfig", "FeatureConfig",
                     "SparseCoreEmbeddingConfig", "RowIdInitializer", "TPUEmbedding", "TPUEmbeddingForServing", "TPUEmbeddingV2",
                     "serving_embedding_lookup"):
            here, there = ({one.name: one.default for one in inspect.signature(getattr(package, name)).parameters.values()}
                           for package in (tpu, THERE))
            self.assertEqual(list(here), list(there), name)
            self.assertEqual(here, there, name)
        for name in ("build", "embedding_lookup", "enqueue", "dequeue", "apply_gradients", "compute_sparse_core_stats"):
            for kind in ("TPUEmbedding", "TPUEmbeddingForServing", "TPUEmbeddingV2"):
                if hasattr(getattr(THERE, kind), name):
                    self.assertEqual(list(inspect.signature(getattr(getattr(tpu, kind), name)).parameters),
                                     list(inspect.signature(getattr(getattr(THERE, kind), name)).parameters), f"{kind}.{name}")

    def test_what_is_refused(self):
        table = tpu.TableConfig(8, 4, name="t")
        for make, error in (
                (lambda: tpu.TableConfig(0, 4), "vocabulary_size: 0 is not allowed; it must be an int, at least 1"),
                (lambda: tpu.TableConfig(8, 4.0), "dim: 4.0"), (lambda: tpu.TableConfig(8, 4, "zeros"), "initializer: 'zeros'"),
                (lambda: tpu.TableConfig(8, 4, combiner="max"), "combiner: 'max' is not allowed; it must be mean, sum or sqrtn"),
                (lambda: tpu.TableConfig(8, 4, dtype=tf.int32), "dtype"), (lambda: tpu.FeatureConfig("t"), "table: 't'"),
                (lambda: tpu.FeatureConfig(table, max_sequence_length=-1), "max_sequence_length: -1"),
                (lambda: tpu.FeatureConfig(table, output_shape=[None, 2]), "output_shape: .None, 2. is not allowed"),
                (lambda: tpu.QuantizationConfig(1, 0.0, 1.0), "num_buckets: 1"), (lambda: tpu.QuantizationConfig(2, 1.0, 1.0), "lower: 1.0"),
                (lambda: tpu.Adagrad(initial_accumulator_value=0.0), "Adagrad: initial_accumulator_value: 0.0"),
                (lambda: tpu.Adam(beta_2=1.0), "Adam: beta_2: 1.0 is not allowed; it must be >= 0 and < 1"),
                (lambda: tpu.Adam(lazy_adam=False), "lazy_adam"), (lambda: tpu.AdagradMomentum(exponent=0.0), "exponent"),
                (lambda: tpu.SGD(use_gradient_accumulation=False, clipvalue=1.0), "clipvalue"),
                (lambda: tpu.TPUEmbeddingV2([tpu.FeatureConfig(table), tpu.FeatureConfig(tpu.TableConfig(9, 4, name="t"))]), "'t' is not allowed for two"),
                (lambda: tpu.TPUEmbeddingV2(tpu.FeatureConfig(table), "sgd"), "optimizer: 'sgd'"),
                (lambda: tpu.TPUEmbeddingV2({"a": table}), "it must be a FeatureConfig")):
            with self.subTest(error), self.assertRaisesRegex(ValueError, error):
                make()

    def test_equal_optimizers_and_names(self):
        self.assertEqual(tpu.Adam(0.1), tpu.Adam(0.1))
        self.assertNotEqual(tpu.Adam(0.1), tpu.Adam(0.2))
        tables = [tpu.TableConfig(8, 4), tpu.TableConfig(9, 4)]
        embedding = tpu.TPUEmbeddingV2([tpu.FeatureConfig(tables[one]) for one in (1, 0, 1)], tpu.Adagrad(0.25))
        self.assertEqual({name: one.shape.as_list() for name, one in embedding.embedding_tables.items()}, {"table_0": [9, 4], "table_1": [8, 4]})
        self.assertEqual([(one.name, one.optimizer) for one in tables], [(None, None)] * 2)  # ours, and not changed
        with self.assertRaises(NotFound):
            self.client.model("nobody")

    def test_a_name_that_is_the_path_of_another_feature(self):
        for names in (("y", "y"), ("y", None), ("y", "x"), ("n", "n"), ("n", "y")):
            table = simple().table
            structure = {path: tpu.FeatureConfig(table, name=name) for path, name in zip("xy", names)}
            embedding = tpu.TPUEmbeddingV2(structure, tpu.SGD(1.0))
            self.assertEqual(len(set(embedding.paths.values())), 2)
            tpu.use(self.client, model="_".join(map(str, names)))
            found, kept = embedding({"x": tf.constant([1, 2]), "y": tf.constant([3, 4])})
            self.assertEqual({path: rows.numpy()[:, 0].tolist() for path, rows in found.items()}, {"x": [1, 2], "y": [3, 4]})
            embedding.apply_gradients({"x": tf.ones([2, 4]), "y": 2 * tf.ones([2, 4])}, kept)
            self.assertEqual(embedding.embedding_tables["t"].numpy()[:6, 0].tolist(), [0, 0, 1, 1, 2, 5])

    def test_stacks_are_planned_for_the_batch_of_a_replica(self):
        def of(**options):
            return {name: tpu.FeatureConfig(tpu.TableConfig(32, 4, name=name), **options) for name in "ab"}

        queue = tpu.TPUEmbedding(of(), tpu.SGD(1.0))
        queue.build(per_replica_batch_size=1 << 18)
        for embedding, stacks in ((tpu.TPUEmbeddingV2(of(output_shape=[8]), tpu.SGD(1.0)), 1), (queue, 2),
                                  (tpu.TPUEmbeddingV2(of(output_shape=[1 << 9, 1 << 9]), tpu.SGD(1.0)), 2)):
            embedding.build()
            self.assertEqual(len(embedding.model.description["stacks"]), stacks)

    def test_a_large_table_is_made_stretch_by_stretch(self):
        """By TensorFlow's arguments for a part of a variable, or by (offset, shape): as one call makes it."""
        calls = []

        def ramp(shape, dtype=tf.float32, **part):
            (rows, columns), begin = part.get("partition_shape", shape), part.get("partition_offset", [0, 0])[0]
            calls.append((begin, rows, shape[0]))
            return tf.reshape(tf.range(begin * columns, (begin + rows) * columns, dtype=dtype), [rows, columns])

        def by_offset(offset, shape):
            return ramp([32, 4], partition_shape=shape, partition_offset=[offset, 0])

        with unittest.mock.patch("emberd.compat.tpu_embedding._config.WHOLE_BYTES", 0), unittest.mock.patch("emberd._loading.STRETCH_BYTES", 10 * 16):
            for initializer in (ramp, by_offset):
                tpu.use(self.client, model=initializer.__name__)
                found = tpu.TPUEmbeddingV2(simple(tpu.SGD(0.1), initializer=initializer)).embedding_tables["t"].numpy()
                np.testing.assert_array_equal(found, ramp([32, 4]))
                self.assertEqual(calls, [(0, 10, 32), (10, 10, 32), (20, 10, 32), (30, 2, 32), (0, 32, 32)])
                calls.clear()

    def test_tables_are_assigned_and_converted(self):
        embedding = tpu.TPUEmbeddingV2(simple(rows=3), tpu.Adagrad(0.25))
        embedding.build()
        table = embedding.embedding_tables["t"]
        table.assign(2.0 * tf.convert_to_tensor(table))
        self.assertEqual(table.read_value().numpy()[:, 3].tolist(), [0, 2, 4])
        self.assertEqual(embedding.variables["t"]["accumulators"].numpy().tolist(), np.full((3, 4), np.float32(0.1)).tolist())

    def test_a_table_is_read_in_each_call_of_a_function(self):
        """Would catch: rows of the first trace, which the function would give for ever."""
        embedding = tpu.TPUEmbeddingV2(simple(tpu.SGD(0.5)))
        embedding.build()
        table, stack = embedding.embedding_tables["t"], embedding.stacked_variables["t"]["parameters"]
        for get in (lambda: table.read_value()[3], lambda: tf.gather(table, 3), lambda: tf.reduce_sum(stack.read_value()),
                    lambda: tf.reduce_sum(stack), lambda: sum(tf.reduce_sum(rows) for _, rows in embedding.embedding_table_shards["t"])):
            row = tf.function(get)
            before = row().numpy()
            np.testing.assert_array_equal(before, get())
            _, kept = embedding(tf.constant([3]))
            embedding.apply_gradients(tf.ones([1, 4]), kept)
            np.testing.assert_allclose(row(), before - (0.5 if before.ndim else 4 * 0.5), atol=1e-4)

    def test_without_an_optimizer_rows_are_looked_up_alone(self):
        embedding = tpu.TPUEmbeddingV2(simple())
        found, kept = embedding(tf.constant([3]))
        self.assertEqual(found.numpy().tolist(), [[3] * 4])
        self.assertEqual(list(embedding.variables["t"]), ["parameters"])


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    unittest.util._MAX_LENGTH = 400
    main()
