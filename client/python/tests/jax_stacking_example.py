"""The example of jax-tpu-embedding's page about stacking in our words: the same calls, names, arguments and shapes, in its order.
test_jax_quick_starts.py runs it with other imports.
"""

import jax
import jax.numpy as jnp
from jax_tpu_embedding.sparsecore.lib.nn import embedding_spec

table_spec_a, table_spec_b = (embedding_spec.TableSpec(
    vocabulary_size=rows, embedding_dim=columns, initializer=lambda: jnp.zeros((128, 16), dtype=jnp.float32),
    optimizer=embedding_spec.SGDOptimizerSpec(), combiner="sum", name=name, max_ids_per_partition=16, max_unique_ids_per_partition=16)
    for name, rows, columns in (("table_a", 64, 12), ("table_b", 120, 10)))
feature_specs = [embedding_spec.FeatureSpec(table_spec=table, input_shape=(16, 1), output_shape=(16, table.embedding_dim), name=name)
                 for name, table in (("feature_spec_a", table_spec_a), ("feature_spec_b", table_spec_b), ("feature_spec_c", table_spec_b))]

from jax_tpu_embedding.sparsecore.lib import embedding  # noqa: E402

embedding.auto_stack_tables(feature_specs, global_device_count=jax.device_count(), num_sc_per_device=4)
embedding.prepare_feature_specs_for_training(feature_specs, global_device_count=jax.device_count(), num_sc_per_device=4)
