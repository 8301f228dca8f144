"""The command line in this process: help, results, JSON, one-line errors, progress."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import typer
from commands import error, run
from profiles import make_worth_profile
from tiny import TCA

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.cli.app import app
from tca_jax.cli.calibrate import _spread
from tca_jax.engine.prompts import encode_prompt
from tca_jax.errors import UserTypeError
from tca_jax.loading import SHIPPED, shipped_profile

pytestmark = pytest.mark.usefixtures("in_work")
SMALL = ["--window=16", "--block-size=8"]
quiet = pytest.mark.filterwarnings("ignore:not even the largest")


@pytest.fixture(scope="module")
def work(work):
    """With a bad text and a profile of another model."""
    (work / "latin1.txt").write_bytes("déjà vu".encode("latin-1"))
    Profile.uniform(TCA, 3, 2, 3).save(work / "other")
    return work


@pytest.fixture
def no_weights(monkeypatch):
    monkeypatch.setattr("tca_jax.loading.load_checkpoint", lambda *args: pytest.fail("the weights were read"))


def commands_of(group, name=""):
    """Names of a command and of all below it."""
    found = [name]
    if hasattr(group, "list_commands"):
        context = group.make_context(name, ["--help"], resilient_parsing=True)
        for each in group.list_commands(context):
            found += commands_of(group.get_command(context, each), f"{name} {each}".strip())
    return found


@pytest.mark.parametrize("command", commands_of(typer.main.get_command(app)))
def test_help_fits_80_columns_and_examples_parse(command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    for example in re.findall(rf"Example: (tca-jax {command}.*)", result.stdout):
        assert run(*shlex.split(example)[1:], "--help").exit_code == 0


def test_generate_prints_the_answer_and_its_cost():
    options = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    expected = tca_jax.generate(tca_jax.load("model"), "hello", **options).text[0]
    result = run("generate", "model", "--prompt", "hello", *flags)
    assert (result.exit_code, result.stdout) == (0, expected + "\n")
    assert "prefill attended to 100.0% of causal pairs" in result.stderr
    assert result.stderr.endswith("the answer is cut at 12 tokens: --max-new-tokens sets the limit\n")


def test_samples_and_log_probabilities():
    options = ["--prompt=hi", "--max-new-tokens=6", "--min-new-tokens=6", "--num-samples=2", "--temperature=1"]
    record = json.loads(run("generate", "model", *options, "--top-logprobs=2", "--json").stdout)
    lm = tca_jax.load("model")
    out = tca_jax.generate(lm, ["hi"], max_new_tokens=6, min_new_tokens=6, num_samples=2, temperature=1, logprobs=2)
    assert [(answer["prompt"], answer["sample"]) for answer in record["answers"]] == [(0, 0), (0, 1)]
    assert [answer["tokens"] for answer in record["answers"]] == out.tokens
    np.testing.assert_allclose([answer["logprobs"] for answer in record["answers"]], out.logprobs)
    likeliest = record["answers"][1]["top_logprobs"][0]
    assert [place["id"] for place in likeliest] == [token for token, _ in out.top_logprobs[1][0]]
    assert likeliest[0]["text"] == lm.tokenizer.decode([likeliest[0]["id"]])
    assert "\n[1, answer 2 of 2] hi\n" in run("generate", "model", *options).stdout


def test_generate_json_of_a_file_or_stdin():
    options = ["--profile=profile", "--max-new-tokens=5", "--json"]
    result = run("generate", "model", "--prompt-file=text.txt", *options)
    record, text = json.loads(result.stdout), Path("text.txt").read_text()
    assert result.stderr == ""
    for other in (["--prompt-file=-"], ["--prompt", text, "--chat"]):  # the tiny model's template is the bare text
        answers = json.loads(run("generate", "model", *other, *options, stdin=text).stdout)["answers"]
        assert answers == record["answers"]
    out = tca_jax.generate(tca_jax.load("model", profile="profile"), text, max_new_tokens=5)
    assert (record["model"], record["profile"]) == ("model", "profile")
    answer = {"text": out.text[0], "tokens": out.tokens[0], "finish_reason": "length"}
    assert record["answers"] == [{"prompt": 0, "sample": 0, **answer}]
    timed = {"compile_seconds", "prefill_seconds", "seconds_per_token"}
    stats = {name: value for name, value in dataclasses.asdict(out.stats).items() if name not in timed}
    assert {name: value for name, value in record["stats"].items() if name not in timed} == stats
    assert record["stats"]["prefill_seconds"] > 0


# --- calibrate and profile show ---------------------------------------------------------------------


@quiet
def test_calibrate_saves_the_budgets_of_the_python_call(tmp_path):
    options = ["--paper", *SMALL, "--tau=0.4", "--tokens=100", "--criterion=retained_mass"]
    result = run("calibrate", "model", "--text=text.txt", "--out", tmp_path, *options)
    assert result.exit_code == 0, result.output
    lm = tca_jax.load("model")
    config = tca_jax.TCAConfig.paper(block_size=8, window=16, tau=0.4, criterion="retained_mass")
    expected = tca_jax.calibrate(lm, _spread(encode_prompt(lm, Path("text.txt").read_text()), 100, 8), config)
    assert Profile.load(tmp_path) == expected
    assert "at 100 tokens" in result.stdout
    assert f"Mean kept share: {expected.kept_share(100).mean():.1%}" in result.stdout


@pytest.mark.integration
@quiet
def test_calibrate_fits_predicted_worth(tmp_path):
    Path(tmp_path / "long.txt").write_text(Path("text.txt").read_text() * 5)
    options = ["--count=2", "--tokens=512", "--kept=0.3", "--json"]
    result = run("calibrate", "model", f"--text={tmp_path / 'long.txt'}", "--out", tmp_path / "new", *options)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["rule"], record["kept"], record["reasons"]["kept"]) == ("worth", 0.3, "as it was asked for")
    assert [source["tokens"] for source in record["sources"]] == [512, 512]
    assert Profile.load(tmp_path / "new").kept == 0.3
    assert "fitting maps" in result.stderr  # in a log, too


@pytest.mark.parametrize(
    ("length", "count", "starts"),
    [(50, 8, [0]), (100, 8, [0]), (199, 8, [0]), (250, 8, [0, 150]), (10_000, 3, [0, 4950, 9900]), (250, 1, [0])],
)
def test_texts_of_a_long_file(length, count, starts):
    found = _spread(list(range(length)), 100, count)
    assert [text[1] - 1 for text in found] == starts
    assert {len(text) for text in found} == {min(length, 100)}
    assert {text[0] for text in found} == {0}  # the token that begins each text


@quiet
def test_calibrate_in_python_shows_progress(capsys):
    lm, config = tca_jax.load("model"), tca_jax.TCAConfig(block_size=8, window=16)
    tca_jax.calibrate(lm, Path("text.txt").read_text(), config)
    assert capsys.readouterr().err.startswith("calibrating model\n")
    tca_jax.calibrate(lm, Path("text.txt").read_text(), config, progress=lambda stage, done, total: None)
    assert capsys.readouterr().err == ""


def test_profile_show_has_all_of_predicted_worth(tmp_path):
    profile = make_worth_profile()
    profile.save(tmp_path)
    shown = run("profile", "show", tmp_path).stdout
    assert "tiny: predicted worth, 2 layers of 2 KV heads" in shown
    assert re.search(r"kept = 0.25: chosen at calibration, .*\nselected = 0.1: the smallest measured share", shown)
    assert re.search(r"25\.0% +98\.0% +- +\+0\.4%", shown)
    assert re.search(r"10\.0% +30\.0% +\+1\.0% +\+0\.02 +-", shown)
    record = json.loads(run("profile", "show", tmp_path, "--json").stdout)
    assert (record["kept"], record["selected"], record["sources"]) == (0.25, 0.1, list(profile.sources))
    assert record["kept_table"][1] == {"kept": 0.25, "facts": 0.98, "copies": None, "following": 0.004}
    make_worth_profile(kept=0.5, kept_table=(dict(profile.kept_table[-1], known=1),)).save(tmp_path)
    assert "(known facts: 1, needed: 32)" in run("profile", "show", tmp_path).stdout
    profile.with_kept(0.2, 0.05).save(tmp_path)
    shown = run("profile", "show", tmp_path).stdout
    assert "kept = 0.2: as it was asked for" in shown
    assert "selected = 0.05: as it was asked for" in shown
    assert error("profile", "show", tmp_path, "--tokens=9").startswith("--tokens goes with budgets of the paper's rule")


@pytest.mark.parametrize("name", ["shipped", *SHIPPED])
def test_a_folder_precedes_a_shipped_profile(name, work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for expected in (Profile.load(shipped_profile()), Profile.load(work / "profile")):
        shown = json.loads(run("profile", "show", name, "--json").stdout)
        assert (shown["model"], shown["library_version"]) == (expected.model_name, expected.library_version)
        Profile.load(work / "profile").save(name)


# --- errors -----------------------------------------------------------------------------------------

CALIBRATE = "calibrate model --text text.txt --out new"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("generate nosuch --prompt x", r"name_or_path = 'nosuch': no such folder.*alias. Aliases: recall-tiny, .*qwen"),
        ("generate model", r"give the prompt as --prompt or as --prompt-file; both may be repeated"),
        ("generate model --prompt a --prompt ''", r"--prompt \(2\) is empty"),
        ("generate model --prompt x --logprobs", r"--logprobs needs --json"),
        ("generate model --prompt-file nosuch.txt", r"nosuch.txt: No such file or directory"),
        ("generate model --prompt-file latin1.txt", r"--prompt-file latin1.txt is not UTF-8 text"),
        ("generate model --prompt x --max-new-tokens 0", r"--max-new-tokens 0: must be an integer of at least 1"),
        ("generate model --prompt x --max-new-tokens 9999", r"--prompt has 1 tokens; .* model has 4096 positions"),
        ("generate model --prompt x --profile other", r"has 3 layers of 2 heads, but model 'model' has 2 of 2"),
        ("generate", r"Missing argument"),
        ("generat", r"No such command 'generat'. Did you mean 'generate'\?"),
        ("plot budgets profile --out /dev/full", r"/dev/full: No space left on device"),
        ("calibrate model --text latin1.txt --out new", r"--text latin1.txt is not UTF-8 text"),
        (f"{CALIBRATE} --paper", r"--text text.txt has 270 tokens: calibration needs 4224"),
        (f"{CALIBRATE} --paper --tokens 20", r"--text text.txt, cut to 20, has 20 tokens"),
        (f"{CALIBRATE} --paper --tau 2", r"--tau 2.0: must lie in \(0, 1\]"),
        (f"{CALIBRATE} --paper --kept 0.5", r"--kept goes with predicted worth: leave out --paper"),
        (CALIBRATE, r"texts have [\d,]+ tokens too few for 8 texts of [\d,]+: pass more text, or lower count"),
        (f"{CALIBRATE} --kept 2", r"--kept 2.0: must be in \(0, 1\]"),
        (f"{CALIBRATE} --tokens 100", r"--tokens 100: must be"),
        (f"{CALIBRATE} --window 512", r"--window goes with --paper"),
        ("generate model --prompt x --profile profile --kept 2", r"--kept 2.0: must be in \(0, 1\]"),
        ("demo --tokens 100", r"--tokens 100: must lie in \[3000, "),
        ("demo --questions 0", r"--questions 0: must lie in \[1, "),
        ("demo --out text.txt", r"--out text.txt cannot be written: .*: Not a directory"),
    ],
)
def test_errors_precede_the_weights(args, message, no_weights):
    assert re.search(message, error(*shlex.split(args)))
    assert not list(Path().glob("new*"))


def refuse(*args, **options):
    raise UserTypeError("prompts is an int: must be text")


@pytest.mark.parametrize("bug", [lambda *args, **options: {}["a bug"], lambda *args, **options: int("bug")])
def test_a_bug_is_no_line(bug, monkeypatch):
    monkeypatch.setattr(tca_jax, "generate", refuse)
    assert error("generate", "model", "--prompt=x", "--json") == "prompts is an int: must be text"
    monkeypatch.setattr(tca_jax, "generate", bug)
    assert isinstance(run("generate", "model", "--prompt=x", "--json").exception, KeyError | ValueError)


def test_out_of_memory_is_a_line(monkeypatch):
    monkeypatch.setattr(tca_jax, "stream", lambda *args, **kwargs: jnp.zeros((2**30, 2**20)).block_until_ready())
    assert error("generate", "model", "--prompt=x").startswith("out of memory: RESOURCE_EXHAUSTED")
