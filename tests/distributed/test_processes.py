"""Two processes, as two hosts would run them, share one model: `jax.distributed` on this machine's CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import processes
import pytest
from tiny import CONFIG, TCA, random_prompt, tiny_lm, write_checkpoint

from tca_jax.calibration.profile import Profile
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.params import save_decoder

PROCESSES, DEVICES = 2, 2  # devices of each process


def run_processes(checkpoint: Path, results: Path) -> None:
    """Runs `processes.py` in as many processes; what goes wrong in one of them is the error of the test."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={DEVICES}",
        "PYTHONPATH": str(Path(processes.__file__).parent),
    }
    command = [sys.executable, processes.__file__, f"127.0.0.1:{processes.free_port()}", str(PROCESSES)]
    said = [results / f"{process}.txt" for process in range(PROCESSES)]
    with contextlib.ExitStack() as stack:
        started = []
        for process, path in enumerate(said):
            file, arguments = stack.enter_context(open(path, "w")), [*command, str(process), checkpoint, results]
            started.append(subprocess.Popen(arguments, env=environment, stdout=file, stderr=file))
            stack.enter_context(started[-1])
    assert not any(process.returncode for process in started), "\n".join(path.read_text() for path in said)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A random model whose attention is peaked, so that answers follow the prompt; a profile whose heads have to move
    to balance two devices, whose layers share a pool on four; and prompts of unequal length."""
    config, folder = dataclasses.replace(CONFIG, num_heads=8, num_kv_heads=4), tmp_path / "checkpoint"
    decoder = tiny_lm(config=config).decoder
    write_checkpoint(folder)  # for its tokenizer
    save_decoder(folder, decoder, jnp.float32)
    profile = Profile.uniform(TCA, 2, 4, 0)
    rows = np.array([[14, 14, 0, 0], [0, 3, 14, 14]])
    dataclasses.replace(profile, candidates=rows, fingerprint=fingerprint(decoder)).save(folder / "profile")
    (folder / "prompts.json").write_text(json.dumps([random_prompt(3, 300), random_prompt(4, 97)]))
    return folder


@pytest.mark.filterwarnings("ignore:no probe is informative")
def test_two_processes_answer_and_calibrate_as_one(checkpoint: Path, tmp_path: Path) -> None:
    results, alone = tmp_path / "results", tmp_path / "alone"
    results.mkdir()
    run_processes(checkpoint, results)
    expected = processes.answers_of(checkpoint, (None, None), alone)
    for process in range(PROCESSES):
        assert json.loads((results / f"{process}.json").read_text()) == expected
    assert [path.name for path in (results / "profile").iterdir()] == ["profile_0"]  # the first process saves
    np.testing.assert_array_equal(Profile.load(results / "profile").candidates, expected["candidates"])
