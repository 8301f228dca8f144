"""The README and `docs/` say what is true: their code runs, their commands parse, their links lead somewhere."""

import contextlib
import functools
import inspect
import io
import re
import shlex
from pathlib import Path

import pytest
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax import loading, methods
from tca_jax.cli.app import app
from tca_jax.methods import registry
from tca_jax.models.registry import ALIASES

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = (README, *sorted((ROOT / "docs").glob("*.md")))
PAGES = (*DOCS, ROOT / "CHANGELOG.md", ROOT / "benchmarks/results/README.md")
CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in CODE.findall(page.read_text()) if found == language]


def runs(block: str) -> bool:
    """Every block runs, but for those that name a model from the Hub."""
    return not any(alias in block for alias in ALIASES)


def commands(page: Path, program: str) -> list[str]:
    """Calls of a program in shell blocks and in the text."""
    lines = [part.strip() for block in blocks(page, "sh") for line in block.splitlines() for part in line.split("|")]
    inline = re.findall(rf"`({program} [^`]+)`", CODE.sub("", page.read_text()))
    return [line for line in (*lines, *inline) if line.startswith(f"{program} ")]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def shared(monkeypatch, tmp_path):
    """A place to write to, one loaded model for all blocks, and a registry to add to."""
    monkeypatch.setattr(tca_jax, "load", load_once)
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    monkeypatch.chdir(tmp_path)


@functools.cache
def load_once(name, profile=None):
    return loading.load(name, profile)


def run(page: Path) -> str:
    """What the blocks of a page print, one after the other, as a reader would type them."""
    printed, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed):
        for block in filter(runs, blocks(page, "python")):
            exec(compile(block, page.name, "exec"), names)
    return printed.getvalue()


@pytest.mark.usefixtures("shared")
def test_the_example_of_the_readme_runs_and_prints_what_it_says():
    generated, streamed, of_another_method, logprob = run(README).splitlines()
    assert generated.startswith("482913. Stats(")
    assert streamed == "482913."
    assert not of_another_method.startswith("482913")
    assert float(logprob) < 0


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("name", ["evaluation", "methods", "profiles", "usage"])
def test_the_blocks_of_a_page_run(name):
    assert run(ROOT / "docs" / f"{name}.md")


def test_no_page_with_blocks_is_left_out():
    with_blocks = [page.stem for page in DOCS if any(map(runs, blocks(page, "python")))]
    assert with_blocks == ["README", "evaluation", "methods", "profiles", "usage"]


@pages
def test_every_command_has_its_options(page, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in commands(page, "tca-jax"):
        _, *args = shlex.split(command, comments=True)
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as end:
            app([*args, "--help"])  # reads the options, and stops before it uses them
        assert end.value.code == 0, command


def test_a_command_with_an_unknown_option_is_noticed(capsys):
    with pytest.raises(SystemExit) as end:
        app(["generate", "recall-tiny", "--prompts", "x", "--help"])
    assert end.value.code == 2
    assert "--prompts" in capsys.readouterr().err


@pages
def test_every_make_target_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for command in commands(page, "make") for word in shlex.split(command, comments=True)[1:]}
    assert named <= targets


@pages
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = CODE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pages
def test_every_file_that_is_named_exists(page):
    for name in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|md|toml))`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_the_table_of_methods_is_the_registry():
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", (ROOT / "docs/methods.md").read_text(), re.MULTILINE)
    rows = [(name, options) for name, options in rows if name not in ("block_size", "window", "num_queries")]
    assert sorted(name for name, _ in rows) == list(methods.names())
    for name, options in rows:
        parameters = inspect.signature(registry._FACTORIES[name]).parameters
        assert re.findall(r"`(\w+)(?:=[^`]*)?`", options) == list(parameters)
        for option, default in re.findall(r"`(\w+)=([\d.]+)`", options):
            assert parameters[option].default == float(default)


def test_what_is_said_to_compile_nothing_compiles_nothing():
    lm = tiny_lm().with_method("streaming", window=16, block_size=8)

    def compile_seconds(lm=lm, length=100, **options):
        given = {"max_new_tokens": 20, "stop_token_ids": (1, 2), "temperature": 0.7, "top_p": 0.9, **options}
        return tca_jax.generate(lm, random_prompt(length, length), **given).stats.compile_seconds

    assert compile_seconds() > 0
    same = (
        {"length": 112},
        {"length": 97, "max_new_tokens": 32},
        {"max_new_tokens": 17, "seed": 5},
        {"temperature": 1, "top_p": 0.5, "stop_token_ids": (3, 4)},
        {"min_p": 0, "repetition_penalty": 1, "min_new_tokens": 0},
        {"lm": tiny_lm(seed=1, eos_token_ids=(7,)).with_method("streaming", window=16, block_size=8)},
    )
    assert [compile_seconds(**options) for options in same] == [0.0] * len(same)
