"""Suites: fixed settings, their files, and a run."""

import functools
import importlib.util
import json
from pathlib import Path

import commands
import pytest
from tiny import TCA, write_checkpoint

from tca_jax import Profile
from tca_jax.lab.evaluation import SUITES, Sources, parse_methods, plan_suite
from tca_jax.lab.evaluation.ruler import TASKS
from tca_jax.lab.evaluation.sources import parquet_file
from tca_jax.loading import open_checkpoint

SMALL = ["--data=data", "--samples=1", "--batch=2"]
run, error = (functools.partial(each, "eval") for each in (commands.run, commands.error))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A model, its profile, and the files of the suites."""
    folder = tmp_path_factory.mktemp("suites")
    write_checkpoint(folder / "model")
    Profile.uniform(TCA, 2, 2, 3).save(folder / "profile")
    data = folder / "data"
    data.mkdir()
    (data / "PaulGrahamEssays.json").write_text(json.dumps({"text": "The quick brown fox jumps over the dog. " * 99}))
    asked = {"question": "Who?", "answers": [{"text": "a person"}]}
    question = {"context": "A person is here.", "qas": [asked, asked]}
    (data / "dev-v2.0.json").write_text(json.dumps({"data": [{"paragraphs": [question]}]}))
    pair = {"question": "Which?", "answer": "1", "context": [["Title", ["It is 1."]]]}
    (data / "hotpotqa.json").write_text(json.dumps([pair, pair]))
    return folder


@pytest.fixture(autouse=True)
def in_work(work, monkeypatch):
    monkeypatch.chdir(work)


@pytest.fixture
def kvpress(work):
    """Samples of kvpress's form, two of each task."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [
        {
            "context": f"Text. One of the special magic numbers for a-b is: 1234{i}. More text. ",
            "question": f"What is it, {task.name}? ",
            "answer_prefix": "It is",
            "answer": [f"1234{i}"],
            "task": task.name,
        }
        for i in range(2)
        for task in TASKS
    ]
    (work / "data" / "4096").mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), work / "data" / "4096" / "test-00000-of-00001.parquet")
    return work / "data"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--suite=ruler"], "--suite ruler: must be one of ['leaderboard', 'paper', 'late']"),
        (["--suite=paper", "--tasks=vt"], "--tasks is fixed by --suite paper: leave it out, or leave out --suite"),
        (["--suite=leaderboard", "--kv-share=0.5"], "--kv-share is fixed by --suite leaderboard"),
        (["--data=data"], "--data data: holds the files of a suite: name one with --suite"),
        (["--suite=late"], "--lengths 8192: must lie in [1, 4096], positions of model"),
        (["--suite=late", "--lengths=2048"], "--methods paper: model has no profile of the paper's hyperparameters"),
        (["--suite=late", "--data=profile"], "--data profile: has no PaulGrahamEssays.json: docs/evaluation.md"),
        (["--suite=paper"], "--data data: has no longbench or data"),
    ],
)
def test_refusals_write_nothing(args, message):
    assert message in error("model", "--profile=profile", *SMALL, "--out=refused", *args)
    assert not Path("refused").exists()


def test_longbench_needs_its_libraries(work):
    if importlib.util.find_spec("rouge"):
        pytest.skip("they are installed")
    (work / "longbench").mkdir()
    (work / "longbench" / "lcc_e.jsonl").write_text(
        json.dumps({"input": "Q", "context": "c", "answers": ["a"], "length": 9, "all_classes": None})
    )
    args = ["--methods=full", "--tasks=lcc", "--lengths=1024", "--longbench=longbench", "--out=refused"]
    assert "LongBench's scores need rouge" in error("model", *args)


def test_files_in_a_folder_complete_the_named_ones(work):
    given = Sources(squad=work / "mine.json")
    found = given.complete(work / "data", ["essays", "squad", "hotpotqa"])
    assert (found.squad, found.essays.name, found.hotpotqa.name) == (
        work / "mine.json",
        "PaulGrahamEssays.json",
        "hotpotqa.json",
    )
    assert Sources().complete(work / "data", ["squad"]).squad.name == "dev-v2.0.json"


def test_leaderboard_asks_full_attention_once(work, kvpress):
    lm, suite = open_checkpoint("model"), SUITES["leaderboard"]
    settings = {"sources": Sources(kvpress=kvpress), "lengths": [4096], "samples": 2, "seed": 0, "batch": 2}
    plans = plan_suite("leaderboard", lm, parse_methods("full,tova"), **settings)
    asked = {folder: [spec.label for spec in plan.methods] for folder, plan in plans.items()}
    assert asked == {"ratio-0": ["full"], **{f"ratio-{n}": ["tova"] for n in (0.25, 0.5, 0.75, 0.875)}}
    assert [plan.kv_share for plan in plans.values()] == [None, 0.75, 0.5, 0.25, 0.125]
    assert {part.protocol for part in suite.parts} == {"late-prefix"}
    assert set(plans["ratio-0"].origins()) == {"kvpress"}
    first, second = plans["ratio-0"].tasks[0][0].draw(plans["ratio-0"].drawing(lm, 4096))
    prompt = first.prompts["late-prefix"]
    assert (prompt.question, prompt.lead) == ("What is it, niah_single_1? ", "It is")
    assert (first.references, second.references) == (("12340",), ("12341",))
    assert first.depths == (prompt.document.index("12340") / len(prompt.document),)
    assert not first.prompts["late"].lead
    with pytest.raises(ValueError, match=r"8192: must hold one \.parquet file with kvpress's samples, found 0"):
        parquet_file(kvpress, 8192)


@pytest.mark.slow
def test_suite_runs_and_continues():
    args = ["model", "--suite=late", "--methods=full,streaming:window=128", "--lengths=1024", *SMALL, "--out=late"]
    first = run(*args)
    assert first.exit_code == 0, first.output
    assert first.stdout == Path("late/ruler-late/table.md").read_text()
    finished = {path: path.stat().st_mtime_ns for path in Path("late").glob("*/results/*/*.json")}
    again = run(*args, "--json")
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    records = json.loads(again.stdout)["results"]
    assert {(record["part"], record["protocol"]) for record in records} == {("ruler-late", "late")}
    assert len(records) == len(finished)
    assert "was made with samples = 1, this run has 2" in run(*args, "--samples=2").stderr
