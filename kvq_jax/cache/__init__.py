"""The cache as a whole: specs, allocation, updates, row operations, files, and the accounting of
its bytes."""
