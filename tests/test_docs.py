"""The README and `docs/` say what is true: code and commands run, links lead somewhere, the site has every page."""

import contextlib
import functools
import inspect
import io
import pkgutil
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from profiles import make_worth_profile
from typer.testing import CliRunner

import tca_jax
from tca_jax import Profile, TCAConfig, loading, methods
from tca_jax.cli.app import app
from tca_jax.lab import plots, recall
from tca_jax.loading import checkpoint_folder
from tca_jax.methods import registry
from tca_jax.models.aliases import ALIASES

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
SITE = tuple(sorted((ROOT / "docs").rglob("*.md")))
DOCS = (README, *SITE)
PAGES = (*DOCS, ROOT / "CHANGELOG.md", ROOT / "lab/results/README.md")
CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: What a page's blocks are run with in place of what they say: shorter texts.
SHORTER = {"default_rng(0), 6000,": "default_rng(0), 1500,", "text[1000:4000]": "text[1000:1800]"}
#: Comments behind commands of which only the options are checked, as are those that name a model from the Hub.
NOT_HERE = re.compile(r"GPU|minute")
QUESTION = "I need the phone number of fixed ribbon."
#: Programs other than `tca-jax` that shell blocks call; tests/serve/test_ray.py looks at the options of `serve`.
PROGRAMS = ("curl", "export", "make", "pip", "python", "python3", "ray", "serve")


class Command(NamedTuple):
    """A line of a shell block: a call of `tca-jax`, what is piped into it, and the file that its output goes to."""

    line: str
    args: list[str]
    piped: list[str]
    target: str | None

    @property
    def runs(self) -> bool:
        """Whether a machine without a GPU and without the Hub runs it in seconds."""
        if self.args[:1] == ["serve"]:  # it ends when it is told to
            return False
        return not named_models(self.line) and not NOT_HERE.search(self.line.partition("  #")[2])


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    return [(language, text) for language, text in CODE.findall(page.read_text()) if language in languages]


def named_models(text: str) -> bool:
    """Whether it names a model from the Hub."""
    return any(alias in text for alias in ALIASES)


def read_command(line: str) -> Command | None:
    """A line of a shell block; None where it calls another program."""
    words = shlex.shlex(line, posix=True, punctuation_chars="|>")
    words.whitespace_split = True
    parts, target = [[]], None
    for word in words:
        if word == "|":
            parts.append([])
        elif word == ">":
            target = next(words)
        elif parts[-1] or not re.fullmatch(r"\w+=.*", word):  # not a variable that is set for the program
            parts[-1].append(word)
    if not parts[-1] or parts[-1][0] != "tca-jax":
        return None
    return Command(line, parts[-1][1:], parts[0] if len(parts) > 1 else [], target)


def lines(block: str) -> list[str]:
    return [line for line in block.splitlines() if line.strip() and not line.startswith("#")]


def commands(page: Path) -> list[Command]:
    """Calls of `tca-jax` in shell blocks and in the text."""
    found = [line for _, block in blocks(page, "sh") for line in lines(block)]
    found += re.findall(r"`(tca-jax [^`]+)`", CODE.sub("", page.read_text()))
    return [command for line in found if (command := read_command(line.strip()))]


def steps(page: Path) -> list[str | Command]:
    """What a reader of a page runs, in its order: Python blocks and commands."""
    found: list[str | Command] = []
    for language, block in blocks(page, "python", "sh"):
        if language == "python":
            found += [] if named_models(block) else [block]
        else:
            found += [command for line in lines(block) if (command := read_command(line)) and command.runs]
    return found


def headings(page: Path) -> list[str]:
    found = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in found]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings(page)}


def links(page: Path) -> list[str]:
    """Targets of links and pictures, but for those of the web."""
    found = re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text()))
    return [target for target in found if not target.startswith("https://")]


@pytest.fixture
def shared(monkeypatch, tmp_path):
    """A folder with what the pages name, one loaded model for all blocks, and a registry to add to."""
    monkeypatch.setattr(tca_jax, "load", functools.cache(loading.load))
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    monkeypatch.chdir(tmp_path)
    Path("report.txt").write_text(
        recall.build_document(np.random.default_rng(0), 1500, ("digits", "words", "hex")).text
    )
    shutil.copytree(checkpoint_folder("recall-tiny") / "profile", "my-profile")
    for name in ("lab", "tca_jax"):
        Path(name).symlink_to(ROOT / name)


def run(page: Path) -> str:
    """What a page's blocks and commands print, one after the other, as a reader would type them."""
    printed, names = io.StringIO(), {"__name__": "__main__"}
    for step in steps(page):
        if isinstance(step, Command):
            printed.write(call(step))
            continue
        for there, here in SHORTER.items():
            step = step.replace(there, here)
        with contextlib.redirect_stdout(printed):
            exec(compile(step, page.name, "exec"), names)
    return printed.getvalue()


def call(command: Command) -> str:
    """What a command prints; it must succeed, and write the file that it names."""
    program, *operands = command.piped or ["echo", QUESTION]
    given = "\n".join(operands) if program == "echo" else Path(operands[0]).read_text()
    result = CliRunner().invoke(app, command.args, input=f"{given}\n")
    assert result.exit_code == 0, f"{command.line}\n{result.output}"
    assert result.stdout, command.line
    if command.target:
        Path(command.target).write_text(result.stdout)
    if "--out" in command.args:
        assert Path(command.args[command.args.index("--out") + 1]).exists(), command.line
    return result.stdout


@pytest.mark.integration
@pytest.mark.usefixtures("shared")
def test_the_readme_runs():
    generated, streamed, logprob, *of_commands = run(README).splitlines()
    assert re.fullmatch(r"482913\.( [\d.]+){5}", generated)
    assert streamed == "482913."
    assert float(logprob) < 0
    assert any(line.startswith("> ") for line in of_commands)  # a question that `chat` answers


WHOLE_MODEL = ["methods", "profiles", "quickstart"]
SMALL_MODEL = ["benchmarks", "choosing", "contexts", "eight-bits", "evaluation", "kernels", "pictures", "usage"]
QUICK = ("contexts", "usage")  # as an integration test; the others are slow


@pytest.fixture(scope="module")
def small(checkpoint):
    """A random model in the place of the shipped one: no right answers, in a fraction of the time."""
    make_worth_profile().save(checkpoint / "profile")
    Profile.uniform(TCAConfig(), 2, 2, 5).save(checkpoint / "profile-paper")
    return checkpoint


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.integration if name in QUICK else pytest.mark.slow)
        for name in WHOLE_MODEL + SMALL_MODEL
    ],
)
def test_blocks_and_commands_of_a_page_run(name, small):
    if name in SMALL_MODEL:  # a folder precedes the alias
        Path("recall-tiny").symlink_to(small)
    printed = run(ROOT / "docs" / f"{name}.md")
    assert printed
    if name == "quickstart":
        assert printed.count("554090") == 2  # the text's list of questions, and the model's answer


def test_no_page_with_something_to_run_is_left():
    assert sorted(page.stem for page in SITE if steps(page)) == sorted(WHOLE_MODEL + SMALL_MODEL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in commands(page):
        args = [arg for arg in command.args if arg != "..."]
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as end:
            app([*args, "--help"])  # reads the options, and stops before it uses them
        assert end.value.code == 0, command.line
    in_shell, text = [line for _, block in blocks(page, "sh") for line in lines(block)], page.read_text()
    for line in in_shell:
        assert read_command(line) or shlex.split(line, comments=True)[0] in PROGRAMS, line
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = [line for line in in_shell if line.startswith("make ")] + re.findall(r"`(make [^`]+)`", CODE.sub("", text))
    assert {word for line in made for word in shlex.split(line, comments=True)[1:]} <= targets
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
    for heading in headings(page):  # the same anchor in the site as on GitHub
        of_site = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        assert of_site in anchors(page), heading
    for name in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|md|toml))`", text):
        assert (ROOT / name).exists(), name


def test_every_public_name_is_in_api_pages():
    names = re.findall(r"^::: ([\w.]+)$", "\n".join(page.read_text() for page in SITE), re.MULTILINE)
    assert len(names) == len(set(names))
    objects = [pkgutil.resolve_name(name) for name in names]
    there = {id(found) for found in objects}
    modules = {found.__name__ for found in objects if inspect.ismodule(found)}
    public = [(tca_jax, name) for name in tca_jax.__all__ if name not in ("methods", "BASELINE")]
    public += [(methods, name) for name in methods.__all__ if name != "BASELINE"]
    public += [(plots, name) for name in vars(plots) if name.startswith("plot_")]
    public += [(recall, name) for name in recall.__all__ if name.lower() == name or name in ("Document", "Question")]
    for module, name in public:
        value = getattr(module, name)
        assert id(value) in there or getattr(value, "__module__", None) in modules, f"{module.__name__}.{name}"


def test_the_table_of_methods_is_the_registry():
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", (ROOT / "docs/methods.md").read_text(), re.MULTILINE)
    rows = [(name, options) for name, options in rows if name not in ("block_size", "window", "num_queries")]
    assert sorted(name for name, _ in rows) == list(methods.names())
    for name, options in rows:
        parameters = inspect.signature(registry._factory(name)).parameters
        assert sorted(re.findall(r"`(\w+)(?:=[^`]*)?`", options)) == sorted(parameters)
        for option, default in re.findall(r"`(\w+)=([\d.]+)`", options):
            assert parameters[option].default == float(default)
