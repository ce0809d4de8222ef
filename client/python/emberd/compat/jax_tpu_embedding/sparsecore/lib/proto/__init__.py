"""Descriptions of specifications, for checkpoints."""
