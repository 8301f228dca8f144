"""The examples run as their first lines say."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *options: str) -> str:
    """What an example prints."""
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attention_in_a_model_of_ones_own_runs_and_stays_within_its_bound():
    printed = run("attend_in_your_model.py")
    error, bound = (float(printed.split(word)[1].split()[0].rstrip(",")) for word in ("error ", "allows "))
    assert 0 < error <= bound


def test_a_method_of_ones_own_answers_with_less_and_is_drawn(tmp_path):
    heading, *lines, picture = run("your_own_method.py", "--out", str(tmp_path)).splitlines()
    assert heading.split()[:3] == ["method", "right", "kept"]
    table = {name: (int(right), float(kept.rstrip("%"))) for name, right, _, _, kept, *_ in map(str.split, lines)}
    assert list(table) == ["full", "streaming", "random", "tca", "observed"]
    assert table["full"] == (4, 100)
    assert table["streaming"][0] < table["observed"][0]  # the text, and so the count, is another in every Python
    assert table["observed"][1] < table["tca"][1]
    path = tmp_path / "your_own_method.png"
    assert picture == f"Picture: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
