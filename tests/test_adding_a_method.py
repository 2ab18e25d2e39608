"""docs/adding_a_method.md: the method of the page works, run as it stands, and one whose codec
stores other arrays than it describes is refused by name."""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.methods.registry import METHODS

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "adding_a_method.md"


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test leaves no method behind."""
    monkeypatch.setattr(METHODS, "_methods", dict(METHODS._methods))


@pytest.fixture
def page(table: None) -> dict[str, Any]:
    """Everything that the page's code blocks define, as one module."""
    names: dict[str, Any] = {"__name__": "adding_a_method"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    return names


def test_the_method_of_the_page_is_one_like_any_other(page: dict[str, Any]):
    spec, plan = page["spec"], page["plan"]
    assert kvq.parse(str(spec)) == spec == kvq.Bytes(largest=63, recent=16)
    assert str(spec) == "bytes:largest=63,recent=16"
    assert page["bits"] == 8 + 16 / 64
    assert plan.layer.k.largest == 63
    read, k = np.asarray(page["keys"][:, :80]), np.asarray(page["k"])
    assert np.abs(read - k).max() <= 0.51 / 63
    assert np.abs(read[:, :32] - k[:, :32]).max() > 0.3 / 63, "nothing is quantized"
    np.testing.assert_array_equal(read[:, 64:], k[:, 64:], "the recent window is not exact")
    assert page["bits"] == kvq.size.body_bits_per_element("bytes", page["dims"])


def returning(change: Any) -> Any:
    """Return what makes, from the page, a method whose codec returns change(codes, scales)."""

    def method_of(page: dict[str, Any]) -> Any:
        class Wrong(page["EightBits"]):
            def quantize(self, *arguments: Any) -> Any:
                return change(*super().quantize(*arguments))

        class Other(page["Bytes"]):
            name = "other"

            def codec(self, side: Any, layer: int, dims: Any, block: int, dtype: str) -> Any:
                return Wrong(side, dims.head_dim)

        return Other()

    return method_of


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize(
    ("method_of", "told"),
    [
        (
            returning(lambda codes, scale: (codes, scale.astype(jnp.float32))),
            r"float32 \[1, 2, 64\] for \[1\], and its body describes float16 \[1, 2, 64\]",
        ),
        (
            returning(lambda codes, scale: (codes, scale[..., None])),
            r"float16 \[1, 2, 64, 1\] for \[1\], and its body describes float16 \[1, 2, 32\]",
        ),
        (
            returning(lambda codes, scale: (codes.astype(jnp.int32), scale)),
            r"int32 \[1, 2, 64, 64\] for \[0\], and its body describes int8 \[1, 2, 64, 64\]",
        ),
        (
            returning(lambda codes, scale: (scale, codes)),
            r"float16 \[1, 2, 64\] for \[0\], and its body describes int8 \[1, 2, 32, 64\]",
        ),
        (
            returning(lambda codes, scale: [codes, scale]),
            r"PyTreeDef\(\[\*, \*\]\), and its body describes PyTreeDef\(\(\*, \*\)\)",
        ),
    ],
)
def test_a_codec_whose_arrays_are_not_those_of_its_body_is_named(
    page: dict[str, Any], method_of: Any, told: str, implementation: Any
):
    """JAX's own errors were about the internals of the cache."""
    kvq.methods.register(method_of(page))
    plan = kvq.layer_plan("other", page["dims"], layer=0, capacity=128, dtype="float32")
    q, k = (jax.ShapeDtypeStruct((1, 64, n, 64), jnp.float32) for n in (4, 2))

    def attend(q: Any, k: Any) -> Any:
        options = dict(prefill=True, implementation=implementation)
        return plan.attend(plan.init(1), q, k, k, **options)

    with pytest.raises(ValueError, match=rf"\AWrong.quantize of k returned {told}"):
        jax.eval_shape(attend, q, k)
