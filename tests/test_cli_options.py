"""Options that `generate` and `chat` share: they mean the same in both, and what is wrong names the option."""

import dataclasses
import functools
import inspect
import json

import commands
import numpy as np
import pytest
import typer
from tiny import TCA, write_checkpoint
from typer.testing import CliRunner

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.cli.chat import chat
from tca_jax.cli.errors import _RENAMED, naming_options
from tca_jax.cli.generate import generate
from tca_jax.cli.options import AnswerOptions, ModelOptions, with_options
from tca_jax.errors import UserError

TEXT = "The quick brown fox jumps over the lazy dog. " * 6
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = {"generate": ["--prompt=Who?"], "chat": ["--file=book.txt"]}
SAMPLED = {"max_new_tokens": 6, "temperature": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SAMPLED.items()]

both = pytest.mark.parametrize("command", ["generate", "chat"])


run, error = (functools.partial(each, stdin="Who?\n") for each in (commands.run, commands.error))


def asked(*args, stdin="Who?\n") -> list[dict]:
    """The answers of a command with `--json`."""
    result = run(*args, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    if args[0] == "generate":
        return json.loads(result.stdout)["answers"]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with models with and without a chat template, a profile, a document, and what was read of it."""
    folder = tmp_path_factory.mktemp("options")
    write_checkpoint(folder / "model", chat_template=None)
    write_checkpoint(folder / "chat", chat_template=TEMPLATE)
    worth = np.array([[1, 0.5], [0.8, 0.3]], np.float32)
    dataclasses.replace(Profile.uniform(TCA, 2, 2, 3), keeping_worth=worth).save(folder / "profile")
    (folder / "book.txt").write_text(TEXT)
    tca_jax.prefill(tca_jax.load(folder / "model"), TEXT).save(folder / "read")
    return folder


@pytest.fixture(autouse=True)
def in_work(work, monkeypatch):
    monkeypatch.chdir(work)


def test_both_commands_take_the_same_options():
    shared = {field.name for kind in (ModelOptions, AnswerOptions) for field in dataclasses.fields(kind)}
    shared |= {"system", "context", "as_json"}
    taken = [inspect.signature(command).parameters for command in (generate, chat)]
    assert all(shared <= set(parameters) for parameters in taken)
    for name in shared - {"as_json"}:  # a chat prints an object a line
        options = [parameters[name].annotation.__metadata__[0] for parameters in taken]
        assert options[0].help == options[1].help
        assert taken[0][name].default == taken[1][name].default


def test_fields_become_options_and_come_back_as_what_was_declared():
    given = []

    @with_options
    def command(model: str, running: ModelOptions = ModelOptions(), last: int = 3) -> None:  # noqa: B008
        given.append((model, running, last))

    assert list(inspect.signature(command).parameters) == [
        *("model", "profile", "method", "dtype", "weights", "kv", "mesh", "backend"),
        "last",
    ]
    command("m", method="full", last=4)
    command("m")
    assert given == [("m", ModelOptions(method="full"), 4), ("m", ModelOptions(), 3)]
    program = typer.Typer()
    program.command()(command)
    assert CliRunner().invoke(program, ["m", "--dtype", "float32"]).exit_code == 0
    assert given[2] == ("m", ModelOptions(dtype="float32"), 3)


def test_sampling_options_draw_the_same_answers_in_both_and_in_python():
    lm = tca_jax.load("model")
    expected = [
        tca_jax.generate(lm, f"{TEXT}\n{question}", seed=7 + i, stop=("zq",), **SAMPLED).text[0]
        for i, question in enumerate(("Who?", "Where?"))
    ]
    options = [*FLAGS, "--stop=zq"]
    read = asked("chat", "model", "--file=book.txt", "--seed=7", *options, stdin="Who?\nWhere?\n")
    assert [answer["question"] for answer in read] == ["Who?", "Where?"]
    assert [answer["text"] for answer in read] == expected  # the next seed draws the next answer
    (answer,) = asked("generate", "model", f"--prompt={TEXT}\nWho?", "--seed=7", *options)
    assert answer["text"] == expected[0]


def test_an_answer_ends_at_a_string_in_both():
    (whole,) = asked("generate", "model", f"--prompt={TEXT}\nWho?", "--max-new-tokens=6")
    stop = f"--stop={whole['text'][1:3]}"
    for args in (("generate", "model", f"--prompt={TEXT}\nWho?"), ("chat", "model", "--file=book.txt")):
        (answer,) = asked(*args, "--max-new-tokens=6", stop)
        assert (answer["text"], answer["finish_reason"]) == (whole["text"][:1], "stop")


def test_json_of_a_chat_is_an_object_a_question_those_that_fail_included():
    long = "why " * 4000
    result = run("chat", "model", "--file=book.txt", "--max-new-tokens=2", "--json", stdin=f"{long}\nWho?\n")
    failed, answer = map(json.loads, result.stdout.splitlines())
    assert (failed["question"], set(failed)) == (long.strip(), {"question", "error"})
    assert "positions" in failed["error"]
    assert set(answer) == {
        *("question", "text", "tokens", "finish_reason", "first_token_seconds", "seconds", "stats"),
    }
    assert 0 < answer["first_token_seconds"] <= answer["seconds"]
    assert answer["stats"]["new_tokens"] == [len(answer["tokens"])] == [2]
    assert "> " not in result.stdout


def test_what_was_saved_is_asked_by_both_commands():
    expected = asked("chat", "model", "--file=book.txt", "--max-new-tokens=4")[0]["text"]
    assert asked("chat", "model", "--context=read", "--max-new-tokens=4")[0]["text"] == expected
    options = ["generate", "model", "--context=read", "--max-new-tokens=4"]
    assert asked(*options, "--prompt=Who?", "--chat")[0]["text"] == expected
    assert (
        asked(*options, "--prompt=\nWho?")[0]["text"] == expected
    )  # as it is: what a chat puts before it is not there
    two = asked(*options, "--prompt=Who?", "--prompt=\nWho?", "--num-samples=2")
    assert [(answer["prompt"], answer["sample"]) for answer in two] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert two[2]["text"] == expected
    streamed = run(*options, "--prompt=\nWho?")
    assert streamed.stdout == f"{expected}\n"
    assert "5 tokens read behind a context of 270, 4 new" in streamed.stderr


def test_a_system_message_stands_before_the_document_as_before_a_prompt():
    system, lm = "Be brief.", tca_jax.load("chat")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{TEXT}\n\nWho?"}]
    (expected,) = tca_jax.generate(lm, [messages], max_new_tokens=6).text
    options = [f"--system={system}", "--max-new-tokens=6"]
    assert asked("chat", "chat", "--file=book.txt", *options)[0]["text"] == expected
    assert asked("generate", "chat", f"--prompt={TEXT}\n\nWho?", *options)[0]["text"] == expected


@both
def test_a_method_is_run_by_its_name_with_its_options(command):
    options = ["--method=streaming:window=32,sinks=8,block_size=8", "--max-new-tokens=4"]
    given = {"generate": [f"--prompt={TEXT}\nWho?"], "chat": ["--file=book.txt"]}[command]
    lm = tca_jax.load("model").with_method("streaming", window=32, sinks=8, block_size=8)
    (expected,) = tca_jax.generate(lm, f"{TEXT}\nWho?", max_new_tokens=4).text
    if command == "chat":
        (expected,) = tca_jax.generate(lm, "\nWho?", context=tca_jax.prefill(lm, TEXT), max_new_tokens=4).text
    assert asked(command, "model", *given, *options)[0]["text"] == expected


def test_a_method_takes_what_a_profile_knows_of_its_options():
    options = [f"--prompt={TEXT}", "--profile=profile", "--max-new-tokens=2", "--json"]
    stats = {}
    for method in ("tca", "full+tca", "duoattention:window=16,block_size=8"):
        record = json.loads(run("generate", "model", *options, f"--method={method}").stdout)
        assert record["method"] == method.partition(":")[0]
        stats[method] = record["stats"]
    plain = json.loads(run("generate", "model", *options).stdout)
    assert plain["method"] == "tca"
    assert stats["tca"]["kept_share"] == plain["stats"]["kept_share"] < 1
    assert stats["full+tca"]["attended_share"] == 1 > stats["tca"]["attended_share"]


@both
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--top-p=2"], "--top-p 2.0: must be in (0, 1]"),
        (["--min-p=-1"], "--min-p -1.0: must be in [0, 1]"),
        (["--repetition-penalty=0"], "--repetition-penalty 0.0: must be"),
        (["--stop="], "--stop '': must be a string that is not empty"),
        (["--min-new-tokens=9", "--max-new-tokens=3"], "--min-new-tokens 9: must be at most --max-new-tokens 3"),
        (["--dtype=int8"], "--dtype int8: must be float32, bfloat16 or float16"),
        (["--backend=cuda"], "--backend 'cuda': must be one of"),
        (["--mesh=2x"], "--mesh 2x: must be devices on 'data' x devices on 'model', such as 1x4"),
        (["--method=nosuch"], "--method nosuch: 'nosuch' is not registered: must be one of"),
        (["--method=tca"], "--method tca: tca needs --profile, from tca-jax calibrate"),
        (["--method=duoattention"], "duoattention needs --profile, from tca-jax calibrate, or gates=FILE.tsv"),
        (["--method=cake"], "--method cake: cake needs preferences, which are measured in Python"),
        (["--method=kvzip-heads"], "kvzip-heads needs head_scores, which are measured in Python"),
        (
            ["--method=streaming", "--profile=profile"],
            "--method streaming takes nothing of a profile: leave out --prof",
        ),
        (["--method=streaming:window=100"], "--method streaming:window=100: window = 100: must be a positive multiple"),
        (["--system=x"], "has no chat template"),
        (["--seed=-1"], "Invalid value for '--seed'"),
        (["--weights=fp4"], "--weights 'fp4': must be one of ['fp8'], or None"),
        (["--kv=int8"], "--kv 'int8': must be one of ['fp8'], or None"),
        (["--max-new-tokens=4096"], "that is 4"),
    ],
)
def test_what_is_wrong_names_the_option_before_weights_are_read(command, args, message, monkeypatch):
    monkeypatch.setattr("tca_jax.loading.load_checkpoint", lambda *args: pytest.fail("the weights were read"))
    assert message in error(command, "model", *ASKED[command], *args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--context=read", "--system=x"], "--system stands before the document: give it where that is read"),
        (["--context=nosuch"], "nosuch does not exist"),
        (
            ["--context=read", "--max-new-tokens=4000"],
            "behind a context of 270; with max_new_tokens = 4000 that is 4274",
        ),
    ],
)
def test_what_does_not_go_with_a_context_is_refused_before_weights_are_read(args, message, monkeypatch):
    monkeypatch.setattr("tca_jax.loading.load_checkpoint", lambda *args: pytest.fail("the weights were read"))
    assert message in error("generate", "model", "--prompt=Who?", *args)


@both
def test_a_context_of_another_method_is_refused_by_name(command):
    asked_for = ["--prompt=Who?"] if command == "generate" else []
    message = error(command, "model", "--context=read", "--method=streaming", *asked_for)
    assert message.startswith("context was made under method 'full', and 'model' runs under 'streaming'")


@pytest.mark.parametrize(
    ("args", "old"),
    [
        (["bench", "attention"], "--area"),
        (["bench", "attention"], "--shares"),
        (["bench", "context"], "--shares"),
        (["bench", "decode"], "--shares"),
        (["bench", "end-to-end"], "--shares"),
        (["bench", "tune"], "--length"),
        (["eval"], "--bytes"),
    ],
)
def test_an_option_that_had_another_name_is_named_by_the_new_one(args, old):
    assert error(*args, old, "0.2") == f"{old} is now {_RENAMED[old]}"


def test_a_command_that_never_had_an_option_does_not_know_it():
    assert error("generate", "model", "--bytes=1").startswith("No such option: --bytes")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("top_p = 2.0: must be in (0, 1]", "--top-p 2.0: must be in (0, 1]"),
        ("TCAConfig.window = 100: must be a multiple", "--window 100: must be a multiple"),
        ("kept goes with criterion 'worth'", "--kept goes with criterion 'worth'"),
        ("kept_share = 2: too much", "kept_share = 2: too much"),
        ("the window = 100", "the window = 100"),
    ],
)
def test_an_error_that_begins_with_an_argument_names_its_option(message, shown):
    with pytest.raises(ValueError) as raised, naming_options("top_p", "window", "kept"):  # noqa: PT011
        raise UserError(message)
    assert str(raised.value) == shown
