"""The modules of jax_tpu_embedding.sparsecore."""
