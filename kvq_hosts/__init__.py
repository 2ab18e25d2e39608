"""Quantized caches in the models of other projects: one file for each project, which imports
kvq_jax and that project alone.

    linen     Flax Linen's attention layers (pip install 'kvq-jax[linen]')
    tunix     Llama 3, Qwen 2, Qwen 3 and Gemma 3 of google-tunix ('kvq-jax[tunix]')
    bonsai    Qwen 3 of jax-ml/bonsai, which is installed from its repository
    served    refuses methods that read more than a host's layers give
"""
