"""`kvq serve`: serve a model to many clients through OpenAI's API."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

import kvq_jax as kvq
from kvq_models.inference.engine.budget import SLOTS, Budget
from kvq_models.inference.engine.engine import QUEUE_LIMIT
from kvq_models.inference.engine.prefix_folder import PrefixFolder
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_tools.cli import engines, inputs, interruption, mesh, sampling_options, text_input
from kvq_tools.cli.console import UserError, format_bytes, input_errors, print_json
from kvq_tools.cli.tables import print_line

PREFIX_MEMORY, PREFIX_DISK = 512 << 20, 4 << 30

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

{inputs.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    inputs.add_model(parser)
    inputs.add_cache(parser)
    inputs.add_calibration(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on (default: %(default)s, this machine only)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        help="the port, or 0 for a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        help=(
            "a bearer token that clients may send; clients of several keys share no prefixes "
            "(default: $KVQ_API_KEY, else none is asked for)"
        ),
    )
    parser.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help=(
            "a name by which clients call this server, or * for any; addresses, localhost, and "
            "this machine's name with --host always are"
        ),
    )
    parser.add_argument(
        "--cors",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="a web site whose pages may use this server, such as https://example.com, or *",
    )
    parser.add_argument(
        "--name", help=("the model's name for clients (default: MODEL, or the last part of a path)")
    )
    parser.add_argument(
        "--chat-template",
        metavar="F",
        help="a file with a chat template in Jinja, instead of the tokenizer's",
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="let messages spell special tokens such as <|im_end|> (default: they are plain text)",
    )
    engines.add_size(parser)
    parser.add_argument(
        "--queue",
        metavar="N",
        type=inputs.positive,
        default=QUEUE_LIMIT,
        help="most requests that may wait (default: %(default)s)",
    )
    parser.add_argument(
        "--prefix-memory",
        metavar="BYTES",
        type=inputs.byte_size,
        help=(
            "host memory for prompts that were already read, which requests with the same "
            "beginning reuse; 0 keeps none (default: 512MiB; none with --mesh)"
        ),
    )
    parser.add_argument(
        "--prefix-dir",
        metavar="DIR",
        help="also keep them on disk here, for the next server of this model and cache",
    )
    parser.add_argument(
        "--prefix-disk",
        metavar="BYTES",
        type=inputs.byte_size,
        help="most bytes in --prefix-dir, such as 20GiB (default: 4GiB)",
    )
    parser.add_argument(
        "--max-body",
        metavar="BYTES",
        type=inputs.byte_size,
        default=8 << 20,
        help="largest request body, such as 8MiB (default: 8MiB)",
    )
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=inputs.positive,
        default=60,
        help="how long answers may take after SIGTERM (default: %(default)s)",
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
    mesh.add(parser)
    inputs.add_implementation(parser)
    inputs.add_dtype(parser, rows="rows of a quantized cache are bfloat16")


def run(options: argparse.Namespace) -> None:
    try:
        importlib.import_module("kvq_tools.serving.app")
        from kvq_tools.serving.server import bound_socket
    except ImportError as error:
        raise UserError(
            f"kvq serve needs the extra serve ({error}): pip install 'kvq-jax[serve]'"
        ) from error
    logging.basicConfig(format="kvq: %(levelname)s: %(message)s")
    api_keys = _checked_keys(options)
    with input_errors():
        bound = bound_socket(options.host, options.port)  # before minutes of loading
    with contextlib.closing(bound):
        _serve(options, api_keys, bound)


def _serve(options: argparse.Namespace, api_keys: list[str], bound: socket.socket) -> None:
    from kvq_tools.serving.app import create_app
    from kvq_tools.serving.guard import known_hosts
    from kvq_tools.serving.metrics import Metrics
    from kvq_tools.serving.server import serve
    from kvq_tools.serving.service import Limits, Service
    from kvq_tools.serving.worker import Worker

    config = inputs.read_config(options.model, options.cache)
    inputs.check_calibration_file(config, options.cache, options.calibration)
    tokenizer = text_input.need_tokenizer(options.model, "serve text")
    template = (
        None if options.chat_template is None else text_input.read_text(options.chat_template)
    )
    size = engines.size_of(options, config)
    placement = mesh.placement_of(
        options.mesh,
        [options.cache.spec],
        config,
        size.slots,
        size.capacity,
        inputs.rows_dtype(options),
    )
    with input_errors():
        prefixes = _prefixes(options, one_device=placement is None)
    engine = engines.loaded(
        options,
        size,
        options.queue,
        wait=False,
        prefixes=prefixes,
        placement=placement,
        verify=options.verify and placement is None,
    )
    metrics = Metrics()
    worker = Worker(engine, metrics.first_token.observe)
    metrics.watch(worker)
    name = options.name or options.model.rstrip("/").rpartition("/")[2]
    service = Service(
        worker,
        tokenizer,
        name,
        metrics,
        chat_template=template,
        limits=Limits(body=options.max_body),
        trusted=options.special_tokens,
        defaults=sampling_options.model_sampling(config),
    )
    server = _described(options, name, size, placement, bound)
    app = create_app(
        service,
        api_keys,
        hosts=known_hosts(options.host, options.allow_host),
        origins=options.cors,
    )
    service.prompts.start()
    with interruption.spared():
        serve(app, worker, bound, lambda: _print(options, server), options.grace)
        service.prompts.close()
        if prefixes is not None and prefixes.folder is not None:
            prefixes.folder.close()
    if not options.json:
        print_line(
            f"[{engine.counts.new_tokens} tokens in {sum(engine.counts.ended.values())} answers;"
            " stopped]"
        )
    if engine.compiling:
        interruption.leave(0)  # tearing an interpreter down while a compiler runs crashes


def _checked_keys(options: argparse.Namespace) -> list[str]:
    """Check the options that need no model, and return the API keys."""
    api_keys = options.api_key or [
        os.environ[name] for name in ("KVQ_API_KEY",) if name in os.environ
    ]
    if not all(api_keys):
        raise UserError(
            "the API key is empty; to serve without one, leave out --api-key and KVQ_API_KEY"
        )
    if options.prefix_disk is not None and options.prefix_dir is None:
        raise UserError("--prefix-disk limits --prefix-dir: give that, too")
    if options.mesh is not None and (options.prefix_memory or options.prefix_dir is not None):
        raise UserError(
            "prefixes are only kept for a cache on one device: leave out --prefix-memory and"
            " --prefix-dir, or --mesh"
        )
    for origin in options.cors:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise UserError(
                f"--cors {origin!r} must be * or an origin without a path, such as"
                " https://example.com"
            )
    return api_keys


def _prefixes(options: argparse.Namespace, *, one_device: bool) -> PrefixStore | None:
    """Return the store of prompts that were read, and set options.prefix_memory to its size."""
    if options.prefix_memory is None:
        options.prefix_memory = PREFIX_MEMORY if one_device else 0
    folder = (
        None
        if options.prefix_dir is None
        else PrefixFolder(Path(options.prefix_dir), options.prefix_disk or PREFIX_DISK)
    )
    if not options.prefix_memory and folder is None:
        return None
    return PrefixStore(options.prefix_memory, folder)


def _described(
    options: argparse.Namespace,
    name: str,
    size: Budget,
    placement: kvq.Placement | None,
    bound: socket.socket,
) -> dict[str, Any]:
    host, port = bound.getsockname()[:2]
    return {
        "url": f"http://{f'[{host}]' if ':' in host else host}:{port}",
        "model": options.model,
        "name": name,
        "cache": str(options.cache.spec),
        "slots": size.slots,
        "capacity": size.capacity,
        "cache_bytes": size.nbytes,
        "mesh": None if placement is None else str(placement),
        "queue": options.queue,
        "prefix_memory": options.prefix_memory,
        "prefix_dir": options.prefix_dir,
    }


def _print(options: argparse.Namespace, server: dict[str, Any]) -> None:
    if options.json:
        print_json("serve", server)
        return
    split = f" on a mesh of {server['mesh']}" if server["mesh"] else ""
    print_line(
        f"[serving {server['name']} at {server['url']}/v1: {server['slots']} slots of"
        f" {server['capacity']} tokens with {options.cache.text},"
        f" {format_bytes(server['cache_bytes'])}{split}; up to {server['queue']} more wait]"
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port, from 0 to 65535")
    return int(text)
