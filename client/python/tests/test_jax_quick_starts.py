"""What a user of jax-tpu-embedding tries first: its quick start, its page about stacking, its layers, its files.

What this would catch: a call that the printed examples make and that is not there, or has another meaning; a step that differentiates the
dense part alone and leaves the tables as they are; positions that become samples; files and checkpoints that jax-tpu-embedding does not read.
"""

import os
import sys
import tempfile
import types
import unittest
import unittest.mock

from cluster import ClusterTest, main, parts_of_rows

try:
    import flax
    import jax
    import optax
except ImportError as error:
    print(f"SKIP: {error.name} is not installed")
    sys.exit(77)

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import linen as nn
from flax import nnx
from google.protobuf import text_format

jax.config.update("jax_platforms", "cpu")
from emberd.compat import jax_tpu_embedding  # noqa: E402
from emberd.errors import NotFound  # noqa: E402
from emberd.compat.jax_tpu_embedding.sparsecore.lib.fdo import csv_file_fdo_client, file_fdo_client  # noqa: E402
from emberd.compat.jax_tpu_embedding.sparsecore.lib.flax.linen import embed, embed_optimizer  # noqa: E402
from emberd.compat.jax_tpu_embedding.sparsecore.lib.flax.nnx import _layouts, checkpoint_utils  # noqa: E402
from emberd.compat.jax_tpu_embedding.sparsecore.lib.flax.nnx import embed as nnx_embed  # noqa: E402
from emberd.compat.jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_proto_utils, embedding_spec  # noqa: E402
from emberd.compat.jax_tpu_embedding.sparsecore.lib.proto import embedding_spec_pb2  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))


class Case(ClusterTest):
    def setUp(self):
        jax_tpu_embedding.use(self.client, model=self.id().split(".")[-1])
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()), ["x"])

    def run_example(self, name):
        """A script for jax-tpu-embedding with changed imports."""
        module, path = types.ModuleType(name), os.path.join(HERE, name)
        with open(path, encoding="utf-8") as file:
            source = file.read()
        exec(compile(source.replace("from jax_tpu_embedding.", "from emberd.compat.jax_tpu_embedding."), path, "exec"), module.__dict__)
        return module


def feature(name="t", rows=32, dim=8, shape=(8, 8), initializer=jax.nn.initializers.constant(0.25), optimizer=None, **options):
    table = embedding_spec.TableSpec(name=name, vocabulary_size=rows, embedding_dim=dim, initializer=initializer,
                                     optimizer=optimizer or embedding_spec.SGDOptimizerSpec(0.5), **options)
    return embedding_spec.FeatureSpec(name=name, table_spec=table, input_shape=shape[:1], output_shape=shape)


def make(specs, key=0):
    return embed.SparseCoreEmbed.create_embedding_variables(specs, jax.random.key(key))


class PrintedExamplesTest(Case):
    def test_the_quick_start_trains_the_tables_by_gradients_of_the_dense_part(self):
        module = self.run_example("jax_quick_start_example.py")
        model = jax_tpu_embedding.model_of(module.variables)
        self.assertEqual(model.features["word_ids"].output_shape, (module.BATCH, module.POSITIONS))
        rows = model.table("word_embedding_table")
        # Of a specification without an initializer: truncated normal of 1 / sqrt(columns) before it is cut at two of these.
        self.assertAlmostEqual(rows.std(), 0.88 / np.sqrt(module.DIM), places=3)
        dense, ids = module.dense, np.asarray(module.ids["word_ids"])
        for _ in range(2):
            kernel, bias = (np.asarray(dense["Dense_0"][name], np.float64) for name in ("kernel", "bias"))
            found = rows[ids].reshape(module.BATCH, -1)
            error = found @ kernel + bias - np.asarray(module.labels)
            of_logits = 2 * error / error.size
            dense = module.train_step(dense, module.variables, module.ids, module.labels)
            np.testing.assert_allclose(dense["Dense_0"]["kernel"], kernel - 0.01 * found.T @ of_logits, atol=1e-6)
            after = model.table("word_embedding_table")
            expected = rows.astype(np.float64)
            np.subtract.at(expected, ids.reshape(-1), module.RATE * (of_logits @ kernel.T).reshape(-1, module.DIM))
            np.testing.assert_allclose(after - rows, expected - rows, atol=1e-7)  # steps of 1e-5
            self.assertGreater(np.abs(after - rows).max(), 5e-6)
            rows = after
        self.assertEqual(float(dense["SparseCoreEmbed_0"]["token"]), 0)

    def test_the_page_about_stacking(self):
        module = self.run_example("jax_stacking_example.py")
        self.assertIs(module.embedding, embedding)
        self.assertEqual({one.table_spec.stacked_table_spec.stack_name for one in module.feature_specs}, {"table_a_table_b"})
        self.assertEqual([one.id_transformation.row_offset for one in module.feature_specs], [0, 16, 32])
        self.assertEqual([one.id_transformation.col_offset for one in module.feature_specs], [0, 64, 64])
        variables = make(module.feature_specs)
        inputs = embedding.preprocess_sparse_dense_matmul_input(
            [np.full((16, 1), row) for row in (63, 119, 3)], None, module.feature_specs, 1, 1, num_sc_per_device=4)[0]
        found = embedding.tpu_sparse_dense_matmul(inputs, variables, module.feature_specs, global_device_count=1)
        self.assertEqual([(one.shape, float(jnp.abs(one).max())) for one in found], [((16, 12), 0), ((16, 10), 0), ((16, 10), 0)])

    def test_an_initializer_of_nothing_gives_the_whole_table(self):
        specs = [feature(rows=10, dim=3, shape=(8, 3), initializer=lambda: jnp.arange(128 * 16, dtype=jnp.float32).reshape(128, 16))]
        model = jax_tpu_embedding.model_of(make(specs))
        np.testing.assert_array_equal(model.table("t"), np.arange(128 * 16).reshape(128, 16)[:10, :3])
        with self.assertRaisesRegex(ValueError, r"initializer: the shape \[9, 8\] is not allowed; it must be at least \[32, 8\]"):
            make([feature(initializer=lambda: jnp.zeros((9, 8)))])

    def test_initializers_are_called_for_a_part_at_a_time(self):
        """One of (offset, shape) for a stretch, as one call for all makes them; one of JAX's for the rows of a SparseCore."""
        calls = []

        def ramp(offset, shape):
            calls.append((offset, shape))
            return jnp.arange(offset * 8, (offset + shape[0]) * 8, dtype=jnp.float32).reshape(shape)

        def drawn(key, shape, dtype=jnp.float32):
            calls.append(shape)
            return jax.random.normal(key, shape, dtype)

        with unittest.mock.patch("emberd._loading.STRETCH_BYTES", 10 * 32):  # 10 rows
            found = jax_tpu_embedding.model_of(make([feature(rows=64, initializer=ramp), feature("u", 64, initializer=drawn)]))
        np.testing.assert_array_equal(found.table("t"), ramp(0, (64, 8)))
        self.assertEqual(calls, [(begin, (min(10, 64 - begin), 8)) for begin in range(0, 64, 10)] + [(16, 8)] * 4 + [(0, (64, 8))])


class ShapesTest(Case):
    def test_ids_in_the_shape_of_the_activations(self):
        # Row i is i everywhere.
        specs = {"t": feature(shape=(4, 3, 8), initializer=lambda: jnp.tile(jnp.arange(32.0)[:, None], (1, 8)), combiner="sum")}
        variables = make(specs)
        ids = np.arange(24).reshape(4, 3, 2)
        cases = [(ids[..., 0], ids[..., 0]), (ids, ids.sum(-1)), (ids.reshape(12, 2), ids.sum(-1)), (ids[..., 0].reshape(-1), ids[..., 0]),
                 (ids[:2, :, 0], ids[:2, :, 0])]
        for given, expected in cases:
            for inputs in (embedding.dense_input({"t": given}, specs),
                           embedding.preprocess_sparse_dense_matmul_input({"t": given}, None, specs, 1, 1, num_sc_per_device=4)[0]):
                found = embedding.tpu_sparse_dense_matmul(inputs, variables, specs, global_device_count=1)["t"]
                self.assertEqual(found.shape, (*expected.shape, 8))
                np.testing.assert_array_equal(found[..., 7], expected)

    def test_gradients_in_the_shape_of_the_activations(self):
        specs = {"t": feature(shape=(4, 3, 8))}
        variables = make(specs)
        gradient = np.arange(12.0, dtype=np.float32).reshape(4, 3, 1) * np.ones(8, np.float32)
        for given in (gradient, gradient.reshape(12, 8)):
            variables = embedding.tpu_sparse_dense_matmul_grad({"t": given}, embedding.dense_input({"t": np.arange(12).reshape(4, 3)}, specs),
                                                               variables, specs)
        for shape in ((3, 4, 8), (4, 3, 4), (12, 4), (8, 12), (4, 24)):
            inputs = embedding.dense_input({"t": np.zeros((4, 3), np.int32)}, specs)
            with self.assertRaisesRegex(ValueError, r"feature 't': a gradient of the shape .* activations, \[samples, 3, 8\]"):
                embedding.tpu_sparse_dense_matmul_grad({"t": np.ones(shape)}, inputs, variables, specs)
        np.testing.assert_array_equal(jax_tpu_embedding.model_of(variables).read_rows("t", np.arange(13))[:, 0],
                                      [*(0.25 - np.arange(12.0)), 0.25])

    def test_other_shapes_are_refused(self):
        specs = {"t": feature(shape=(4, 3, 8))}
        for shape in ((4, 2), (3, 4), (4, 3, 2, 1), (5,)):
            with self.assertRaisesRegex(ValueError, r"feature 't': .*output_shape \[4, 3, 8\]"):
                embedding.dense_input({"t": np.zeros(shape, np.int32)}, specs)
        with self.assertRaisesRegex(IndexError, "4294967301 does not fit in int32"):
            embedding.dense_input({"t": np.full((4, 3), 2**32 + 5)}, specs)
        with self.assertRaisesRegex(TypeError, "ids are whole numbers"):
            embedding.dense_input({"t": jnp.zeros((4, 3))}, specs)
        with self.assertRaisesRegex(ValueError, r"features\['a'\]: it must have the structure of feature_specs, a sequence of 1; got ndarray"):
            embedding.dense_input({"a": np.zeros((4, 3))}, {"a": [specs["t"]]})

    def test_types_take_what_they_are_of(self):
        self.assertEqual(embedding.Nested[int], embed.Nested[int])
        with self.assertRaisesRegex(TypeError, "table 't': optimizer: None is not allowed"):
            embedding_spec.TableSpec("t", 8, 8)


class Linen(nn.Module):
    specs: embedding.Nested[embedding_spec.FeatureSpec]

    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(1)(embed.SparseCoreEmbed(self.specs)(inputs)["t"])[:, 0]


class LinenTest(Case):
    def test_variables_among_the_parameters(self):
        specs = {"t": feature()}  # not prepared
        layer, model = embed.SparseCoreEmbed(specs), Linen(specs)
        embedding.prepare_feature_specs_for_training(specs, 1, 4)
        inputs = layer.preprocess_inputs(0, {"t": np.arange(8)[:, None]}, None)
        boxed = model.init(jax.random.key(0), inputs)
        self.assertEqual(nn.get_partition_spec(boxed)["params"]["SparseCoreEmbed_0"][embed.EMBEDDING_PARAM_NAME],
                         jax.sharding.PartitionSpec("sparsecore_sharding", None))
        params = nn.unbox(boxed)
        optimizer = embed_optimizer.create_optimizer_for_sc_model(params, optax.sgd(0.1))
        state = optimizer.init(params)

        @jax.jit
        def train_step(params, state, inputs):
            loss, gradients = jax.value_and_grad(lambda params: model.apply(params, inputs).sum())(params)
            updates, state = optimizer.update(gradients, state, params)
            return loss, embed_optimizer.apply_updates_for_sc_model(params, updates), state

        kernel = np.asarray(params["params"]["Dense_0"]["kernel"])
        loss, params, state = train_step(params, state, inputs)
        self.assertAlmostEqual(float(loss), float(8 * 0.25 * kernel.sum()), places=5)
        np.testing.assert_allclose(params["params"]["Dense_0"]["kernel"], kernel - 0.1 * 8 * 0.25, atol=1e-6)
        variables = params["params"]["SparseCoreEmbed_0"][embed.EMBEDDING_PARAM_NAME]
        rows = jax_tpu_embedding.model_of(variables).read_rows("t", [7, 8])
        np.testing.assert_allclose(rows, [0.25 - 0.5 * kernel[:, 0], np.full(8, 0.25)], atol=1e-6)
        after = layer.apply({"params": {embed.EMBEDDING_PARAM_NAME: variables}}, {"t": jnp.ones((8, 8))}, inputs, method=layer.apply_gradient)
        self.assertEqual(list(after), [embed.EMBEDDING_PARAM_NAME])
        np.testing.assert_allclose(jax_tpu_embedding.model_of(variables).read_rows("t", [7])[0], rows[0] - 0.5, atol=1e-6)

    def test_arrays_of_ids(self):
        specs = {"t": feature()}
        model = Linen(specs)
        params = model.init(jax.random.key(0), {"t": jnp.arange(8)})["params"]
        with self.assertRaisesRegex(ValueError, 'the collection "embedding" has nothing, and not \'t\''):
            model.apply({"params": params}, {"t": jnp.arange(8)})
        variables = make(specs)
        # Also where it stands under the path of the layer, as Flax itself would have it.
        for held in (variables, {"SparseCoreEmbed_0": variables}):
            found = model.apply({"params": params, "embedding": held}, {"t": jnp.arange(8)})
            np.testing.assert_allclose(found, 0.25 * np.asarray(params["Dense_0"]["kernel"]).sum() * np.ones(8), rtol=1e-5)
        self.assertEqual(float(np.abs(jax_tpu_embedding.model_of(variables).table("t") - 0.25).max()), 0)  # no step has been made

    def test_activations_have_the_dtype_of_the_variables(self):
        """As where all parameters of a model were cast: the variables still stand for their tables, and sums are made in float32."""
        specs = {"t": feature(), "u": feature("u")}
        layer = embed.SparseCoreEmbed(specs)
        inputs = layer.preprocess_inputs(0, {name: np.array([1, 1, 1, 1, 2, 3, 4, 5])[:, None] for name in specs}, None)
        params = nn.unbox(layer.init(jax.random.key(0), inputs))
        model = jax_tpu_embedding.model_of(params)
        cast = jax.tree.map(lambda one: one.astype(jnp.bfloat16), params)
        mixed = {"params": {embed.EMBEDDING_PARAM_NAME: {"t": cast["params"][embed.EMBEDDING_PARAM_NAME]["t"],
                                                          "u": params["params"][embed.EMBEDDING_PARAM_NAME]["u"]}}}
        for given, dtypes in ((params, (jnp.float32, jnp.float32)), (cast, (jnp.bfloat16, jnp.bfloat16)), (mixed, (jnp.bfloat16, jnp.float32))):
            found = jax.jit(layer.apply)(given, inputs)
            self.assertEqual((found["t"].dtype, found["u"].dtype), dtypes)
            np.testing.assert_array_equal(np.asarray(found["t"], np.float32), np.full((8, 8), 0.25, np.float32))
        found = layer.apply({"params": {"token": jnp.zeros((), jnp.bfloat16)}, "embedding": cast["params"][embed.EMBEDDING_PARAM_NAME]},
                            {name: jnp.arange(8) for name in specs})
        self.assertEqual(found["t"].dtype, jnp.bfloat16)
        gradients = jax.jit(jax.grad(lambda params: sum(one.astype(jnp.float32).sum() for one in layer.apply(params, inputs).values())))(cast)
        jax.block_until_ready(gradients)
        rows = model.read_rows("t", [1, 2])[:, 0]
        self.assertEqual(rows.tolist(), [0.25 - 0.5 * 4, 0.25 - 0.5])  # 4 gradients of 1 for a row
        after = layer.apply(gradients, {name: jnp.ones((8, 8), jnp.bfloat16) for name in specs}, inputs, method=layer.apply_gradient)
        self.assertEqual({one.dtype for one in jax.tree.leaves(after)}, {jnp.dtype(jnp.bfloat16)})
        self.assertEqual(model.read_rows("t", [2])[0, 0], 0.25 - 1)

    def test_tables_are_made_in_jitted_functions(self):
        """As where a model is initialized with its shardings: first only the shapes are asked for."""
        specs = {"t": feature(initializer=jax.nn.initializers.normal(1.0)), "whole": feature("whole", initializer=lambda: jnp.ones((32, 8)))}
        model = embed.SparseCoreEmbed(specs)
        inputs = model.preprocess_inputs(0, {"t": np.arange(8), "whole": np.arange(8)})
        shapes = jax.eval_shape(model.init, jax.random.key(1), inputs)
        with self.assertRaises(NotFound):
            self.client.model(self.id().split(".")[-1])
        params = jax.jit(model.init, out_shardings=nn.get_sharding(shapes, model.mesh))(jax.random.key(1), inputs)
        first = jax_tpu_embedding.model_of(nn.unbox(params))
        second = jax_tpu_embedding.model_of(nn.unbox(model.init(jax.random.key(1), inputs)))
        self.assertEqual([first.name, second.name], [self.id().split(".")[-1] + end for end in ("", "_1")])
        np.testing.assert_allclose(first.table("t"), second.table("t"), atol=1e-6)
        self.assertEqual((first.table("t").std().round(), first.table("whole").min()), (1, 1))

    def test_variables_of_another_process_stand_for_nothing(self):
        with self.assertRaisesRegex(ValueError, "do not stand for tables of this process"):
            jax_tpu_embedding.model_of({"t": jnp.array([[-1.0, 0.0]])})


def statistics(**counts):
    return embedding.SparseDenseMatmulInputStats(**{name: {"t": np.array(one)} for name, one in counts.items()})


class FilesTest(Case):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_statistics_are_written_as_jax_tpu_embedding_reads_them(self):
        client = file_fdo_client.NPZFileFDOClient(self.folder)
        client.record(statistics(max_ids_per_partition=[3, 5], max_unique_ids_per_partition=[2, 2]))
        client.record(statistics(max_ids_per_partition=[4, 1], max_unique_ids_per_partition=[1, 3], id_drop_counters=0))
        client.publish()
        [name] = os.listdir(self.folder)
        self.assertRegex(name, r"^fdo_stats_0_\d+\.npz$")
        with np.load(os.path.join(self.folder, name)) as stored:
            self.assertEqual({key: np.max(one, 0).tolist() for key, one in stored.items()},
                             {"t_max_ids": [4, 5], "t_max_unique_ids": [2, 3], "t_id_drop_counters": [0]})

    def test_the_newest_file_of_each_process_counts(self):
        for process, time, counts in ((0, 9, [[9, 9]]), (0, 10, [[1, 2], [2, 1]]), (1, 7, [[1, 4]])):
            np.savez(os.path.join(self.folder, f"fdo_stats_{process}_{time}.npz"), a_max_ids=counts, a_required_buffer_size=[8])
        found = file_fdo_client.NPZFileFDOClient(self.folder).load()
        self.assertEqual(found.max_ids_per_partition["a"].tolist(), [2, 4])
        self.assertEqual(found.required_buffer_size_per_sc["a"].tolist(), [8])
        np.savez(os.path.join(self.folder, "fdo_stats_1_8.npz"), other=[1])
        with self.assertRaisesRegex(ValueError, "'other' is not allowed; it must end with _max_ids"):
            file_fdo_client.NPZFileFDOClient(self.folder).load()
        with self.assertRaisesRegex(FileNotFoundError, "publish first"):
            csv_file_fdo_client.CSVFileFDOClient(self.folder).load()

    def test_statistics_as_text(self):
        for history, lines in ((True, ["t_max_ids,3 5", "t_max_ids,4 1"]), (False, ["t_max_ids,4 5"])):
            client = csv_file_fdo_client.CSVFileFDOClient(os.path.join(self.folder, str(history)), retain_history=history)
            client.record(statistics(max_ids_per_partition=[3, 5]))
            client.record(statistics(max_ids_per_partition=[4, 1]))
            client.publish()
            [name] = os.listdir(os.path.join(self.folder, str(history)))
            with open(os.path.join(self.folder, str(history), name), encoding="utf-8") as file:
                self.assertEqual(file.read().splitlines(), ["key,values", *lines])
            self.assertEqual(client.load().max_ids_per_partition["t"].tolist(), [4, 5])

    def test_specifications_as_messages(self):
        def rate(step):
            return 0.5

        specs = [feature("a", optimizer=embedding_spec.FTRLOptimizerSpec(rate, beta=0.5, multiply_linear_by_learning_rate=True)),
                 feature("b", 100, optimizer=embedding_spec.FTRLOptimizerSpec(rate, beta=0.5, multiply_linear_by_learning_rate=True))]
        embedding.auto_stack_tables(specs, 2, 4)
        made = embedding.create_proto_from_feature_specs(specs, global_device_count=2, num_sparsecore_per_device=4)
        # By number and type of each field, as they travel.
        self.assertEqual(made.stacked_table_specs[0].table_specs[1].feature_specs[0].SerializeToString(),
                         b"\x0a\x01b\x12\x01\x08\x1a\x02\x08\x08\x20\x08\x28\x40\x30\x04")
        stack = made.stacked_table_specs[0]
        self.assertEqual((stack.stack_name, stack.stack_vocab_size, stack.num_sparsecores, stack.total_sample_count,
                          stack.activation_mem_bytes_limit), ("a_b", 192, 8, 16, 2 * 2**20))
        table = stack.table_specs[1]
        self.assertEqual((table.table_name, table.vocab_size, table.padded_vocab_size, table.row_offset_in_shard, table.shard_rotation),
                         ("b", 100, 128, 8, 4))
        read = text_format.Parse(text_format.MessageToString(made), embedding_spec_pb2.EmbeddingSpecProto())
        optimizer = embedding_proto_utils.proto_to_optimizer_spec(read.stacked_table_specs[0].table_specs[1].optimizer)
        self.assertEqual((type(optimizer), optimizer.beta, optimizer.multiply_linear_by_learning_rate),
                         (embedding_spec.FTRLOptimizerSpec, 0.5, True))
        self.assertRegex(optimizer.learning_rate.tag, r"test_specifications_as_messages.*rate$")
        for spec in (embedding_spec.LaPropOptimizerSpec(0.5, b1=0.25), embedding_spec.SGDOptimizerSpec(np.float32(0.125))):
            self.assertEqual(embedding_proto_utils.proto_to_optimizer_spec(embedding_proto_utils.optimizer_spec_to_proto(spec)).learning_rate,
                             spec.learning_rate)
        for proto, said in ((embedding_spec_pb2.OptimizerSpecProto(type="CUSTOM"), r"the type CUSTOM is not allowed without its rule.*CustomOptimizerSpec\(learning_rate"),
                            (embedding_spec_pb2.OptimizerSpecProto(), "the type 0 is not allowed; it must be one of SGD")):
            with self.assertRaisesRegex(ValueError, f"optimizer: {said}"):
                embedding_proto_utils.proto_to_optimizer_spec(proto)

    def test_a_rule_of_ones_own_is_in_the_message(self):
        def rule(gradient, table, first, second, rate, factor):
            first = jnp.maximum(first, gradient)
            return table - rate * gradient * factor, first, second + gradient

        class Spec(embedding_spec.CustomOptimizerSpec):
            def get_hyperparameters(self, step=None):
                return (*super().get_hyperparameters(step), jnp.float32(0.5))

        def again(spec):
            text = text_format.MessageToString(embedding_proto_utils.optimizer_spec_to_proto(spec))
            return embedding_proto_utils.proto_to_optimizer_spec(text_format.Parse(text, embedding_spec_pb2.OptimizerSpecProto()))

        slots = jax.nn.initializers.constant(0.25), jax.nn.initializers.zeros
        for given, name in ((Spec(0.125, rule, slot_variable_initializers_tuple=slots, short_name_str="mine"), "mine"),
                            (embedding_spec.CustomOptimizerSpec(0.125, lambda gradient, table, rate: table - rate * gradient), "custom")):
            read = again(given)
            self.assertEqual(read.declared().to_json(), given.declared().to_json())
            self.assertEqual((read.short_name(), read.slot_variables_count(), len(read.get_hyperparameters(0))),
                             (name, given.slot_variables_count(), len(given.get_hyperparameters(0))))
            self.assertEqual(again(read), read)  # so tables of one rule may be stacked
            self.assertEqual(hash(again(read)), hash(read))
        self.assertIn("<lambda>", again(Spec(lambda step: 0.5, rule, slot_variable_initializers_tuple=slots)).learning_rate.tag)
        for wrong, said in ((embedding_spec.CustomOptimizerSpec(0.125), "give one of custom_computation_fn and stablehlo"),
                            (embedding_spec.CustomOptimizerSpec(0.125, rule, slot_variable_initializers_tuple=(jax.nn.initializers.normal(),)), "each must give one number")):
            with self.assertRaisesRegex(ValueError, said):
                embedding_proto_utils.optimizer_spec_to_proto(wrong)


class Net(nnx.Module):
    def __init__(self, specs, mesh):
        rngs = nnx.Rngs(params=42)
        self.embedding_layer = nnx_embed.SparseCoreEmbed(feature_specs=specs, mesh=mesh, sharding_axis="x", rngs=rngs)
        self.dense = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, inputs, step=None):
        found = self.embedding_layer(inputs, step=step)
        return self.dense(found["a"] + found["b"])[:, 0]


class CheckpointTest(Case):
    """Tables of 20 and 100 rows in a stack; Adam."""

    def specs(self, sparsecores, stacked=True, optimizer=embedding_spec.AdamOptimizerSpec(0.1), rows=100):
        made = {name: feature(name, count, shape=(8, 8), initializer=jax.nn.initializers.normal(1.0), optimizer=optimizer)
                for name, count in (("a", 20), ("b", rows))}
        if stacked:
            embedding.auto_stack_tables(made, 1, sparsecores)
        embedding.prepare_feature_specs_for_training(made, 1, sparsecores)
        return made

    def train(self, net, optimizer, specs):
        inputs, _ = embedding.preprocess_sparse_dense_matmul_input(
            {"a": np.arange(8)[:, None], "b": np.arange(92, 100)[:, None]}, None, specs, 1, 1, num_sc_per_device=4)

        @nnx.jit
        def train_step(net, optimizer, inputs, step):
            loss, gradients = nnx.value_and_grad(lambda net: jnp.mean((net(inputs, step=step) - 1) ** 2), allow_int=True)(net)
            optimizer.update(net, gradients)
            return loss

        return [float(train_step(net, optimizer, inputs, jnp.int32(step))) for step in range(3)]

    def made(self, sparsecores, stacked=True):
        specs = self.specs(sparsecores, stacked)
        net = Net(specs, self.mesh)
        optimizer = nnx_embed.PartitionedOptimizer(net, optax.adam(0.1))
        return net, optimizer, specs, jax_tpu_embedding.model_of(net.embedding_layer.embedding_table.get_value())

    def test_a_checkpoint_is_laid_out_as_on_sparsecores_and_restores_into_any_topology(self):
        with tempfile.TemporaryDirectory() as folder:
            net, optimizer, specs, model = self.made(4)
            self.train(net, optimizer, specs)
            manager = checkpoint_utils.create_checkpoint_manager(cp_path=folder, cp_options=ocp.CheckpointManagerOptions(max_to_keep=2))
            checkpoint_utils.save_checkpoint(cp_manager=manager, step=3, model=net, optimizer=optimizer, feature_specs=specs,
                                             num_global_devices=1, num_sc_per_device=4)
            manager.wait_until_finished()
            kept = {name: [model.table(name, slot=slot) for slot in ("", "momentum", "velocity")] for name in "ab"}
            stored = manager.restore(3, args=ocp.args.Composite(model=ocp.args.StandardRestore()))["model"]["embedding_layer"]["embedding_table"]
            stored = stored.get("value", stored)["a_b"]
            self.assertEqual(stored["table"].shape, (32 + 128, 8))
            # Row 97 of b, the second of the stack: of 4 SparseCores, each of 8 + 32 rows, the one at 1, behind a: 40 + 8 + 24.
            for slot, values in enumerate((stored["table"], stored["slot"]["momentum"], stored["slot"]["velocity"])):
                np.testing.assert_array_equal(values[72], kept["b"][slot][97])
            self.assertGreater(np.abs(kept["b"][1][97]).max(), 0)

            expected = self.train(net, optimizer, specs)
            for sparsecores, stacked in ((4, True), (2, False)):
                other, other_optimizer, other_specs, other_model = self.made(sparsecores, stacked)
                self.assertGreater(np.abs(other_model.table("b") - kept["b"][0]).max(), 0.01)
                if stacked:
                    with parts_of_rows(10, 8):
                        checkpoint_utils.restore_checkpoint(input_checkpoint_path=folder, step=None, model=other, optimizer=other_optimizer)
                else:
                    checkpoint_utils.restore_cross_topology_checkpoint(
                        cross_topology_checkpoint_restore_path=folder, model=other, optimizer=other_optimizer,
                        target_feature_specs=other_specs, num_global_devices=1, num_sc_per_device=sparsecores)
                for name in "ab":
                    for slot, values in zip(("", "momentum", "velocity"), kept[name]):
                        np.testing.assert_array_equal(other_model.table(name, slot=slot), values)
                self.assertEqual(self.train(other, other_optimizer, other_specs), expected)
            manager.close()

    def test_a_checkpoint_of_another_model_changes_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            net, optimizer, specs, _ = self.made(4)
            manager = checkpoint_utils.create_checkpoint_manager(cp_path=folder, cp_options=ocp.CheckpointManagerOptions())
            checkpoint_utils.save_checkpoint(cp_manager=manager, step=3, model=net, optimizer=optimizer, feature_specs=specs,
                                             num_global_devices=1, num_sc_per_device=4)
            manager.wait_until_finished()
            other, other_optimizer, _, model = self.made(4)
            before = {name: model.table(name) for name in "ab"}
            with self.assertRaisesRegex(ValueError, "step: 4 is not in .*there are \\[3\\]"):
                checkpoint_utils.restore_checkpoint(cp_manager=manager, step=4, model=other, optimizer=other_optimizer)

            def broken(variables, spec, stacks=checkpoint_utils._stacks):
                made = stacks(variables, spec)
                made["a_b"]["slot"]["velocity"][72, 3] = np.inf  # row 97 of b, behind all of a
                return made

            with unittest.mock.patch.object(checkpoint_utils, "_stacks", broken):
                checkpoint_utils.save_checkpoint(cp_manager=manager, step=5, model=net, optimizer=optimizer, feature_specs=specs,
                                                 num_global_devices=1, num_sc_per_device=4)
            manager.wait_until_finished()
            with self.assertRaisesRegex(ValueError, "inf in row 97, column 3 of slot 'velocity' of table 'b'; all values must be finite"):
                checkpoint_utils.restore_checkpoint(cp_manager=manager, step=5, model=other, optimizer=other_optimizer)
            other.dense = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
            with self.assertRaisesRegex(ValueError, r"dense/bias: the checkpoint has the shape \[1\]; the model \[2\]"):
                checkpoint_utils.restore_checkpoint(cp_manager=manager, step=3, model=other, optimizer=other_optimizer)
            for name in "ab":
                np.testing.assert_array_equal(model.table(name), before[name])
            manager.close()

    def test_a_checkpoint_is_converted_for_another_topology(self):
        topology = checkpoint_utils.TargetTopology
        with tempfile.TemporaryDirectory() as folder:
            net, optimizer, specs, model = self.made(4)
            self.train(net, optimizer, specs)
            source = os.path.join(folder, "source")
            with checkpoint_utils.create_checkpoint_manager(cp_path=source, cp_options=ocp.CheckpointManagerOptions()) as manager:
                checkpoint_utils.save_checkpoint(cp_manager=manager, step=3, model=net, optimizer=optimizer, feature_specs=specs,
                                                 num_global_devices=1, num_sc_per_device=4)
            slots = ("", "momentum", "velocity")
            kept = {name: [model.table(name, slot=slot) for slot in slots] for name in "ab"}
            other, other_optimizer, _, other_model = self.made(4)
            # Where row 97 of b is then: SparseCore 5 of 8, each of 8 + 16 rows; SparseCore 1 of 8, each of 16; as in the table; SparseCore 1 of 2.
            for number, (asked, stack, shape, row) in enumerate((
                    ({"target_topology": topology(2, 4)}, "a_b", (64 + 128, 8), 5 * 24 + 8 + 12),
                    ({"target_topology": topology(2, 4), "target_batch_size": 2**19}, "b", (128, 8), 16 + 12),  # activations of both do not fit
                    ({}, "b", (100, 8), 97),
                    ({"target_topology": topology(1, 2), "target_feature_specs": self.specs(2, stacked=False)}, "b", (112, 8), 56 + 48))):
                path = os.path.join(folder, str(number))
                checkpoint_utils.convert_cross_topology_checkpoint(input_checkpoint_path=source, output_checkpoint_path=path, save_step=7, **asked)
                with checkpoint_utils.create_checkpoint_manager(cp_path=path, cp_options=ocp.CheckpointManagerOptions()) as manager:
                    stored = manager.restore(7, args=ocp.args.Composite(model=ocp.args.StandardRestore()))["model"]["embedding_layer"]["embedding_table"]
                stored = stored.get("value", stored)[stack]
                for values, expected in zip((stored["table"], *stored["slot"].values()), kept["b"]):
                    self.assertEqual(values.shape, shape)
                    np.testing.assert_array_equal(values[row], expected[97])
                for name in "ab":
                    other_model.assign_rows(name, [3], np.ones((1, 8)))
                checkpoint_utils.restore_checkpoint(input_checkpoint_path=path, model=other, optimizer=other_optimizer)
                for name in "ab":
                    for slot, values in zip(slots, kept[name]):
                        np.testing.assert_array_equal(other_model.table(name, slot=slot), values)

            fewer, wider = self.specs(2), self.specs(2, rows=101)
            del fewer["b"]
            for asked, message in (({"target_batch_size": 8}, "target_topology: must be given"), ({"restore_step": 4}, "step: 4 is not in"),
                                   ({"target_topology": topology(1, 2), "target_feature_specs": fewer}, "table 'b' of the checkpoint is missing"),
                                   ({"target_topology": topology(1, 2), "target_feature_specs": wider}, "'b' is 101 x 8; in the checkpoint it is 100 x 8")):
                with self.assertRaisesRegex(ValueError, message):
                    checkpoint_utils.convert_cross_topology_checkpoint(input_checkpoint_path=source, output_checkpoint_path=os.path.join(folder, "no"), **asked)
            self.assertFalse(os.path.exists(os.path.join(folder, "no")))

    def test_stacks_whose_optimizers_are_not_described_stay_together(self):
        described = [embedding.create_proto_from_feature_specs(self.specs(sparsecores), 1, sparsecores) for sparsecores in (4, 8)]
        for spec in described:
            for table in spec.stacked_table_specs[0].table_specs:
                table.ClearField("optimizer")
        self.assertEqual([table.optimizer.type for table in _layouts.planned(described[0], 2, 4, None).stacked_table_specs[0].table_specs], [0, 0])
        made = _layouts.planned(described[0], 1, 8, None)
        for table in described[1].stacked_table_specs[0].table_specs:
            table.ClearField("combiner")
        self.assertEqual(made, described[1])
        with self.assertRaisesRegex(ValueError, "stack 'a_b': 4194304 bytes of activations on each SparseCore are above the limit of 2097152"):
            _layouts.planned(described[0], 2, 4, 2**19)

    def test_tables_of_a_rule_of_ones_own_keep_it_on_another_topology(self):
        rule = embedding_spec.CustomOptimizerSpec(0.125, lambda gradient, table, slot, rate: (table - rate * gradient, slot + gradient),
                                                  slot_variable_initializers_tuple=(jax.nn.initializers.constant(0.25),))
        specs = self.specs(4, optimizer=rule)
        source = embedding.create_proto_from_feature_specs(specs, 1, 4)
        made = _layouts.planned(source, 2, 4, None).stacked_table_specs
        self.assertEqual([[(one.table_name, one.optimizer) for one in stack.table_specs] for stack in made],
                         [[(one.table_name, one.optimizer) for one in source.stacked_table_specs[0].table_specs]])
        self.assertIn("stablehlo", str(made[0].table_specs[0].optimizer))


if __name__ == "__main__":
    assert flax.__version__
    main()
