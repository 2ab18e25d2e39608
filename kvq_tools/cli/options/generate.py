"""The options of `kvq generate`."""

from __future__ import annotations

import argparse

from kvq_tools.cli.options import shared, values

MAX_DRAFTS = 256  # a step computes logits for each

DESCRIPTION = """\
Continues a prompt with a Llama-family checkpoint whose keys and values go
through the cache SPEC, prints the text, and ends with one line about what was
done: the cache and its bytes, the bytes of a bf16 cache, tokens, times
(compilation apart) and speed. Sampling is what the model's
generation_config.json asks for, else greedy, unless you give --temperature,
--top-k, --top-p or --min-p."""

EPILOG = f"""\
examples:
  kvq generate embedded --prompt "It was a bright" --cache kivi:bits=2 \\
      --temperature 0.6 --max-new-tokens 400 --stream
  kvq generate path/to/Llama-3.2-1B-Instruct --chat --temperature 0.7 \\
      --top-p 0.9 --prompt "Name three rivers." --cache innerq:bits=2
  kvq generate embedded --prompts prompts.jsonl --out answers.jsonl \\
      --cache kivi:bits=4 --memory 1GiB
  kvq generate smollm2 --from report.safetensors \\
      --prompt "What does the report say about cost?"
  kvq generate path/to/Llama-3.1-8B --prompt-file book.txt \\
      --cache kivi:bits=2 --mesh heads=4,tokens=2
  kvq generate path/without/tokenizer --prompt-ids 1,306,763 --json

With --prompts, each line of the file is a quoted text or an object:
  {{"prompt": TEXT}}
  {{"prompt_ids": [1, 2]}}
  {{"messages": [{{"role": "user", "content": TEXT}}]}}
An object may also have "id" (default: the line's number, counted from 0),
"max_new_tokens", "temperature", "top_k", "top_p", "min_p" and "seed". A line
draws random numbers by --seed and its id, so equal prompts have different
answers; with "seed" it draws those of one prompt with that --seed. Answers are
written as they come. Run the command again to continue where it stopped.

{shared.CACHE_GRAMMAR}"""


def configure(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    prompt = shared.add_prompt(parser, required=False)
    prompt.add_argument(
        "--prompts",
        metavar="F",
        help="a file with one prompt per line, as JSON; several are generated at a time",
    )
    parser.add_argument(
        "--out",
        metavar="F",
        help=(
            "the file for the answers to --prompts, one per line; prompts that it already "
            "answers are skipped"
        ),
    )
    shared.add_saved(
        parser,
        "continue from a file of `kvq prefill`; a prompt is a question about it: it "
        "follows the saved text, or ends the user's message of a saved chat",
    )
    shared.add_calibration(parser)
    shared.add_generation(parser, max_new_tokens=128)
    shared.add_number(
        parser,
        "--capacity",
        "S",
        "tokens that the cache can hold (default: prompt and new tokens, rounded up to a "
        "multiple of 64)",
    )
    shared.add_size(parser, capacity=False)
    shared.add_mesh(parser)
    parser.add_argument("--stream", action="store_true", help="print text as it comes")
    shared.add_number(
        parser,
        "--draft",
        "N",
        "prompt-lookup decoding: draft up to N tokens per step from earlier text; output "
        "is unchanged up to rounding (default: none)",
        type=values.integer(1, MAX_DRAFTS),
    )
