"""GPU kernels on plain arrays; imports jax only. docs/kernels.md tells how fast they should be and why."""
