"""The cache as a whole: specs, allocation, updates, row operations, files, and byte counts."""
