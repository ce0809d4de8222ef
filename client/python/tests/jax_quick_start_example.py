"""The quick start of jax-tpu-embedding in our words: the same calls, names, arguments and shapes, in its order.
test_jax_quick_starts.py runs it with other imports.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax_tpu_embedding.sparsecore.lib.flax import embed
from jax_tpu_embedding.sparsecore.lib.nn import embedding_spec

BATCH, POSITIONS, ROWS, DIM, RATE = 32, 16, 1024, 128, 0.05

words = embedding_spec.TableSpec(vocabulary_size=ROWS, embedding_dim=DIM, name="word_embedding_table",
                                 optimizer=embedding_spec.SGDOptimizerSpec(learning_rate=RATE))
feature_specs = {"word_ids": embedding_spec.FeatureSpec(
    table_spec=words, input_shape=(BATCH, POSITIONS), output_shape=(BATCH, POSITIONS, DIM), name="word_ids")}


class Model(nn.Module):
    feature_specs: embed.Nested[embedding_spec.FeatureSpec]

    @nn.compact
    def __call__(self, ids):
        found = embed.SparseCoreEmbed(feature_specs=self.feature_specs)(ids)["word_ids"]
        return nn.Dense(ROWS)(found.reshape((found.shape[0], -1)))


with jax.sharding.Mesh(jax.devices(), axis_names=("data",)):
    variables = embed.SparseCoreEmbed.create_embedding_variables(feature_specs, jax.random.PRNGKey(0))
model = Model(feature_specs=feature_specs)
dense = model.init(jax.random.PRNGKey(1), {"word_ids": jnp.zeros((BATCH, POSITIONS), dtype=jnp.int32)})["params"]


@jax.jit
def train_step(dense, variables, ids, labels):
    def loss_of(dense):
        return jnp.mean(jnp.square(model.apply({"params": dense, "embedding": variables}, ids) - labels))

    gradients = jax.grad(loss_of)(dense)  # of the dense part alone
    return jax.tree.map(lambda before, gradient: before - 0.01 * gradient, dense, gradients)


ids = {"word_ids": jax.random.randint(jax.random.PRNGKey(2), (BATCH, POSITIONS), 0, ROWS)}
labels = jax.random.normal(jax.random.PRNGKey(3), (BATCH, ROWS))
