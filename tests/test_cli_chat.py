"""`tca-jax chat`: a document that is read once, questions from a terminal and from a pipe, and what is refused."""

import contextlib
import functools
import re
from pathlib import Path

import commands
import pytest
from tiny import write_checkpoint

import tca_jax
from tca_jax.engine.prompts import DocumentTemplate

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = "The quick brown fox jumps over the lazy dog. " * 6
OPTIONS = {"max_new_tokens": 6}


run, error = (functools.partial(each, "chat") for each in (commands.run, commands.error))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_checkpoint(folder / "plain", chat_template=None)
    write_checkpoint(folder / "chat", chat_template=TEMPLATE)
    (folder / "book.txt").write_text(TEXT)
    return folder


@pytest.fixture(autouse=True)
def in_work(work, monkeypatch):
    monkeypatch.chdir(work)


def test_each_line_of_a_pipe_is_asked_of_the_document_alone():
    result = run("plain", "--file=book.txt", "--max-new-tokens=6", stdin="Who?\n\n Where? \n")
    assert result.exit_code == 0, result.output
    lm = tca_jax.load("plain")
    who, where = tca_jax.generate(lm, [f"{TEXT}\nWho?", f"{TEXT}\nWhere?"], **OPTIONS).text
    assert result.stdout == f"> Who?\n{who}\n> Where?\n{where}\n"
    read, *times = result.stderr.splitlines()
    assert re.fullmatch(r"270 tokens read in [\d.]+ s.*; KV cache [\d.]+ MB, [\d.]+ MB under full attention", read)
    assert len(times) == 2
    assert all(re.fullmatch(r"\[first token after [\d.]+ s, [\d.]+ s in all.*; 4 tokens\]", line) for line in times)


def test_with_a_chat_template_document_and_question_are_one_message_of_the_user():
    result = run("chat", "--file=book.txt", "--max-new-tokens=6", stdin="Who?\n")
    assert result.exit_code == 0, result.output
    lm = tca_jax.load("chat")
    (answer,) = tca_jax.generate(lm, [[{"role": "user", "content": f"{TEXT}\n\nWho?"}]], **OPTIONS).text
    assert result.stdout == f"> Who?\n{answer}\n"


def test_a_conversation_that_is_followed_is_one_chat():
    result = run("chat", "--file=book.txt", "--max-new-tokens=6", "--follow", stdin="Who?\nWhere?\n")
    assert result.exit_code == 0, result.output
    lm = tca_jax.load("chat")
    chat = [{"role": "user", "content": f"{TEXT}\n\nWho?"}]
    (who,) = tca_jax.generate(lm, [chat], **OPTIONS).text
    chat += [{"role": "assistant", "content": who}, {"role": "user", "content": "Where?"}]
    (where,) = tca_jax.generate(lm, [chat], **OPTIONS).text
    assert result.stdout == f"> Who?\n{who}\n> Where?\n{where}\n"


def test_a_document_that_was_saved_is_not_read_again(tmp_path):
    folder = tmp_path / "saved"
    first = run("plain", "--file=book.txt", "--max-new-tokens=6", f"--save-context={folder}", stdin="Who?\n")
    assert first.exit_code == 0, first.output
    again = run("plain", f"--context={folder}", "--max-new-tokens=6", stdin="Who?\n")
    assert again.stdout == first.stdout
    assert re.match(r"270 tokens loaded in [\d.]+ s;", again.stderr)


class Terminal:
    """Lines as somebody types them; then Ctrl-D."""

    def __init__(self, *lines):
        self.lines = iter(lines)

    def __call__(self, prompt):
        assert prompt == "> "
        line = next(self.lines, None)
        if line is None:
            raise EOFError
        return line


@pytest.mark.parametrize("lines", [("Who?",), ("Who?", "", "never asked")])
def test_a_terminal_is_asked_until_an_empty_line_or_the_end(lines, monkeypatch):
    asked = []
    monkeypatch.setattr("tca_jax.cli.chat.sys.stdin", type("Stdin", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", Terminal(*lines))
    monkeypatch.setattr("tca_jax.cli.chat.Conversation.ask", lambda self, question: asked.append(question))
    from tca_jax.cli.chat import chat

    chat("plain", file=Path("book.txt"))
    assert asked == ["Who?"]


@pytest.mark.parametrize("follow", [False, True])
def test_ctrl_c_at_a_terminal_ends_an_answer_and_not_the_chat(follow, monkeypatch, capsys):
    pressed = iter([False, True, *[False] * 100])

    @contextlib.contextmanager
    def pressed_once():
        yield lambda: next(pressed)

    monkeypatch.setattr("tca_jax.cli.chat.sys.stdin", type("Stdin", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", Terminal("Who?", "Where?"))
    monkeypatch.setattr("tca_jax.cli.chat.spare_one_ctrl_c", pressed_once)
    from tca_jax.cli.chat import chat

    chat("plain", file=Path("book.txt"), max_new_tokens=6, follow=follow)
    printed = capsys.readouterr()
    (where,) = tca_jax.generate(tca_jax.load("plain"), f"{TEXT}\nWhere?", **OPTIONS).text  # "Who?" is forgotten
    assert printed.out.endswith(f"{where}\n\n")
    assert printed.err.count("[interrupted; Ctrl-C again, or an empty line, ends the chat]\n") == 1


def test_what_is_wrong_is_said_before_weights_are_read(tmp_path):
    assert error("plain") == "give the document as --file, or as --context where it was saved before"
    assert "give the document as" in error("plain", "--file=book.txt", "--context=saved")
    assert error("plain", "--file=missing.txt").startswith("missing.txt: No such file")
    assert "holds no context" in error("plain", f"--context={tmp_path}")
    long = tmp_path / "long.txt"
    long.write_text("x" * 5000)
    assert "--file has 5000 tokens; with max_new_tokens = 256 that is 5256" in error("plain", f"--file={long}")


def test_a_template_that_changes_messages_is_refused(tmp_path):
    write_checkpoint(tmp_path / "model", chat_template="{% for m in messages %}{{ m['role'] }}{% endfor %}")
    message = "the chat template of model does not give messages as they are, once and in order"
    assert message in error(tmp_path / "model", "--file=book.txt")


def test_a_frame_holds_what_a_template_puts_around_the_parts():
    frame = DocumentTemplate.of(tca_jax.load("chat"))
    assert frame == DocumentTemplate("<user>", "\n\n", "</s><assistant>", "</s><user>", verbatim=True)
    assert DocumentTemplate.of(tca_jax.load("plain")) == DocumentTemplate("", "\n", "", "\n", verbatim=False)


def test_a_question_that_does_not_fit_is_refused_and_the_next_one_answered():
    long = "why " * 4000
    result = run("plain", "--file=book.txt", "--max-new-tokens=6", stdin=f"{long}\nWho?\n")
    assert result.exit_code == 0, result.output
    assert "positions" in next(line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert result.stdout.endswith(
        f"> Who?\n{tca_jax.generate(tca_jax.load('plain'), f'{TEXT}{chr(10)}Who?', **OPTIONS).text[0]}\n"
    )


def test_standard_input_is_for_questions_and_not_for_the_document():
    assert error("plain", "--file=-") == ("--file -: standard input holds the questions; give the document as a file")
