"""GPU kernels on plain arrays; imports jax only. docs/kernels.md derives the speed that they can
have."""
