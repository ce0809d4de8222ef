"""Statistics of batches, kept in files."""
