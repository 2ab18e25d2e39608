"""Quantized caches in the models of other projects: one file for each project, which imports
kvq_jax and that project alone.

    linen     Flax Linen's attention layers (pip install 'kvq-jax[linen]')
    tunix     Llama 3, Qwen 2 and Qwen 3 of google-tunix, in its own sampler ('kvq-jax[tunix]')
    bonsai    Qwen 3 of jax-ml/bonsai, which has no release: install it from its repository
"""
