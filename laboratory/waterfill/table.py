"""The variants that are measured: what each changes of waterfill, and how it is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from kvq_jax.codecs.codec import Side
from kvq_jax.methods.waterfill.widths import template
from laboratory.waterfill.moments import SIDES, BothSides, Moments
from laboratory.waterfill.variants import (
    CHUNKS,
    Basis,
    Rule,
    Variant,
    eigen,
    pairs,
    rescaled,
    spread,
    turned_within_runs,
    widths_of,
)

Bases = dict[Side, Basis]

# the rows that a variant is fitted to, with the gradients of the calibration's text
TEXT = "the calibration's text"
OWN = "the scored prompts"
OTHERS = "that text and the prompts of other domains"
BLOCK_BITS = 8 / 32  # of a byte for each channel of a block


@dataclasses.dataclass(frozen=True)
class Entry:
    """One variant.

    name: as the page has it.
    rows: the rows that it is fitted to.
    scales: the rows that means, and if `deviations` deviations of channels, are of, if others.
    keys, values: moments -> basis.
    within: "" or "chunks" or "runs", in which channels are turned among themselves.
    rule: how normalized channels are quantized.
    power, least, profiles, joint: of `widths_of`.
    overhead: stored bits of an element beside the codes and the token's byte.
    sides: the sides that are quantized.
    key_share: chunk bits that keys take from values.
    expected: True if scores of quantized keys have half of their expected variance added.
    """

    name: str
    rows: str = TEXT
    scales: str = ""
    deviations: bool = True
    keys: Callable[[Moments], Basis] = pairs
    values: Callable[[Moments], Basis] = eigen
    within: str = ""
    rule: Rule = Rule()
    power: float = 1.0
    minimum: int = 0
    profiles: int = 4
    joint: bool = False
    overhead: float = 0.0
    sides: str = "kv"
    key_share: int = 0
    expected: bool = False

    @property
    def free_sides(self) -> tuple[Side, ...]:
        """Return the sides whose channels can be mixed: RoPE pairs cannot."""
        return ("v",) if self.keys is pairs else SIDES

    def quantizer(
        self, moments: BothSides, bits: float, scales: BothSides | None = None
    ) -> Variant:
        """Return the variant for `bits` stored bits of an element, scales included.

        scales: the moments that means and deviations are of.
        """
        head_dim = moments["k"].mean.shape[-1]
        keys, values = (sum(side) for side in template(bits - self.overhead, head_dim))
        assert head_dim == 8 * CHUNKS, "a chunk is 8 channels"
        bases: Bases = {"k": self.keys(moments["k"]), "v": self.values(moments["v"])}
        budget: dict[Side, int] = {"k": keys + self.key_share, "v": values - self.key_share}
        widths = widths_of(
            bases,
            budget,
            power=self.power,
            minimum=self.minimum,
            profiles=self.profiles,
            joint=self.joint,
        )
        if self.within == "chunks":
            bases |= {side: spread(bases[side]) for side in self.free_sides}
        elif self.within == "runs":
            bases |= {s: turned_within_runs(bases[s], widths[s]) for s in self.free_sides}
        if scales is not None:
            bases = {
                side: rescaled(bases[side], scales[side], deviations=self.deviations)
                for side in SIDES
            }
        return Variant(bases, widths, self.rule)


def without_mean(basis: Basis) -> Basis:
    return basis._replace(mean=np.zeros_like(basis.mean))


def _plain(moments: Moments) -> Basis:
    return eigen(moments, metric_weight=0)


def _ridged(moments: Moments) -> Basis:
    return eigen(moments, ridge=0.1)


EIGEN = dataclasses.replace(Entry("eigen keys"), keys=eigen)
SHARED = dataclasses.replace(EIGEN, name="eigen keys, joint bits", joint=True)
BOTH = dataclasses.replace(EIGEN, name="both", within="chunks")
JOINT = dataclasses.replace(BOTH, name="  and joint bits", joint=True)

ENTRIES = (
    Entry("waterfill"),
    Entry("waterfill, values exact", sides="k"),
    Entry("waterfill, keys exact", sides="v"),
    Entry("waterfill, own domain", rows=OWN),
    Entry("waterfill, other domains", rows=OTHERS),
    Entry("values' chunks turned", within="chunks"),
    EIGEN,
    BOTH,
    dataclasses.replace(BOTH, name="  and the own domain", rows=OWN),
    dataclasses.replace(BOTH, name="  and other domains", rows=OTHERS),
    dataclasses.replace(EIGEN, name="eigenbases, runs turned", within="runs"),
    dataclasses.replace(BOTH, name="  and levels of Lloyd and Max", rule=Rule(lloyd=1)),
    dataclasses.replace(BOTH, name="  and every channel may be clipped", rule=Rule(unclipped=9)),
    dataclasses.replace(BOTH, name="  and unclipped from 4 bits", rule=Rule(unclipped=4)),
    dataclasses.replace(BOTH, name="  and unclipped from 3 bits", rule=Rule(unclipped=3)),
    dataclasses.replace(BOTH, name="  and the best of 9 scales", rule=Rule(search=9)),
    dataclasses.replace(
        BOTH,
        name="  and a scale for each channel of a block",
        rule=Rule(block=32),
        overhead=BLOCK_BITS,
    ),
    dataclasses.replace(BOTH, name="  and widths of the energies' root", power=0.5),
    dataclasses.replace(BOTH, name="  and at least one bit", minimum=1),
    SHARED,
    dataclasses.replace(SHARED, name="  and means of the prompt", scales=OWN, deviations=False),
    dataclasses.replace(SHARED, name="  and means and deviations of the prompt", scales=OWN),
    dataclasses.replace(SHARED, name="  and expected weights", expected=True),
    dataclasses.replace(
        SHARED, name="  and levels of Lloyd and Max from 3 bits", rule=Rule(lloyd=3)
    ),
    dataclasses.replace(
        SHARED, name="  and scales of each block", rule=Rule(block=32), overhead=BLOCK_BITS
    ),
    JOINT,
    dataclasses.replace(JOINT, name="  and joint bits, own domain", rows=OWN),
    dataclasses.replace(JOINT, name="  and joint bits, other domains", rows=OTHERS),
    dataclasses.replace(JOINT, name="  and joint bits, unclipped from 4", rule=Rule(unclipped=4)),
    dataclasses.replace(JOINT, name="  and joint bits, 30 profiles", profiles=30),
    dataclasses.replace(BOTH, name="  and keys with 2 more chunk bits", key_share=2),
    dataclasses.replace(BOTH, name="  and values with 2 more chunk bits", key_share=-2),
    dataclasses.replace(
        BOTH,
        name="  and no means",
        keys=lambda moments: without_mean(eigen(moments)),
        values=lambda moments: without_mean(eigen(moments)),
    ),
    dataclasses.replace(BOTH, name="  and a ridge of 0.1", keys=_ridged, values=_ridged),
    dataclasses.replace(BOTH, name="  and no gradients in the basis", keys=_plain, values=_plain),
)
