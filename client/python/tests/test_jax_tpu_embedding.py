"""emberd.compat.jax_tpu_embedding: a script for jax-tpu-embedding runs by changed imports, and computes what NumPy does.

What this would catch: a name or an argument that is missing, initial rows of another key, a combiner, a weight or an optimizer
that is another formula, a lookup that shows the rows after the update, and a step that is made twice.
"""

import os
import sys
import tempfile
import types
import unittest

from cluster import ClusterTest, emberd, main

try:
    import flax
    import jax
    import optax
except ImportError as error:
    print(f"SKIP: {error.name} is not installed")
    sys.exit(77)

import jax.numpy as jnp
import numpy as np
from flax import nnx

jax.config.update("jax_platforms", "cpu")
from emberd.compat import jax_tpu_embedding  # noqa: E402
from emberd.compat.jax_tpu_embedding.sparsecore.lib.flax.nnx import embed  # noqa: E402
from emberd.compat.jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec, table_stacking  # noqa: E402

EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jax_tpu_embedding_example.py")
# Of ten updates at rates up to 0.5, against float64: Adam divides gradients by their size, so that of small ones the rounding
# to float32 is seen.
TOLERANCE = 2e-5


def gains(weights, combiner):
    if combiner == "mean":
        return weights / weights.sum()
    return weights / np.sqrt((weights ** 2).sum()) if combiner == "sqrtn" else weights


class Plain:
    """A table in float64."""

    def __init__(self, rows, combiner, update):
        self.rows, self.combiner, self.update = rows.astype(np.float64), combiner, update
        self.slots = [np.zeros_like(self.rows), np.zeros_like(self.rows)]

    def look_up(self, ids, weights):
        return np.stack([gains(w.astype(np.float64), self.combiner) @ self.rows[i] for i, w in zip(ids, weights)])

    def apply(self, parts, step):
        """parts: ids, weights and gradient of each feature."""
        total, touched = np.zeros_like(self.rows), np.zeros(len(self.rows), bool)
        for ids, weights, gradient in parts:
            for i, w, g in zip(ids, weights, gradient):
                np.add.at(total, i, gains(w.astype(np.float64), self.combiner)[:, None] * g)
                touched[i] = True
        self.update(self, total, touched, step)


def sgd(table, g, touched, step):
    table.rows[touched] -= 0.5 * g[touched]


def adagrad(table, g, touched, step):
    if step == 0:
        table.slots[0] += 0.1
    table.slots[0][touched] += g[touched] ** 2
    table.rows[touched] -= 0.1 * g[touched] / np.sqrt(table.slots[0][touched])


def adam(table, g, touched, step):
    t, rate = step + 1, 0.05 / (step + 1)
    m, v = table.slots
    m[touched] += 0.1 * (g - m)[touched]
    v[touched] += 0.001 * (g ** 2 - v)[touched]
    table.rows[touched] -= (rate * (m / (1 - 0.9 ** t)) / (np.sqrt(v / (1 - 0.999 ** t)) + 1e-8))[touched]


class ExampleTest(ClusterTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        jax_tpu_embedding.use(cls.client, model="example")
        cls.module = types.ModuleType("example")
        with open(EXAMPLE, encoding="utf-8") as file:
            exec(compile(file.read().replace("from jax_tpu_embedding.", "from emberd.compat.jax_tpu_embedding."), EXAMPLE,
                         "exec"), cls.module.__dict__)
        with tempfile.TemporaryDirectory() as folder:
            cls.start, cls.seen, cls.end = cls.module.run(folder)

    def test_it_runs_by_changed_imports_and_computes_what_numpy_does(self):
        module, start, seen, end = self.module, self.start, self.seen, self.end
        tables = {"words": Plain(start["words"].table, "mean", adam), "users": Plain(start["users"].table, "sum", sgd),
                  "items": Plain(start["items"].table, "sqrtn", adagrad)}
        dense = np.ones(module.DIM)
        of_feature = {"title": "words", "text": "words", "user": "users", "item": "items"}
        for step, ((features, weights, label), (loss, activations)) in enumerate(zip(module.batches(), seen)):
            found = {name: tables[of_feature[name]].look_up(features[name], weights[name]) for name in features}
            for name in features:
                np.testing.assert_allclose(activations[name], found[name], atol=1e-6 if step == 0 else TOLERANCE)
            summed = sum(found.values())
            error = summed * dense - label
            self.assertAlmostEqual(loss, np.mean(error ** 2), places=5)
            of_activations = 2 * error * dense / error.size
            for name, table in tables.items():
                table.apply([(features[one], weights[one], of_activations) for one in features if of_feature[one] == name],
                            step)
            dense = dense - 0.1 * (2 * error * summed / error.size).sum(0)
        for name, table in tables.items():
            np.testing.assert_allclose(end[name].table, table.rows, atol=TOLERANCE if name == "words" else 2e-6)
            self.assertGreater(np.abs(end[name].table - start[name].table).max(), 0.01)
        np.testing.assert_allclose(end["items"].slot[0], tables["items"].slots[0], atol=TOLERANCE)
        # The limits of what was seen.
        stack = module.feature_specs["user"].table_spec.stacked_table_spec
        self.assertEqual(stack.max_unique_ids_per_partition <= stack.max_ids_per_partition < 64, True)

    def test_initial_rows_are_those_of_the_keys(self):
        keys = jax.random.split(jax.random.key(13), 12)  # of 4 SparseCores and 3 stacks, the first of which is that of "item"
        values = np.stack([jax.nn.initializers.normal(0.5)(key, (16, 8)) for key in keys[:4]])
        np.testing.assert_array_equal(self.start["items"].table, values.swapaxes(0, 1).reshape(64, 8)[:40, :6])


def specs(rows=32, dim=8, optimizer=None, valency=2, batch=8, names=("t",)):
    return [embedding_spec.FeatureSpec(name, embedding_spec.TableSpec(
        name, rows, dim, jax.nn.initializers.constant(0.25), optimizer or embedding_spec.SGDOptimizerSpec(0.5), "sum"),
        (batch, valency), (batch, dim)) for name in names]


class Case(ClusterTest):
    def setUp(self):
        jax_tpu_embedding.use(self.client, model=self.id().split(".")[-1])
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()), ["x"])
        self.sharding = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec("x", None))

    def make(self, features):
        embedding.prepare_feature_specs_for_training(features, 1, 4)
        return embedding.init_embedding_variables(jax.random.key(0), embedding.get_table_specs(features), self.sharding, 4)

    def inputs(self, features, ids):
        return embedding.preprocess_sparse_dense_matmul_input(ids, None, features, 1, 1, num_sc_per_device=4)


class FunctionsTest(Case):
    def test_evaluating_makes_no_step_and_training_goes_on(self):
        features = specs()
        variables = self.make(features)
        model = jax_tpu_embedding.model_of(variables)
        look_up = jax.jit(lambda inputs, variables: embedding.tpu_sparse_dense_matmul(inputs, variables, features,
                                                                                     global_device_count=1))
        update = jax.jit(lambda gradients, inputs, variables: embedding.tpu_sparse_dense_matmul_grad(
            gradients, inputs, variables, features))
        one, other = (self.inputs(features, [np.full((8, 2), row, np.int32)])[0] for row in (1, 2))
        for _ in range(3):
            self.assertEqual(float(look_up(one, variables)[0][0, 0]), 0.5)
            self.assertEqual(float(look_up(other, variables)[0][0, 0]), 0.5)
        for inputs in (other, one, one):  # without a lookup before, too
            variables = update([np.ones((8, 8), np.float32)], inputs, variables)
        self.assertEqual(float(look_up(one, variables)[0][0, 0]), 0.5 - 2 * 16)
        self.assertEqual(model.read_rows("t", [1, 2, 3])[:, 0].tolist(), [0.25 - 16, 0.25 - 8, 0.25])

    def test_rows_are_clamped(self):
        features = specs()
        variables = self.make(features)
        inputs, _ = self.inputs(features, [np.full((8, 2), 1, np.int32)])
        variables = embedding.tpu_sparse_dense_matmul_grad([np.ones((8, 8), np.float32)], inputs, variables, features,
                                                           embedding_var_limits={"t": (-1.0, None)})
        model = jax_tpu_embedding.model_of(variables)
        self.assertEqual(model.read_rows("t", [1, 2])[:, 0].tolist(), [-1, 0.25])

    def test_adam_without_a_step_is_corrected_as_in_the_first(self):
        features = specs(optimizer=embedding_spec.AdamOptimizerSpec(0.1))
        variables = self.make(features)
        inputs, _ = self.inputs(features, [np.full((8, 2), 1, np.int32)])
        for _ in range(2):
            variables = embedding.tpu_sparse_dense_matmul_grad([np.full((8, 8), 1 / 16, np.float32)], inputs, variables, features)
        # Of gradient 1: m = 0.1, 0.19; v = 0.001, 0.001999.
        expected = 0.25 - 0.1 - 0.1 * (0.19 / 0.1) / np.sqrt(0.001999 / 0.001)
        self.assertAlmostEqual(float(jax_tpu_embedding.model_of(variables).read_rows("t", [1])[0, 0]), expected, places=6)

    def test_statistics_are_those_of_the_documentation(self):
        features = specs(batch=2)
        embedding.prepare_feature_specs_for_training(features, 1, 2)
        ids = np.empty(2, object)
        ids[:] = [np.array([0, 0, 0, 2, 4, 1]), np.array([1, 1, 1, 3, 3, 5, 5, 7, 7, 0])]
        _, stats = embedding.preprocess_sparse_dense_matmul_input([ids], None, features, 1, 1, num_sc_per_device=2)
        # Repeated ids of a sample are merged before they are counted.
        self.assertEqual(stats.max_ids_per_partition["t"].tolist(), [3, 4])
        self.assertEqual(stats.max_unique_ids_per_partition["t"].tolist(), [3, 4])
        self.assertEqual(stats.required_buffer_size_per_sc["t"].tolist(), [16, 16])

    def test_ids_in_coordinates(self):
        features = specs(batch=3)
        variables = self.make(features)
        inputs, _ = embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor(
            [np.array([[0, 0], [0, 1], [2, 0]])], [np.array([5, 6, 7])], [np.array([3, 2])], features, 1, 1)
        found = embedding.tpu_sparse_dense_matmul(inputs, variables, features, global_device_count=1)
        self.assertEqual(np.asarray(found[0])[:, 0].tolist(), [0.5, 0, 0.25])

    def test_stacks_and_their_places(self):
        # The case of upstream's documentation: a (64, 12) and b (120, 10) on 1 device with 4 SparseCores.
        optimizer = embedding_spec.SGDOptimizerSpec()
        features = [embedding_spec.FeatureSpec(name, embedding_spec.TableSpec(name, rows, dim, jax.nn.initializers.zeros,
                                                                              optimizer, "sum"), (16, 1), (16, dim))
                    for name, rows, dim in (("a", 64, 12), ("b", 120, 10), ("c", 8, 8))]
        embedding.auto_stack_tables(features, 1, 4)
        self.assertEqual([one.table_spec.setting_in_stack for one in features],
                         [embedding_spec.TableSettingInStack("a_b", 64, 16, 0, 0),
                          embedding_spec.TableSettingInStack("a_b", 128, 16, 16, 0),
                          embedding_spec.TableSettingInStack("c", 32, 8, 0, 0)])
        self.assertEqual([one.id_transformation for one in features],
                         [embedding_spec.FeatureIdTransformation(0, 0, 0), embedding_spec.FeatureIdTransformation(16, 64, 0),
                          embedding_spec.FeatureIdTransformation(0, 0, 0)])
        variables = self.make(features)
        self.assertEqual(sorted(variables), ["a_b", "c"])
        model = jax_tpu_embedding.model_of(variables)
        self.assertEqual([model.tables[name].stack for name in "abc"], ["a_b", "a_b", "c"])
        model.assign_rows("b", [3], np.arange(10)[None])
        self.assertEqual(table_stacking.unshard_and_unstack_tables(
            {"b": features[1].table_spec}, {"a_b": variables["a_b"].table}, 4)["b"][3].tolist(), list(range(10)))

    def test_what_is_refused(self):
        features = specs()
        with self.assertRaisesRegex(ValueError, "prepare_feature_specs_for_training"):
            embedding.init_embedding_variables(jax.random.key(0), embedding.get_table_specs(features), self.sharding, 4)
        embedding.prepare_feature_specs_for_training(features, 1, 4)
        with self.assertRaisesRegex(ValueError, "structure"):
            self.inputs(features, {"t": np.zeros((8, 2), np.int32)})
        for ids in (np.full((8, 2), 2**32 + 5), [[2**32 + 5]] + [[]] * 7):
            with self.assertRaisesRegex(IndexError, r"4294967301(.0)? does not fit in int32"):
                embedding._compressed(ids, None, features[0])
        with self.assertRaisesRegex(ValueError, "'DIV' is not allowed"):
            embedding.preprocess_sparse_dense_matmul_input([np.zeros((8, 2))], None, features, 1, 1, sharding_strategy="DIV")


class Net(nnx.Module):
    def __init__(self, features, mesh, rngs):
        self.embed = embed.SparseCoreEmbed(features, "x", mesh, rngs)
        self.dense = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, inputs, step=None):
        return self.dense(self.embed(inputs, step)["t"])[:, 0]


class NnxTest(Case):
    def test_the_layer_with_its_optimizer(self):
        features = {"t": specs(valency=1)[0]}
        embedding.prepare_feature_specs_for_training(features, 1, 4)
        net = Net(features, self.mesh, nnx.Rngs(0))
        model = jax_tpu_embedding.model_of(net.embed.embedding_table.get_value())
        optimizer = embed.PartitionedOptimizer(net, optax.sgd(0.1))
        kernel = np.asarray(net.dense.kernel[...])
        data = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec("x"))

        @nnx.jit(in_shardings=(embed.get_named_sharding(net, self.mesh), embed.get_named_sharding(optimizer, self.mesh), data,
                               None), donate_argnames=["net", "optimizer"])
        def train_step(net, optimizer, inputs, step):
            loss, gradients = nnx.value_and_grad(lambda net: jnp.sum(net(inputs, step)))(net)
            optimizer.update(net, gradients)
            return loss

        inputs, _ = self.inputs(features, {"t": np.arange(8, dtype=np.int32)[:, None]})
        loss = train_step(net, optimizer, inputs, jnp.int32(0))
        self.assertAlmostEqual(float(loss), float(8 * 0.25 * kernel.sum()), places=5)
        np.testing.assert_allclose(model.read_rows("t", [7, 8]), [0.25 - 0.5 * kernel[:, 0], np.full(8, 0.25)], atol=1e-6)
        np.testing.assert_allclose(net.dense.kernel[...], kernel - 0.1 * 8 * 0.25, atol=1e-6)
        train_step(net, optimizer, inputs, jnp.int32(1))
        self.assertEqual(float(net.embed.embedding_table.get_value()["t"].table[0, 1]), 2)


if __name__ == "__main__":
    assert flax.__version__ and emberd.__version__
    main()
