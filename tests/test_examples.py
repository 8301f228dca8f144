"""Examples run as their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import free_port

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


def test_flax_nnx_model_takes_other_attention():
    options = "--steps", "2", "--length", "64"
    trained, heading, full, calibrated, sparsest = run("flax_nnx_model.py", *options).splitlines()
    assert trained.startswith("trained on 64 pairs with full attention: loss ")
    assert heading.split()[:2] == ["attention", "right"]
    assert [line.split("%")[0].split()[0] for line in (full, calibrated, sparsest)] == ["full", "tca,", "tca,"]


@pytest.mark.slow
def test_own_method_answers_with_less():
    heading, *lines = run("your_own_method.py").splitlines()
    assert heading.split()[:3] == ["method", "right", "kept"]
    cells = {name: (right, kept, attended) for name, right, _, _, kept, _, attended, _ in map(str.split, lines)}
    table = {name: (int(right), *(float(x.rstrip("%")) for x in shares)) for name, (right, *shares) in cells.items()}
    assert list(table) == ["full", "streaming", "worth", "observed"]
    assert table["full"] == (4, 100, 100)
    assert table["streaming"][2] < table["observed"][2] < 100
    assert table["streaming"][0] < table["observed"][0]  # the text, and so the count, depends on Python's version
    assert table["observed"][1] < table["worth"][1]


@pytest.mark.slow
def test_served_answers_are_complete():
    tca_jax = str(Path(sys.executable).with_name("tca-jax"))
    command = ["sh", str(EXAMPLES / "serve_demo.sh"), tca_jax, sys.executable]
    done = subprocess.run(
        command, env={**os.environ, "PORT": str(free_port())}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if " -> " in line]
    assert len(answers) == 3
    assert all(answer.endswith(".") for answer in answers)
