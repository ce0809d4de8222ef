"""Layers of Flax NNX."""
