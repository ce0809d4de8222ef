"""Specifications, lookups and layers."""
