"""What exact newest tokens do to KL: after prompts of several lengths, the KL of caches with 32 to
512 exact newest tokens over that with 32, on the same windows of each text.

    python -m laboratory.studies.recent_tokens smollm2 --text novel.txt --text wiki.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from kvq_models import load_llama
from kvq_tools.evaluation.intervals import paired_ratio
from kvq_tools.evaluation.run import measure_rows
from kvq_tools.evaluation.windows import opened

METHODS = "turboquant:bits=3", "turboquant:bits=2", "kivi:bits=2"  # which need no calibration
RECENTS = 32, 64, 128, 256, 512
SCORED = 124


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True, type=Path)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens before the scored ones")
    parser.add_argument("--windows", type=int, default=4, help="of each text")
    asked = parser.parse_args()
    llama, tokenizer = load_llama(asked.model, dtype="float32")
    width, rows = asked.prompt + 1 + SCORED, []
    for path in asked.text:
        text = path.read_text(encoding="utf-8")
        ids = np.asarray(tokenizer(text, verbose=False).input_ids, np.int32)
        if len(ids) < width:
            raise ValueError(f"{path} has {len(ids)} tokens, a window has {width}")
        starts = np.linspace(0, len(ids) - width, asked.windows).astype(int)
        windows = np.stack([ids[start : start + width] for start in starts])
        rows.append(opened(windows, ids, tokenizer.bos_token_id))
    recents = [recent for recent in RECENTS if recent <= asked.prompt // 4]
    specs = [f"{m},sink=4,recent={recent},block=32" for m in METHODS for recent in recents]
    qualities = measure_rows(
        [(llama, spec) for spec in specs],
        np.concatenate(rows),
        prompt=asked.prompt,
        scored=SCORED,
        batch=2,
    )
    for i, (spec, quality) in enumerate(zip(specs, qualities, strict=True)):
        first = qualities[i - i % len(recents)]
        ratio, interval = paired_ratio(quality.kl.tolist(), first.kl.tolist())
        bounds = "" if quality is first else f" [{interval.low:.2f}, {interval.high:.2f}]"
        print(f"{spec:45} KL {quality.kl.mean():.4f}, ratio {ratio:.2f}{bounds}")


if __name__ == "__main__":
    main()
