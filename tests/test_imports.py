"""Imports run one way.

tests, laboratory, benchmarks, tools -> kvq_tools -> kvq_models -> kvq_jax -> pallas_kernels and
cpu_kernels -> jax. kvq_hosts imports kvq_jax, and each of its files one project of others.
"""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ORDER = (  # each may import those before it
    *("cpu_kernels", "pallas_kernels", "kvq_jax", "kvq_hosts", "kvq_models", "kvq_tools"),
    *("tools", "benchmarks", "laboratory", "tests"),
)
MODEL_ORDER = ("named_models", "llama", "calibration", "inference")  # the same of kvq_models' parts
FOLDERS = {"kvq_models": "models/kvq_models"}  # of packages that do not lie at the top
LAYOUT, OPTIONS = "pallas_kernels.tiles.layout", "pallas_kernels.launch"
PARTIAL = "pallas_kernels.decode_attention.partial_attention"
# the only files above the kernels that know of them, and what they may import: all, or a module
# that needs no Triton
KERNEL_DOORS = {
    "kvq_jax/arrays/codebook_array.py": (LAYOUT,),
    "kvq_jax/arrays/float_array.py": (LAYOUT,),
    "kvq_jax/arrays/grouped_array.py": (LAYOUT,),
    "kvq_jax/arrays/packing.py": (LAYOUT,),
    "kvq_jax/arrays/polar_array.py": (LAYOUT,),
    "kvq_jax/arrays/slot_array.py": (LAYOUT,),
    "kvq_jax/arrays/sparse_outliers.py": (LAYOUT,),
    "kvq_jax/arrays/uniform.py": ("pallas_kernels.stored_scales",),
    "kvq_jax/attention/arithmetic.py": (OPTIONS, "pallas_kernels.self_test"),
    "kvq_jax/attention/cudnn.py": (PARTIAL,),
    "kvq_jax/attention/dequantized_body.py": (PARTIAL,),
    "kvq_jax/attention/dispatch.py": (OPTIONS, "cpu_kernels.library"),
    "kvq_jax/attention/fused.py": ("pallas_kernels",),
    "kvq_jax/attention/native.py": (PARTIAL, "cpu_kernels"),
    "kvq_jax/attention/online_softmax.py": (PARTIAL,),
    "kvq_jax/attention/prompt.py": (PARTIAL, "cpu_kernels.exact_attention", "cpu_kernels.library"),
    "kvq_jax/attention/streaming.py": (PARTIAL,),
    "kvq_jax/codecs/kernel_readers.py": (LAYOUT, "pallas_kernels.readers"),
    "kvq_jax/codecs/kernel_writers.py": ("pallas_kernels.quantize",),
    "kvq_jax/codecs/native_bodies.py": (LAYOUT, "cpu_kernels.body"),
    "kvq_jax/types/rope.py": ("pallas_kernels.angles",),
    "models/kvq_models/llama/packed_loading.py": ("cpu_kernels.library",),
    "models/kvq_models/llama/packed_weights.py": ("cpu_kernels",),
    "models/kvq_models/llama/tabled_weights.py": ("cpu_kernels",),
}
# What others want to know of a codec, a method or a stored array they ask its base class: its own
# class is known in these rooms alone, and to the files behind which it is made or timed.
CONCRETE = re.compile(
    r"kvq_jax\.codecs\.(codebook|grouped|rotating)\b"
    r"|kvq_jax\.methods\.\w+\.(codec|method)\b|kvq_jax\.methods\.dense\b"
    r"|kvq_jax\.arrays\.(codebook|float|grouped|polar|run|slot)_array\b"
    r"|kvq_jax\.arrays\.sparse_outliers\b"
)
ROOMS = ("kvq_jax/arrays/", "kvq_jax/codecs/", "kvq_jax/methods/", "benchmarks/", "laboratory/")
MAKERS = ("kvq_jax/attention/fused.py", "kvq_jax/cache/spec.py")
KERNELS = ("cpu_kernels", "pallas_kernels")  # neither knows of the other
HEAVY = {"torch", "transformers"}  # never needed to import the cache or the kernels


def imported(source: str, package: tuple[str, ...]) -> set[str]:
    """Dotted names that a module imports, anywhere in it; relative imports are resolved against its
    package."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def package_of(path: pathlib.Path) -> str:
    if path.is_relative_to("laboratory/tests"):
        return "tests"
    return next(
        (name for name, folder in FOLDERS.items() if path.is_relative_to(folder)), path.parts[0]
    )


def violations(path: pathlib.Path, source: str) -> list[str]:
    """Imports of the file `path` (relative to the project) that run the wrong way."""
    own, found = package_of(path), []
    for name in sorted(imported(source, path.parts[:-1])):
        top = name.split(".")[0]
        wrong_way = top in ORDER and ORDER.index(top) > ORDER.index(own)
        allowed = KERNEL_DOORS.get(path.as_posix(), ())
        past_the_door = (
            top in KERNELS
            and own in ("kvq_jax", "kvq_models", "kvq_tools", "tools")
            and not any(f"{name}.".startswith(f"{door}.") for door in allowed)
        )
        of_a_later_part = _later_part(path, name)
        from_the_top = (
            own == "kvq_tools"
            and path.parts[1] not in ("cli", "__main__.py")
            and f"{name}.".startswith("kvq_tools.cli.")
        )
        beside_the_library = own == "kvq_hosts" and top in ORDER and top not in (own, "kvq_jax")
        from_hosts = top == "kvq_hosts" and own not in ("kvq_hosts", "benchmarks", "tests")
        heavy = top in HEAVY and own in ("kvq_jax", *KERNELS)
        asks_a_class = (
            CONCRETE.match(name) is not None
            and own != "tests"
            and path.as_posix() not in MAKERS
            and not path.as_posix().startswith(ROOMS)
        )
        kernels_of_another_device = top in KERNELS and own in KERNELS and top != own
        of_packages = wrong_way, past_the_door, from_the_top, beside_the_library, from_hosts
        if any((*of_packages, of_a_later_part, heavy, kernels_of_another_device, asks_a_class)):
            found.append(f"{path} imports {name}")
    return found


def _later_part(path: pathlib.Path, name: str) -> bool:
    """Return True if a module of a part of kvq_models imports from one above it."""
    folder, parts = pathlib.Path(FOLDERS["kvq_models"]), name.split(".")
    if not path.is_relative_to(folder) or parts[0] != "kvq_models" or len(parts) < 2:
        return False
    importer, part = path.relative_to(folder).parts[0], parts[1]
    return (
        importer in MODEL_ORDER
        and part in MODEL_ORDER
        and MODEL_ORDER.index(part) > MODEL_ORDER.index(importer)
    )


def test_imports_run_one_way():
    files = [
        path
        for package in ORDER
        for path in sorted((ROOT / FOLDERS.get(package, package)).rglob("*.py"))
    ]
    assert len(files) > 200, "the walk finds no sources"
    found = [
        line
        for path in files
        for line in violations(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kvq_jax/cache/cache.py", "from kvq_models.llama.config import LlamaConfig"),
        ("kvq_jax/cache/cache.py", "from pallas_kernels.tiles.layout import PlaneLayout"),
        ("pallas_kernels/launch.py", "def f():\n    import kvq_jax"),
        ("cpu_kernels/body.py", "from pallas_kernels.tiles.layout import PlaneLayout"),
        ("models/kvq_models/llama/model.py", "from pallas_kernels import launch"),
        (
            "kvq_tools/report/collect.py",
            "from kvq_tools.cli.commands.memory import parameter_bytes",
        ),
        ("kvq_jax/methods/kivi/method.py", "import torch"),
        ("kvq_jax/cache/accounting.py", "from kvq_jax.arrays.codebook_array import CodebookArray"),
        ("kvq_tools/cli/commands/doctor.py", "from kvq_jax.codecs import grouped"),
        ("models/kvq_models/calibration/fit.py", "from kvq_jax.methods.kvquant import codec"),
        ("models/kvq_models/llama/config.py", "from kvq_models.inference.sampling import Sampling"),
        ("kvq_hosts/linen.py", "from cpu_kernels.library import unavailable"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str):
    assert violations(pathlib.Path(path), source)
