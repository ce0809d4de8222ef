"""emberd.compat.tpu_embedding without training: lookups for serving, and what a batch would need on TPUs.

What this would catch: rows of another table, of another combiner or rounded in another way than those that were trained, a shape that is not
TensorFlow's, and a limit that a batch does not have.
"""

import math
import os
import unittest

from cluster import main, parts_of_rows

from test_tpu_embedding import THERE, Case, simple  # skips where there is no TensorFlow

import numpy as np
import tensorflow as tf
from emberd.compat import tpu_embedding as tpu


class ServingTest(Case):
    """Against TensorFlow's own lookups for serving, over variables with the rows of the cluster."""

    def config(self, kinds):
        users, items = (kinds.TableConfig(vocabulary_size=32, dim=4, combiner=combiner, name=combiner) for combiner in ("mean", "sqrtn"))
        return {"user": kinds.FeatureConfig(users, output_shape=[64]), "seen": kinds.FeatureConfig(items, max_sequence_length=2),
                "liked": (kinds.FeatureConfig(items), kinds.FeatureConfig(items, max_sequence_length=5, output_shape=[3, 2])),
                "last": kinds.FeatureConfig(items, output_shape=[3, 1])}

    def test_lookups_are_those_of_tensorflow(self):
        name = self.id().split(".")[-1]
        config, there = self.config(tpu), self.config(THERE)
        trained = tpu.TPUEmbeddingV2(config, tpu.SGD(1.0))
        trained.build()
        for table in trained.embedding_tables.values():
            values = np.random.default_rng(1).normal(size=(32, 4)).astype(np.float32)
            with parts_of_rows(10, 4):
                table.assign(values)
            bad = np.zeros_like(values)
            bad[31, 3] = np.inf
            for wrong, said in ((bad, r"value\[31, 3\] is not finite"), (values[1:], r"value: the shape \[31, 4\] is not allowed; it must be \[32, 4\]")):
                with parts_of_rows(0, 4), self.assertRaisesRegex(ValueError, said):
                    table.assign(wrong)
            np.testing.assert_array_equal(table.numpy(), values)
        tpu.use(self.client, model=name)
        serving = tpu.TPUEmbeddingForServing(config, None)  # without slots, of which the model has none either
        self.assertEqual(serving.model.name, trained.model.name)
        tables = {feature.table: tf.Variable(serving.embedding_tables[ours.table].numpy())
                  for feature, ours in zip(tf.nest.flatten(there), tf.nest.flatten(config))}
        ragged, sparse = tf.ragged.constant([[1, 2, 3], [], [4]]), tf.SparseTensor([[0, 0], [0, 2], [2, 1]], tf.constant([1, 2, 3], tf.int64), [3, 3])
        some = tf.constant([0.5, 2.0, 1.0])
        inputs = {"user": tf.constant([[1], [2], [31]]), "seen": ragged, "liked": (sparse, ragged), "last": ragged}
        weights = {"user": None, "seen": None, "liked": (tf.SparseTensor(sparse.indices, some, sparse.dense_shape), None), "last": None}
        for given, scales in ((inputs, None), (inputs, weights), ({"seen": sparse}, None), ({"user": tf.constant([[1, 2], [3, 4]])}, None)):
            expected = THERE.serving_embedding_lookup(given, scales, tables, there)
            for found in (serving(given, scales), tf.function(serving.embedding_lookup)(given, scales),
                          tpu.serving_embedding_lookup(given, scales, serving.embedding_tables, config)):
                tf.nest.assert_same_structure(expected, found)
                for one, other in zip(tf.nest.flatten(expected), tf.nest.flatten(found)):
                    np.testing.assert_allclose(other, one, atol=1e-6)
        for call, error in ((lambda: serving({"other": ragged}), "inputs: other is not a feature of feature_config; it has last, liked/0, liked/1, seen, user"),
                            (lambda: serving({"seen": sparse}, {"sene": sparse}), "weights: sene is not in inputs, whose structure they must have; there are seen"),
                            (lambda: serving({"seen": sparse}, sparse), "weights: feature is not in inputs"),
                            (lambda: serving({"last": ragged[:2]}), r"feature 'last': 2 samples are not allowed for output_shape \[3, 1\]"),
                            (lambda: tpu.serving_embedding_lookup(inputs, None, tables, config), "tables: a ResourceVariable is not allowed")):
            with self.assertRaisesRegex((ValueError, TypeError), error):
                call()

    def test_trained_rows_are_served_and_tables_that_are_not_there_are_made(self):
        one = simple(rows=4)
        fresh = tpu.TPUEmbeddingForServing(one, None)
        self.assertEqual(fresh(tf.constant([3])).numpy().tolist(), [[3.0] * 4])
        tpu.use(self.client, model="trained")
        trained = tpu.TPUEmbeddingV2(one, tpu.Adagrad(1.0))
        _, kept = trained(tf.constant([3]))
        tpu.use(self.client, model="trained")
        serving = tpu.TPUEmbeddingForServing(one, tpu.Adagrad(1.0))
        self.assertEqual(list(serving.variables["t"]), ["parameters", "accumulators"])
        trained.apply_gradients(tf.ones([1, 4]), kept)
        np.testing.assert_allclose(serving(tf.constant([3])), [[3 - 1 / np.sqrt(1.1)] * 4], atol=1e-6)
        with self.assertRaisesRegex(ValueError, "'feature': table: combiner: 'mean' is not allowed, for that of table 't' of model 'trained' is 'sum'"):
            tpu.serving_embedding_lookup(tf.constant([3]), None, serving.embedding_tables, simple(rows=4, combiner="mean"))

    def test_other_tables_and_rows_that_are_rounded_in_another_way_are_refused(self):
        ids, name = {path: tf.constant([3]) for path in "xy"}, self.id().split(".")[-1]

        def config(tables="ab", combiner="sum", quantized=tpu.QuantizationConfig(3, 0.0, 1.9), **options):
            return {path: tpu.FeatureConfig(tpu.TableConfig(32, 4, tf.initializers.Constant(value), None, combiner, table, quantized), **options)
                    for path, table, value in zip("xy", tables, (0.5, 1.9))}

        trained = tpu.TPUEmbeddingV2(config(), tpu.SGD())
        trained.build()
        for given in (config(), config((None, None))):  # a table without a name is that of its feature
            tpu.use(self.client, model=name)
            found = tpu.TPUEmbeddingForServing(given, None)(ids)
            np.testing.assert_allclose([found[path].numpy()[0, 0] for path in "xy"], [0.95, 1.9], rtol=1e-6)
        for given, error in (
                (config("ba"), "feature 'x': table: 'b' is not allowed, for in model .* this feature looks up table 'a'"),
                (config(quantized=None), "feature 'x': table: quantization_config: None is not allowed, for that of table 'a' of model .* is "
                                         r"QuantizationConfig\(num_buckets=3, lower=0.0, upper=1.89"),
                (config(quantized=tpu.QuantizationConfig(5, 0.0, 1.9)), r"quantization_config: QuantizationConfig\(num_buckets=5, lower=0.0"),
                (config(combiner="mean", max_sequence_length=2, output_shape=[1]), "feature 'x': table: combiner: 'mean' is not allowed")):
            tpu.use(self.client, model=name)
            serving = tpu.TPUEmbeddingForServing(given, None)
            for call in (lambda: serving(ids), lambda: tpu.serving_embedding_lookup(ids, None, serving.embedding_tables, given)):
                with self.subTest(error), self.assertRaisesRegex(ValueError, error):
                    call()
        unnamed = config((None, None))
        swapped = {unnamed[path].table: trained.embedding_tables[table] for path, table in zip("xy", "ba")}
        with self.assertRaisesRegex(ValueError, "feature 'x': table: 'b' is not allowed"):
            tpu.serving_embedding_lookup(ids, None, swapped, unnamed)
        tpu.use(self.client, model="other")
        other = tpu.TPUEmbeddingForServing(config(), None)
        for tables, said in (({**serving.embedding_tables, **other.embedding_tables}, f"{name} and other"), ({}, "no model")):
            with self.assertRaisesRegex(ValueError, f"tables: those of {said} are not allowed; a lookup is of one model"):
                tpu.serving_embedding_lookup(ids, None, tables, other._structure)

    def test_limits_that_a_batch_would_need(self):
        users, items = (tpu.TableConfig(64, 8, name=name, combiner="sum") for name in ("users", "items"))
        config = {"a": tpu.FeatureConfig(users, output_shape=[8]), "b": (tpu.FeatureConfig(items, output_shape=[8]),)}
        batch = {"a": tf.constant([0, 8, 16, 24, 1, 1, 2, 3]), "b": (tf.ragged.constant([[5, 5, 13]] + [[]] * 7),)}
        # Apart, of 2 chips of 4 SparseCores, each SparseCore with 2 samples: 0 and 8 go to SparseCore 0, 5 and 13 to 5.
        apart = tpu.SparseCoreEmbeddingConfig(disable_table_stacking=True)
        found = tpu.TPUEmbeddingV2.compute_sparse_core_stats(batch, config, 2, optimizer=tpu.SGD(), sparse_core_embedding_config=apart)
        self.assertEqual(found, ({"items": 2, "users": 2}, {"items": 2, "users": 2}))
        # In a stack of 1 chip with 2 SparseCores: the first 8 samples are those of one feature.
        ids, unique = tpu.TPUEmbeddingV2.compute_sparse_core_stats(batch, config, 1, 2, tpu.SGD())
        self.assertEqual([list(one) for one in (ids, unique)], [["items_users"]] * 2)
        self.assertEqual((ids["items_users"], unique["items_users"]), (5, 5))
        with self.assertRaisesRegex(ValueError, "64"):
            tpu.TPUEmbeddingV2.compute_sparse_core_stats({**batch, "a": tf.constant([64] * 8)}, config, 1)

    def test_a_batch_that_needs_more_than_the_capacity(self):
        chosen = tpu.SparseCoreEmbeddingConfig(max_ids_per_chip_per_sample=8)
        embedding = tpu.TPUEmbeddingV2(simple(rows=512), tpu.SGD(1.0), False, chosen)
        parts = math.prod(embedding.model.description[one] for one in ("shards", "sparsecores_per_shard"))
        embedding(tf.ragged.constant([[one * parts for one in range(8)]], dtype=tf.int64))
        with self.assertRaisesRegex(Exception, "max_ids_per_chip_per_sample 8 x 1 samples"):
            embedding(tf.ragged.constant([[one * parts for one in range(9)]], dtype=tf.int64))
        with self.assertRaisesRegex(ValueError, "max_ids_per_chip_per_sample: -1"):
            tpu.TPUEmbeddingV2(simple(rows=8), tpu.SGD(1.0), False, tpu.SparseCoreEmbeddingConfig(max_ids_per_chip_per_sample=-1)).build()


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    unittest.util._MAX_LENGTH = 400
    main()
