"""The options of `kvq memory`."""

from __future__ import annotations

import argparse

from kvq_jax import peak_rates
from kvq_jax.peak_rates import Device
from kvq_tools.cli.options import shared, values

MEMORY = {
    "h100-pcie": 80e9,
    "h100-sxm": 80e9,
    "h200": 141e9,
    "a100-80gb": 80e9,
}  # bytes, from the data sheets
MESH_DEVICE = "h200"

DESCRIPTION = """\
With --budget alone: the caches that fit it, by resident bytes, the best first,
with their KL to full precision as it was measured on a public model.

With --cache: exact bytes by component, average bits per element, the ratio to a
bf16 cache, resident bytes, and the largest context that fits a budget.

Reads config.json only (MODEL can be that file): no weights are loaded, and none
are downloaded unless MODEL is a GGUF file on the Hub. Resident bytes are the
cache, its parameters (made once from weights or a calibration) and the working
memory of a decode step, not the weights. With --roofline, for caches that
rebuild keys and values: the longest context for which rebuilding them takes no
longer than reading weights and cache (section 3.4 of the XQuant paper)."""

EPILOG = f"""\
examples:
  kvq memory meta-llama/Llama-3.1-8B --budget 6GiB --context 32K --batch 8
  kvq memory meta-llama/Llama-3.1-8B --cache dense --cache innerq:bits=2 \\
      --context 131072 --batch 1 --budget 24GiB
  kvq memory meta-llama/Llama-3.1-8B --cache xquant:bits=2 \\
      --cache kivi:bits=2 --roofline h200
  kvq memory meta-llama/Llama-3.1-8B --cache kivi:bits=2 --context 10M \\
      --mesh auto --devices 8 --device h200

{shared.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_caches(
        parser, "a cache; can be repeated (default with --budget: all that were measured)"
    )
    shared.add_sequences(parser)
    shared.add_number(
        parser,
        "--budget",
        "SIZE",
        "list the caches that fit, such as 24GiB; with --cache, the largest context that fits",
        type=values.byte_size,
    )
    shared.add_fixed_dtype(parser, "full-precision rows and of the model")
    _add_roofline(parser)
    _add_mesh(parser)


def _add_roofline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--roofline",
        metavar="DEVICE",
        type=_device,
        nargs="?",
        const=peak_rates.DEVICES[peak_rates.PAPER_DEVICE],
        help=(
            "also print the longest context at which a cache that rebuilds keys and values "
            f"(xquant) hides that behind memory traffic: {', '.join(peak_rates.DEVICES)} "
            f"(default: {peak_rates.PAPER_DEVICE}, as in the paper), or peaks FLOPS:BYTES, such "
            "as 756e12:2e12"
        ),
    )


def _device(text: str) -> Device:
    try:
        return peak_rates.device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh",
        metavar="WAYS",
        help=(
            "also print what each of several devices holds and reads: auto (the fastest "
            "placement that fits), or rows=R,heads=H,tokens=T"
        ),
    )
    shared.add_number(
        parser,
        "--devices",
        "N",
        "with --mesh: its devices (default: as many as WAYS names, 8 for auto)",
        type=values.integer(1, 4096),
    )
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        type=_device,
        help=(
            f"with --mesh: the kind of its devices, {', '.join(MEMORY)} (default: {MESH_DEVICE}), "
            "or peaks FLOPS:BYTES"
        ),
    )
