"""The protocol of docs/evaluation.md over all methods."""
