"""The Llama family in Flax NNX: configs, checkpoints, the forward pass."""
