"""A trainer written after the documentation of jax-tpu-embedding. test_jax_tpu_embedding.py runs it with other imports.

Three tables with an optimizer each, one of them for two features, ragged ids with weights; the lookup, the dense part and the
update are in one jitted function over a mesh.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_tpu_embedding.sparsecore.lib.fdo import file_fdo_client
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec, table_stacking
from jax_tpu_embedding.sparsecore.utils import utils

BATCH, ROWS, DIM, STEPS = 32, 40, 6, 10

mesh = Mesh(np.array(jax.devices()), axis_names=["device"])
pd, pe = P("device"), P("device", None)
num_sc_per_device = utils.num_sparsecores_per_device(jax.devices()[0])


def table(name, optimizer, combiner):
    return embedding_spec.TableSpec(vocabulary_size=ROWS, embedding_dim=DIM, initializer=jax.nn.initializers.normal(0.5),
                                    optimizer=optimizer, combiner=combiner, name=name, max_ids_per_partition=64,
                                    max_unique_ids_per_partition=64)


def feature(name, table_spec, valency):
    return embedding_spec.FeatureSpec(table_spec=table_spec, input_shape=(BATCH, valency), output_shape=(BATCH, DIM),
                                      name=name)


words = table("words", embedding_spec.AdamOptimizerSpec(learning_rate=lambda step: 0.05 / (step + 1)), "mean")
users = table("users", embedding_spec.SGDOptimizerSpec(learning_rate=0.5), "sum")
items = table("items", embedding_spec.AdagradOptimizerSpec(learning_rate=0.1), "sqrtn")
feature_specs = nn.FrozenDict({"title": feature("title", words, 4), "text": feature("text", words, 8),
                               "user": feature("user", users, 1), "item": feature("item", items, 3)})
embedding.prepare_feature_specs_for_training(feature_specs, global_device_count=mesh.size,
                                             num_sc_per_device=num_sc_per_device)
table_specs = {f.table_spec.name: f.table_spec for f in jax.tree.leaves(feature_specs)}
emb_variables = embedding.init_embedding_variables(jax.random.key(13), table_specs, NamedSharding(mesh, pe),
                                                   num_sc_per_device)


def batches():
    random = np.random.default_rng(3)
    for _ in range(STEPS):
        text = np.empty(BATCH, object)
        text[:] = [random.integers(0, ROWS, random.integers(1, 8)).astype(np.int32) for _ in range(BATCH)]
        features = {"title": random.integers(0, ROWS, (BATCH, 4), dtype=np.int32), "text": text,
                    "user": random.integers(0, ROWS, (BATCH, 1), dtype=np.int32),
                    "item": random.integers(0, ROWS, (BATCH, 3), dtype=np.int32)}
        weights = {}
        for name, ids in features.items():
            if ids.dtype == object:
                weights[name] = np.empty(BATCH, object)
                weights[name][:] = [random.uniform(0.5, 2, len(row)).astype(np.float32) for row in ids]
            else:
                weights[name] = np.ones(ids.shape, np.float32)
        yield features, weights, random.standard_normal((BATCH, DIM)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(2,),
                   out_shardings=(None, None, utils.embedding_table_format(mesh, pe)))
def train_step(feature_specs, inputs, emb_variables, dense, label, step):
    activations = jax.shard_map(
        functools.partial(embedding.tpu_sparse_dense_matmul, global_device_count=mesh.size, feature_specs=feature_specs,
                          sharding_strategy="MOD"),
        mesh=mesh, in_specs=(pd, pe), out_specs=pd, check_vma=False)(inputs, emb_variables)

    def loss_of(dense, activations):
        return jnp.mean((sum(activations.values()) * dense - label) ** 2)

    loss, (of_dense, of_activations) = jax.value_and_grad(loss_of, argnums=(0, 1))(dense, activations)
    emb_variables = jax.shard_map(
        lambda gradients, inputs, variables, step: embedding.tpu_sparse_dense_matmul_grad(
            gradients, inputs, variables, feature_specs=feature_specs, sharding_strategy="MOD", step=step),
        mesh=mesh, in_specs=(pd, pd, pe, P()), out_specs=pe, check_vma=False)(of_activations, inputs, emb_variables, step)
    return (loss, activations), dense - 0.1 * of_dense, emb_variables


def run(folder):
    """What was seen in each step, and the tables at the end."""
    global emb_variables
    fdo_client = file_fdo_client.NPZFileFDOClient(folder)
    start = table_stacking.unshard_and_unstack_tables(table_specs, emb_variables, mesh.size * num_sc_per_device)
    dense, seen = jnp.ones(DIM), []
    for step, (features, weights, label) in enumerate(batches()):
        structure = jax.tree.structure(feature_specs)
        inputs, stats = embedding.preprocess_sparse_dense_matmul_input(
            structure.unflatten([features[name] for name in sorted(features)]),
            structure.unflatten([weights[name] for name in sorted(weights)]), feature_specs,
            local_device_count=mesh.local_mesh.size, global_device_count=mesh.size, num_sc_per_device=num_sc_per_device,
            sharding_strategy="MOD", batch_number=step)
        inputs = jax.tree.map(lambda x: jax.make_array_from_process_local_data(NamedSharding(mesh, pd), x), inputs)
        fdo_client.record(stats)
        (loss, activations), dense, emb_variables = train_step(feature_specs, inputs, emb_variables, dense, label, step)
        seen.append((float(loss), {name: np.asarray(value) for name, value in activations.items()}))
    fdo_client.publish()
    embedding.update_preprocessing_parameters(feature_specs, fdo_client.load(), num_sc_per_device)
    end = table_stacking.unshard_and_unstack_tables(table_specs, emb_variables, mesh.size * num_sc_per_device)
    return start, seen, end
