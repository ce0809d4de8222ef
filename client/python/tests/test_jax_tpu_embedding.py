"""emberd.compat.jax_tpu_embedding: a script for jax-tpu-embedding runs by changed imports, and computes what NumPy does.

What this would catch: a name or an argument that is missing or elsewhere than in jax-tpu-embedding, initial rows of another key, a combiner,
a weight or an optimizer that is another formula, a lookup that shows the rows after the update, a step that is made twice, and stacks,
limits or sizes that are not those of jax-tpu-embedding.
"""

import functools
import glob
import importlib
import json
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
import jax_signatures
import numpy as np
from flax import nnx

jax.config.update("jax_platforms", "cpu")
from emberd.compat import jax_tpu_embedding  # noqa: E402
from emberd.compat.jax_tpu_embedding import _tables  # noqa: E402
from emberd.compat.jax_tpu_embedding.sparsecore.lib.flax.nnx import embed  # noqa: E402
from emberd.compat.jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_proto_utils, embedding_spec, table_stacking  # noqa: E402
from emberd.compat.jax_tpu_embedding.sparsecore.utils import utils  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(HERE, "jax_tpu_embedding_example.py")
GOLDEN = os.path.join(HERE, "..", "..", "..", "tests", "golden")
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
        self.stacked(features)
        return embedding.init_embedding_variables(jax.random.key(0), embedding.get_table_specs(features), self.sharding, 4)

    def stacked(self, features):
        embedding.prepare_feature_specs_for_training(features, 1, 4)
        return features

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
        with self.assertRaisesRegex(ValueError, "embedding_var_limits: 'u' is not allowed; it must be one of the stacks t"):
            embedding.tpu_sparse_dense_matmul_grad([np.ones((8, 8), np.float32)], inputs, variables, features, embedding_var_limits={"u": (-1.0, None)})
        self.assertEqual(model.read_rows("t", [1, 2])[:, 0].tolist(), [-1, 0.25])

    def test_activations_are_not_wider_than_their_table(self):
        features = specs()
        variables = self.make(features)
        inputs, _ = self.inputs(features, [np.full((8, 2), 1, np.int32)])
        features[0].output_shape = (8, 9)
        with self.assertRaisesRegex(ValueError, r"feature 't': output_shape \[8, 9\] is not allowed; it may have 8 columns, as many as table 't'"):
            embedding.tpu_sparse_dense_matmul(inputs, variables, features, global_device_count=1)

    def test_a_rule_of_ones_own_is_lowered_by_jax(self):
        def rule(gradient, table, first, second, rate, factor):
            first = jnp.where(first > gradient, first, jnp.square(gradient))
            return jnp.clip(table - rate * gradient / jnp.sqrt(first + factor), -1, 1), first, jnp.minimum(second, gradient)

        class Spec(embedding_spec.CustomOptimizerSpec):
            def get_hyperparameters(self, step=None):
                return (*super().get_hyperparameters(step), jnp.float32(0.5))

        slots = jax.nn.initializers.constant(0.25), jax.nn.initializers.zeros
        rate = np.float32(0.1)
        spec = Spec(rate, rule, slot_variable_initializers_tuple=slots, short_name_str="mine")
        text = spec.lower_to_stablehlo(rule, 8, 2, 2)
        for optimizer in (spec, Spec(float(rate), stablehlo=text, slot_variable_initializers_tuple=slots),
                          Spec(lambda: rate, stablehlo=text.encode(), slot_variable_initializers_tuple=slots)):
            features = specs(optimizer=optimizer)
            variables = self.make(features)
            self.assertEqual(len(next(iter(variables.values())).slot), 2)
            inputs, _ = self.inputs(features, [np.full((8, 2), 1, np.int32)])
            model = jax_tpu_embedding.model_of(variables)
            row = [np.full((1, 8), value, np.float32) for value in (0.25, 0.25, 0)]
            for gradient in (0.125, -0.5, 2):
                variables = embedding.tpu_sparse_dense_matmul_grad([np.full((8, 8), gradient, np.float32)], inputs, variables, features)
                row = [np.asarray(one) for one in rule(np.float32(16 * gradient), *row, rate, np.float32(0.5))]
                for slot, want in zip(("", "slot_0", "slot_1"), row):
                    np.testing.assert_allclose(model.read_rows("t", [1], slot=slot), want, rtol=1e-6)
        limited = spec.lower_to_stablehlo(lambda gradient, table, rate: table, 8, max_value=0.5)
        self.assertIn("stablehlo.minimum", limited)

    def test_what_no_rule_of_ones_own_is(self):
        for wrong, message in ((embedding_spec.CustomOptimizerSpec(), "give one of custom_computation_fn and stablehlo"),
                               (embedding_spec.CustomOptimizerSpec(0.1, lambda g, w, lr: w - jnp.cumsum(g)), "line .*expected"),
                               (embedding_spec.CustomOptimizerSpec(0.1, stablehlo="module {}"), "expected a function"),
                               (embedding_spec.CustomOptimizerSpec(0.1, stablehlo="x", slot_variable_initializers_tuple=(jax.nn.initializers.normal(),)),
                                "each must give one number")):
            with self.assertRaisesRegex(Exception, message):
                self.make(specs(optimizer=wrong))

    def test_adam_without_a_step_is_corrected_as_in_the_first(self):
        for rate in (0.1, lambda step: 0.1 / (1 + step)):
            features = specs(optimizer=embedding_spec.AdamOptimizerSpec(rate))
            variables = self.make(features)
            inputs, _ = self.inputs(features, [np.full((8, 2), 1, np.int32)])
            for _ in range(2):
                variables = embedding.tpu_sparse_dense_matmul_grad([np.full((8, 8), 1 / 16, np.float32)], inputs, variables, features)
            # Of gradient 1: m = 0.1, 0.19; v = 0.001, 0.001999.
            expected = 0.25 - 0.1 - 0.1 * (0.19 / 0.1) / np.sqrt(0.001999 / 0.001)
            self.assertAlmostEqual(float(jax_tpu_embedding.model_of(variables).read_rows("t", [1])[0, 0]), expected, places=6)
        features = specs(optimizer=embedding_spec.SGDOptimizerSpec(rate))
        variables = self.make(features)
        with self.assertRaisesRegex(ValueError, "is a function of the step; give `step`"):
            embedding.tpu_sparse_dense_matmul_grad([np.ones((8, 8), np.float32)], inputs, variables, features)

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

    def test_coordinates_that_are_no_samples_in_order(self):
        features = specs(batch=3)
        for indices, values, error in (
                ([[1, 0], [0, 0]], [5, 6], "indices: the sample 0 is not allowed behind 1; samples must be in order"),
                ([[0, 0], [1, 0]], [5, 6, 7], r"indices of the shape \[2, 2\] are not allowed for values of the shape \[3\]"),
                ([[0, 0], [1, 0], [2, 0]], [5, 6], r"indices of the shape \[3, 2\] are not allowed for values of the shape \[2\]"),
                ([0, 1], [5, 6], r"indices of the shape \[2\] are not allowed"),
                ([[0, 0], [3, 0]], [5, 6], r"indices: the sample 3 is not allowed; dense_shape\[0\] allows \[0, 3\)"),
                ([[-1, 0], [0, 0]], [5, 6], "indices: the sample -1 is not allowed"),
                ([[0.5, 0], [1, 0]], [5, 6], "indices: float64 is not allowed")):
            with self.subTest(error), self.assertRaisesRegex((TypeError, ValueError), "feature 't': " + error):
                embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor(
                    [np.array(indices)], [np.array(values)], [np.array([3, 2])], features, 1, 1, num_sc_per_device=4)
        for samples, pointers in (([0, 0, 1, 1, 2, 2], [0, 2, 4, 6]), ([1], [0, 0, 1, 1]), ([], [0, 0, 0, 0])):
            inputs, _ = embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor(
                [np.array([[one, 0] for one in samples], np.int64).reshape(-1, 2)], [np.arange(len(samples))], [np.array([3, 2])],
                self.stacked(features), 1, 1, num_sc_per_device=4)
            self.assertEqual(inputs.lhs_row_pointers["t"].tolist(), pointers)
            self.assertEqual(inputs.lhs_embedding_ids["t"][:len(samples)].tolist(), list(range(len(samples))))

    def test_weights_that_are_not_those_of_the_ids(self):
        features = self.stacked(specs(batch=4))

        def ragged(*rows):
            made = np.empty(len(rows), object)
            made[:] = [np.array(row) for row in rows]
            return made

        def preprocess(ids, weights):
            return embedding.preprocess_sparse_dense_matmul_input([ids], [weights], features, 1, 1, num_sc_per_device=4)[0]

        ids = ragged([1, 2], [3], [4], [5])
        for given, weights, error in (
                (np.ones((4, 1), np.int32), np.ones((4, 2)), r"weights of the shape \[4, 2\] are not allowed for ids of the shape \[4, 1\]"),
                (np.ones((4, 2), np.int32), np.ones((2, 4)), r"weights of the shape \[2, 4\] are not allowed for ids of the shape \[4, 2\]"),
                (np.ones((4, 2), np.int32), [[1, 2], [1], [1], [1]], r"weights for ids of the shape \[4, 2\]: .*inhomogeneous"),
                (ids, ragged([7], [], [], []), "1 weights in row 0 are not allowed for its 2 ids"),
                (ids, ragged([1], [2, 3], [4], [5]), "1 weights in row 0 are not allowed for its 2 ids"),
                (list(ids), [[1, 2], [3], [4]], "3 rows of weights are not allowed for 4 rows of ids")):
            with self.subTest(error), self.assertRaisesRegex(ValueError, "feature 't': " + error):
                preprocess(given, weights)
        masked = np.ma.array(np.ones((4, 2)), mask=np.eye(4, 2))
        for given, weights in ((np.ones((4, 2), np.int32), masked), (list(np.ones((4, 2), np.int32)), list(masked))):
            with self.assertRaisesRegex(TypeError, "feature 't': weights: a masked array is not allowed"):
                preprocess(given, weights)
        inputs = preprocess(ids, ragged([1, 2], [3], [4], [5]))
        self.assertEqual(inputs.lhs_gains["t"][:5].tolist(), [1, 2, 3, 4, 5])
        variables = self.make(features)
        cut = inputs.replace(sparse_dense_matmul_input=inputs.sparse_dense_matmul_input._replace(lhs_gains={"t": np.ones(1, np.float32)}))
        with self.assertRaisesRegex(Exception, r"feature 't': lhs_gains of the shape \[1\] are not allowed for lhs_embedding_ids of the shape \[8\]"):
            jax.block_until_ready(embedding.tpu_sparse_dense_matmul(cut, variables, features, global_device_count=1))

    def test_ids_that_are_no_integers(self):
        features = self.stacked(specs(batch=2))
        for ids, said in ((np.array([1.9, 2.9]), "float64"), ([[1.9], [2]], "float64"),
                          (np.ma.masked_equal([1, 2], 2), "a masked array"),
                          (np.array(["a", "b"]), "<U1.*Texts are hashed first")):
            with self.subTest(said), self.assertRaisesRegex(TypeError, f"feature 't': {said}"):
                embedding.preprocess_sparse_dense_matmul_input([ids], None, features, 1, 1, num_sc_per_device=4)
            if isinstance(ids, np.ndarray):
                with self.assertRaisesRegex(TypeError, f"feature 't': {said}"):
                    embedding.dense_input([ids], features)
        inputs, _ = embedding.preprocess_sparse_dense_matmul_input([[[], [2]]], None, features, 1, 1, num_sc_per_device=4)
        self.assertEqual(inputs.lhs_embedding_ids["t"].tolist(), [2])

    def test_tables_that_are_alone_have_rates_and_limits_of_their_own(self):
        schedules = [embedding_spec.SGDOptimizerSpec(lambda step, rate=rate: rate / (1 + step)) for rate in (0.5, 0.25)]
        default = embedding_spec.SGDOptimizerSpec(0.01)  # the cluster's, too, for what has a schedule
        for place, (optimizers, limits, moves) in enumerate(((schedules, None, [0.5, 0.25]), ([schedules[0], default], None, [0.5, 0.01]),
                                                             ([default] * 2, {"a": (0.995, None)}, [0.005, 0.01]))):
            jax_tpu_embedding.use(self.client, model=f"alone_{place}")
            features = {name: embedding_spec.FeatureSpec(name, embedding_spec.TableSpec(name, 32, 8, jax.nn.initializers.ones, optimizer, "sum"), (4, 1), (4, 8))
                        for name, optimizer in zip("ab", optimizers)}
            variables = self.make(features)
            ids = {name: np.arange(4)[:, None] for name in features}
            inputs, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, features, 1, 1, num_sc_per_device=4)
            embedding.tpu_sparse_dense_matmul(inputs, variables, features, global_device_count=1)
            variables = embedding.tpu_sparse_dense_matmul_grad({name: jnp.ones((4, 8)) for name in features}, inputs, variables, features, step=0,
                                                               embedding_var_limits=limits)
            model = jax_tpu_embedding.model_of(variables)
            self.assertEqual([model.tables[name].stack for name in "ab"], ["a", "b"])
            np.testing.assert_allclose([1 - model.read_rows(name, [1])[0, 0] for name in "ab"], moves, atol=1e-6)

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
            with self.assertRaisesRegex(IndexError, "4294967301 does not fit in int32"):
                embedding._compressed(ids, None, features[0])
        for ids in ([["a"]] + [[]] * 7, [[1.9, 2]] + [[]] * 7, np.full((8, 2), "a"), np.full((8, 2), True), np.full((8, 2), 1.5)):
            with self.assertRaisesRegex(TypeError, r"feature 't': (<U\d+|bool|float64) is not allowed; ids are int32 or int64"):
                embedding._compressed(ids, None, features[0])
        with self.assertRaisesRegex(TypeError, "feature 't': float64 is not allowed; ids are int32 or int64"):
            embedding.dense_input([np.full((8, 2), 1.5)], features)
        with self.assertRaisesRegex(ValueError, "'DIV' is not allowed"):
            embedding.preprocess_sparse_dense_matmul_input([np.zeros((8, 2))], None, features, 1, 1, sharding_strategy="DIV")


def recorded(*place):
    with open(os.path.join(GOLDEN, *place), encoding="utf-8") as file:
        return json.load(file)


# Of the wheel's names, those that are not here: what is of TPUs alone, and what is not made yet.
NOT_HERE = {
    "lib.flax.linen.embed": ("WithSparseCoreLayout", "with_sparsecore_layout"),  # layouts of a TPU's memory
    "lib.flax.nnx.embed": ("embedding_lookup_bwd",),
    "lib.nn.embedding": ("EmbeddingVariablesInitializer", "SparseDenseMatmulInputStats.from_cc", "sharding_strategy_to_enum",
                         "stack_embedding_gradients", "unstack_embedding_activations"),  # objects of its C++, and stacked activations
    "lib.nn.embedding_spec": ("CustomOptimizerSpec.wrap_stablehlo_with_limits", *(f"{kind}OptimizerSpec.get_optimizer_primitive" for kind in (
        "", "Custom", "SGD", "Adagrad", "Adam", "AdagradMomentum", "FTRL", "LaProp", "F2A"))),
    "utils.utils": ("DeviceLike",),
}


def differences(theirs, ours):
    """Why not all calls of theirs are calls of ours with the same meaning. Both as jax_signatures.parameters says."""
    def parts(text):
        before, star, after = f"{text}, ".partition("*, ")
        return *([one for one in part.split(", ") if one and not one.startswith("_")] for part in (before, after if star else "")),

    (their_places, their_names), (our_places, our_names) = parts(theirs), parts(ours)
    mine = dict(one.partition("=")[::2] for one in our_places + our_names)
    for one in their_places + their_names:
        name, _, default = one.partition("=")
        if name not in mine:
            yield f"{name} is missing"
        elif default not in ("", "...", mine[name]):
            yield f"{name} is {mine[name]}, theirs {default}"
    wrong = [name for name, other in zip((one.partition("=")[0] for one in their_places), (one.partition("=")[0] for one in our_places)) if name != other]
    if wrong or len(our_places) < len(their_places):
        yield f"the order is {our_places}, theirs {their_places}"
    known = {one.partition("=")[0] for one in their_places + their_names}
    for one in our_places + our_names:
        if "=" not in one and not one.startswith("*") and one not in known:
            yield f"{one} must be given"


class SignaturesTest(unittest.TestCase):
    def test_every_call_of_the_wheel_is_one_here(self):
        found = 0
        for name, theirs in recorded("jax_tpu_embedding_signatures.json").items():
            place = next(one for one in jax_signatures.MODULES if name.startswith(one + "."))
            path = name[len(place) + 1:]
            ours = importlib.import_module(f"{jax_tpu_embedding.__name__}.sparsecore.{place}")
            with self.subTest(name):
                if any(path == one or path.startswith(one + ".") for one in NOT_HERE.get(place, ())):
                    self.assertFalse(hasattr(ours, path.split(".")[0]) and "." not in path, "is here: take it out of NOT_HERE")
                    continue
                for part in path.split("."):
                    ours = getattr(ours, part)
                if theirs is not None:
                    self.assertEqual(list(differences(theirs, jax_signatures.parameters(ours))), [])
                found += 1
        self.assertGreater(found, 120)

    def test_what_differs_is_found(self):
        for ours, expected in (("a, b=1, *, c=2", []), ("a=3, b=1, c=2, d=4", []), ("b=1, a, *, c=2", ["the order is"]), ("a, b=2, *, c=2", ["b is 2"]),
                               ("a, b=1", ["c is missing"]), ("a, b=1, *, c=2, d", ["d must be given"]), ("a, *, b=1, c=2", ["the order is"])):
            found = list(differences("a, b=1, *, c=2", ours))
            self.assertEqual([one[:len(want)] for one, want in zip(found, expected)], expected)
            self.assertEqual(len(found), len(expected), found)

    def test_the_recording_is_that_of_the_wheel(self):
        try:
            importlib.import_module("jax_tpu_embedding")
        except ImportError:
            self.skipTest("jax-tpu-embedding 0.2.0 is not installed; it needs Python 3.12")
        self.assertEqual(jax_signatures.signatures("jax_tpu_embedding"), recorded("jax_tpu_embedding_signatures.json"))


class RecordedTest(unittest.TestCase):
    """Against what jax-tpu-embedding itself has computed."""

    def test_estimated_limits(self):
        cases = recorded("estimate_preprocessing_parameters.json")
        for case in cases:
            if "expected" not in case:
                with self.assertRaisesRegex(ValueError, "^(global_batch_size|valency): 0 is not allowed; it must be larger than 0"):
                    utils.estimate_preprocessing_parameters(**case["input"])
            else:
                self.assertEqual(utils.estimate_preprocessing_parameters(**case["input"]), case["expected"])
        self.assertEqual(len(cases), 26)

    def stacked(self, given):
        """Features as the stacking of a case leaves them."""
        kinds = {"sgd": embedding_spec.SGDOptimizerSpec, "adagrad": embedding_spec.AdagradOptimizerSpec}
        tables = {one["name"]: embedding_spec.TableSpec(
            one["name"], one["vocab"], one["dim"], jax.nn.initializers.zeros, kinds[one["optimizer"].split(":")[0]](float(one["optimizer"].split(":")[1])),
            one["combiner"], 8, 8) for one in given["tables"]}
        features = [embedding_spec.FeatureSpec(one["name"], tables[one["table"]], (one["global_batch"], 1),
                                               (one["global_batch"], tables[one["table"]].embedding_dim)) for one in given["features"]]
        arguments = (given["global_device_count"], given["num_sc_per_device"], given["rotation"], lambda *_: 8, lambda *_: 8)
        limit = {"activation_mem_bytes_limit": given["activation_mem_bytes_limit"] or 2**21}
        for group in given["groups"] or ():
            table_stacking.stack_tables(features, group, *arguments, **limit)
        if not given["groups"]:
            table_stacking.auto_stack_tables(features, *arguments, **limit)
        return features, tables

    def test_stacks_and_rows_in_them(self):
        cases = sorted(glob.glob(os.path.join(GOLDEN, "jax", "05?.json")))
        self.assertEqual(len(cases), 8)
        for case in cases:
            given, expected = (recorded(case)[part] for part in ("input", "expected"))
            features, tables = self.stacked(given)
            for name, place in expected["tables"].items():
                found = tables[name].setting_in_stack
                self.assertEqual({one: place[one] for one in vars(found)}, vars(found))
            stacks = embedding.get_stacked_table_specs(features)
            for name, stack in expected["stacks"].items():
                self.assertEqual(stack, {one: getattr(stacks[name], one) for one in stack})
            for feature, want in zip(features, expected["features"]):
                moved = vars(feature.id_transformation)
                self.assertEqual(moved, {one: want[one] for one in moved})
            if "stacked" in expected:
                self.check_rows(given, expected, features, tables)

    def check_rows(self, given, expected, features, tables):
        shards = given["global_device_count"] * given["num_sc_per_device"]
        values = {name: 100000.0 * number + np.arange(table.vocabulary_size * table.embedding_dim).reshape(table.vocabulary_size, -1)
                  for number, (name, table) in enumerate(sorted(tables.items()))}
        specs = embedding_proto_utils.create_proto_from_feature_specs(features, given["global_device_count"], given["num_sc_per_device"])
        stacked = table_stacking.stack_and_shard_tables(tables, values, shards, -1)
        flat = table_stacking.stack_and_shard_feature_tables({name: jnp.asarray(one) for name, one in values.items()}, specs)
        for name, want in expected["stacked"].items():
            np.testing.assert_array_equal(stacked[name], want)
            np.testing.assert_array_equal(flat[name], np.where(np.asarray(want) == -1, 0, want).reshape(flat[name].shape))
        back = table_stacking.unshard_and_unstack_tables(tables, jax.tree.map(np.asarray, stacked), shards)
        for found in (back, table_stacking.unstack_and_unshard_stacked_tables(jax.tree.map(np.asarray, flat), specs)):
            for name, one in values.items():
                np.testing.assert_array_equal(found[name], one)
        physical = table_stacking.get_row_ids_in_stacked_tables(specs, {name: range(len(one)) for name, one in values.items()})
        self.assertEqual(sorted(sum(physical.values(), [])), sorted(sum(expected["physical_rows"].values(), [])))
        for name, rows in expected["physical_rows"].items():
            place, stack = tables[name].setting_in_stack, tables[name].stacked_table_spec
            self.assertEqual(table_stacking.compute_physical_row_ids(shards, stack.stack_vocab_size, place.shard_rotation, place.row_offset_in_shard,
                                                                     np.arange(len(rows))).tolist(), rows)

    def test_arrays_are_freed(self):
        features = specs()
        embedding.prepare_feature_specs_for_training(features, 1, 4)
        proto = embedding_proto_utils.create_proto_from_feature_specs(features, 1, 4)
        rows = jnp.ones((32, 8))
        stacks = table_stacking.stack_and_shard_feature_tables({"t": rows}, proto, delete_input=True)
        found = table_stacking.unstack_and_unshard_stacked_tables(stacks, proto, donate=True)
        self.assertEqual([rows.is_deleted(), stacks["t"].is_deleted(), float(found["t"].sum())], [True, True, 256])
        self.assertEqual(float(table_stacking.stack_and_shard_feature_tables({"t": [[1.0] * 8] * 32}, proto)["t"].sum()), 256)
        for function, what in ((table_stacking.stack_and_shard_feature_tables, "feature_tables: the table"),
                               (table_stacking.unstack_and_unshard_stacked_tables, "stacked_tables: the stack")):
            with self.assertRaisesRegex(ValueError, f"{what} 't' is missing; there are u"):
                function({"u": found["t"]}, proto)
            for shape in ((1, 8), (8,), (8, 32), (16, 8)):  # which NumPy would repeat, or JAX read the last row of
                with self.assertRaisesRegex(ValueError, r"_tables: 't': the shape \[.*\] is not allowed; it must be \[32, 8\]"):
                    function({"t": jnp.ones(shape)}, proto)
        with self.assertRaisesRegex(ValueError, r"table 't': row_ids: 32 is not allowed; it must be in \[0, 32\)"):
            table_stacking.get_row_ids_in_stacked_tables(proto, {"t": [31, 32]})

    def test_sizes_of_buffers(self):
        sizes = set()
        for name in ("001", "005", "013", "020", "030"):
            case = recorded("jax", f"{name}.json")
            options = case["input"]["options"]
            where = {"global_device_count": options["global_device_count"], "num_sc_per_device": options["num_sc_per_device"],
                     "enable_minibatching": options["enable_minibatching"]}
            for stack, want in case["expected"]["hosts"][0]["stacks"].items():
                first = case["input"]["stacks"][stack][0]
                self.assertEqual(embedding.compute_row_pointers_size_per_device(**where), want["row_pointers_size_per_device"])
                [feature] = specs(names=(stack,))
                embedding.prepare_feature_specs_for_training(feature, where["global_device_count"], where["num_sc_per_device"])
                table = feature.table_spec
                table.stacked_table_spec = table.stacked_table_spec.replace(
                    max_ids_per_partition=first["max_ids_per_partition"],
                    suggested_coo_buffer_size_per_device=first["suggested_coo_buffer_size_per_device"])
                self.assertEqual(embedding.compute_coo_buffer_size_per_device([feature], **where), {stack: want["coo_buffer_size_per_device"]})
                if first["suggested_coo_buffer_size_per_device"] is None:
                    self.assertEqual(embedding.compute_theoretical_max_coo_buffer_size(first["max_ids_per_partition"], **where),
                                     want["coo_buffer_size_per_device"])
                sizes.add((first["suggested_coo_buffer_size_per_device"] is None, want["coo_buffer_size_per_device"]))
                table.stacked_table_spec = table.stacked_table_spec.replace(suggested_coo_buffer_size_per_device=2**40)
                with self.assertRaisesRegex(ValueError, r"suggested_coo_buffer_size_per_device: 1099511627776 is not allowed; it must be in \(0, "):
                    embedding.compute_coo_buffer_size_per_device(feature, **where)
        self.assertGreater(len(sizes), 3)


class SpecificationsTest(unittest.TestCase):
    def test_parameters_and_slots_of_optimizers(self):
        # By jax-tpu-embedding 0.2.0, in step 3.
        cases = ((embedding_spec.SGDOptimizerSpec(0.5), "sgd", (0.5,), ()),
                 (embedding_spec.AdagradOptimizerSpec(0.5), "adagrad", (0.5,), ("accumulator",)),
                 (embedding_spec.AdamOptimizerSpec(0.5), "adam", (0.09188358, 0.9, 0.999, 6.3197536e-10), ("momentum", "velocity")),
                 (embedding_spec.FTRLOptimizerSpec(0.5), "ftrl", (0.5, -0.5, 0, 0, 0), ("accumulator", "linear")),
                 (embedding_spec.LaPropOptimizerSpec(0.5), "laprop", (0.5, 0.9, 0.73044926, 1e-30), ("mu", "nu")),
                 (embedding_spec.F2AOptimizerSpec(0.5), "f2a", (0.5, 0.5, 0, 0, 1e6, 3), ("accumulator", "local_step")),
                 (embedding_spec.AdagradMomentumOptimizerSpec(0.5), "adagrad_momentum", (0.5, 0.9, 1, 1e-10, 2, 0), ("accumulator", "momentum")))
        for spec, name, values, slots in cases:
            self.assertEqual(spec.short_name(), name)
            np.testing.assert_allclose(spec.get_hyperparameters(3), values, rtol=1e-6)
            self.assertEqual(spec.slot_variables_initializers()._fields, slots)
            self.assertEqual(spec.slot_variables_count(), len(slots))
            again = type(spec).from_float_and_bool_params(spec.get_float_params(), spec.get_bool_params(), 0.5)
            self.assertEqual(again, spec)
        first = embedding_spec.AdagradOptimizerSpec(initial_accumulator_value=0.25).slot_variables_initializers().accumulator
        self.assertEqual(np.asarray(first(jax.random.key(0), (1, 2))).tolist(), [[0.25, 0.25]])

    def test_limits_of_quantization(self):
        self.assertEqual(embedding_spec.QuantizationConfig(min_value=-1, max_value=1, num_buckets=2).as_tuple(), (-1, 1, 2))
        with self.assertRaisesRegex(ValueError, "min_value: 1 is not allowed; it must be less than max_value, 1"):
            embedding_spec.QuantizationConfig(1, 1, 2)
        with self.assertRaisesRegex(ValueError, "num_buckets: 1 is not allowed; it must be at least 2"):
            embedding_spec.QuantizationConfig(0, 1, 1)

    def test_statistics_by_device(self):
        stats = embedding.SparseDenseMatmulInputStats({"t": np.array([5])}, {"t": np.array([3])}, {"t": np.array([16, 24])})
        self.assertEqual([stats.get_required_buffer_size_per_device("t", cores) for cores in (None, 4)], [48, 96])
        self.assertIsNone(stats.get_required_buffer_size_per_device("other"))
        stats.set_required_buffer_size_per_device("t", 100)
        self.assertEqual(stats.replace(id_drop_counters={"t": 1}).required_buffer_size_per_sc["t"].tolist(), [50, 50])
        with self.assertRaisesRegex(ValueError, "num_sc_per_device: None is not allowed where nothing was counted for the stack 'u'"):
            stats.set_required_buffer_size_per_device("u", 100)
        features = specs()
        features[0].table_spec.suggested_coo_buffer_size_per_device = 64
        embedding.prepare_feature_specs_for_training(features, 1, 4)
        stack = features[0].table_spec.stacked_table_spec
        for update, buffer in ((stats.replace(required_buffer_size_per_sc={}), 64), (stats, 200)):
            embedding.update_preprocessing_parameters(features, update, 4)
            self.assertEqual(features[0].table_spec.stacked_table_spec, stack.replace(
                max_ids_per_partition=5, max_unique_ids_per_partition=3, suggested_coo_buffer_size_per_device=buffer))

    def test_shapes_are_known_before_there_are_ids(self):
        features = {"a": specs(names=("a",))[0], "b": specs(names=("b",), valency=1)[0]}
        features["c"] = embedding_spec.FeatureSpec("c", features["b"].table_spec, (8, 3), (8, 3, 8))
        features["d"] = embedding_spec.FeatureSpec("d", features["b"].table_spec, (8,), (8, 8))
        ids = {name: np.zeros(one.input_shape, np.int32) for name, one in features.items()}
        made, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, features, 1, 1, num_sc_per_device=4)
        found = embedding.eval_preprocess_sparse_dense_matmul_input_shape(features, 1, 1)
        self.assertEqual(jax.tree.map(lambda one: one.shape, found), jax.tree.map(np.shape, made))
        self.assertEqual(found.lhs_embedding_ids["a"].dtype, made.lhs_embedding_ids["a"].dtype)
        self.assertEqual(made.replace(num_minibatches=3).num_minibatches, 3)

    def test_a_table_on_devices(self):
        # 2 devices of 2 SparseCores: SparseCore i mod 4.
        table = np.arange(16)[:, None]
        sharded = utils.shard_emb_table(table, num_devices=2, num_sc_per_device=2)
        self.assertEqual(sharded[..., 0].tolist(), [[0, 4, 8, 12, 1, 5, 9, 13], [2, 6, 10, 14, 3, 7, 11, 15]])
        np.testing.assert_array_equal(utils.unshard_emb_table(sharded, 2), table)
        with self.assertRaisesRegex(ValueError, "sharding_strategy: 'DIV' is not allowed"):
            utils.unshard_emb_table(sharded, 2, "DIV")

    def test_features_have_copies_of_a_table_and_no_other_of_its_name(self):
        def feature(name, **options):
            given = {"vocabulary_size": 32, "embedding_dim": 8, "initializer": jax.nn.initializers.normal(0.5),
                     "optimizer": embedding_spec.SGDOptimizerSpec(0.5), **options}
            return embedding_spec.FeatureSpec(name, embedding_spec.TableSpec("t", **given), (8, 1), (8, 8))

        def drawn(scale):
            def draw(key, shape, dtype=jnp.float32, *, scale=scale):
                return scale * jax.random.normal(key, shape, dtype)

            return draw

        for initializer in (lambda: jax.nn.initializers.normal(1 / jnp.sqrt(8.0)), lambda: jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", [0], 1),
                            lambda: drawn(0.5), lambda: functools.partial(drawn(1), scale=0.5), lambda: lambda *given, of=drawn(0.5): of(*given)):
            one, other = (feature(name, initializer=initializer(), optimizer=embedding_spec.SGDOptimizerSpec(lambda step: 0.5 / (1 + step)))
                          for name in "ab")
            self.assertIs(embedding.get_table_specs([one, other])["t"], one.table_spec)
            self.assertEqual(jax.jit(lambda x: x + len(embedding.get_table_specs([one, other])))(1), 2)
        one, other = (feature(name, initializer=functools.partial(drawn(1), **options)) for name, options in (
            ("a", {"scale": 0.5, "dtype": jnp.float32}), ("b", {"dtype": jnp.float32, "scale": 0.5})))
        self.assertIs(embedding.get_table_specs([one, other])["t"], one.table_spec)
        with self.assertRaisesRegex(ValueError, "table_spec: initializer"):
            embedding.get_table_specs([feature("a", initializer=drawn(0.5)), feature("b", initializer=drawn(0.25))])
        copies = [feature("a"), feature("b")]
        embedding.auto_stack_tables(copies, 1, 4)
        self.assertEqual(list(embedding.get_table_specs(copies)), ["t"])
        self.assertEqual([one.id_transformation.row_offset for one in copies], [0, 8])
        self.assertEqual(copies[0].table_spec.setting_in_stack, copies[1].table_spec.setting_in_stack)
        for name, value in (("vocabulary_size", 64), ("embedding_dim", 16), ("combiner", "sum"),
                            ("initializer", jax.nn.initializers.zeros), ("initializer", jax.nn.initializers.normal(0.25)),
                            ("optimizer", embedding_spec.SGDOptimizerSpec(0.25))):
            for call in (embedding.get_table_specs, lambda features: embedding.auto_stack_tables(features, 1, 4),
                         lambda features: embedding.prepare_feature_specs_for_training(features, 1, 4)):
                with self.assertRaisesRegex(ValueError, f"table_spec: {name}: .* of feature 'b' is not .* of table 't'"):
                    call([feature("a"), feature("b", **{name: value})])

    def test_tables_of_unequal_width(self):
        features = specs(names=("a",)) + specs(names=("b",), dim=12)
        with self.assertRaisesRegex(ValueError, "fail_on_excess_padding: the tables a, b have 8, 16 columns with padding"):
            table_stacking.stack_tables(features, ["a", "b"], 1, 4, fail_on_excess_padding=True)
        self.assertFalse(features[0].table_spec.is_stacked())
        with self.assertWarnsRegex(UserWarning, "stack 'wide': the tables a, b have 8, 16 columns with padding; each row takes 16"):
            table_stacking.stack_tables(features, ["a", "b"], 1, 4, stack_name="wide")
        self.assertEqual(features[0].table_spec.setting_in_stack.padded_embedding_dim, 16)
        with self.assertRaisesRegex(ValueError, "table_to_padded_vocab_size: the table 'b' is missing; there are a"):
            table_stacking.compute_table_to_setting_in_stack("s", ["a", "b"], 8, {"a": 32}, 4, 1)


    def test_a_name_is_that_of_one_stack(self):
        features = specs(names=("a", "b_c")) + specs(names=("a_b", "c"), dim=16)
        with self.assertRaisesRegex(ValueError, "stack_name: 'a_b_c' is not allowed for a_b, c, for it is that of the stack of a, b_c; give another"):
            embedding.auto_stack_tables(features, 1, 4)
        self.assertEqual([one.table_spec.is_stacked() for one in features], [True, True, False, False])
        table_stacking.stack_tables(features, ["a_b", "c"], 1, 4, stack_name="other")
        self.assertEqual(list(table_stacking.get_table_stacks(embedding.get_table_specs(features))), ["a_b_c", "other"])

    def test_a_table_in_a_stack_stays_as_it_is(self):
        features = specs()
        table = features[0].table_spec
        table.optimizer = optimizer = embedding_spec.SGDOptimizerSpec(0.25)
        embedding.prepare_feature_specs_for_training(features, 1, 4)
        for name, value in (("optimizer", embedding_spec.SGDOptimizerSpec(0.5)), ("vocabulary_size", 64), ("max_ids_per_partition", 8)):
            with self.assertRaisesRegex(AttributeError, f"table 't': {name}: it cannot be set once the table is in a stack, here 't'"):
                setattr(table, name, value)
        self.assertEqual((table.optimizer, table.vocabulary_size, table.max_ids_per_partition), (optimizer, 32, 256))


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
        self.assertEqual(float(net.embed.embedding_table.get_value()["t"].table[0, 3]), 2)

    def test_evaluating_the_layer_begins_no_step(self):
        """One that began would count, for LaProp and F2A, too."""
        features = {"t": specs(valency=1)[0]}
        net = Net(features, self.mesh, nnx.Rngs(0))
        variables = net.embed.embedding_table.get_value()
        model, kernel = jax_tpu_embedding.model_of(variables), np.asarray(net.dense.kernel[...])
        evaluated, inputs = (self.inputs(features, {"t": np.full((8, 1), row, np.int32)})[0] for row in (5, 1))
        evaluate = nnx.jit(lambda net, inputs: net(inputs))
        gradient = nnx.jit(nnx.grad(lambda net, inputs: jnp.sum(net(inputs))))
        for step in range(2):
            np.testing.assert_allclose(evaluate(net, evaluated), np.full(8, 0.25 * kernel.sum()), atol=1e-6)
            nnx.update(net, nnx.state(gradient(net, inputs), embed.is_embedding_variables))
            np.testing.assert_allclose(evaluate(net, evaluated), np.full(8, 0.25 * kernel.sum()), atol=1e-6)
            jax.effects_barrier()
            self.assertEqual(_tables.of(variables["t"].table).trainer.next_step, step + 1)
        np.testing.assert_allclose(model.read_rows("t", [1])[0], 0.25 - 2 * 0.5 * 8 * kernel[:, 0], atol=1e-5)


if __name__ == "__main__":
    assert flax.__version__ and emberd.__version__
    main()
