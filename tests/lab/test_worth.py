"""Maps of predicted worth as a command."""

import numpy as np
import pytest
from tiny import write_checkpoint

from tca_jax.lab import worth


@pytest.mark.integration
def test_maps_of_targets_are_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worth, "calibration_text", lambda seed, tokens, folder: f"line {seed} of many\n" * tokens)
    worth.main(str(write_checkpoint(tmp_path / "model")), tmp_path / "maps", count=2, tokens=600)
    saved = {path.stem: np.load(path)["maps"] for path in sorted((tmp_path / "maps").iterdir())}
    assert list(saved) == ["effect", "probability", "worth"]
    assert all(np.isfinite(maps).all() for maps in saved.values())
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[:3]] == ["worth", "probability", "effect"]
    assert [line.split()[0] for line in printed[3:] if line.strip(" ─")][:2] == ["kept", "10.0%"]
