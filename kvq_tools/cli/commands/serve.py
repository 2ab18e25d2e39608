"""`kvq serve`: serve a model to many clients through OpenAI's API."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import re
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.prefix_folder import PrefixFolder
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.requests import Reason
from kvq_tools.cli import engines, inputs, interruption, mesh, sampling_options, text_input
from kvq_tools.cli.console import UserError, counted, format_bytes, input_errors, print_json
from kvq_tools.cli.tables import print_line
from kvq_tools.serving import heaps
from kvq_tools.serving.sockets import bound_socket

PREFIX_MEMORY, PREFIX_DISK = 512 << 20, 4 << 30
WHOLE = ("ended", "length")  # reasons why an answer is whole
EXTRA = ("fastapi", "openai", "prometheus_client", "uvicorn")  # packages that a server needs


def run(options: argparse.Namespace) -> None:
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"kvq serve needs the extra serve (no {', '.join(missing)}): pip install"
            " 'kvq-jax[serve]'"
        )
    logging.basicConfig(format="kvq: %(levelname)s: %(message)s")
    heaps.limit()
    api_keys = _api_keys(options)
    _check_options(options)
    with input_errors():
        bound = bound_socket(options.host, options.port)  # before minutes of loading
    with contextlib.closing(bound):
        _serve(options, api_keys, bound)


def _serve(options: argparse.Namespace, api_keys: list[str], bound: socket.socket) -> None:
    config = inputs.read_config(options.model, options.cache)
    inputs.check_calibration_option(options, config)
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
    with ThreadPoolExecutor(1) as beside:  # while XLA reads programs, which holds no lock of Python
        imported = beside.submit(importlib.import_module, "kvq_tools.serving.app")
        engine = engines.loaded(
            options,
            size,
            options.queue,
            prefixes=prefixes,
            placement=placement,
            verify=options.verify and placement is None,
        )
        imported.result()
    _answer(options, api_keys, bound, engine, tokenizer, template)


def _answer(
    options: argparse.Namespace,
    api_keys: list[str],
    bound: socket.socket,
    engine: Engine,
    tokenizer: Any,
    template: str | None,
) -> None:
    """Serve the engine until the process is told to end."""
    from kvq_tools.serving.app import create_app
    from kvq_tools.serving.guard import known_hosts
    from kvq_tools.serving.metrics import Metrics
    from kvq_tools.serving.server import serve
    from kvq_tools.serving.service import Limits, Service, largest_body
    from kvq_tools.serving.worker import Worker

    metrics = Metrics()
    worker = Worker(engine, metrics.first_token.observe)
    metrics.watch(worker)
    name = options.name or os.path.basename(os.path.abspath(options.model))
    service = Service(
        worker,
        tokenizer,
        name,
        metrics,
        chat_template=template,
        limits=Limits(body=options.max_body or largest_body(engine.capacity)),
        trusted=options.special_tokens,
        defaults=sampling_options.model_sampling(engine.llama.config),
    )
    server = _described(options, name, engine, bound)
    app = create_app(
        service, api_keys, hosts=known_hosts(options.host, options.allow_host), origins=options.cors
    )
    service.prompts.start()
    heaps.settle()
    with interruption.spared(), heaps.trimmed():
        serve(app, worker, bound, lambda: _print(options, server), options.grace)
        service.prompts.close()
        if engine.prefixes is not None and engine.prefixes.folder is not None:
            engine.prefixes.folder.close()
    if not options.json:
        print_line(footer(engine.counts.new_tokens, worker.ended))
    if engine.compiling or worker.compiling:
        interruption.leave(0)  # tearing an interpreter down while a compiler runs crashes


def footer(tokens: int, ended: Mapping[Reason, int]) -> str:
    """Return the last line: whole answers, and how many requests ended otherwise."""
    answers = sum(ended.get(reason, 0) for reason in WHOLE)
    others = [f", {n} {reason}" for reason, n in ended.items() if reason not in WHOLE and n]
    drawn = f"{counted(tokens, 'tokens')} in {counted(answers, 'answers')}"
    return f"[{drawn}{''.join(others)}; stopped]"


def _api_keys(options: argparse.Namespace) -> list[str]:
    key = os.environ.get("KVQ_API_KEY")
    api_keys = [one.strip() for one in options.api_key or ([] if key is None else [key])]
    if not all(api_keys):
        raise UserError(
            "the API key is empty; to serve without one, leave out --api-key and KVQ_API_KEY"
        )
    return api_keys


def _check_options(options: argparse.Namespace) -> None:
    """Check the options that need no model."""
    if not options.host:  # a socket would take it for all addresses
        raise UserError("--host is empty; write 127.0.0.1, or 0.0.0.0 for every network")
    if options.name == "":
        raise UserError("--name is empty; leave it out for the model's")
    if options.prefix_disk is not None and options.prefix_dir is None:
        raise UserError("--prefix-disk limits --prefix-dir: give that, too")
    if options.prefix_disk == 0:
        raise UserError("--prefix-disk 0 keeps nothing: leave out --prefix-dir, too")
    if options.prefix_dir is not None:
        inputs.output_directory(options.prefix_dir, "--prefix-dir")
    if options.mesh is not None and (options.prefix_memory or options.prefix_dir is not None):
        raise UserError(
            "prefixes are only kept for a cache on one device: leave out --prefix-memory and"
            " --prefix-dir, or --mesh"
        )
    for name in options.allow_host:
        if not re.fullmatch(r"[^/:\s]+", name):
            raise UserError(
                f"--allow-host {name!r} must be * or a name without scheme and port, such as"
                " kvq.example.com"
            )
    for origin in options.cors:
        if origin != "*" and not re.fullmatch(r"(?i:https?)://[^/\s]+", origin):
            raise UserError(
                f"--cors {origin!r} must be * or an origin without a path, such as"
                " https://example.com"
            )


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
    options: argparse.Namespace, name: str, engine: Engine, bound: socket.socket
) -> dict[str, Any]:
    host, port = bound.getsockname()[:2]
    return {
        "url": f"http://{f'[{host}]' if ':' in host else host}:{port}",
        "model": options.model,
        "name": name,
        "cache": str(options.cache.spec),
        "slots": engine.slots,
        "capacity": engine.capacity,
        "cache_bytes": engine.nbytes,
        "mesh": None if engine.placement is None else str(engine.placement),
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
        f"[serving {server['name']} at {server['url']}/v1:"
        f" {counted(server['slots'], 'slots')} of {server['capacity']} tokens with"
        f" {options.cache.text}, {format_bytes(server['cache_bytes'])}{split}; up to"
        f" {server['queue']} more wait; /health is ok once programs are compiled, and requests"
        " wait until then]"
    )
