"""Examples run as their first lines say."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *options: str) -> str:
    """The output of an example."""
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attention_in_own_model_stays_within_bound():
    printed = run("attend_in_your_model.py")
    error, bound = (float(printed.split(word)[1].split()[0].rstrip(",")) for word in ("error ", "allows "))
    assert 0 < error <= bound


@pytest.mark.slow
def test_plain_jax_answers_as_full_attention():
    *_, question, full, tca = run("plain_jax_transformer.py", "--bytes", "700", "--window", "256").splitlines()
    assert question.startswith("question: ")
    assert [line.split()[0] for line in (full, tca)] == ["full", "tca"]
    assert full.endswith("right")
    assert full.split()[1:] == tca.split()[1:]


def test_flax_nnx_model_takes_other_attention():
    options = "--steps", "2", "--length", "64"
    trained, heading, full, calibrated, sparsest = run("flax_nnx_model.py", *options).splitlines()
    assert trained.startswith("trained on 64 pairs with full attention: loss ")
    assert heading.split()[:2] == ["attention", "right"]
    assert [line.split("%")[0].split()[0] for line in (full, calibrated, sparsest)] == ["full", "tca,", "tca,"]


@pytest.mark.slow
def test_methods_are_compared_on_own_checkpoint(tmp_path):
    checkpoint = str(write_checkpoint(tmp_path / "tiny"))
    sizes = ["--bytes=500", "--documents=1", "--window=128", "--block-size=16", "--room=4"]
    given = ("--methods", "full,tca,full+streaming", *sizes, "--out", str(tmp_path / "out"))
    heading, *lines = run("compare_methods.py", checkpoint, *given).splitlines()
    assert [line.split()[0] for line in (heading, *lines)] == ["method", "full", "tca", "full+streaming"]
    assert (tmp_path / "out" / "profile").is_dir()
    record = json.loads((tmp_path / "out" / "compare_methods.json").read_text())
    shares = [result["kv_share"] for result in record["results"]]
    assert shares[2] < shares[0] == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("compare_methods.py", ["no-such-model"], "error: name_or_path = 'no-such-model'"),
        ("flax_nnx_model.py", ["--length", "32"], "--length 32: must be at least 1 and 64"),
    ],
)
def test_errors_take_one_line(name, options, message):
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_own_method_answers_with_less():
    heading, *lines = run("your_own_method.py").splitlines()
    assert heading.split()[:3] == ["method", "right", "kept"]
    cells = {name: (right, kept, attended) for name, right, _, _, kept, _, attended, _ in map(str.split, lines)}
    table = {name: (int(right), *(float(x.rstrip("%")) for x in shares)) for name, (right, *shares) in cells.items()}
    assert list(table) == ["full", "streaming", "tca", "observed"]
    assert table["full"] == (4, 100, 100)
    assert table["streaming"][2] < table["observed"][2] < 100
    assert table["streaming"][0] < table["observed"][0]  # the text, and so the count, depends on Python's version
    assert table["observed"][1] < table["tca"][1]


@pytest.mark.slow
def test_served_answers_are_complete():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    tca_jax = str(Path(sys.executable).with_name("tca-jax"))
    command = ["sh", str(EXAMPLES / "serve_demo.sh"), tca_jax, sys.executable]
    done = subprocess.run(command, env={**os.environ, "PORT": port}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if " -> " in line]
    assert len(answers) == 3
    assert all(answer.endswith(".") for answer in answers)
