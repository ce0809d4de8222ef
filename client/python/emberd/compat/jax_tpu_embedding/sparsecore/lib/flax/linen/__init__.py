"""The layer of Flax Linen."""
