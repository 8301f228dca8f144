"""Maps of predicted worth as a command."""

import numpy as np
import pytest

from tca_jax.lab import worth
from tca_jax.lab.evaluation import late_documents


@pytest.mark.integration
def test_maps_of_targets_are_saved(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(late_documents, "draw_text", lambda rng, seed, *_: f"line {seed} of many\n" * 600)
    worth.main(str(checkpoint), tmp_path / "maps", count=2, tokens=600)
    saved = {path.stem: np.load(path)["maps"] for path in sorted((tmp_path / "maps").iterdir())}
    assert list(saved) == ["effect", "probability", "worth"]
    assert all(np.isfinite(maps).all() for maps in saved.values())
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[:3]] == ["worth", "probability", "effect"]
    assert [line.split()[0] for line in printed[3:] if line.strip(" ─")][:2] == ["kept", "10.0%"]
