"""XLA's list of thunks: which of them launch something, and which belong to one layer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

LAYERS = 3  # a period needs the layer before it and the one after it
KERNEL = "decode_attention"  # the attention kernel's name begins so
_LINE = re.compile(r"(?P<indent> *)(?P<number>\d+): (?P<kind>k\w+) *\[[^\]]*\] *(?P<name>\S*)")
_SECTION = re.compile(r" *(condition|body|\w*branch\w*):\s*$")
LAUNCHES = (
    "kCustomKernel",
    "kKernel",
    "kCopy",
    "kGemm",
    "kCublasLtMatmul",
    "kCuDnn",
    "kMemset32BitValue",
    "kCustomCall",
    "kMemzero",
)


@dataclasses.dataclass
class Thunk:
    """One line of the list: its kind, the kernel's name, and the thunks inside of it by section
    (condition, body, a branch)."""

    kind: str
    name: str
    inside: dict[str, list[Thunk]] = dataclasses.field(default_factory=dict)

    def launches(self, trips: int) -> Iterator[str]:
        """Yield the name of each launch. A loop runs `trips` times.

        Raises ValueError for a kind that is not a launch and holds no others.
        """
        if self.kind == "kWhile":
            for _ in range(trips):
                yield from (
                    name
                    for section in self.inside.values()
                    for thunk in section
                    for name in thunk.launches(trips)
                )
            yield from (
                name for thunk in self.inside.get("condition", ()) for name in thunk.launches(trips)
            )
        elif self.inside:
            yield from max(
                (
                    [n for t in section for n in t.launches(trips)]
                    for section in self.inside.values()
                ),
                key=len,
            )
        elif self.kind in LAUNCHES:
            yield re.sub(r"(_\d+)+$", "", self.name) or self.kind
        else:
            raise ValueError(
                f"it is not known whether a thunk of kind {self.kind} launches anything"
            )


def thunks(text: str) -> list[Thunk]:
    """Return the list of a dump. Raises ValueError for a line of another form."""
    top: list[Thunk] = []
    lists, latest = (
        {0: top},
        dict[int, Thunk](),
    )  # by indentation: the list of a thunk, and the last one
    opened: tuple[int, list[Thunk]] | None = None  # a section whose first thunk is still to come
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if match := _LINE.match(line):
            if opened is not None and indent > opened[0]:
                lists[indent] = opened[1]
            opened = None
            thunk = Thunk(match["kind"], match["name"])
            lists[indent].append(thunk)
            latest = {at: last for at, last in latest.items() if at < indent} | {indent: thunk}
        elif match := _SECTION.match(line):
            owner = latest[
                max(at for at in latest if at <= indent)
            ]  # "condition:" is not indented, "body:" is
            opened = indent, owner.inside.setdefault(match[1], [])
        elif line.strip():
            raise ValueError(f"a list of thunks has a line of unknown form: {line!r}")
    return top


def of_a_layer(top: list[Thunk]) -> list[Thunk]:
    """Return the thunks after the attention kernels of the last but one layer, up to and with the
    last one's.

    Every layer must have equally many attention kernels, one for each group of heads. Raises
    ValueError otherwise.
    """
    places = [i for i, thunk in enumerate(top) if thunk.name.startswith(KERNEL)]
    each, rest = divmod(len(places), LAYERS)
    if not each or rest:
        raise ValueError(
            f"{len(places)} kernels of attention in {LAYERS} layers: something else reads the cache"
        )
    return top[places[-1 - each] + 1 : places[-1] + 1]


def by_name(top: list[Thunk], hlo: str) -> list[Thunk]:
    """Return the list with the names of Mosaic GPU's kernels, which XLA calls in the order of the
    compiled program. Raises ValueError if it calls anything else."""
    names = [
        re.search(r'op_name="(?:[^"]*/)?([^"/]+)/[^"/]*"', line)
        for line in hlo.splitlines()
        if 'custom_call_target="mosaic_gpu' in line
    ]
    calls = [thunk for thunk in top if thunk.kind == "kCustomCall"]
    if len(calls) != len(names):
        raise ValueError(f"{len(calls)} calls, {len(names)} of them of kernels on Mosaic GPU")
    for thunk, name in zip(calls, names, strict=True):
        thunk.name = name[1] if name else thunk.name
    return top


def captured(text: str) -> tuple[int, int]:
    """Return (command buffers, launches in none) of the list in which XLA has put launches into
    command buffers. Raises ValueError if it is empty."""
    kinds = re.findall(r"^\d+: (k\w+)", text, re.MULTILINE)
    if not kinds:
        raise ValueError("XLA wrote no list of thunks with command buffers")
    return kinds.count("kCommandBuffer"), sum(kind in LAUNCHES for kind in kinds)
