"""The public names: groups, old names that warn, specs as Python calls, methods of other
packages."""

import dataclasses
import importlib.metadata
import inspect
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

import kvq_jax as kvq
from kvq_jax.cache import spec_classes
from kvq_jax.methods import registry
from kvq_jax.methods.base import Method, Windows, option
from kvq_jax.methods.registry import METHODS
from kvq_jax.moved_names import MOVED

GROUPS = ("cache", "files", "methods", "parameters", "rows", "size", "types")


def test_newcomers_see_ten_names_and_the_groups():
    listed = set(kvq.__all__) - {"__version__", *GROUPS}
    assert len(listed) == 10
    assert {"parse", "init_cache", "layer_plan", "roundtrip", "CacheDims"} <= listed
    for group in GROUPS:
        module = getattr(kvq, group)
        assert all(hasattr(module, name) for name in module.__all__), group


def test_old_names_warn_and_are_the_new_ones():
    for old, new in MOVED.items():
        group, name = new.split(".")
        with pytest.warns(DeprecationWarning, match=f"kvq_jax.{old} is now kvq_jax.{new};"):
            value = getattr(kvq, old)
        assert value is getattr(getattr(kvq, group), name)
        assert name in getattr(kvq, group).__all__
    dims = kvq.CacheDims(1, 2, 2, 32, 64)
    with pytest.warns(DeprecationWarning, match="kvq_jax.size.of"):
        size = kvq.size("dense", dims, 1, 64)
    assert size == kvq.size.of("dense", dims, 1, 64)
    with pytest.raises(AttributeError, match="no attribute 'Kiwi'"):
        _ = kvq.Kiwi


@pytest.mark.parametrize("name", METHODS)
def test_each_method_has_a_call_that_makes_its_spec(name: str):
    (public,) = (p for p, own in spec_classes.names().items() if own == name)
    make = getattr(kvq, public)
    assert make() == kvq.parse(name)
    assert make(recent=40, skip_layers=(0, 1, 5)) == kvq.parse(
        f"{name}:recent=40,skip_layers=0-1/5"
    )
    options = {field.name: field.default for field in METHODS[name].options()}
    assert make(**options) == kvq.parse(name), "the defaults are those of the text"
    signature = inspect.signature(make)
    assert set(options) <= set(signature.parameters)
    assert all(f"    {option}: " in make.__doc__ for option in options)


def test_calls_are_checked_as_texts_are():
    assert kvq.Kivi(bits=4, recent=32) == kvq.parse("kivi:bits=4,recent=32")
    assert kvq.Kivi(bits=4) != kvq.Kivi(bits=2)
    assert kvq.Kivi(sink=None, skip_layers=()) == kvq.parse("kivi"), "the defaults, written out"
    with pytest.raises(ValueError, match="kivi:bits=5 is not allowed; choose from 2, 3, 4, 8"):
        kvq.Kivi(bits=5)
    with pytest.raises(ValueError, match="unknown option 'bit' of kivi"):
        kvq.Kivi(bit=4)


POINTS = """
[kvq_jax.methods]
toy = toy_kvq:Toy
"""
TOY = """
import dataclasses
from typing import ClassVar
from kvq_jax.methods.kivi import Kivi

@dataclasses.dataclass(frozen=True)
class Toy(Kivi):
    name: ClassVar[str] = "toy"
    summary: ClassVar[str] = "KIVI by another name"
"""
PROGRAM = """
import jax.numpy as jnp
import kvq_jax as kvq
assert "toy" not in kvq.methods.METHODS, "it is imported when it is asked for"
k = jnp.arange(2 * 64 * 32.0).reshape(1, 2, 64, 32) % 7
specs = "toy:bits=4", "kivi:bits=4"
of_toy, of_kivi = (kvq.roundtrip(spec, k, k, layout="BNTH")[0] for spec in specs)
assert (of_toy == of_kivi).all()
assert "kvq_jax.methods.waterfill" not in sys.modules, "a method is imported when it is looked up"
print(kvq.Toy(bits=4), kvq.parse("k=toy+v=int4+cache:block=32"), kvq.methods.METHODS["toy"])
"""


def test_an_installed_package_brings_a_method(tmp_path: pathlib.Path):
    """Its folders are as pip leaves them."""
    (tmp_path / "toy_kvq.py").write_text(TOY)
    information = tmp_path / "toy_kvq-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kvq\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(POINTS)
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    command = [sys.executable, "-c", start + PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("toy:bits=4 k=toy+v=int4")


def test_a_method_that_its_package_lacks_is_named(monkeypatch: pytest.MonkeyPatch):
    point = importlib.metadata.EntryPoint("toy", "kvq_jax:Gone", registry.ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [point])
    with pytest.raises(ValueError, match="the method 'toy' of 'kvq_jax:Gone': "):
        inspect.unwrap(registry.register_installed)()


def test_a_broken_package_leaves_other_names_as_they_are(monkeypatch: pytest.MonkeyPatch):
    point = importlib.metadata.EntryPoint("toy", "kvq_jax:Gone", registry.ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [point])
    registry.register_installed.cache_clear()
    assert kvq.Kivi() == kvq.parse("kivi")
    with pytest.raises(AttributeError, match="no attribute 'Toy': the method 'toy' of 'kvq_jax:G"):
        _ = kvq.Toy
    assert not hasattr(kvq, "Toy")


def test_a_class_of_the_name_of_ours_has_another_name(monkeypatch: pytest.MonkeyPatch):
    class InnerQ(type(METHODS["kivi"])):
        name = "toy"

    monkeypatch.setitem(METHODS, "toy", InnerQ())
    names = spec_classes.names()
    assert names["InnerQ"] == "innerq"
    assert names["Toy"] == "toy"


def test_a_name_is_registered_once():
    kvq.methods.register(METHODS["kivi"])  # the same again changes nothing
    with pytest.raises(ValueError, match="register Kivi with its default options: rotate=True"):
        kvq.methods.register(dataclasses.replace(METHODS["kivi"], rotate=True))


class Mine(Method):
    """A method that lacks nothing, for the classes below."""

    name = "mine"
    summary = "a method of a test"
    source = "this file"

    def windows(self) -> Windows:
        return Windows(0, 16, 16)

    def codec(self, side: Any, layer: int, dims: Any, block: int, dtype: str) -> Any:
        raise NotImplementedError


def options_of(**fields: Any) -> type[Method]:
    """Return a dataclass with these options, or other attributes, over `Mine`."""
    own = {f: v for f, v in fields.items() if isinstance(v, dataclasses.Field)}
    others = {f: v for f, v in fields.items() if f not in own}
    made = [(f, type(v.default), v) for f, v in own.items()]
    return dataclasses.make_dataclass("Own", made, bases=(Mine,), frozen=True, namespace=others)


def without_dataclass() -> Method:
    class Own(Mine):
        bits: int = option(4, "bits of a code")

    return Own()


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: options_of(bits=option(4, "b"))(bits=2), "with its default options: bits=2 bel"),
        (lambda: options_of(recent=option(4, "r"))(), "recent of Own has the name of an option of"),
        (lambda: options_of(bits=option(None, "b"))(), "bits of Own must have a default that is"),
        (lambda: options_of(sizes=option((1, 2), "s"))(), "sizes of Own must have a default that"),
        (lambda: options_of(bits=dataclasses.field(default=4))(), "bits = option(4, 'what it doe"),
        (
            without_dataclass,
            "bits of Own is no option yet: put @dataclasses.dataclass(frozen=True)",
        ),
        (lambda: options_of(summary=None)(), "Own needs summary: ClassVar[str]"),
        (lambda: options_of(name="Mine")(), "a method's name is lower-case letters, digits and _"),
    ],
)
def test_a_method_that_no_spec_could_write_is_not_registered(make: Any, message: str):
    """Each was taken, and its options did nothing or were read back as others."""
    with pytest.raises(ValueError, match=rf"\A.*{re.escape(message)}.*\Z"):
        kvq.methods.register(make())
    assert "mine" not in METHODS


def test_a_class_that_is_defined_again_takes_its_own_place(monkeypatch: pytest.MonkeyPatch):
    """As a cell of a notebook does that runs twice."""
    monkeypatch.setattr(METHODS, "_methods", dict(METHODS._methods))
    first, again = (options_of(bits=option(bits, "bits of a code")) for bits in (4, 2))
    kvq.methods.register(first())
    kvq.methods.register(first())
    assert (kvq.parse("mine").k.bits, kvq.Own().k.bits) == (4, 4)
    kvq.methods.register(again())
    assert (kvq.parse("mine").k.bits, kvq.Own().k.bits) == (2, 2)
    assert inspect.signature(kvq.Own).parameters["bits"].default == 2
    other = type("Other", (Mine,), {})
    with pytest.raises(ValueError, match="'mine' is taken by Own: give Other another"):
        kvq.methods.register(other())


def test_every_method_of_ours_could_be_registered():
    for method in METHODS.values():
        kvq.methods.register(method)
