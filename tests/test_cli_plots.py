"""`tca-jax plot`: the pictures that it writes, what it refuses, and its help."""

import functools
import json
import re
import shlex
from pathlib import Path

import commands
import numpy as np
import pytest
from tiny import TCA, write_checkpoint

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.lab import plots
from tca_jax.lab.commands.plots import _page_of
from tca_jax.lab.plots.inspection import attention_received, kept_tokens

COMMANDS = ["", "budgets", "selected", "attention", "latency", "accuracy", "reading", "keeping"]
TEXT = "The quick brown fox jumps over the lazy dog. " * 6


run, error = (functools.partial(each, "plot") for each in (commands.run, commands.error))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_checkpoint(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    Profile.uniform(TCA, 2, 2, 3).save(folder / "profile")
    full = {"method": "full", "attended_share": 1.0, "inside": 0.5, "inside_full": 0.5, "kv_share": 1.0, "late": 1.0}
    tca = {"method": "tca", "attended_share": 0.2, "inside": 0.51, "inside_full": 0.5, "kv_share": 0.3, "late": 0.9}
    models = {name: {"tokens": 8192, "points": [full, tca, {**tca, "late": None}]} for name in ("one", "two")}
    (folder / "curves.json").write_text(json.dumps({"models": models}))
    (folder / "call.json").write_text(
        json.dumps({"stats": {"new_tokens": [4], "prefill_seconds": 1.0, "seconds_per_token": 0.1}})
    )
    return folder


@pytest.fixture(autouse=True)
def in_work(work, monkeypatch):
    monkeypatch.chdir(work)


@pytest.fixture
def drawn(monkeypatch) -> dict:
    """Arguments of the plots in place of their files."""
    calls: dict = {}

    def draw(name):
        def plot(*args, **options):
            calls[name] = (args, options)
            return Path("drawn.png")

        return plot

    for name in [name for name in vars(plots) if name.startswith("plot_")]:
        monkeypatch.setattr(plots, name, draw(name))
    return calls


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_its_example_parses(command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    if command:
        example = re.search(rf"Example: tca-jax plot ({command}.*)", result.stdout).group(1)
        assert run(*shlex.split(example), "--help").exit_code == 0


@pytest.mark.parametrize(
    "args",
    [
        ("budgets", "profile", "--tokens=64"),
        ("selected", "model", "--file=text.txt", "--profile=profile", "--question=why?"),
        ("attention", "model", "--file=text.txt", "--max-tokens=64"),
        ("latency", "call.json"),
        ("reading", "curves.json"),
        ("keeping", "curves.json"),
    ],
    ids=lambda args: args[0],
)
def test_a_picture_is_written_where_it_is_asked_for_and_named(args, tmp_path):
    path = tmp_path / "new" / "picture.png"
    result = run(*args, "--out", path)
    assert (result.exit_code, result.stdout) == (0, f"Picture: {path}\n"), result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_selected_tokens_is_that_of_text_and_question_under_the_profile(drawn):
    args = ["--file=text.txt", "--profile=profile", "--max-tokens=90", "--question=why?", "--start=7", "--head=1"]
    assert run("selected", "model", *args).exit_code == 0
    (kept, texts, name, out), options = drawn["plot_selected_tokens"]
    lm = tca_jax.load("model", "profile")
    ids = lm.tokenizer.encode(TEXT)[:90] + lm.tokenizer.encode("\n\nwhy?", add_special_tokens=False)
    np.testing.assert_array_equal(kept, kept_tokens(lm, ids))
    assert "".join(texts).endswith("why?")
    assert (name, out) == ("model, tca", Path("out/selected.png"))
    assert options == {"start": 7, "layer": None, "head": 1, "block_size": 8, "window_start": options["window_start"]}


def test_the_picture_of_attention_is_that_of_full_attention(drawn):
    assert run("attention", "model", "--file=text.txt", "--max-tokens=64").exit_code == 0
    (received, name, _), _ = drawn["plot_attention"]
    lm = tca_jax.load("model")
    np.testing.assert_array_equal(received, attention_received(lm, lm.tokenizer.encode(TEXT)[:64]))
    assert name == "model"


def test_the_picture_of_a_profile_has_its_shares_and_what_heads_are_worth(drawn):
    assert run("budgets", "profile", "--tokens=64").exit_code == 0
    (share, tokens, name, out), options = drawn["plot_kept_share"]
    found = Profile.load("profile")
    np.testing.assert_array_equal(share, found.kept_share(64))
    np.testing.assert_array_equal(options["prefill_share"], found.prefill_kept_share(64))
    assert (tokens, name, out) == (64, found.model_name, Path("out/budgets.png"))
    reading, keeping = options["worth"]
    np.testing.assert_array_equal(reading.nats, found.reading_worth)
    np.testing.assert_array_equal(keeping.nats, found.keeping_worth)
    assert not reading.chosen.any()
    assert keeping.chosen.all()


def test_a_page_begins_with_the_line_a_little_before_the_words_that_are_looked_for():
    lines = [f"line {i} of many, all of them alike\n" for i in range(60)]
    found = _page_of("line 40 ", lines)
    assert lines[found].startswith("line ")
    assert 400 <= sum(map(len, lines[found:40])) < 400 + len(lines[0])
    assert _page_of("line 2 ", lines) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("budgets", "none"), r"none"),
        (("selected", "model", "--file=text.txt", "--around=cat"), r"--around 'cat': these words are not in the text"),
        (("selected", "model", "--file=text.txt", "--layer=9"), r"layer = 9: must lie in \[0, 1\]"),
        (("attention", "model", "--file=missing.txt"), r"missing.txt: No such file"),
        (("latency", "text.txt"), r"text.txt is not valid JSON"),
        (("accuracy", "call.json"), r"call.json: holds no accuracy of methods"),
        (("reading", "call.json"), r"call.json: holds no models"),
        (("keeping", "text.txt"), r"text.txt is not valid JSON"),
        (("attention", "model", "--file=text.txt", "--dtype=int8"), r"^--dtype int8: must be float32"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_refused_with_its_name(args, message):
    assert re.search(message, error(*args))


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_what_is_no_png_is_refused_before_anything_is_read(command):
    wanted = {"selected": ["model", "--file=missing"], "attention": ["model", "--file=missing"]}
    message = error(command, *wanted.get(command, ["missing"]), "--out=new/map.jpg")
    assert message == "--out new/map.jpg: pictures are PNG files; the name must end in .png"
