"""kvq calibrate and --calibration: the file is the library's, commands use it, and anything wrong
with it is one line."""

import shutil

import pytest

import kvq_jax as kvq
from kvq_models import (
    calibrate,
    generate,
    load_calibration,
    load_llama,
    prepare,
    resolved,
    right_padded,
    save_calibration,
)
from kvq_models.calibration import fit
from kvq_tools.cli import main
from tests.kvq_models.checkpoints import PROMPT, save_with_tokenizer
from tests.kvq_tools.cli.test_cli_errors import assert_one_line_error

SPEC = "kvquant:bits=2,outliers=0.1,block=8"
TEXT = " ".join(
    f"the key of the {a} is {b}."
    for a in ("cat", "dog", "cow")
    for b in ("seven", "four", "nine", "two")
)
SIZES = "--samples 2 --length 32 --dtype float32"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a directory with a random one-layer model, a tokenizer and a text."""
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), TEXT, max_position_embeddings=64)


def request(model, out, spec=SPEC, sizes=SIZES):
    return f"calibrate {model} --text {model / 'text.txt'} --cache {spec} --out {out} {sizes}"


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "f.safetensors"
    assert main.main(request(model, path).split()) == 0
    return path


@pytest.fixture(scope="module")
def waterfill_file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "w.safetensors"
    spec = "waterfill:bits=4,sink=1,block=16"
    assert main.main(request(model, path, spec).split()) == 0
    return path


# --- calibrate


def test_calibrate_writes_the_librarys_file_says_what_it_is_and_clears_up(
    model, tmp_path, run_json
):
    out = tmp_path / "f.safetensors"
    found = run_json(request(model, out))
    llama, tokenizer = load_llama(model, dtype="float32")
    ids = tokenizer(TEXT).input_ids
    expected = calibrate(
        llama, ids, SPEC, samples=2, length=32, work=tmp_path / "w", text="text.txt"
    )
    save_calibration(expected, tmp_path / "library")
    assert out.read_bytes() == (tmp_path / "library").read_bytes()
    sides = {"k": expected.keys["layers.0.k"], "v": expected.keys["layers.0.v"]}
    facts = {"samples": 2, "length": 32, "text_tokens": len(ids), "loss": expected.origin.loss}
    facts |= {"bytes": out.stat().st_size, "layers": [{"layer": 0} | sides]}
    assert found.items() >= facts.items()
    assert found["seconds"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.safetensors", "library", "w"], (
        "OUT.work was left behind"
    )


def test_ctrl_c_says_how_to_go_on_and_the_same_command_then_writes_the_same_file(
    model, file, tmp_path, run, monkeypatch
):
    out, record, calls = tmp_path / "f.safetensors", fit.record, []

    def interrupt(*arguments):
        if calls:
            raise KeyboardInterrupt
        calls.append(arguments)
        return record(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fit, "record", interrupt)
        code, text, err = run(request(model, out))
    assert (code, text) == (130, "")
    assert err.splitlines()[-1] == f"kvq: interrupted: the same command continues from '{out}.work'"
    assert not out.exists()
    code, _, err = run(request(model, out))
    assert code == 0, err
    assert "running samples, 1 ..." in err, "the complete sample was run again"
    assert out.read_bytes() == file.read_bytes()
    assert not out.with_name("f.safetensors.work").exists()


def test_length_is_at_most_what_the_model_was_trained_for_unless_it_is_given(
    model, tmp_path, run_json, run
):
    assert run_json(request(model, tmp_path / "f", sizes="--samples 2"))["length"] == 64
    code, _, err = run(request(model, tmp_path / "f"), "--length", 65)
    assert code == 0
    assert "kvq: warning: samples of 65 tokens go beyond the 64 positions" in err


# --- commands that run a cache


def test_generate_with_a_calibration_gives_the_librarys_tokens(model, file, run_json):
    options = f"--cache={SPEC} --calibration={file} --max-new-tokens=16 --dtype=float32"
    found = run_json(f"generate {model} --prompt='{PROMPT}' {options}")
    llama, tokenizer = load_llama(model, dtype="float32")
    tokens, lengths = right_padded([tokenizer(PROMPT).input_ids])
    cache = kvq.init_cache(SPEC, llama.config, 1, found["capacity"], "float32")
    ends = llama.config.eos_token_ids
    prepared = prepare(llama, SPEC, file)
    out = generate(prepared, cache, tokens, lengths, max_new_tokens=16, eos_ids=ends)
    assert found["tokens"] == out.tokens[0, : int(out.lengths[0])].tolist()
    assert found["calibration"] == str(file)


def test_a_cache_without_its_calibration_or_with_another_is_one_line_before_weights_are_read(
    model, file, run, no_weights
):
    no_weights()
    command = ("generate", model, "--prompt", "a", "--cache")
    for more, message in (
        ((SPEC,), f"kvq calibrate MODEL --text FILE --cache '{kvq.parse(SPEC)}'"),
        ((SPEC.replace("bits=2", "bits=3"), "--calibration", file), "for other options"),
        (("kivi", "--calibration", file), f"calibration '{file}' is not needed for"),
        ((SPEC, "--calibration", f"{file}.none"), "is not a file"),
        ((SPEC, "--calibration", model / "model.safetensors"), "is not a calibration"),
        ((SPEC, "--calibration", file), "weights were read"),
    ):
        assert_one_line_error(run(*command, *more), message)


def test_a_fraction_of_outliers_below_one_value_is_a_warning_with_a_remedy(model, run_json):
    sentence = "values have no outliers in full precision: outliers="

    def warnings(spec: str) -> list[str]:
        found = run_json("doctor", model, "--cache", spec)["warnings"]
        return [warning for warning in found if sentence in warning]

    (warning,) = warnings("kvquant:bits=2,block=8")
    enough = warning.rsplit("outliers=", 1)[1].split()[0]
    assert not warnings(f"kvquant:bits=2,block=8,outliers={enough}"), "the remedy is none"


def test_doctor_tells_of_a_calibration_that_is_needed_fits_or_does_not(
    model, file, tmp_path, run_json, run
):
    needed = run_json("doctor", model, "--cache", SPEC)
    assert needed["facts"]["calibration"] == "needed for the keys of 1 layers and the values of 1"
    assert any("kvq calibrate MODEL" in warning for warning in needed["warnings"])
    fits = run_json("doctor", model, "--cache", SPEC, "--calibration", file)
    samples = "2 samples of 32 tokens of text.txt, seed 0, float32"
    assert fits["facts"]["calibration"] == f"fits this cache and model: {samples}"
    assert not any("calibrat" in warning for warning in fits["warnings"])
    plain = run_json("doctor", model, "--cache", "kivi:block=8")
    assert plain["facts"]["calibration"] == "not needed"
    for cache, message in (
        ("kivi", "takes no calibration"),
        (f"{SPEC},pre_rope=false", "other options"),
    ):
        refused = run("doctor", model, "--cache", cache, "--calibration", file)
        assert_one_line_error(refused, message)
    shutil.copy(model / "config.json", tmp_path)
    bare = run_json("doctor", tmp_path, "--cache", SPEC, "--calibration", file)
    told = "the weights are not in a local directory and were not compared"
    assert told in bare["facts"]["calibration"]


def test_a_cache_that_leaves_open_what_its_calibration_decides_is_told_so(
    model, tmp_path, run, no_weights
):
    out, spec = tmp_path / "w.safetensors", "waterfill:bits=2,sink=1,recent=3,block=16"
    code, printed, _ = run(request(model, out, spec))
    assert code == 0
    used = str(load_calibration(out, load_llama(model)[0], spec).spec)
    assert "k_widths=" in used
    assert f"--cache '{used}'" in printed
    no_weights()
    for cache, warned in ((spec, True), (used, False)):
        _, _, err = run(f"generate {model} --prompt=a --cache={cache} --calibration={out}")
        assert "weights were read" in err
        assert (f"--cache '{used}' uses it" in err) == warned


def test_a_plan_fits_its_budget_and_is_the_cache_that_the_calibration_decides(
    model, waterfill_file, run, run_json
):
    command = f"plan {model} --calibration {waterfill_file} --context 256 --batch 2 --budget"
    by_bits = run_json(command, "3 bits")
    caches = {cache["bits"]: cache for cache in by_bits["caches"]}
    assert by_bits["chosen"] == caches[3.0]["name"]
    llama = load_llama(model)[0]
    calibration = load_calibration(waterfill_file, llama, "waterfill")
    assert by_bits["chosen"] == str(resolved("waterfill:bits=3", calibration))
    predicted = [caches[bits]["predicted_kl"] for bits in sorted(caches)]
    assert predicted == sorted(predicted, reverse=True)
    assert len(set(predicted)) == len(predicted)
    size = kvq.size.of(by_bits["chosen"], llama.config, 2, 256).resident
    assert size > caches[3.0]["bytes"], "waterfill's calibration is in memory, too"
    bits = caches[3.0]["body_bits_per_element"]
    for budget in (size, size - 1):
        found = run_json(command, budget)
        chosen = {cache["name"]: cache for cache in found["caches"]}[found["chosen"]]
        assert kvq.size.of(chosen["name"], llama.config, 2, 256).resident <= budget
        assert (chosen["body_bits_per_element"] >= bits) == (budget == size)
    _, text, _ = run(command, "3bits")
    assert f"--cache '{by_bits['chosen']}'" in text
