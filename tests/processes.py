"""One of several processes that share a model over the devices of all: what `distributed/test_processes.py` starts.

python processes.py COORDINATOR PROCESSES PROCESS CHECKPOINT RESULTS
"""

from __future__ import annotations

import faulthandler
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

import tca_jax
from tca_jax.engine import generation

NEW_TOKENS = 12
SECONDS = 300  # that a process may take


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def answers_of(folder: Path, meshes: Sequence[Mesh | None], results: Path) -> dict[str, object]:
    """What the model says to two prompts, at once and as a stream, and to questions about two contexts; and the profile
    that it is calibrated to."""
    prompts = json.loads((folder / "prompts.json").read_text())
    lm, other = (tca_jax.load(folder, profile=folder / "profile", mesh=mesh) for mesh in meshes)
    questions, context = [prompt[:5] for prompt in prompts], tca_jax.prefill(other, prompts)
    profile = tca_jax.calibrate(other, prompts[:1], other.method.cache.config)
    profile.save(results / "profile")
    return {
        "tokens": tca_jax.generate(lm, prompts, max_new_tokens=NEW_TOKENS).tokens,
        "streamed": list(map("".join, zip(*tca_jax.stream(lm, prompts, max_new_tokens=NEW_TOKENS), strict=True))),
        "asked": tca_jax.generate(other, questions, context=context, max_new_tokens=NEW_TOKENS).tokens,
        "candidates": profile.candidates.tolist(),
        "fingerprint": profile.fingerprint,
    }


def main(coordinator: str, processes: str, process: str, checkpoint: str, results: str) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # one that waits for the other says where
    jax.distributed.initialize(coordinator, int(processes), int(process))
    assert jax.device_count() == 4
    assert jax.local_device_count() == 2
    folder = Path(results)
    # Processes see other times, by which streams choose how many tokens they wait for.
    generation._STREAM_SECONDS *= 100 ** int(process)
    meshes = [jax.make_mesh(shape, ("data", "model")) for shape in ((2, 2), (1, 4))]
    (folder / f"{process}.json").write_text(json.dumps(answers_of(Path(checkpoint), meshes, folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
