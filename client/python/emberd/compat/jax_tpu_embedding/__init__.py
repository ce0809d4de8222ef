"""jax-tpu-embedding on a cluster of emberd: the same names and signatures, without a TPU.

A script runs after `jax_tpu_embedding` in its imports has become `emberd.compat.jax_tpu_embedding`:

    from emberd.compat.jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec
    from emberd.compat.jax_tpu_embedding.sparsecore.lib.flax.nnx import embed              # or lib.flax.linen
    from emberd.compat.jax_tpu_embedding.sparsecore.utils import utils

The rows are on the cluster: what is called embedding variables here is a pair of numbers that stands for them and goes through
jitted functions as the tables would, donated and returned. They hold no rows: lib.flax.nnx.checkpoint_utils saves these along. `use` says which cluster; without it one is started in child
processes that end with this one. `model_of` gives the emberd.Model, to read and assign rows or save checkpoints.

What differs: each process has one device; an id outside of its table is an error; limits of partitions are for TPUs, and
the cluster makes as many mini-batches as it needs; samples that do not divide evenly are kept. An initializer may be
emberd.Normal and so on: the cluster then makes the rows. A custom optimizer is elementwise. There is no pmap, no stacked form of activations
and gradients, and no pipelining of SparseCore and TensorCore (see emberd.jax.Embedding.prefetch).
"""

from ._tables import model_of, use

__all__ = ["model_of", "use"]
