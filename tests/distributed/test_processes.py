"""Two processes, as two hosts would run them, share one model: `jax.distributed` on this machine's CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from tiny import CONFIG, TCA, random_prompt, write_checkpoint

from tca_jax.calibration.profile import Profile
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.names import parameters
from tca_jax.models.params import save_decoder

PROCESSES, DEVICES = 2, 2  # devices of each process
MESHES = {"(1, 4)": (1, 4), "(2, 2)": (2, 2)}


def run_processes(checkpoint: Path, results: Path) -> None:
    """Runs `processes.py` in as many processes; what goes wrong in one of them is the error of the test."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={DEVICES}",
        "PYTHONPATH": str(Path(processes.__file__).parent),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, processes.__file__, address, str(PROCESSES)]
    said = [results / f"{process}.txt" for process in range(PROCESSES)]
    with contextlib.ExitStack() as stack:
        started = []
        for process, path in enumerate(said):
            file, arguments = stack.enter_context(open(path, "w")), [*command, str(process), checkpoint, results]
            started.append(subprocess.Popen(arguments, env=environment, stdout=file, stderr=file))
            stack.enter_context(started[-1])
    told = "\n".join(path.read_text() for path in said)
    assert not any(process.returncode for process in started), told


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """A random model whose attention is peaked, so that answers follow the prompt."""
    config = dataclasses.replace(CONFIG, num_heads=8, num_kv_heads=4)
    drawn = nnx.split(Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)))
    return nnx.merge(drawn[0], jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, drawn[1]))


@pytest.fixture(scope="module")
def checkpoint(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder, a profile whose heads have to move to balance two devices, whose layers share a pool on four, and
    prompts of unequal length."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)  # for its tokenizer
    save_decoder(folder, decoder, jnp.float32)
    profile = Profile.uniform(TCA, 2, 4, 0)
    rows = np.array([[14, 14, 0, 0], [0, 3, 14, 14]])
    dataclasses.replace(profile, candidates=rows, fingerprint=fingerprint(decoder)).save(folder / "profile")
    (folder / "prompts.json").write_text(json.dumps([random_prompt(3, 300), random_prompt(4, 97)]))
    return folder


@pytest.fixture(scope="module")
def results(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes write about the checkpoint."""
    folder = tmp_path_factory.mktemp("results")
    run_processes(checkpoint, folder)
    return folder


def reports(results: Path) -> list[dict[str, Any]]:
    return [json.loads((results / f"{process}.json").read_text()) for process in range(PROCESSES)]


@pytest.mark.parametrize("shape", MESHES)
def test_each_process_holds_the_parts_of_its_devices(shape: str, results: Path, decoder: Decoder) -> None:
    data, model = MESHES[shape]
    mesh = AbstractMesh((data, model), ("data", "model"))
    sizes = [(x.size, x.ndim) for x in jax.tree.leaves(nnx.state(decoder))]
    share = min(1, DEVICES / model)
    read = sum(size * (share if ndim > 1 else 1) for size, ndim in sizes)
    for process, report in enumerate(reports(results)):
        assert (report[shape]["read"], report[shape]["fingerprint"]) == (read, fingerprint(decoder))
        with np.load(results / f"{process}-{data}x{model}.npz") as parts:
            held = dict(parts)
        for parameter in parameters(decoder):
            value = np.asarray(parameter.variable[...])
            local = NamedSharding(mesh, parameter.spec).shard_shape(value.shape)
            places = [0] if parameter.split_axis is None else range(model)[process * DEVICES % model :][:DEVICES]
            for place in places:
                start = [place * size if axis == parameter.split_axis else 0 for axis, size in enumerate(local)]
                part = held.pop(".".join(map(str, [*parameter.path, "at", *start])))
                index = tuple(slice(first, first + size) for first, size in zip(start, local, strict=True))
                np.testing.assert_array_equal(part, value[index])
        assert not held


@pytest.mark.filterwarnings("ignore:no probe is informative")
def test_two_processes_answer_and_calibrate_as_one(results: Path, checkpoint: Path, tmp_path: Path) -> None:
    alone = processes.answers_of(checkpoint, (None, None), tmp_path)
    assert [report["answers"] for report in reports(results)] == [alone] * PROCESSES
    assert [path.name for path in (results / "profile").iterdir()] == ["profile_0"]  # the first process saves
    np.testing.assert_array_equal(Profile.load(results / "profile").candidates, alone["candidates"])
