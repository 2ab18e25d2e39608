"""The method of plans, and the texts and widths on which they measure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvq_tools.evaluation.defaults import STEP

if TYPE_CHECKING:  # the options of a command are declared without JAX
    from kvq_jax.methods.base import Method

METHOD = "waterfill"
KEY_BASES, VALUE_BASES = ("pairs", "eigen"), ("eigen", "rotation")
MEASURED = (1.5, 2.5, 4.0)  # stored bits at which every side is measured
RECENTS = (128, 256, 512)  # newest tokens to keep exact, tried beside the method's own
SCORED = 4 * STEP  # tokens of a window after the prompt
WINDOW, WINDOWS = 512 + SCORED, 2
LONGER = 4  # times the exact tokens of a cache that is checked, at least, in a prompt
LONGEST = LONGER * max(RECENTS) + SCORED  # tokens of a window on which whole caches are checked
CODE = "Python's standard library"  # what is measured without --other-text
SAMPLES, LENGTH = 2, 1024  # samples of the calibration, and tokens of each


class Bases(NamedTuple):
    """The channels of keys and of values, as waterfill's `key_basis` and `value_basis` name
    them."""

    keys: str = "pairs"
    values: str = "eigen"

    @classmethod
    def of(cls, method: Method) -> Bases:
        """Return the bases of a method, by default those of another method than waterfill."""
        keys, values = cls()
        return cls(getattr(method, "key_basis", keys), getattr(method, "value_basis", values))

    @property
    def predicted(self) -> bool:
        """Return True if a calibration predicts costs without a measurement. A rotation has no
        energies."""
        return self.values != "rotation"

    def spec(self, bits: float | None = None) -> str:
        """Return the method of plans with these bases, as a spec's text."""
        options = [] if bits is None else [f"bits={bits:g}"]
        options += [f"key_basis={self.keys}"]
        options += [f"value_basis={self.values}"] if self.values != "eigen" else []
        return f"{METHOD}:{','.join(options)}"

    def flags(self) -> str:
        """Return the options of `kvq plan` that ask for these bases."""
        flags = zip(("--key-basis", "--value-basis"), self, Bases(), strict=True)
        return "".join(f" {flag} {basis}" for flag, basis, usual in flags if basis != usual)
