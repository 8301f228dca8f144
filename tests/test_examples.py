"""The examples run as their first lines say."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_attention_in_a_model_of_ones_own_runs_and_stays_within_its_bound():
    command = [sys.executable, str(EXAMPLES / "attend_in_your_model.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    error, bound = (float(done.stdout.split(word)[1].split()[0].rstrip(",")) for word in ("error ", "allows "))
    assert 0 < error <= bound
