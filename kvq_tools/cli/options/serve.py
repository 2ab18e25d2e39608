"""The options of `kvq serve`."""

from __future__ import annotations

import argparse

from kvq_models.inference.engine.limits import QUEUE_LIMIT, SLOTS
from kvq_tools.cli.options import shared, values

MAX_GRACE = 86_400  # a day

DESCRIPTION = f"""\
Serves a Llama-family checkpoint with OpenAI's API: /v1/chat/completions,
/v1/completions and /v1/models, as well as /health and /metrics (for
Prometheus). Requests share the slots of one cache of fixed size: {SLOTS} slots of
the model's full length, or as many as fit into --memory. Requests that find no
slot wait in a queue, and are refused at once if the queue is full. After Ctrl-C
or SIGTERM the server answers the requests that it accepted, then stops."""

EPILOG = f"""\
examples:
  kvq serve smollm2 --cache kivi:bits=4
  kvq serve path/to/Llama-3.2-1B-Instruct --cache kivi:bits=2 \\
      --memory 8GiB --host 0.0.0.0 --api-key "$KEY"
  curl http://127.0.0.1:8000/v1/chat/completions \\
      -H 'content-type: application/json' -d '{{
        "model": "smollm2", "stream": true,
        "messages": [{{"role": "user", "content": "Name three rivers."}}]}}'

docs/serving.md lists the supported fields of a request.

{shared.CACHE_GRAMMAR}"""


def _body_size(text: str) -> int:
    size = values.byte_size(text)
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} refuses every request; write 8MiB")
    return size


def configure(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    shared.add_cache(parser)
    shared.add_calibration(parser)
    _add_clients(parser)
    _add_texts(parser)
    shared.add_size(parser)
    shared.add_number(parser, "--queue", "N", "most requests that may wait", default=QUEUE_LIMIT)
    _add_prefixes(parser)
    _add_limits(parser)
    shared.add_mesh(parser)
    shared.add_implementation(parser)
    shared.add_dtype(parser, one_cache=True)


def _add_clients(parser: argparse.ArgumentParser) -> None:
    """Add the address of the server, and who may call it."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on (default: %(default)s, this machine only)",
    )
    parser.add_argument(
        "--port",
        type=values.integer(0, 65535),
        default=8000,
        help="the port, or 0 for a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        help=(
            "a bearer token that clients must send; repeat for several keys, whose clients share "
            "no prefixes (default: $KVQ_API_KEY, else none is required)"
        ),
    )
    parser.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help=(
            "a name by which clients call this server, or * for any; IP addresses, localhost and, "
            "with --host, this machine's name are always allowed"
        ),
    )
    parser.add_argument(
        "--cors",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="a web site whose pages may use this server, such as https://example.com, or *",
    )


def _add_texts(parser: argparse.ArgumentParser) -> None:
    """Add what clients call the model, and how their messages become its prompts."""
    parser.add_argument(
        "--name", help="the model's name for clients (default: MODEL, or the last part of a path)"
    )
    parser.add_argument(
        "--chat-template",
        type=values.file_name,
        metavar="F",
        help="a file with a chat template in Jinja, instead of the tokenizer's",
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="let messages spell special tokens such as <|im_end|> (default: they are plain text)",
    )


def _add_prefixes(parser: argparse.ArgumentParser) -> None:
    """Add the memory for prompts that were already read."""
    shared.add_number(
        parser,
        "--prefix-memory",
        "BYTES",
        "host memory for prompts that were already read, which requests with the same "
        "beginning reuse; 0 keeps none (default: 512MiB; none with --mesh)",
        type=values.byte_size,
    )
    parser.add_argument(
        "--prefix-dir",
        metavar="DIR",
        help="also keep them on disk here, for the next server of this model and cache",
    )
    shared.add_number(
        parser,
        "--prefix-disk",
        "BYTES",
        "most bytes in --prefix-dir, such as 20GiB (default: 4GiB)",
        type=values.byte_size,
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the limits of requests and of the end, and the check of the memory."""
    parser.add_argument(
        "--max-body",
        metavar="BYTES",
        type=_body_size,
        help=(
            "largest request body, such as 8MiB (default: 1KiB for each token of "
            "--capacity, at least 1MiB and at most 8MiB)"
        ),
    )
    shared.add_number(
        parser,
        "--grace",
        "SECONDS",
        "how long answers may take after SIGTERM",
        type=values.integer(1, MAX_GRACE),
        default=60,
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help=(
            "look for flipped bits in the caches, in a hundredth of the time, and compute again "
            "what they damaged (default: yes; no with --mesh)"
        ),
    )
    parser.set_defaults(verify=True)  # argparse would add a default that it is given to the help
