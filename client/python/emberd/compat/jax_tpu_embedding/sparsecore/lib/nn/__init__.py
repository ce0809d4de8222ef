"""Specifications of tables and features, and the functions on them."""
