"""GPU kernels on plain arrays. Imports only jax. docs/kernels.md derives their attainable speed."""
