"""Greedy decoding of one sequence with prompt-lookup drafts and without, on texts that repeat
themselves and on texts that do not.

    python -m benchmarks.drafts --model smollm2 --json drafts.json

Every text is decoded `--repeats` times each way, in turns, after both programs are compiled; times
are of decoding alone, and the tokens must be the same. A step that drafts N tokens computes 1 + N
places, accepted or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvq_jax as kvq
from benchmarks.markdown import head, table
from benchmarks.report_file import Report, arguments, cores, header
from kvq_models import load_llama, prepare
from kvq_models.llama.model import Llama
from kvq_tools.chat_template import rendered
from kvq_tools.cli.timed import TimedGeneration

PASSAGE = (
    "The river rises in the hills behind the old mill and runs for eleven miles before it meets the"
    " sea. In spring it floods the lower meadows, and the farmers drive their cattle to the ridge;"
    " in autumn it is so low that children cross it on stones. The mill has not turned since the"
    " war. Its wheel was sold for timber, its stones lie in the garden of the inn, and only the"
    " weir is kept in order, because the inn's cellar would flood without it."
)
CODE = '''def mean(values: list[float]) -> float:
    """Return the mean of the values."""
    if not values:
        raise ValueError("give at least one value")
    return sum(values) / len(values)


def variance(values: list[float]) -> float:
    """Return the variance of the values."""
    if not values:
        raise ValueError("give at least one value")
'''
TEXTS = {  # how a prompt is asked, and whether it is a message of a conversation
    "a passage is continued": (PASSAGE, False),
    "code is continued": (CODE, False),
    "a passage is copied": (f"Repeat this text word for word:\n\n{PASSAGE}", True),
    "a passage is summarized": (f"Summarize this text in three sentences:\n\n{PASSAGE}", True),
    "a short question": ("Name three rivers of Europe and say where each of them ends.", True),
}


@dataclasses.dataclass(frozen=True)
class DraftRow:
    """One text, decoded with up to `drafts` drafted tokens a step (0: without). steps: of the
    model. same: whether the tokens are those without drafts. seconds: of decoding, of each
    repeat."""

    text: str
    drafts: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    same: bool
    seconds: tuple[float, ...]

    @property
    def ms_per_step(self) -> float:
        return 1e3 * float(np.median(self.seconds)) / self.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftReport(Report):
    """model: as it was named. cores: of the machine."""

    model: str
    cache: str
    cores: int
    rows: tuple[DraftRow, ...]


def prompt_of(tokenizer: Any, text: str, message: bool) -> list[int]:
    """Return the tokens of a prompt; a message is rendered with the tokenizer's chat template where
    it has one."""
    if message and tokenizer.chat_template:
        return tokenizer(
            rendered(tokenizer, [{"role": "user", "content": text}]), add_special_tokens=False
        )["input_ids"]
    return tokenizer(text)["input_ids"]


def rows_of(
    llama: Llama,
    cache: str,
    capacity: int,
    text: str,
    prompt: list[int],
    ways: Sequence[int],
    new: int,
    repeats: int,
) -> list[DraftRow]:
    """Decode one text each way, in turns; what is compiled first is not timed. ways: numbers of
    drafts, the first of them 0."""
    tokens, steps = dict[int, list[int]](), dict[int, int]()
    seconds: dict[int, list[float]] = {drafts: [] for drafts in ways}
    for _ in range(repeats):
        for drafts in ways:
            empty = kvq.init_cache(cache, llama.config, 1, capacity, "float32")
            timed = TimedGeneration(
                llama,
                empty,
                prompt,
                max_new_tokens=new,
                eos_ids=llama.config.eos_token_ids,
                drafts=drafts,
            )
            done = timed.run()
            tokens[drafts] = np.asarray(done.tokens)[0, : int(done.lengths[0])].tolist()
            steps[drafts] = timed.steps
            seconds[drafts].append(round(timed.decode_seconds, 4))
    return [
        DraftRow(
            text,
            drafts,
            len(prompt),
            len(tokens[drafts]),
            steps[drafts],
            tokens[drafts] == tokens[0],
            tuple(seconds[drafts]),
        )
        for drafts in ways
    ]


def page(report: DraftReport, file: pathlib.Path) -> str:
    """Render each text each way."""
    said = (
        f"{report.cores} cores, one sequence, `{report.cache}`, greedy; medians of the repeats."
        " Tokens a step count the step's own one."
    )
    lines = []
    for row in report.rows:
        plain = next(one for one in report.rows if one.text == row.text and one.drafts == 0)
        seconds = float(np.median(row.seconds))
        times = f"{float(np.median(plain.seconds)) / seconds:.2f}"
        counts = (
            str(row.drafts or "none"),
            f"{row.new_tokens}",
            f"{row.steps}",
            f"{row.new_tokens / row.steps:.2f}",
        )
        lines.append(
            (
                row.text,
                *counts,
                f"{row.ms_per_step:.1f}",
                f"{row.new_tokens / seconds:.1f}",
                times,
                "yes" if row.same else "no",
            )
        )
    names = (
        "text",
        "drafts",
        "tokens",
        "steps",
        "tokens a step",
        "ms a step",
        "tokens/s",
        "times none",
        "same tokens",
    )
    return "\n\n".join([*head(report, file, said), table(names, lines)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafts", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--model", default="smollm2", help="a checkpoint with a tokenizer (default: %(default)s)"
    )
    parser.add_argument(
        "--cache", default="kivi:bits=4", metavar="SPEC", help="the cache (default: %(default)s)"
    )
    parser.add_argument(
        "--drafts",
        nargs="+",
        type=int,
        default=[2, 4],
        metavar="N",
        help="tokens a step (default: %(default)s)",
    )
    parser.add_argument(
        "--new", type=int, default=96, metavar="N", help="tokens to generate (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="times that each is decoded (default: %(default)s)",
    )
    parser.add_argument(
        "--json", metavar="F", help="write the report, with the time of every repeat"
    )
    args = parser.parse_args(argv)
    if min(*args.drafts, args.new, args.repeats) < 1:
        parser.error("--drafts, --new and --repeats are at least 1")
    plain, tokenizer = load_llama(args.model, dtype="float32")
    llama, rows = prepare(plain, args.cache), list[DraftRow]()
    prompts = {
        text: prompt_of(tokenizer, prompt, message) for text, (prompt, message) in TEXTS.items()
    }
    capacity = max(map(len, prompts.values())) + args.new
    for text, prompt in prompts.items():
        rows += rows_of(
            llama, args.cache, capacity, text, prompt, (0, *args.drafts), args.new, args.repeats
        )
        for row in rows[-1 - len(args.drafts) :]:
            print(
                f"{row.text:<26} drafts {row.drafts}: {row.new_tokens} tokens in {row.steps} steps"
                f" of {row.ms_per_step:.1f} ms,"
                f" {row.new_tokens / float(np.median(row.seconds)):.1f}"
                f" tokens/s{'' if row.same else ', OTHER TOKENS'}",
                flush=True,
            )
    report = DraftReport(
        title="Drafts looked up in the text",
        model=args.model,
        cache=args.cache,
        cores=cores(),
        rows=tuple(rows),
        **header(("benchmarks.drafts", *arguments(argv))),
    )
    if args.json:
        report.write(args.json)


if __name__ == "__main__":
    main()
