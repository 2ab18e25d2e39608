"""One table over all commands: what a user gets wrong is one line and exit code 2, found before
weights are read."""

import errno
import os
import pathlib
import shlex
import shutil
import tempfile
from collections.abc import Callable

import pytest

from tests.kvq_tools.cli.test_cli_errors import assert_one_line_error

# Commands as they are typed, with the paths of the test in braces. {model} has 256 positions and
# no chat template, {bare} has no tokenizer, {tekken} another one, {text} is a long text.
REFUSED = [
    # prompts
    ("generate {tmp}/missing --prompt a", "does not exist"),
    ("generate {model}", "--prompt --prompt-file --prompt-ids --prompts --from is required"),
    ("generate {model} --prompt ''", "prompt is empty"),
    ("generate {model} --prompts {tmp}/prompts --out {tmp}/out", "line 2: the prompt is empty"),
    ("generate {model} --prompt {surrogate}", "the prompt is not UTF-8 text; convert it to"),
    ("generate {model} --prompt a --chat", "no chat template"),
    ("generate {bare} --prompt a", "--prompt-ids"),
    ("generate {bare} --prompt-ids 1,300", "token id 300 is outside"),
    ("chat {model}", "has no chat template"),
    ("chat {bare}", "has no tokenizer"),
    ("demo --model {bare}", "has no tokenizer"),
    ("serve {bare}", "has no tokenizer, which is needed to serve text"),
    ("chat {tekken}", "has no tokenizer (add a tokenizer.json: tekken.json is not read), which"),
    ("generate {tekken} --prompt a", "tekken.json is not read); give token ids"),
    # options and their values
    ("generate {model} --prompt a --cache kivi:bit=2", "options: bits, group_size"),
    ("generate {model} --prompt a --cache kivi:group_size=7,block=7", "divisors"),
    ("generate {model} --prompt a --temperature=-1", "temperature=-1.0"),
    ("generate {model} --prompt a --draft 3 --temperature 0.5", "for greedy decoding"),
    ("generate {model} --prompt a --draft 3 --mesh heads=2", "on one device"),
    ("generate {model} --prompt a --draft 99999", "'99999' must be an integer from 1 to 256"),
    ("generate {model} --prompt a --memory 0", "--memory is for many prompts: give --prompts"),
    ("serve {model} --max-body 0", "'0' refuses every request; write 8MiB"),
    ("serve {model} --grace 99999999", "'99999999' must be an integer from 1 to 86400"),
    ("memory {model} --cache kivi --budget 999999999T", "is more than the largest size"),
    (
        "calibrate {model} --text {text} --cache kvquant --out {tmp}/f --samples 4294967296",
        "must be an integer from 1 to 65536",
    ),
    ("eval {model} --text {text} --cache int4 --step 999", "more than the window of 256 tokens"),
    (
        "report {model} --text {text} --cache int4 --steps 999 --out {tmp}/o",
        "--steps 999 has no context within the model's 256 positions; give fewer",
    ),
    ("ruler {model} --task fwe --limit 4294967296", "too many generated samples; give at most 1"),
    (f"passkey {{model}} --max-new-tokens {'9' * 25}", "was trained for 256 positions"),
    *(
        (f"{words} {'9' * 5000}", f"'{'9' * 20}...' must be an integer of at least 1 ")
        for words in (
            "passkey {model} --max-new-tokens",
            "memory {model} --cache kivi --context",
            "generate {model} --prompt a --capacity",
        )
    ),
    ("generate {model} --prompt a --seed ٣", "'٣' must be an integer"),
    (
        f"generate {{bare}} --prompt-ids {'9' * 5000}",
        "9...' is not a list of token ids; write 1,2,3",
    ),
    (
        f"generate {{model}} --prompt a --top-k {'9' * 5000}",
        "invalid int value: '99999999999999999999...",
    ),
    (
        "generate {bare} --prompt-ids=1,2 --cache=kivi:pre_rope=true --implementation=pallas",
        "implementation='pallas' cannot run: ",
    ),
    ("generate {model} --prompt a --seed 5", "--seed 5 has no effect on greedy decoding: give a"),
    ("generate {model} --prompt a --seed 99999999999999999999999999", "argument --seed: '9999"),
    ("generate {model} --cahce=kivi", "has no option --cahce. Did you mean --cache?"),
    ("generate {model} --temp 1", "has no option --temp. Did you mean --temperature?"),
    ("memory {model} --cache kivy", "Did you mean kivi?"),
    ("memory {model} --cache KIVI", "Did you mean kivi?"),
    ("memory SmolLM --cache kivi", "is not a Hub id (organisation/name). Did you mean smollm2?"),
    ("memory embeded --cache kivi", "Did you mean embedded?"),
    ("memory {tmp}/pipe --cache kivi", "is not a directory with config.json and safetensors"),
    ("memory {model} --cache dense --budget 2.5", "'2.5' is not a size; write 24GiB"),
    ("plan {model} --budget 2.5", "'2.5' is not a budget; write 2.5bits, 600MiB"),
    ("passkey {model} --lengths 100000", "--lengths 100000 is beyond the 256 positions of the m"),
    ("plan {model} --budget -1bits", "one that begins with - needs an =, as in --budget=-1 (see"),
    ("passkey {model} --lengths 5", "tokens already, and 0 are left for it"),
    ("memory {model} --cache kivi:grup_size=16", "Did you mean group_size?"),
    ("memory {model} --cache dense --budget lots", "24GiB"),
    ("eval {model} --text {text} --cache int4 --chunk 8", "--chunk is for --mode chunked"),
    ("quantize-weights {model} --bits 7 --text {text} --out {tmp}/o", "invalid choice"),
    (
        "quantize-weights {model} --bits 3 --packed --text {text} --out {tmp}/o",
        "packed weights have 4 bits",
    ),
    ("quantize-weights {model} --bits 3 --sparse 2 --text {text} --out {tmp}/o", "sparse=2.0 must"),
    ("serve {model} --host 256.1.1.1", "not known"),
    ("serve {model} --host ''", "write 127.0.0.1, or 0.0.0.0 for every network"),
    ("serve {model} --name ''", "--name is empty"),
    ("serve {model} --allow-host http://kvq.example.com", "a name without scheme and port"),
    ("serve {model} --allow-host kvq.example.com:8000", "a name without scheme and port"),
    ("serve {model} --prefix-dir ''", "--prefix-dir is empty"),
    ("report {model} --text {text} --cache kivi --out ''", "--out is empty"),
    ("quantize-weights {model} --bits 4 --out ''", "--out is empty"),
    ("eval {model} --cache kivi --text ''", "the name of a file is empty; name a file"),
    ("generate {model} --prompt-file ''", "the name of a file is empty; name a file"),
    ("quantize-weights {model} --bits 4 --out {tmp}/o --text ''", "the name of a file is empty"),
    *(
        (f"{command} ''", f"argument {command.split()[-1]}: the name is empty; name a file")
        for command in (
            "generate {model} --from",
            "chat {model} --from",
            "report --out {tmp}/o --from",
            "passkey {model} --data",
            "serve {model} --chat-template",
        )
    ),
    ("memory ''", "the name of the model is empty; give a directory"),
    ("generate '' --prompt a", "the name of the model is empty; give a directory"),
    ("serve {model} --prefix-dir {text}", "is a file; name a directory"),
    ("serve {model} --prefix-dir {tmp} --prefix-disk 0", "leave out --prefix-dir, too"),
    ("serve {model} --prefix-disk 1GiB", "--prefix-disk limits --prefix-dir"),
    ("serve {model} --mesh heads=2 --prefix-memory 1MiB", "leave out --prefix-memory and"),
    ("passkey {model} --depths 0,2", "between 0 and 1"),
    ("niah {model} --task multiquery --depths 0.5", "--depths is for one needle, and multiquery"),
    ("niah {model} --task single_1 --text a.txt", "--text is for needles in a text, and single_1"),
    ("memory {model} --cache kivi --mesh heads=3", "2 KV heads do not divide into 3 parts"),
    ("memory {model} --cache kivi --mesh columns=2", "write rows=R,heads=H,tokens=T"),
    ("memory {model} --cache kivi --devices 8", "--devices is for the devices of a mesh: give --m"),
    ("memory {model} --cache kivi --device h200", "--device is for the devices of a mesh: give --"),
    ("memory {model} --budget 1GiB --device h200", "--device is for the devices of a mesh: give -"),
    ("memory {model} --cache kivi --context 10G", "must be an integer of at least 1"),
    # sizes
    ("prefill {model} --prompt 'a key' --out {tmp}/f --capacity 1", "over the capacity of 1"),
    ("generate {bare} --prompt-ids 1,2 --max-new-tokens 9 --capacity 10", "over --capacity 10"),
    (
        "generate {model} --prompt a --cache dense --capacity 999999999999",
        "a cache of 999999999999 tokens takes 232.83 TiB, and this device has",
    ),
    ("demo --model {model} --new-tokens 500", "more than the 128 tokens"),
    ("eval {model} --text {text} --cache int4 --limit 1", "at least two tokens, and this one has"),
    ("eval {model} --text {text} --cache int4 --window 257", "beyond the 256 positions"),
    ("eval {model} --text {text} --cache int4 --window 250 --protocol", "beyond the 256 positions"),
    ("eval {model} --text {text} --cache int4 --window 20 --protocol", "more than 64 tokens of"),
    ("memory {model} --cache kivi --mesh tokens=16 --devices 8", "needs 16 devices, and there are"),
    ("report {model} --text {text} --cache int4 --contexts 64,999 --out {tmp}/o", "999 is beyond"),
    ("report {model} --text {text} --cache int4 --window 999 --out {tmp}/o", "beyond the 256"),
    *(
        (f"{command} --text {{tmp}}/row --out {{tmp}}/f", "give a longer --text, or --length ")
        for command in ("calibrate {model} --cache kvquant", "quantize-weights {model} --bits 3")
    ),
    ("serve {model} --memory 1KB", "give more, or a smaller cache"),
    ("serve {model} --memory 200KB --slots 64 --capacity 256", "64 slots of 256 tokens"),
    ("passkey {model} --data {tmp}/row --max-new-tokens 255", "was trained for 256 positions"),
    ("niah {model}", "256 positions, which include --max-new-tokens (now 128)"),
    ("plan {model} --device h200", "belong together"),
    ("plan {model} --device h200 --tokens-per-second 1e12", "out of reach"),
    (
        "plan {model} --text {text} --device h200 --tokens-per-second 1e-320",
        "more than can be counted in a step of --tokens-per-second 9.99989e-321: give a higher",
    ),
    ("memory {model} --cache xquant --roofline 1e308:1e-10", "756e12:2e12, each at least 1 (see"),
    ("memory {model} --cache kivi --mesh auto --device 9:1e-320", "2e12, each at least 1 (see"),
    ("plan {model} --budget 2bits --text {text} --window 200", "leave nothing to quantize"),
    ("plan {model} --budget 2bits --other-text {text}", "--other-text needs --text without --fast"),
    ("plan {model} --budget 2bits --windows 4", "--windows needs --text without --fast"),
    (
        "plan {model} --budget 2bits --text {text} --fast --window 512",
        "--window needs --text without --fast",
    ),
    ("plan {model} --budget 2bits --work ''", "argument --work: the name is empty; name a direc"),
    ("plan {model} --budget 2bits --work {tmp}/none", "was made in '/"),
    ("plan {model} --budget 100bits --text {text}", "bits=100 cannot be stored with heads of"),
    (f"plan {{model}} --budget {'9' * 400}bits --text {{text}}", "is not a budget; write"),
    (f"memory {{model}} --budget {'9' * 400}GiB", "is more than the largest size"),
    ("serve {model} --memory 1KB --slots 1", "error: 1 slot of 64 tokens, and a row"),
    # what does not go together
    ("eval {model} --text {text} --cache squat --prompt 0", "takes statistics from a prompt"),
    ("eval {model} --text {text} --cache int4 --flips", "in the output of --json: add it"),
    ("eval {model} --text {text} --cache int4 --protocol --flips", "--flips is not for --protocol"),
    ("eval {model} --text {text} --cache int4 --protocol --mode=fake", "--mode is not for"),
    ("eval {model} --text {text} --cache int4 --protocol --batch 2", "--batch is not for"),
    ("eval {model} --text {text} --cache int4 --protocol --buckets 9", "--buckets is not for"),
    ("eval {model} --text {text} --cache int4 --protocol --limit 999", "--limit is not for"),
    ("serve {model} --cache kvquant:outliers=0", "needs a calibration"),
    ("passkey {model} --data {tmp}/row --lengths 9", "--lengths is for generated samples"),
    *(
        (f"{words} --data {{tmp}}/row --seed 0", "--seed is for generated samples")
        for words in ("passkey {model}", "niah {model}", "ruler {model}")
    ),
    ("niah {model} --task multikey_1 --max-new-tokens 4", "give one (--text FILE)"),
    ("memory {model} --cache auto:bits=2", "no plan of"),
    ("plan {model} --device h200 --tokens-per-second 9 --budget 2bits", "a speed is a budget"),
    ("report --out {tmp}/o", "needs MODEL and --text and --cache, or --from"),
    ("report --cache auto:bits=2.5 --text {text} --out {tmp}/o", "needs MODEL, or --from"),
    ("report --cache auto:bits=2.5 --from {text} --out {tmp}/o", "leave out --cache"),
    ("report {model} --from {tmp}/row --out {tmp}/o", "leave out MODEL"),
    *(
        (f"report --from {{tmp}}/row {words} --out {{tmp}}/o", f"leave out {words.split()[0]}")
        for words in (
            *("--window 64", "--buckets 3", "--mode fake", "--steps 2", "--sample 9", "--batch 2"),
            *("--dtype bfloat16", "--weights dense", "--activations int8"),
        )
    ),
    # files
    (
        "calibrate {model} --text {text} --cache kvquant --out {tmp}/f --work {text}",
        "is a file; name a directory",
    ),
    (f"generate {{model}} --prompt a --cache kivi:block={'9' * 25}", "at least 1 and below 2**31"),
    ("report --from {text} --out {tmp}/o", "is not JSON"),
    ("report --from {tmp}/nested --out {tmp}/o", "is not JSON"),
    ("eval {model} --text {tmp}/none.txt --cache int4", "none.txt': No such file or directory"),
    ("calibrate {model} --text {text} --cache kvquant --out {tmp}/none/f", "that exists"),
    ("quantize-weights {model} --bits 3 --text {text} --out .", "exists and is not an empty"),
    ("passkey {model} --data {tmp}/empty", "has no samples"),
    *(
        (f"{command} {{model}} --text {{tmp}}/empty {rest}", "empty' is empty; name a file with a")
        for command, rest in (
            ("eval", "--cache int4"),
            ("eval", "--cache int4 --protocol"),
            ("plan", "--budget 2bits"),
            ("calibrate", "--cache kvquant --out {tmp}/f"),
        )
    ),
    ("generate {model} --prompt-file {tmp}/empty", "empty' is empty; name a file with a text"),
    ("generate {model} --prompts {tmp}/empty --out {tmp}/f", "empty' is empty; name a file"),
    ("eval {model} --text {tmp}/latin --cache int4", "latin' is not UTF-8 text; save it as UTF-8"),
    ("plan {model} --budget 2bits --text {text} --calibration {tmp}/none", "none' is not a file"),
    ("passkey {model} --data {tmp}/row --answers {text}", "must be a new file"),
    ("passkey {model} --data {tmp}/row --answers {tmp}/none/f", "in a directory that exists"),
    ("plan {model} --budget 2bits --out {tmp}/none/f", "a file in a directory that exists"),
    ("prefill {model} --prompt a --out {tmp}/none/f", "a file in a directory that exists"),
    ("generate {model} --prompts {tmp}/row --out {tmp}/none/f", "a file in a directory that"),
    ("prefill {model} --prompt a --out {tmp}/pipe", "is a device or a pipe, which keeps nothing"),
    ("generate {model} --prompts {tmp}/row --out {tmp}/pipe", "is a device or a pipe"),
    ("plan {model} --budget 2bits --picture {tmp}/pipe", "is a device or a pipe"),
    # a file to write that is one to read
    *(
        (f"{command} {{tmp}}/row", f"row' would replace a file of {option}")
        for command, option in (
            ("passkey {model} --data {tmp}/row --answers", "--data"),
            ("generate {model} --prompts {tmp}/row --out", "--prompts"),
            ("prefill {model} --prompt-file {tmp}/row --out", "--prompt-file"),
            ("calibrate {model} --cache kvquant --text {tmp}/row --out", "--text"),
            ("plan {model} --budget 2bits --text {tmp}/row --out", "--text"),
            ("plan {model} --budget 2bits --text {text} --other-text {tmp}/row --out", "--other"),
            ("plan {model} --budget 2bits --calibration {tmp}/row --out", "--calibration"),
            ("plan {model} --budget 2bits --text {text} --out {tmp}/row --picture", "--picture"),
        )
    ),
    (
        "prefill {model} --prompt a --cache {tmp}/plan.json --out {tmp}/plan.json",
        "replace a file of --cache; name another one",
    ),
    *(
        (f"prefill {{model}} --prompt a --out {{model}}/{name}", "replace a file of MODEL; name")
        for name in ("config.json", "model.safetensors", "tokenizer.json")
    ),
    # names that are too long for the system
    ("memory {long} --cache kivi", "File name too long"),
    *(
        (f"{command}{{long}}", f"{command.split()[-1]} cannot be written: File name too long; give")
        for command in (
            "generate {model} --prompts {tmp}/row --out ",
            "calibrate {model} --text {text} --cache kvquant --out ",
            "passkey {model} --data {tmp}/row --answers ",
            "report {model} --text {text} --cache int4 --out ",
            "quantize-weights {model} --bits 3 --text {text} --out ",
        )
    ),
]


@pytest.mark.parametrize(("command", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_bad_input_is_one_line_and_found_before_weights_are_read(
    command: str,
    message: str,
    model: pathlib.Path,
    bare: pathlib.Path,
    tmp_path: pathlib.Path,
    run,
    no_weights: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
):
    no_weights()
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nested").write_text("[" * 100_000)
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    (tmp_path / "text").write_text("the key of the cat " * 99)
    (tmp_path / "prompts").write_text('"a"\n""\n')
    (tmp_path / "row").write_text('{"input": "a", "target": "c"}\n')
    (tmp_path / "plan.json").write_text(
        '{"format": "kvq.cache-plan", "cache": "kivi", "calibration": null}'
    )
    shutil.copytree(bare, tmp_path / "tekken")
    (tmp_path / "tekken" / "tekken.json").write_text("{}")
    names = {"model": model, "bare": bare, "tmp": tmp_path, "text": tmp_path / "text"}
    names |= {"tekken": tmp_path / "tekken", "long": "a" * 300}
    words = [word.format(**names, surrogate="a\udcffb") for word in shlex.split(command)]
    before = sorted(tmp_path.iterdir())
    assert_one_line_error(run(*words), message)
    assert sorted(tmp_path.iterdir()) == before, "something was written"


@pytest.mark.parametrize(
    "command",
    [
        "prefill {model} --prompt a --out {tmp}/f",
        "plan {model} --budget 2bits --out {tmp}/f",
        "generate {model} --prompts {tmp}/none --out {tmp}/f",
        "quantize-weights {model} --bits 3 --out {tmp}/f",
    ],
)
def test_a_directory_that_cannot_be_written_is_found_before_any_work(
    command: str, model: pathlib.Path, tmp_path: pathlib.Path, run, monkeypatch
):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/tmp/tmpabc")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    words = shlex.split(command.format(model=model, tmp=tmp_path))
    assert_one_line_error(
        run(*words), "f' cannot be written: Permission denied; name another directory"
    )


def test_a_plan_that_cannot_be_kept_names_the_option_for_another_folder(
    tmp_path: pathlib.Path, run, monkeypatch
):
    text = tmp_path / "text"
    text.write_text("the key of the cat " * 999)
    monkeypatch.setenv("KVQ_CACHE", str(text))  # no directory can be made there
    assert_one_line_error(
        run("plan", "embedded", "--budget", "2bits", "--fast", "--text", text),
        "cannot be written: Not a directory; name another directory",
    )


def test_the_current_folder_is_not_replaced(model, tmp_path: pathlib.Path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_line_error(
        run("quantize-weights", model, "--bits", "4", "--out", "."),
        "--out '.' is the current directory; name a new one",
    )


def test_a_deleted_current_folder_is_named(tmp_path: pathlib.Path, run, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert_one_line_error(
        run("generate", "embedded", "--prompt", "a"),
        "the current folder was deleted; change to one that exists",
    )
