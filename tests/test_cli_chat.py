"""`tca-jax chat`, and the options that it shares with `tca-jax generate`."""

import contextlib
import functools
import json
import re
from pathlib import Path

import commands
import jax
import pytest
from profiles import make_worth_profile
from serving import TEMPLATE
from tiny import TCA, write_checkpoint

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.cli.chat import chat

pytestmark = pytest.mark.usefixtures("in_work")
TEXT = "The quick brown fox jumps over the lazy dog. " * 6
SHORT = {"max_new_tokens": 6}
run, error = (functools.partial(each, stdin="Who?\n") for each in (commands.run, commands.error))
both = pytest.mark.parametrize(
    "command", [["generate", "model", "--prompt=Who?"], ["chat", "model", "--file=book.txt"]]
)


def chatted(*args, stdin="Who?\n"):
    """The answers that a chat prints under its questions."""
    result = run("chat", *args, stdin=stdin)
    assert result.exit_code == 0, result.output
    return re.split(r"^> .*\n", result.stdout.removesuffix("\n"), flags=re.MULTILINE)[1:]


def generated(*args):
    return [each["text"] for each in json.loads(run("generate", *args, "--json").stdout)["answers"]]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Models with and without a chat template, a profile, a document, and its context."""
    folder = tmp_path_factory.mktemp("chat")
    write_checkpoint(folder / "model", chat_template=None)
    write_checkpoint(folder / "chat", chat_template=TEMPLATE)
    Profile.uniform(TCA, 2, 2, 3).save(folder / "profile")
    make_worth_profile().save(folder / "worth")
    (folder / "book.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def lm(work):
    return tca_jax.load(work / "model")


def answer(lm, prompt, **options):
    return tca_jax.generate(lm, [prompt], **SHORT | options).text[0]


def test_questions_from_a_pipe(lm, tmp_path):
    saved = tmp_path / "saved"
    asked = ["model", "--max-new-tokens=6"]
    first = run("chat", *asked, "--file=book.txt", f"--save-context={saved}", stdin="Who?\n\n Where? \n")
    assert first.exit_code == 0, first.output
    who, where = (answer(lm, f"{TEXT}\n{question}") for question in ("Who?", "Where?"))
    assert first.stdout == f"> Who?\n{who}\n> Where?\n{where}\n"
    read, *times = first.stderr.splitlines()
    assert re.fullmatch(r"270 tokens read in [\d.]+ s; KV cache [\d.]+ MB, [\d.]+ MB in full attention", read)
    assert all(re.fullmatch(r"\[4 tokens in [\d.]+ s(, compiling [\d.]+ s)?\]", line) for line in times)
    again = run("chat", *asked, f"--context={saved}")
    assert again.stdout == f"> Who?\n{who}\n"
    assert again.stderr.startswith("270 tokens loaded;")
    options = ["model", f"--context={saved}", "--max-new-tokens=6"]
    assert generated(*options, "--prompt=Who?", "--chat") == generated(*options, "--prompt=\nWho?") == [who]
    streamed = run("generate", *options, "--prompt=\nWho?")
    assert streamed.stdout == f"{who}\n"
    assert "5 tokens read behind a context of 270, 4 new" in streamed.stderr
    message = error("chat", "model", f"--context={saved}", "--method=streaming")
    assert message.startswith("context was made under method 'full', and 'model' runs under 'streaming'")


def test_an_answer_at_the_limit_is_marked(lm):
    result = run("chat", "model", "--file=book.txt", "--max-new-tokens=2")
    assert result.stderr.endswith("\nthe answer is cut at 2 tokens: --max-new-tokens sets the limit\n")
    assert "cut" not in run("chat", "model", "--file=book.txt", "--max-new-tokens=6").stderr


@pytest.mark.parametrize("follow", [False, True])
def test_a_chat_template_frames_document_and_questions(follow):
    lm = tca_jax.load("chat")
    user = [{"role": "user", "content": f"{TEXT}\n\nWho?"}]
    who = answer(lm, user)
    said = [{"role": "assistant", "content": who}, {"role": "user", "content": "Where?"}]
    where = answer(lm, user + said if follow else [{"role": "user", "content": f"{TEXT}\n\nWhere?"}])
    asked = ["chat", "--file=book.txt", "--max-new-tokens=6", *["--follow"][: int(follow)]]
    assert [each.removesuffix("\n") for each in chatted(*asked, stdin="Who?\nWhere?\n")] == [who, where]


def typed(monkeypatch, *lines):
    """Lines that are typed at a terminal, and Ctrl-D."""
    left = iter(lines)

    def read(prompt):
        assert prompt == "> "
        with contextlib.suppress(StopIteration):
            return next(left)
        raise EOFError

    monkeypatch.setattr("tca_jax.cli.chat.sys.stdin", type("Stdin", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", read)


@pytest.mark.parametrize("follow", [False, True])
def test_ctrl_c_ends_one_answer(follow, lm, monkeypatch, capsys):
    pressed = iter([True, *[False] * 100])
    typed(monkeypatch, "Who?", "Where?")
    monkeypatch.setattr("tca_jax.cli.chat.spare_one_ctrl_c", lambda: contextlib.nullcontext(lambda: next(pressed)))
    chat("model", file=Path("book.txt"), follow=follow, **SHORT)
    printed = capsys.readouterr()
    where = answer(lm, f"{TEXT}\nWhere?")  # "Who?" is forgotten
    assert printed.out.endswith(f"\n{where}\n")
    assert printed.err.count("[interrupted; Ctrl-C again, or an empty line, ends the chat]\n") == 1


def test_a_chat_outlives_a_long_question(lm):
    result = run("chat", "model", "--file=book.txt", "--max-new-tokens=6", stdin=f"{'why ' * 4000}\nWho?\n")
    assert "positions" in next(line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert result.stdout.endswith(f"> Who?\n{answer(lm, f'{TEXT}{chr(10)}Who?')}\n")


def test_a_stream_compiles_before_its_first_piece(lm, monkeypatch):
    stream = tca_jax.stream(lm, "a new length " * 9, max_new_tokens=40, stop_token_ids=())
    next(stream)
    monkeypatch.setattr(jax, "jit", None)
    assert list(stream)


# --- options ----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--top-p=2"], "--top-p 2.0: must be in (0, 1]"),
        (["--stop="], "--stop ['']: must be non-empty strings"),
        (["--min-new-tokens=9", "--max-new-tokens=3"], "--min-new-tokens 9: must be at most max_new_tokens = 3"),
        (["--dtype=int8"], "--dtype int8: must be float32, bfloat16 or float16"),
        (["--mesh=2x"], "--mesh 2x: must be devices on 'data' x devices on 'model', such as 1x4"),
        (["--method=nosuch"], "--method nosuch: 'nosuch' is not registered: must be one of"),
        (["--method=tca"], "--method tca: tca needs --profile, from tca-jax calibrate --paper"),
        (["--method=duoattention"], "duoattention needs --profile, from tca-jax calibrate, or gates=FILE.tsv"),
        (
            ["--method=streaming", "--profile=profile"],
            "--method streaming takes nothing of a Profile: leave out --prof",
        ),
        (["--method=tca", "--profile=worth"], "--method tca takes nothing of a WorthProfile: leave out --profile"),
        (["--method=streaming:window=100"], "--method streaming:window=100: window = 100: must be a positive multiple"),
        (["--system=x"], "has no chat template"),
        (["--kv=int8"], "--kv 'int8': must be one of ['fp8'], or None"),
        (["--max-new-tokens=4096"], "that is 4"),
        (["--context=nosuch"], "nosuch"),
        (["--context=nosuch", "--system=x"], "--system"),
    ],
)
def test_wrong_options_are_named_before_weights(command, args, message, monkeypatch):
    monkeypatch.setattr("tca_jax.loading.load_checkpoint", lambda *args: pytest.fail("the weights were read"))
    if any(arg.startswith("--context") for arg in args):
        command = command[:2] + command[2:] * (command[0] == "generate")
    assert message in error(*command, *args)


def test_documents_that_chat_refuses(tmp_path):
    assert error("chat", "model") == "give the document as --file, or as --context where it was saved before"
    assert "give the document as" in error("chat", "model", "--file=book.txt", "--context=saved")
    assert error("chat", "model", "--file=-").startswith("--file -: standard input holds the questions")
    assert error("chat", "model", "--file=missing.txt").startswith("missing.txt: No such file")
    assert "holds no context" in error("chat", "model", f"--context={tmp_path}")
    (tmp_path / "long.txt").write_text("x" * 5000)
    assert "that is 5256" in error("chat", "model", f"--file={tmp_path / 'long.txt'}")
    write_checkpoint(tmp_path / "model", chat_template="{% for m in messages %}{{ m['role'] }}{% endfor %}")
    assert "does not give messages as they are" in error("chat", tmp_path / "model", "--file=book.txt")
