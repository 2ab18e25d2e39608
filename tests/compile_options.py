"""How tests compile. Their programs run for milliseconds: without LLVM's optimizations they compile
several times faster."""

import shutil

import jax

# JAX 0.10 knows this option; later versions refuse to start with it.
_EMITTERS = "xla_cpu_use_fusion_emitters" if jax.__version_info__ < (0, 11) else None
_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,  # each part of a program costs a run of LLVM
} | ({_EMITTERS: False} if _EMITTERS else {})
# A GPU's tests are of what its compiler makes in use.
QUICK_COMPILE = _QUICK if shutil.which("nvidia-smi") is None else {}
USUAL_COMPILE = {  # for tests of what a compiler makes
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_parallel_codegen_split_count": 32,
} | ({_EMITTERS: True} if _EMITTERS else {})
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in _QUICK.items())
