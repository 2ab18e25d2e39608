"""Types and shapes are checked while the tests run: jaxtyping's import hook puts beartype around
every function of the packages."""

import dataclasses
import importlib
import inspect
import pkgutil
import typing
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import kvq_jax as kvq
import kvq_models
import kvq_tools
import pallas_kernels
from kvq_jax.arrays import grouped_array
from kvq_jax.arrays.grouped_array import GroupedArray, GroupFormat
from kvq_jax.attention import reference
from kvq_jax.types.pytree import describe
from kvq_jax.types.rope import cosines_and_sines
from kvq_models.inference.sampling import Sampling, sample

PACKAGES = (pallas_kernels, kvq, kvq_models, kvq_tools)
ROWS = jnp.zeros((2, 2, 32, 64))
FORMAT = GroupFormat(2, "asym", "tokens", 32, 64, 32)
ROPE = kvq.types.Rope(jnp.ones(32), jnp.ones(()))


def modules() -> list[ModuleType]:
    names = (
        info.name
        for package in PACKAGES
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    )
    return [importlib.import_module(name) for name in names if not name.endswith("__main__")]


OPTIONAL = {"Figure"}  # of matplotlib, which only drawing imports


def functions(module: ModuleType) -> list[typing.Any]:
    own = [
        value
        for value in vars(module).values()
        if getattr(value, "__module__", None) == module.__name__
    ]
    methods = [
        inspect.unwrap(method)
        for cls in own
        if inspect.isclass(cls)
        for method in vars(cls).values()
        if inspect.isfunction(method)
    ]
    written = [
        method for method in methods if method.__code__.co_filename != "<string>"
    ]  # a dataclass's are generated from its fields
    return [value for value in own if inspect.isclass(value) or inspect.isfunction(value)] + written


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_package_is_imported_through_the_hook(package):
    assert type(package.__loader__).__name__ == "_JaxtypingLoader", (
        "pyproject.toml's --jaxtyping-packages does not name the package"
    )


def test_every_annotation_can_be_resolved():
    """One that cannot is not checked at all."""
    unresolved = []
    for module in modules():
        for value in functions(module):
            try:
                typing.get_type_hints(value, include_extras=True)
            except Exception as error:
                if getattr(error, "name", None) not in OPTIONAL:
                    unresolved.append(f"{module.__name__}.{value.__qualname__}: {error}")
    assert not unresolved, "\n".join(unresolved)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (
            lambda: kvq.types.LayerInputs(
                *(None, None, ROWS, None, ROWS, ROWS[:, :, :16]),
                *(jnp.zeros((2, 32), int), jnp.ones((2, 32), bool), None),
            ),
            "v",
        ),
        (lambda: cosines_and_sines(jnp.zeros((2, 31, 1), int), ROPE), "positions"),
        (lambda: reference.attend(ROWS, ROWS, ROWS[..., :32], jnp.ones((2, 32, 32), bool)), "v"),
        (
            lambda: sample(jnp.zeros((2, 7)), Sampling(), jax.random.key(0), jnp.zeros((2,), int)),
            "step",
        ),
    ],
)
def test_a_wrong_shape_is_refused_by_its_argument(call, argument: str):
    with pytest.raises(TypeCheckError, match=f"parameter '{argument}'"):
        call()


def test_pytrees_are_rebuilt_with_other_leaves():
    """JAX puts things into a tree that the constructor does not take; nor does it take the
    descriptions of a layout."""
    body = grouped_array.quantize(ROWS, FORMAT)
    named = jax.tree.map(lambda leaf: object(), body)
    assert isinstance(named, GroupedArray)
    assert jax.tree.structure(named) == jax.tree.structure(body)
    assert jax.vmap(grouped_array.quantize, (0, None))(ROWS[None], FORMAT).scale.shape == (
        1,
        *body.scale.shape,
    )
    described = describe(GroupedArray, words=(), scale=None, zero=None, format=FORMAT)
    assert jax.tree.leaves(described) == []
    with pytest.raises(TypeError, match="scale, zero"):
        describe(GroupedArray, words=(), format=FORMAT)
    with pytest.raises(TypeCheckError, match="scale"):
        dataclasses.replace(body, scale=body.scale[0])
    assert [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(body)
    ] == [".words[0]", ".scale", ".zero"]
