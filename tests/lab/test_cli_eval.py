"""`tca-jax eval`: a whole run, what a second one adds, and what is refused; runs that are killed: tests/reliability."""

import functools
import json
import re
from pathlib import Path

import commands
import pytest
from tiny import TCA, write_checkpoint

from tca_jax import Profile

TEXT = "The quick brown fox jumps over the lazy dog. " * 12
NOISE_TASK = ["--tasks=niah_single_1", "--lengths=1024", "--samples=2", "--batch=2"]


run, error = (functools.partial(each, "eval") for each in (commands.run, commands.error))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    write_checkpoint(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    Profile.uniform(TCA, 2, 2, 3).save(folder / "profile")
    return folder


@pytest.fixture(autouse=True)
def in_work(work, monkeypatch):
    monkeypatch.chdir(work)


def records(folder):
    return {path.name: json.loads(path.read_text()) for path in sorted(Path(folder).glob("results/*/*.json"))}


def test_second_run_adds_to_a_folder():
    result = run("model", "--methods=full", *NOISE_TASK, "--protocols=prefix", "--out=out")
    assert result.exit_code == 0, result.output
    assert result.stdout == Path("out/table.md").read_text()
    ((name, record),) = records("out").items()
    assert name == "niah_single_1-1024-prefix.json"
    samples = record["samples"]
    assert record["score"] == 100 * sum(sample["score"] for sample in samples) / 2
    assert [len(sample["references"]) for sample in samples] == [1, 1]
    assert all(sample["prompt_tokens"] + 128 <= 1024 for sample in samples)
    assert record["kv_cache_bytes"] == record["full_kv_cache_bytes"] > 0
    assert record["attended_share"] == 1
    finished = Path("out/results/full/niah_single_1-1024-prefix.json").stat().st_mtime_ns

    more = ["--methods=full,random:share=0.25,window=128", *NOISE_TASK, "--protocols=prefix", "--out=out", "--json"]
    result = run("model", *more)
    assert result.exit_code == 0, result.output
    listed = json.loads(result.stdout)["results"]
    assert [record["method"] for record in listed] == ["full", "random:share=0.25,window=128"]
    assert listed[1]["kv_cache_bytes"] < 0.7 * listed[1]["full_kv_cache_bytes"]
    assert 0.2 < listed[1]["attended_share"] < 0.7
    assert Path("out/results/full/niah_single_1-1024-prefix.json").stat().st_mtime_ns == finished
    assert "| random:share=0.25,window=128 |" in Path("out/table.md").read_text()
    message = error("model", "--methods=full", *NOISE_TASK, "--protocols=prefix", "--out=out", "--seed=1")
    assert message.startswith("--out out was made with seed = 0, this run has 1")


def test_substitutes_are_marked():
    small = ["--tasks=loss", "--lengths=128", "--samples=1", "--out=sub"]
    result = run("model", "--methods=tca", "--profile=profile", *small)
    assert result.exit_code == 0, result.output
    assert "## loss †, 128 tokens" in result.stdout
    assert re.search(r"^- text: the source of Python [\d.]+'s standard library$", result.stdout, re.MULTILINE)
    assert records("sub")["loss-128-text.json"]["substitutes"]["text"].startswith("the source of Python")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--methods=fool"], "--methods fool: 'fool' is not registered: must be one of"),
        (["--tasks=niah"], "--tasks niah: must be one of ['ruler', 'recall', 'longbench', 'kvpress', 'niah_single_1'"),
        (["--tasks=vt,vt"], "--tasks names vt twice"),
        (["--protocols=suffix"], "--protocols suffix: must be one of ['prefix', 'preamble', 'late', 'late-prefix']"),
        (["--lengths=4k"], "--lengths 4k: must be numbers of tokens"),
        (["--lengths=8192"], "--lengths 8192: must lie in [1, 4096], positions of model"),
        (["--tasks=fwe", "--lengths=256"], "--lengths 256: fwe needs at least"),
        (["--tasks=qa_1", "--lengths=4096"], "--tasks qa_1: needs --squad FILE"),
        (["--tasks=longbench"], "--tasks longbench: no task of it can be run: qasper: needs --longbench DIR"),
        (["--tasks=longbench", "--longbench=text.txt"], "--longbench text.txt: must be a folder"),
        (["--squad=absent.json"], "absent.json: No such file or directory"),
        (["--kv-share=1.5"], "--kv-share 1.5: must lie in (0, 1]"),
        (["--bytes-of=answer", "--kv-share=0.5"], "--bytes-of answer: must be one of ['call', 'prompt']"),
        (["--bytes-of=prompt"], "--bytes-of prompt: needs --kv-share"),
        (["--methods=tca", "--tasks=loss", "--lengths=128"], "--methods tca: needs --profile DIR"),
        (["--profile=absent"], "absent"),
        (["--out=text.txt/x"], "--out text.txt/x cannot be written"),
    ],
)
def test_refusals_write_nothing(args, message):
    assert message in error("model", "--methods=full", "--out=refused", *args)
    assert not Path("refused").exists()


def test_groups_skip_tasks_that_do_not_fit():
    from tca_jax.lab.evaluation import Sources, make_plan, parse_methods
    from tca_jax.loading import open_checkpoint

    settings = {"samples": 1, "seed": 0, "sources": Sources(), "kv_share": None, "batch": 1}
    checkpoint, methods = open_checkpoint("model"), parse_methods("full")
    plan = make_plan(checkpoint, methods, ["ruler"], [1024, 4096], ["prefix", "late"], **settings)
    lengths = {task.name: lengths for task, lengths in plan.tasks}
    assert set(lengths) == {
        *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        *("niah_multivalue", "niah_multiquery", "vt", "fwe"),
    }
    assert lengths["niah_single_1"] == (1024, 4096)
    assert lengths["vt"] == (4096,)
    assert "qa_1: needs --squad FILE" in plan.skipped
    assert any(reason.startswith("--lengths 4096: cwe needs at least") for reason in plan.skipped)
    jobs = plan.jobs()
    assert len(jobs) == len(set(jobs)) == 2 * sum(map(len, lengths.values()))
