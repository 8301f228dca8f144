"""One of several processes that share a model over the devices of all: what `test_processes.py` starts.

python process.py COORDINATOR PROCESSES PROCESS CHECKPOINT RESULTS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
from reads import Reads

MESHES = ((1, 4), (2, 2))  # devices on "data" and "model"
NEW_TOKENS = 12


def shards_of(folder: Path, shape: tuple[int, int], results: Path) -> dict[str, object]:
    """Loads the checkpoint onto a mesh of all devices, and saves the parts that are this process's."""
    import tca_jax.models.params
    from tca_jax.models.config import read_config
    from tca_jax.models.fingerprint import fingerprint
    from tca_jax.models.names import parameters

    reads = tca_jax.models.params.safe_open = Reads()
    mesh = jax.make_mesh(shape, ("data", "model"))
    decoder = tca_jax.models.params.load_decoder(folder, read_config(folder), np.float32, mesh=mesh)
    parts = {}
    for parameter in parameters(decoder):
        for part in parameter.variable[...].addressable_shards:
            start = [each.start or 0 for each in part.index]
            parts[".".join(map(str, [*parameter.path, "at", *start]))] = np.asarray(part.data)
    np.savez(results, **parts)
    return {"fingerprint": fingerprint(decoder), "read": sum(map(sum, reads.elements.values()))}


def answers_of(folder: Path) -> dict[str, object]:
    """What the model on a mesh of all devices says to two prompts, and its fingerprint."""
    import tca_jax

    lm = tca_jax.load(folder, profile=folder / "profile", mesh=jax.make_mesh((2, 2), ("data", "model")))
    prompts = json.loads((folder / "prompts.json").read_text())
    return {"tokens": tca_jax.generate(lm, prompts, max_new_tokens=NEW_TOKENS).tokens, "fingerprint": lm.fingerprint}


def main(coordinator: str, processes: str, process: str, checkpoint: str, results: str) -> None:
    jax.distributed.initialize(coordinator, int(processes), int(process))
    assert jax.device_count() == 4
    assert jax.local_device_count() == 2
    folder = Path(results)
    told = {
        str(shape): shards_of(Path(checkpoint), shape, folder / f"{process}-{shape[0]}x{shape[1]}.npz")
        for shape in MESHES
    }
    told["answers"] = answers_of(Path(checkpoint))
    (folder / f"{process}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
