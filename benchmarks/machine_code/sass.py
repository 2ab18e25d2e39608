"""Assemble and disassemble machine code of NVIDIA GPUs (SASS), and count its main loop.

A loop is a natural loop of the control flow graph: a branch back to an instruction that every way
to the branch passes, with all instructions that reach the branch without leaving. The blocks that
ptxas puts out of line for warps that diverged (BRA.DIV) do not count.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import tempfile

from benchmarks.machine_code.tools import run_tool

_SECTION = re.compile(r"\s*\.section\s+([^\s,]+)")
_LABEL = re.compile(r"\s*(\.L\w+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_PREDICATE = re.compile(r"@!?U?P\w+\s+")
_PREDICATE_OPERAND = re.compile(r"!?U?P\w+\s*,")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_MMA_SHAPE = re.compile(r"(?:HMMA|IMMA|BMMA|DMMA)(?:\.SP)?\.(8|16)(8)(4|8|16|32|64)(?:\.|$)")
_WGMMA_SHAPE = re.compile(r"[HIQB]GMMA(?:\.SP)?\.(\d+)x(\d+)x(\d+)")

# Classes by opcode without its modifiers. An opcode of the uniform datapath (UIADD3) belongs to the
# class of its twin (IADD3).
_OPCODES = {
    "int": (
        "LOP LOP3 SHF SHL SHR PRMT BFE BFI SGXT BMSK LEA IADD IADD3 IADD32I IMAD IMAD32I IMUL IDP"
        " ISETP ISCADD IABS VIADD VIADDMNMX IMNMX VIMNMX VABSDIFF SEL PLOP3 POPC FLO BREV I2I"
    ),
    "cvt": "I2F I2FP I2IP F2F F2I F2FP F2IP FRND",
    "f32": (
        "FMUL FFMA FFMA32I FADD FMNMX FMNMX3 FMUL2 FFMA2 FADD2 FSEL FSETP FSET FCHK FSWZADD MUFU"
    ),
    "f16": "HFMA2 HADD2 HMUL2 HMNMX2 HSET2 HSETP2 HADD2_32I HMUL2_32I HFMA2_32I",
    "mma": "HMMA IMMA BMMA DMMA HGMMA IGMMA QGMMA BGMMA",
    "lds": "LDS LDSM STS STSM ATOMS MOVM",
    "ldg": "LDG LDGSTS STG LD ST ATOMG RED BLKCP TMALDG TMASTG",
    "shfl": "SHFL VOTE REDUX CREDUX MATCH",
    "bar": (
        "BAR DEPBAR LDGDEPBAR ARRIVES WARPSYNC WARPGROUP MEMBAR FENCE ERRBAR BSSY BSYNC SYNCS CCTL"
        " NANOSLEEP"
    ),
    "mov": "MOV CS2R S2R S2UR R2UR R2P P2R R2B B2R",
    "bra": "BRA BRX JMP JMX CALL RET EXIT BREAK YIELD NOP",
    "spill": "LDL STL",
}
_CLASS = {opcode: name for name, opcodes in _OPCODES.items() for opcode in opcodes.split()}
CLASSES = (*_OPCODES, "other")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, such as `@P1 LDG.E.64 R2, desc[UR4][R2.64]`. opcode: with modifiers
    (LDG.E.64)."""

    text: str

    @property
    def opcode(self) -> str:
        return _PREDICATE.sub("", self.text, count=1).split()[0]

    @property
    def base(self) -> str:
        """Return the opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def kind(self) -> str:
        """Return its class, one of CLASSES."""
        if self.opcode.startswith("IMAD.MOV"):
            return "mov"
        return _CLASS.get(self.base) or _CLASS.get(self.base.removeprefix("U")) or "other"

    @property
    def is_plain_load(self) -> bool:
        """Return True for a load of global memory into a register, for which something waits.
        LDGSTS goes to shared memory on its own."""
        return self.base in ("LDG", "LD")

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of one warp for a matrix instruction, 0 for others."""
        if match := _MMA_SHAPE.match(self.opcode):
            m, n, k = map(int, match.groups())
            return m * n * k
        if match := _WGMMA_SHAPE.match(self.opcode):
            m, n, k = map(int, match.groups())
            return m * n * k // 4  # four warps share it
        return 0


@dataclasses.dataclass(frozen=True)
class Function:
    """The code of one kernel. labels: the index of the instruction that each stands before."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def successors(self, index: int) -> tuple[int, ...]:
        """Return the places to which control can go after an instruction of this index."""
        instruction, following = self.instructions[index], index + 1
        nexts = [following] if following < len(self.instructions) else []
        conditional = _PREDICATE.match(instruction.text) is not None
        if instruction.base in ("EXIT", "RET", "BRX", "JMX"):
            return tuple(nexts) if conditional else ()
        target = _TARGET.search(instruction.text)
        if instruction.base not in ("BRA", "JMP") or target is None or ".DIV" in instruction.opcode:
            return tuple(nexts)
        operands = instruction.text.partition(instruction.opcode)[2]
        if conditional or _PREDICATE_OPERAND.match(operands.strip()):
            return (*nexts, self.labels[target.group(1)])
        return (self.labels[target.group(1)],)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A natural loop: its instructions in the order of their addresses."""

    indices: tuple[int, ...]
    instructions: tuple[Instruction, ...]

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one warp in one iteration, by matrix instructions."""
        return sum(instruction.multiply_adds for instruction in self.instructions)

    @property
    def plain_loads(self) -> int:
        return sum(instruction.is_plain_load for instruction in self.instructions)

    def counts(self) -> dict[str, int]:
        """Count the instructions of each class that occurs, in the order of CLASSES."""
        counted = collections.Counter(instruction.kind for instruction in self.instructions)
        return {kind: counted[kind] for kind in CLASSES if counted[kind]}


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The result of ptxas for a kernel.

    spill_bytes: stores and loads together.
    shared_bytes: bytes that the code itself declares.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    function: Function


def assemble(ptx: str, name: str, architecture: str) -> Assembly:
    """Assemble the kernel `name` of a PTX text and disassemble the result. Raises RuntimeError if a
    tool is missing or fails."""
    with tempfile.TemporaryDirectory(prefix="machine_code") as folder:
        source, binary = pathlib.Path(folder) / "kernel.ptx", pathlib.Path(folder) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        said = run_tool(
            "ptxas",
            "-v",
            f"--gpu-name={architecture}",
            f"--entry={name}",
            str(source),
            "-o",
            str(binary),
        ).stderr
        listing = run_tool("nvdisasm", "-c", str(binary)).stdout
    registers = re.search(r"Used (\d+) registers", said)
    if registers is None:
        raise RuntimeError(f"ptxas did not say how many registers {name} uses: {said[:2000]}")
    shared = re.search(r"(\d+) bytes smem", said)
    return Assembly(
        registers=int(registers.group(1)),
        spill_bytes=sum(int(size) for size in re.findall(r"(\d+) bytes spill", said)),
        shared_bytes=int(shared.group(1)) if shared else 0,
        function=functions(listing)[name],
    )


def functions(listing: str) -> dict[str, Function]:
    """Return the functions in the output of `nvdisasm -c`, by name."""
    parsed: dict[str, tuple[list[Instruction], dict[str, int]]] = {}
    current = None
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            name = section.group(1)
            current = (
                parsed.setdefault(name.removeprefix(".text."), ([], {}))
                if name.startswith(".text.")
                else None
            )
        elif current is None:
            continue
        elif label := _LABEL.match(line):
            current[1][label.group(1)] = len(current[0])
        elif instruction := _INSTRUCTION.match(line):
            current[0].append(Instruction(instruction.group(1)))
    return {
        name: Function(name, tuple(instructions), labels)
        for name, (instructions, labels) in parsed.items()
    }


def loops(function: Function) -> tuple[Loop, ...]:
    """Return the loops that can be reached, by address. Loops with the same header are one loop."""
    blocks, edges = _blocks(function)
    dominators = _dominators(edges)
    sources: dict[int, set[int]] = collections.defaultdict(set)
    for block, nexts in edges.items():
        for header in nexts & dominators[block]:
            sources[header].add(block)
    predecessors = _reversed(edges)
    closed = []
    for header in sorted(sources):
        body, waiting = {header}, list(sources[header])
        while waiting:
            if (block := waiting.pop()) not in body:
                body.add(block)
                waiting += predecessors[block]
        indices = tuple(i for block in sorted(body) for i in blocks[block])
        closed.append(Loop(indices, tuple(function.instructions[i] for i in indices)))
    return tuple(closed)


def main_loop(function: Function) -> Loop:
    """Return the loop in which a kernel spends its time.

    Of the innermost loops with matrix instructions, it is the one that computes most, and of equals
    the shortest (a loop's copy that masks its last tokens is longer). Without matrix instructions
    it is the longest of the innermost loops.

    Raises ValueError for a kernel without a loop.
    """
    candidates = loops(function)
    if not candidates:
        raise ValueError(f"{function.name} has no loop")
    candidates = [loop for loop in candidates if loop.multiply_adds] or list(candidates)
    bodies = [set(loop.indices) for loop in candidates]
    inner = [
        loop
        for loop, body in zip(candidates, bodies, strict=True)
        if not any(other < body for other in bodies)
    ]
    if inner[0].multiply_adds:
        return max(inner, key=lambda loop: (loop.multiply_adds, -len(loop.indices)))
    return max(inner, key=lambda loop: len(loop.indices))


def _blocks(function: Function) -> tuple[dict[int, range], dict[int, set[int]]]:
    """Return the basic blocks reachable from the first instruction, named by their first index, and
    the edges between them."""
    size = len(function.instructions)
    starts = {0} | {index for index in function.labels.values() if index < size}
    starts |= {index + 1 for index in range(size - 1) if function.successors(index) != (index + 1,)}
    order = sorted(starts)
    spans = {start: range(start, end) for start, end in zip(order, [*order[1:], size], strict=True)}
    blocks: dict[int, range] = {}
    edges: dict[int, set[int]] = {}
    waiting = [0] if size else []
    while waiting:
        if (start := waiting.pop()) not in blocks:
            blocks[start] = spans[start]
            edges[start] = set(function.successors(spans[start][-1]))
            waiting += edges[start]
    return blocks, edges


def _dominators(edges: dict[int, set[int]]) -> dict[int, set[int]]:
    """Return, for each block, the blocks that every way to it passes, itself included."""
    predecessors = _reversed(edges)
    dominators = {block: set(edges) for block in edges}
    if edges:
        dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in sorted(edges.keys() - {0}):
            new = {block} | set.intersection(
                *(dominators[source] for source in predecessors[block])
            )
            changed |= new != dominators[block]
            dominators[block] = new
    return dominators


def _reversed(edges: dict[int, set[int]]) -> dict[int, set[int]]:
    predecessors: dict[int, set[int]] = collections.defaultdict(set)
    for block, nexts in edges.items():
        for following in nexts:
            predecessors[following].add(block)
    return predecessors
