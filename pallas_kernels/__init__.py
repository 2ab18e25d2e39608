"""GPU kernels on plain arrays; imports jax only. Decode attention over packed words will live here."""
