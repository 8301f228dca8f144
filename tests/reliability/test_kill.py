"""kill -9 at any moment of evaluating and saving: nothing finished is lost, nothing is half there."""

import errno
import os

import jax
import numpy as np
import pytest
from reliability.killing import RANDOM_KILLS, command_line, run_killed, some_changes
from tiny import TCA, random_prompt, tiny_lm, with_candidates, write_checkpoint

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.lab.evaluation import Results


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


OLD_PROFILE = Profile.uniform(TCA, 2, 2, 5)
#: Number of a change to the disk of an evaluation of two tasks, when one is finished.
BETWEEN_TWO_TASKS = 12


# --- evaluations ----------------------------------------------------------------------------------


def measured(record):
    """A result without times."""
    return {name: value for name, value in record.items() if name != "finished" and not name.endswith("seconds")}


def table_without_seconds(folder):
    """Its text tables end with a column of seconds."""
    return [line.rsplit("|", 2)[0] for line in (folder / "table.md").read_text().splitlines()]


@pytest.mark.slow
def test_an_evaluation_killed_at_any_moment_keeps_what_is_finished_and_goes_on_to_the_same_table(tmp_path):
    model = write_checkpoint(tmp_path / "model")
    (tmp_path / "text.txt").write_text("It was a dark night, and 42 dogs ran. " * 8)
    (tmp_path / "base").mkdir()
    code = command_line(
        *("eval", str(model), "--methods", "full", "--tasks", "loss", "--lengths", "64,128", "--samples", "1"),
        *("--text", str(tmp_path / "text.txt"), "--out", "{target}"),
    )
    changes = [BETWEEN_TWO_TASKS, *some_changes(25)[1:]]
    runs = run_killed(
        tmp_path / "base", code, times=RANDOM_KILLS, changes=changes, cache=tmp_path / "cache", goes_on=True
    )
    whole, killed, gone_on = runs[0], runs[1::2], runs[2::2]
    assert whole.status == 0, whole.log
    wanted = {(r["task"], r["length"]): measured(r) for r in Results(whole.folder).read_all()}
    assert len(wanted) == 2
    assert sum(run.status == -1 for run in killed) > len(changes) // 2, killed
    counts = set()
    for run, on in zip(killed, gone_on, strict=True):
        finished = Results(run.folder).read_all()
        counts.add(len(finished))
        assert on.status == 0, on.log
        results = Results(on.folder).read_all()
        assert all(record in results for record in finished), run  # with its times: it was not run again
        assert {(r["task"], r["length"]): measured(r) for r in results} == wanted, run
        assert table_without_seconds(on.folder) == table_without_seconds(whole.folder), run
        assert {path.name for path in on.folder.glob("*.png")} == {path.name for path in whole.folder.glob("*.png")}
    assert 1 in counts, "no kill came between two tasks"


# --- contexts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm():
    return with_candidates(tiny_lm(), [[0, 6], [TCA.num_candidates, 3]])


@pytest.fixture(scope="module")
def contexts(lm):
    """Of the same programs, with other tokens."""
    old, new, other = (tca_jax.prefill(lm, random_prompt(seed, 100)) for seed in range(3))
    return old, new, other


def same(one, other) -> bool:
    return one.token_ids() == other.token_ids() and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one.cache), jax.tree.leaves(other.cache), strict=True)
    )


#: Numbers of changes to the disk of a saving context that come behind the new one's rename, which is the 34th to 40th
#: of 41 to 46: native code names the files, and threads write some of them twice. By the last most runs have ended.
BEHIND_THE_RENAME = (41, 44)

# A context is loaded and saved again as another: making one takes seconds of compiling.
_SAVE_CONTEXT = """
from pathlib import Path
import tca_jax
tca_jax.Context.load(Path(target).parent / "new").save(target)
"""


@pytest.mark.slow
def test_a_context_save_killed_at_any_moment_leaves_the_old_context_or_the_new_one(contexts, tmp_path):
    old, new, other = contexts
    old.save(tmp_path / "base")
    new.save(tmp_path / "new")
    changes = [*range(1, BEHIND_THE_RENAME[0], 1 if RANDOM_KILLS > 1 else 5), *BEHIND_THE_RENAME]
    runs = run_killed(tmp_path / "base", _SAVE_CONTEXT, times=RANDOM_KILLS, changes=changes, cache=tmp_path / "cache")
    assert runs[0].status == 0, runs[0].log
    seen = {True: 0, False: 0}
    for run in runs:
        loaded = tca_jax.Context.load(run.folder)
        is_new = same(loaded, new)
        assert is_new or same(loaded, old), run
        assert is_new or run.status == -1, run
        seen[is_new] += 1
    assert min(seen.values()) > 1
    for run in (runs[-1], runs[1]):  # over what a killed save has left
        other.save(run.folder)
        assert same(tca_jax.Context.load(run.folder), other)
        assert [path.name for path in run.folder.iterdir()] == visible(run.folder)
        assert len(visible(run.folder)) == 1


SAVES = 5
_SAVER = f"""
import sys
import tca_jax
own = tca_jax.Context.load(sys.argv[2])
for _ in range({SAVES}):
    own.save(sys.argv[1])
"""


# --- disks that are full, and folders that nobody may write ---------------------------------------


def fails(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(("where", "number"), [("os.rename", errno.ENOSPC), ("pathlib.Path.mkdir", errno.EROFS)])
@pytest.mark.parametrize("kind", ["profile", "context"])
def test_a_failed_save_changes_nothing(where, number, kind, contexts, tmp_path, monkeypatch):
    old, new, _ = contexts if kind == "context" else (OLD_PROFILE, Profile.uniform(TCA, 2, 2, 1), None)
    old.save(tmp_path / "f")
    with monkeypatch.context() as patch:
        patch.setattr(where, fails(number))
        with pytest.raises(OSError, match=rf"cannot save a {kind}: {os.strerror(number)}: '{tmp_path}/f'") as raised:
            new.save(tmp_path / "f")
    assert raised.value.errno == number
    loaded = type(old).load(tmp_path / "f")
    assert same(loaded, old) if kind == "context" else loaded == old
    new.save(tmp_path / "f")
    assert visible(tmp_path / "f") == [f"{kind}_1"]


def test_a_file_in_the_place_of_the_folder_is_not_overwritten(contexts, tmp_path):
    (tmp_path / "c").write_text("mine")
    with pytest.raises(OSError, match=rf"cannot save a context: .*'{tmp_path}/c'"):
        contexts[0].save(tmp_path / "c")
    assert (tmp_path / "c").read_text() == "mine"
