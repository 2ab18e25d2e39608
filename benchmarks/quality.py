"""What caches do to a small model's predictions, through the real cache: the comparisons of papers, on one text.

Every cache that needs a calibration gets one, from samples of another text. Numbers in benchmarks/results/README.md come from the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import kvq_jax as kvq
from kvq_jax.methods.kvquant.accounting import paper_bits
from models import EMBEDDED, Llama, load_llama, prepare
from models.calibration.fit import calibrate
from models.calibration.needs import needs
from models.evaluation import measure

BITS = (4, 3, 2)
PLAIN = "datatype=int,outliers=0,pre_rope=false"  # what the paper's ablations of axes start from


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A cache of one of the tables. other_text: calibrated on the other calibration text."""

    table: str
    label: str
    cache: str
    other_text: bool = False


def kvquant() -> Iterator[Candidate]:
    """The comparisons of the KVQuant paper."""
    for b in BITS:
        yield from _datatypes(b)
    for k, v in (("token", "token"), ("channel", "channel"), ("channel", "token")):
        axes = f"int3, keys by {k}s, values by {v}s"
        yield Candidate("Axes (the paper's Table 9)", axes, f"kvquant:bits=3,{PLAIN},k_axis={k},v_axis={v}")
    for axis, cache in (("channels", "kvquant:bits=3,datatype=int,outliers=0,"), ("tokens", "int3:")):
        for rope in (False, True):
            label = f"int3, keys by {axis}, {'before' if rope else 'after'} RoPE"
            yield Candidate("RoPE (Tables 10 and 20)", label, f"{cache}pre_rope={str(rope).lower()}")
    for label, options in (
        ("int3", "datatype=int"),
        ("nf3", "datatype=nf"),
        ("nuq3, unweighted", "weighting=none"),
        ("nuq3, Fisher", "weighting=fisher"),
        ("nuq3, Fisher x scale^2", "weighting=fisher_scale"),
    ):
        yield Candidate("Levels (Table 11)", label, f"kvquant:bits=3,outliers=0,{options}")
    for fraction in (0, 0.01, 0.03):
        for kind in ("matrix", "vector") if fraction else ("vector",):
            label = f"nuq3, {fraction:.0%} outliers" + (f" of each {'layer' if kind == 'matrix' else 'vector'}" if fraction else "")
            yield Candidate("Outliers (Table 12)", label, f"kvquant:bits=3,outliers={fraction},thresholds={kind}")
    for b in BITS:
        for fraction in (0, 0.01):
            for sink in (0, 1):
                label = f"nuq{b}, {fraction:.0%} outliers, {'first token exact' if sink else 'no sink'}"
                yield Candidate("Sink (Table 13)", label, f"kvquant:bits={b},outliers={fraction},sink={sink}")
    for b in BITS:
        for other in (False, True):
            label = f"nuq{b}, 1% outliers, calibrated on {'the other text' if other else 'the first text'}"
            yield Candidate("Calibration text (Table 21)", label, f"kvquant:bits={b}", other)
    for b in BITS:
        for on in ("false", "true"):
            yield Candidate("Q-Norm", f"nuq{b}, 1% outliers{', Q-Norm' if on == 'true' else ''}", f"kvquant:bits={b},qnorm={on}")


def _datatypes(b: int) -> Iterator[Candidate]:
    table = "Data types (Tables 1 and 17)"
    yield Candidate(table, "exact", "dense")
    for label, cache in (
        (f"int{b}", f"int{b}"),
        (f"int{b}, groups of 64", f"int{b}:group_size=64"),
        (f"nf{b}", f"nf{b}"),
        (f"nf{b}, groups of 64", f"nf{b}:group_size=64"),
        (f"nuq{b}", f"kvquant:bits={b},outliers=0"),
        (f"nuq{b}, 1% outliers", f"kvquant:bits={b},outliers=0.01"),
        (f"kivi {b}", f"kivi:bits={b}"),
    ):
        yield Candidate(table, label, cache)


def squat_polarquant() -> Iterator[Candidate]:
    """SQuat and PolarQuant beside methods of the same bits. Windows are those of each method unless the table says otherwise."""
    window = "sink=0,recent=96,block=32"
    for label, cache in (
        ("exact", "dense"),
        ("squat", "squat:solver=eigh"),
        ("squat_pre", "squat_pre:solver=eigh"),
        ("kivi", "kivi"),
        ("kivi, keys before RoPE", "kivi:pre_rope=true"),
        ("innerq, windows as kivi", f"innerq:{window}"),
        ("innerq, 2 bits with the sign", f"innerq:total_bits=2,{window}"),
        ("int2, windows as kivi", f"int2:group_size=32,{window}"),
    ):
        yield Candidate("2 bits, keys and values", label, cache)
    for rank in (1, 5, 20, 64):
        for lam in ("1e-06", "1e-05", "0.0001", "0.001"):
            yield Candidate("SQuat by rank and lambda", f"rank {rank}, lambda {lam}", f"squat:rank={rank},lam={lam},solver=eigh")
    same = "cache:sink=0,recent=0,block=128"
    for label, keys in (
        ("exact", "dense"),
        ("polarquant 4 + 4", "polarquant"),
        ("polarquant 4 + 4, fixed cut", "polarquant:cut=fixed"),
        ("polarquant 4 + 4, global grid", "polarquant:grid=global"),
        ("kivi 4, groups of 128", "kivi:bits=4,group_size=128"),
        ("kivi 4, groups of 32", "kivi:bits=4,group_size=32"),
        ("int4", "int4"),
        ("polarquant 4 + 2", "polarquant:radius_bits=2,group_size=64"),
        ("polarquant 4 + 2, fixed cut", "polarquant:radius_bits=2,group_size=64,cut=fixed"),
        ("polarquant 3 + 3", "polarquant:angle_bits=3,radius_bits=3,group_size=64"),
        ("kivi 3, groups of 64", "kivi:bits=3,group_size=64"),
        ("int3", "int3"),
        ("polarquant 3 + 2", "polarquant:angle_bits=3,radius_bits=2,group_size=64"),
        ("polarquant 2 + 2", "polarquant:angle_bits=2,radius_bits=2,group_size=64"),
        ("kivi 2, groups of 64", "kivi:bits=2,group_size=64"),
    ):
        yield Candidate("Keys alone, the same windows (block 128, no recent)", label, f"k={keys}+v=dense+{same}")


def squat() -> Iterator[Candidate]:
    """Which queries span SQuat's subspace: the prompt's where they are, or turned to the positions that follow it."""
    for bits in (2, 3):
        table, given = f"Queries that span the subspace, {bits} bits", f"bits={bits},rank=64,block_channels=8"
        yield Candidate(table, "exact", "dense")
        yield Candidate(table, "kivi", f"kivi:bits={bits}")
        yield Candidate(table, "squat, as the paper has it", f"squat:bits={bits}")
        yield Candidate(table, "squat, all directions", f"squat:{given}")
        for ahead in (64, 256, 512):
            yield Candidate(table, f"squat, turned to the next {ahead} positions", f"squat:{given},ahead={ahead}")
        yield Candidate(table, "kivi, keys before RoPE", f"kivi:bits={bits},pre_rope=true")
        yield Candidate(table, "squat_pre, as the paper has it", f"squat_pre:bits={bits}")
        yield Candidate(table, "squat_pre, all directions", f"squat_pre:{given}")


def xquant(pairs: str) -> Iterator[Candidate]:
    """XQuant beside caches of keys and values, all with groups of 64, blocks of 128 and no other window. `pairs` are bits of xquant and of
    caches of keys and values, 4:2 8:4."""
    window = "sink=0,recent=0,block=128"
    yield Candidate("Equal bytes (the paper's Table 1)", "exact", f"dense:{window}")
    for pair in pairs.split():
        b, kv = (int(n) for n in pair.split(":"))
        shared = {"kivi": "group_size=64,pre_rope=true", "xquant": "group_size=64"}
        for label, cache in (
            (f"kivi {kv}, keys before RoPE", f"kivi:bits={kv},{shared['kivi']}"),
            (f"kvquant {kv}, 1% outliers", f"kvquant:bits={kv}"),
            (f"xquant {b}", f"xquant:bits={b},{shared['xquant']}"),
        ):
            yield Candidate("Equal bytes (the paper's Table 1)", label, f"{cache},{window}")
        for last in (0, 1) if b < 4 else ():
            table = f"{'The first layer' if last == 0 else 'Two of four layers'} in 4 bits (Table 4)"
            for name, bits in (("kivi", kv), ("xquant", b)):
                label = f"{name} {bits}" + (", keys before RoPE" if name == "kivi" else "")
                yield Candidate(table, label, f"{name}:bits=4@0-{last}/{bits},{shared[name]},{window}")
            for reading in ("post_norm", "unit_norm"):
                options = f"bits={b},base_layer={last},reading={reading},group_size=64"
                yield Candidate(table, f"xquant_cl {b}, {reading}", f"xquant_cl:{options},{window}")
        for reading in ("post_norm", "unit_norm", "residual_stream"):
            options = f"bits={b},base_layer=0,latent=false,reading={reading},group_size=64"
            yield Candidate("What is accumulated, as wide as the model", f"xquant_cl {b}, {reading}", f"xquant_cl:{options},{window}")
        for latent in ("true", "false"):
            label = f"xquant {b}, {'latents' if latent == 'true' else 'the layer input'}"
            yield Candidate("Latents or the layer input", label, f"xquant:bits={b},latent={latent},group_size=64,{window}")
        for outlier in ("false", "true"):
            label = f"xquant {b}, latents{', the first channel of keys exact' if outlier == 'true' else ''}"
            options = f"bits={b},latent=true,exact_outlier_channel={outlier},group_size=64"
            yield Candidate("The outlier channel (Table B.1)", label, f"xquant:{options},{window}")


SUITES = {
    "xquant": ("Quality of XQuant, KV heads shared", lambda: iter(dict.fromkeys(xquant("4:4 3:3 2:2")))),
    "xquant_mha": ("Quality of XQuant, a KV head for each query head", lambda: iter(dict.fromkeys(xquant("8:4 4:2 3:2 2:2")))),
    "kvquant": ("Quality of KVQuant and the formats that it is compared with", kvquant),
    "squat_polarquant": ("Quality of SQuat and PolarQuant", squat_polarquant),
    "squat": ("Quality of SQuat by the queries that span its subspace", squat),
}


@dataclasses.dataclass(frozen=True)
class QualityRow:
    """One cache. Bits are of a body element: as stored, and by the paper's rule (None where it says nothing)."""

    table: str
    label: str
    cache: str
    other_text: bool
    stored_bits: float
    paper_bits: float | None
    outlier_fraction: float
    tokens: int
    nats: float
    kl: float
    agreement: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)


@dataclasses.dataclass(frozen=True)
class Text:
    """A text by name and contents, and how many tokens of it were used."""

    name: str
    sha256: str
    tokens: int


@dataclasses.dataclass(frozen=True)
class QualityReport:
    """Rows and what they were measured on."""

    title: str
    command: str
    date: str
    model: str
    jax_version: str
    window: int
    prompt: int
    samples: int
    sample_length: int
    text: Text
    calibration_text: Text
    other_calibration_text: Text
    rows: tuple[QualityRow, ...]

    def write(self, file: pathlib.Path) -> None:
        file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: pathlib.Path) -> QualityReport:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        texts = {name: Text(**fields[name]) for name in ("text", "calibration_text", "other_calibration_text")}
        return cls(**{**fields, **texts, "rows": tuple(QualityRow(**row) for row in fields["rows"])})


class Bench:
    """The model, its texts, and the calibrations made so far; samples are recorded once for each text."""

    def __init__(self, options: argparse.Namespace, work: pathlib.Path):
        self.llama, self.tokenizer = load_llama(options.model, dtype="float32")
        self.name = "the embedded Llama" if options.model == EMBEDDED else f"{options.model.name}, {_heads(self.llama)}"
        self.options, self.work = options, work
        self.calibrated: dict[tuple[str, bool], Llama] = {}
        self.texts = {name: self._read(getattr(options, name)) for name in ("text", "calibration_text", "other_calibration_text")}

    def _read(self, path: pathlib.Path) -> tuple[Text, np.ndarray]:
        text = path.read_text(encoding="utf-8")
        ids = np.asarray(self.tokenizer(text, verbose=False).input_ids, np.int32)
        return Text(path.name, hashlib.sha256(text.encode()).hexdigest(), len(ids)), ids

    def rows(self) -> Int[Array, "B T"]:
        """Windows of the text, equally spaced, each after the token that opens every text."""
        ids, width = self.texts["text"][1], self.options.window - 1
        if len(ids) < self.options.windows * width:
            raise ValueError(f"{self.options.text} has {len(ids)} tokens, fewer than {self.options.windows} windows of {width}")
        starts = np.linspace(1, len(ids) - width, self.options.windows).astype(int)
        windows = np.stack([np.concatenate([ids[:1], ids[s : s + width]]) for s in starts])
        return jnp.asarray(windows)

    def prepared(self, candidate: Candidate) -> Llama:
        """The model with what the cache needs."""
        spec = kvq.parse(candidate.cache)
        if not needs(spec, self.llama.config):
            return prepare(self.llama, spec)
        key = str(spec), candidate.other_text
        if key not in self.calibrated:
            name = "other_calibration_text" if candidate.other_text else "calibration_text"
            sizes = {"samples": self.options.samples, "length": self.options.length}
            found = calibrate(self.llama, self.texts[name][1], spec, work=self.work / name, text=self.texts[name][0].name, **sizes)
            self.calibrated[key] = prepare(self.llama, spec, found)
        return self.calibrated[key]

    def measure(self, candidate: Candidate) -> QualityRow:
        spec, config = kvq.parse(candidate.cache), self.llama.config
        quality = measure(self.prepared(candidate), spec, self.rows(), self.options.prompt)
        return QualityRow(
            **dataclasses.asdict(candidate),
            stored_bits=kvq.body_bits_per_element(spec, config),
            paper_bits=paper_bits(spec, config, self.options.window),
            outlier_fraction=kvq.outlier_fraction(spec, config),
            **dataclasses.asdict(quality),
        )


def run(options: argparse.Namespace) -> QualityReport:
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(options, pathlib.Path(work))
        bench.rows()  # refuses a short text before the first minutes are spent
        title, candidates = SUITES[options.suite]
        found = [c for c in candidates() if options.only is None or options.only in c.table]
        titles = list(dict.fromkeys(c.table for c in found))
        chosen = sorted(found, key=lambda c: titles.index(c.table))
        measured: dict[tuple[str, bool], QualityRow] = {}
        rows = []
        for candidate in chosen:
            key = str(kvq.parse(candidate.cache)), candidate.other_text
            if key not in measured:
                measured[key] = bench.measure(candidate)
            rows.append(dataclasses.replace(measured[key], table=candidate.table, label=candidate.label, cache=candidate.cache))
            print(f"{candidate.label:55s} perplexity {rows[-1].perplexity:8.3f}  KL {rows[-1].kl:.5f}", file=sys.stderr, flush=True)
        return QualityReport(
            title=title,
            command=_command(options),
            date=datetime.date.today().isoformat(),
            model=f"{bench.name}, float32",
            jax_version=jax.__version__,
            window=options.window,
            prompt=options.prompt,
            samples=options.samples,
            sample_length=options.length,
            rows=tuple(rows),
            **{name: text for name, (text, _) in bench.texts.items()},
        )


def _heads(llama: Llama) -> str:
    config = llama.config
    return f"{config.num_hidden_layers} layers, {config.num_attention_heads} query heads on {config.num_key_value_heads} KV heads"


def _command(options: argparse.Namespace) -> str:
    """The command line, with files by their names."""
    texts = (f"--{name.replace('_', '-')} {getattr(options, name).name}" for name in ("text", "calibration_text", "other_calibration_text"))
    sizes = (f"--{name} {getattr(options, name)}" for name in ("windows", "window", "prompt", "samples", "length"))
    model = [] if options.model == EMBEDDED else [f"--model {options.model.name}"]
    return " ".join(["python -m benchmarks.quality", options.suite, *model, *texts, *sizes, f"--json {options.json.name}"])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("suite", choices=tuple(SUITES), help="whose comparisons")
    made.add_argument("--model", metavar="DIR", type=pathlib.Path, default=EMBEDDED, help="whose predictions (default: the embedded model)")
    made.add_argument("--text", metavar="FILE", type=pathlib.Path, required=True, help="what is scored")
    made.add_argument("--calibration-text", metavar="FILE", type=pathlib.Path, required=True, help="what caches are calibrated on")
    made.add_argument("--other-calibration-text", metavar="FILE", type=pathlib.Path, required=True, help="another such text")
    made.add_argument("--json", metavar="FILE", type=pathlib.Path, required=True, help="where the rows go")
    made.add_argument("--windows", type=int, default=16, help="windows of the text")
    made.add_argument("--window", type=int, default=1024, help="tokens of a window")
    made.add_argument("--prompt", type=int, default=0, help="tokens of a window that are a prompt, and not scored")
    made.add_argument("--samples", type=int, default=16, help="calibration samples")
    made.add_argument("--length", type=int, default=1024, help="tokens of a calibration sample")
    made.add_argument("--only", metavar="WORDS", help="only tables whose title holds these words")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    made = parser()
    options = made.parse_args(argv)
    try:
        report = run(options)
    except (ValueError, OSError) as error:
        made.exit(2, f"{error}\n")
    report.write(options.json)
    print(options.json)


if __name__ == "__main__":
    main()
