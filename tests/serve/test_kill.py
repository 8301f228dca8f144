"""An engine that is killed (SIGKILL) at any moment loses no document that it reported as stored."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from tiny import random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.serve import Engine

RUNS = 4
DOCUMENTS = [random_prompt(seed, 40) for seed in range(40)]
OPTIONS = {"max_new_tokens": 6, "stop_token_ids": ()}
SECONDS = 300  # in which the first document is stored: nothing takes so long
PAGES = 400

# Reads documents and reports each that is stored; forgets some, so that folders come and go.
READER = """
import sys
from tiny import random_prompt, tiny_lm, with_candidates
from tca_jax.serve import Engine

folder, count, pages = sys.argv[1], *map(int, sys.argv[2:])
engine = Engine(with_candidates(tiny_lm(), [[0, 5], [9, 13]]), max_rows=2, pages=pages, answer_tokens=32, disk=folder)
ids = [engine.read(random_prompt(seed, 40)) for seed in range(count)]
for seed, id_ in enumerate(ids):
    engine.wait(id_, stored=True)
    print("forget" if seed % 4 == 3 else "stored", seed, flush=True)
    if seed % 4 == 3:
        engine.forget(id_)
"""


def killed(folder, seconds):
    """Reports of an engine that is killed `seconds` after the first one."""
    path = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-c", READER, str(folder), str(len(DOCUMENTS)), str(PAGES)]
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        lines = [process.stdout.readline()]
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    assert process.returncode in (-signal.SIGKILL, 0)
    told = [line.split() for line in lines if line.endswith("\n")]
    stored, forgotten = ({int(seed) for word, seed in told if word == which} for which in ("stored", "forget"))
    assert stored
    return stored, forgotten


@pytest.mark.slow
def test_killed_engines_lose_no_stored_document(tmp_path):
    lm = with_candidates(tiny_lm(), [[0, 5], [9, 13]])
    moments = random.Random(0)
    expected = [None] * len(DOCUMENTS)
    for run in range(RUNS):
        folder = tmp_path / str(run)
        stored, forgotten = killed(folder, moments.uniform(0, 1.5))
        with Engine(lm, max_rows=2, pages=PAGES, answer_tokens=32, disk=folder) as engine:
            names = {path.name for path in folder.iterdir()}
            found = {each.id for each in engine.documents()}
            assert names == found  # what was half written is gone
            assert all(each.stored for each in engine.documents())
            for seed, document in enumerate(DOCUMENTS):
                if seed not in stored:
                    continue
                id_ = engine.read(document)
                assert id_ in found
                if expected[seed] is None:
                    context = tca_jax.prefill(lm, document)
                    expected[seed] = tca_jax.generate(lm, [[3, 4]], context=context, **OPTIONS).tokens[0]
                assert engine.ask(id_, [3, 4], **OPTIONS).result(SECONDS).tokens == expected[seed]
            assert not any(engine.read(DOCUMENTS[seed]) in found for seed in sorted(forgotten)[:-1])
