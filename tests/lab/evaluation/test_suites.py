"""Suites: what is fixed and what may be changed, tables beside published figures, estimates, whole runs."""

import functools
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import commands
import numpy as np
import pytest
from tiny import TCA, write_checkpoint
from word_pieces import write_with_bytes, write_with_pieces

from tca_jax import Profile
from tca_jax.lab.evaluation import parse_methods, suite_run
from tca_jax.lab.evaluation.estimates import Rate, Rates, rate_key
from tca_jax.lab.evaluation.longbench import scores
from tca_jax.lab.evaluation.longbench.tasks import DATA_SETS
from tca_jax.lab.evaluation.published import FIGURES, model_key, published
from tca_jax.lab.evaluation.results import Job
from tca_jax.lab.evaluation.ruler import TASKS
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.lab.evaluation.suite_run import Left, estimate_lines
from tca_jax.lab.evaluation.suite_tables import GROUPS, suite_table
from tca_jax.lab.evaluation.suites import BY_NAME, LATE, LEADERBOARD, PAPER, plan_suite, suite_settings
from tca_jax.loading import open_checkpoint

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
OWN = ["--squad=data/own-squad.json", "--hotpotqa=data/own-hotpotqa.json"]
SMALL = ["--data=data", "--samples=1", "--batch=2"]

run, error = (functools.partial(each, "eval") for each in (commands.run, commands.error))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A model, its profile, and files of the forms of all that suites read."""
    folder = tmp_path_factory.mktemp("suites")
    write_checkpoint(folder / "model", chat_template=CHAT)
    Profile.uniform(TCA, 2, 2, 3).save(folder / "profile")
    data = folder / "data"
    (data / "longbench").mkdir(parents=True)
    (data / "PaulGrahamEssays.json").write_text(json.dumps({"text": "The quick brown fox jumps over the dog. " * 99}))
    paragraphs = [
        {"context": f"Person {i} is here.", "qas": [{"question": f"Who is {i}?", "answers": [{"text": f"person {i}"}]}]}
        for i in range(4)
    ]
    (data / "own-squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    pairs = [{"question": "Which?", "answer": f"{i}", "context": [[f"Title {i}", [f"It is {i}."]]]} for i in range(4)]
    (data / "own-hotpotqa.json").write_text(json.dumps(pairs))
    for data_set in DATA_SETS:
        records = [
            {
                "input": f"Q {i}?",
                "context": "word " * 40 * (i + 1),
                "answers": ["Paragraph 2"],
                "length": (100, 5000, 9000)[i],
                "all_classes": ["yes"],
            }
            for i in range(3)
        ]
        (data / "longbench" / f"{data_set.name}_e.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.fixture(autouse=True)
def in_work(work, monkeypatch):
    monkeypatch.chdir(work)


@pytest.fixture
def scorers(monkeypatch):
    """What stands in for the libraries of LongBench's scorers, which tests have not."""
    rouge = types.SimpleNamespace(get_scores=lambda *args, **kwargs: {"rouge-l": {"f": 0.5}})
    monkeypatch.setattr(scores, "require_libraries", lambda: None)
    monkeypatch.setitem(sys.modules, "rouge", types.SimpleNamespace(Rouge=lambda: rouge))
    monkeypatch.setitem(sys.modules, "rapidfuzz", types.SimpleNamespace(fuzz=types.SimpleNamespace(ratio=lambda *a: 7)))


def write_samples(folder, length=4096):
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
            "max_new_tokens": task.new_tokens,
        }
        for i in range(2)
        for task in TASKS
    ]
    (folder / str(length)).mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / str(length) / "test-00000-of-00001.parquet")
    return folder


# --- what is fixed --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--suite=ruler"], "--suite ruler: must be one of ['leaderboard', 'paper', 'late']"),
        (["--suite=paper", "--tasks=vt"], "--tasks is fixed by --suite paper: leave it out, or leave out --suite"),
        (["--suite=late", "--protocols=prefix"], "--protocols is fixed by --suite late"),
        (["--suite=leaderboard", "--kv-share=0.5"], "--kv-share is fixed by --suite leaderboard"),
        (["--suite=late", "--bytes-of=prompt"], "--bytes-of is fixed by --suite late"),
        (["--data=data"], "--data data: holds the files of a suite: name one with --suite"),
        (["--suite=late"], "--lengths 8192: must lie in [1, 4096], positions of model"),
        (["--suite=late", "--lengths=2048"], "--methods paper: model has no profile of the paper's hyperparameters"),
        (["--suite=late", "--lengths=1024", "--data=profile"], "--data profile: has no PaulGrahamEssays.json: made by"),
        (["--suite=late", "--lengths=1024", "--out=profile"], "--out profile holds files but no suite.json: must be"),
    ],
)
def test_what_a_suite_fixes_or_lacks_is_refused_in_one_line_and_leaves_nothing(args, message):
    assert message in error("model", "--profile=profile", *SMALL, *OWN, "--out=refused", *args)
    assert not Path("refused").exists()


def test_longbenchs_libraries_are_asked_for_before_files_are():
    message = "LongBench's scores need rouge"
    if importlib.util.find_spec("rouge"):
        pytest.skip("they are installed")
    assert message in error("model", "--suite=paper", "--methods=full", "--lengths=1024", *SMALL, "--out=refused")


def test_the_suites_are_what_their_names_say(work):
    assert (LEADERBOARD.lengths, LEADERBOARD.samples) == ((4096,), 500)
    assert [part.kv_share for part in LEADERBOARD.parts] == [None, 0.75, 0.5, 0.25, 0.125]
    assert {part.protocol for part in LEADERBOARD.parts} == {"late-prefix"}
    assert PAPER.lengths == LATE.lengths == (8192, 16384, 32768, 65536, 131072)
    assert [(part.tasks, part.protocol) for part in PAPER.parts] == [("ruler", "prefix"), ("longbench", "prefix")]
    assert [part.protocol for part in LATE.parts] == ["late"]
    for suite in BY_NAME.values():
        assert parse_methods(suite.methods)[0].label == "full"


def test_of_a_leaderboard_full_attention_is_asked_once_and_the_others_at_every_ratio(work):
    sources, lm = Sources(kvpress=write_samples(work / "data")), open_checkpoint("model")
    settings = {"lengths": [4096], "samples": 2, "seed": 0, "batch": 2}
    plans = plan_suite(LEADERBOARD, lm, parse_methods("full,tova"), sources, **settings)
    asked = {part.name: [spec.label for spec in plan.methods] for part, plan in plans.items()}
    assert asked == {"ratio-0": ["full"], **{f"ratio-{n}": ["tova"] for n in (0.25, 0.5, 0.75, 0.875)}}
    plan = next(iter(plans.values()))
    assert len(plan.jobs()) == 13
    assert set(plan.origins()) == {"kvpress/4096"}
    first, second = plan.tasks[0][0].draw(plan.drawing(lm, 4096))
    prompt = first.prompts["late-prefix"]
    assert prompt.document.startswith("Text. One of")
    assert (prompt.question, prompt.lead) == ("What is it, niah_single_1? ", "It is")
    assert (first.references, second.references) == (("12340",), ("12341",))
    np.testing.assert_allclose(first.depths, prompt.document.index("12340") / len(prompt.document))
    assert not first.prompts["late"].lead
    assert set(plan_suite(LEADERBOARD, lm, parse_methods("tova"), sources, **settings)) == set(LEADERBOARD.parts[1:])


# --- tables ---------------------------------------------------------------------------------------


def record(method, task, score, length=8192, groups=None, **fields):
    return {
        "method": method,
        "task": task,
        "length": length,
        "score": score,
        "groups": groups or {},
        "kv_cache_bytes": 1.0 if method == "full" else 0.25,
        "full_kv_cache_bytes": 1.0,
        "kept_share": 1.0 if method == "full" else 0.2,
        "attended_share": 1.0 if method == "full" else 0.5,
        "own_budget": False,
        "budget": "",
        "substitutes": {},
        **fields,
    }


def planned(suite, work, methods, lengths, samples, **files):
    lm = open_checkpoint("model")
    plans = plan_suite(
        suite, lm, parse_methods(methods), Sources(**files), lengths=lengths, samples=samples, seed=0, batch=1
    )
    return plans, {
        **suite_settings(suite, lm, lengths=lengths, samples=samples, seed=0),
        "model": "Llama-3.1-8B-Instruct",
    }


def test_the_table_of_paper_has_means_beside_published_ones(work, scorers):
    data = work / "data"
    files = {"squad": data / "own-squad.json", "hotpotqa": data / "own-hotpotqa.json", "longbench": data / "longbench"}
    plans, settings = planned(PAPER, work, "full,xattention", [2048, 4096], 3, **files)
    ruler, longbench = plans
    tasks = [task.name for task, lengths in plans[ruler].tasks if 4096 in lengths]
    of_ruler = [record("full", task, 50.0 + i, 4096) for i, task in enumerate(tasks)]
    of_ruler += [record("full", task.name, 10.0, 2048) for task, lengths in plans[ruler].tasks if 2048 in lengths]
    of_ruler += [record("xattention", task, 30.0, 4096) for task in tasks[1:]]  # one is not finished
    of_longbench = [
        record("full", name, 10.0 * i, groups={"0-4k": 1.0, "8k+": 10.0 * i})
        for i, names in enumerate(GROUPS.values())
        for name in names
    ]
    text = suite_table(PAPER, settings, plans, {ruler: of_ruler, longbench: of_longbench})
    mean = 50 + (len(tasks) - 1) / 2
    assert f"| full | here | 10.0 | {mean:.1f} | {(10 + mean) / 2:.1f} | 100.0% | 100.0% | 100.0% |" in text
    assert "| full | [1] | - | 95.5 | - | - | - | - |" in text
    assert "| xattention | here | - | - | - | 25.0% | 20.0% | 50.0% |\n| xattention | [3] | - | 96.8 |" in text
    # 2 data sets a group, 3 of the fourth: (2 (0 + 10 + 20 + 40 + 50) + 3 * 30) / 13
    of_groups = "0.0 | 10.0 | 20.0 | 30.0 | 40.0 | 50.0 | 25.4 | 1.0 | - | 25.4"
    assert f"| full | here | {of_groups} | 100.0% |" in text
    assert "| full | [7] | 45.3 | 45.2 | 26.6 | 68.4 | 59.5 | 46.3 | 50.1 | - |" in text
    assert "\n1. README of github.com/NVIDIA/RULER" in text
    assert "\n7. TurboQuant, arXiv 2504.19874, Table 1" in text
    assert (
        "**Not the suite's settings**: 3 samples of each task instead of 100; lengths 2,048, 4,096 instead of" in text
    )
    assert "The first 3 samples of each data set." in text
    assert "arXiv 2512.09238) are not beside these" in text
    assert "not of Llama" not in text
    assert "They are of llama-3.1-8b-instruct, not of other.\n" in suite_table(
        PAPER, {**settings, "model": "other"}, plans, {ruler: of_ruler, longbench: []}
    )


def test_the_table_of_a_leaderboard_has_kvpresss_columns(work):
    plans, settings = planned(LEADERBOARD, work, "full,tova", [4096], 500, kvpress=write_samples(work / "data"))
    records = {part: [] for part in plans}
    zero, quarter, _, _, most = plans
    names = [task.name for task in TASKS]
    records[zero] = [record("full", name, 91.0 + 0.5 * i, 4096) for i, name in enumerate(names)]
    records[quarter] = [record("tova", name, 26.0, 4096) for name in names]
    other = {"own_budget": True, "budget": "cannot hold so little", "kept_share": 0.5}
    records[most] = [record("tova", name, 13.0, 4096, **other) for name in names]
    lines = suite_table(LEADERBOARD, settings, plans, records).splitlines()
    start = lines.index("## Leaderboard") + 2
    assert lines[start] == "| dataset | data_dir | model | method | compression_ratio | score | kept | from |"
    model = "ruler | 4096 | Llama-3.1-8B-Instruct"
    assert lines[start + 2 : start + 5] == [
        f"| {model} | full | 0 | 94.00 | 100.0% | here |",
        "| ruler | 4096 | llama-3.1-8b-instruct | full | 0 | 95.70 | - | [1] |",
        f"| {model} | tova | 0.25 | 26.00 | 20.0% | here |",
    ]
    assert f"| {model} | tova | 0.5 | - | - | here |" in lines
    assert f"| {model} | tova | 0.5 ‡ | 13.00 | 50.0% | here |" in lines
    assert "| ruler | 4096 | llama-3.1-8b-instruct | kvzip | 0.9 | 90.50 | - | [1] |" in lines
    assert f"| method | compression_ratio | {' | '.join(names)} |" in lines
    assert "- tova, 4,096 tokens: cannot hold so little" in lines
    assert not any("Not the suite's settings" in line for line in lines)


def test_every_published_figure_has_a_source_and_stands_beside_a_part_and_its_columns():
    parts = {part.figures for suite in BY_NAME.values() for part in suite.parts}
    lengths = {str(length) for length in (4096, *PAPER.lengths)}
    columns = {"ruler": lengths, "longbench-e": {*GROUPS, "mean"}, "leaderboard": {"mean"}}
    for figures in FIGURES:
        assert figures.part in parts
        assert set(figures.scores) <= columns[figures.part]
        assert all(0 < score <= 100 for score in figures.scores.values())
        assert re.search(r"arXiv \d{4}\.\d{5}|github\.com/", figures.source)
        assert figures.model == model_key(figures.model)
    (full,) = published("longbench-e", "meta-llama/Meta-Llama-3.1-8B-Instruct")
    weights = [len(names) for names in GROUPS.values()]
    assert full.scores["mean"] == round(np.average([full.scores[name] for name in GROUPS], weights=weights), 2)
    assert {figures.model for figures in published("ruler", "Qwen/Qwen3-8B")} == {"qwen3-8b"}
    assert published("ruler", "llama3.1-8b-instruct") == published("ruler", "/models/Llama-3.1-8B-Instruct/")
    assert published("", "x") == ()


# --- estimates ------------------------------------------------------------------------------------


def test_an_estimate_is_what_a_batch_took_for_all_batches():
    rate = Rate(batch=4, draw_seconds=0.5, prompt_seconds=2.0, step_seconds=0.25, extra_tokens=3)
    assert rate.seconds(10, 8) == 10 * 2.5 + 3 * 10 * 0.25  # three batches of 11 tokens, the first with the prompt
    part = PAPER.parts[0]
    left = [Left(part, Job(m, "vt", n, "prefix"), 10, s) for m, n, s in (("full", 8192, 50), ("tca", 8192, 40))]
    left.append(Left(part, Job("full", "vt", 16384, "prefix"), 20, 7200))
    first, *others = estimate_lines(left)
    assert first.startswith("estimate: about 2.0 h for 40 samples, from one measured batch of each method, length and")
    assert others == ["  ruler, 8,192 tokens: 90 s (full 50 s, tca 40 s)", "  ruler, 16,384 tokens: 2.0 h (full 2.0 h)"]
    assert estimate_lines([]) == ["estimate: nothing is left to do"]


def test_rates_are_measured_once_for_a_machine_and_a_batch(tmp_path):
    rate, key = Rate(2, 0.5, 1.0, 0.1, 0), "ruler/full/8192/prefix"
    assert Rates(tmp_path, 4).get(key, lambda: rate) == rate
    assert Rates(tmp_path, 4).get(key, lambda: pytest.fail("measured again")) == rate
    other = Rate(1, 0.5, 9.0, 0.1, 0)
    assert Rates(tmp_path, 8).get(key, lambda: other) == other


def test_data_sets_have_rates_of_their_own_tasks_of_one_length_share_one():
    ruler, longbench = PAPER.parts
    one, other = (Job("full", task, 8192, "prefix") for task in ("vt", "qasper"))
    assert rate_key(ruler, one) == rate_key(ruler, other)
    assert rate_key(longbench, one) != rate_key(longbench, other)


def test_progress_counts_seconds_of_the_estimate():
    part = PAPER.parts[0]
    own = [Left(part, Job("full", "vt", n, "prefix"), 4, s) for n, s in ((8192, 10.0), (16384, 90.0))]
    told = []
    report = suite_run._progress(own, 4, 100.0, 200.0, lambda *args: told.append(args))
    for job, done in ((own[0].job, 2), (own[0].job, 4), (own[1].job, 6), (own[1].job, 8)):
        report(job, done, 8)
    assert [(done, total) for done, total, _ in told] == [(105, 200), (110, 200), (155, 200), (200, 200)]
    assert told[0][2] == "ruler, full: vt, 8,192"


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_suite_goes_on_where_it_was_interrupted_and_ends_with_the_same_table(monkeypatch):
    args = ["model", "--suite=late", "--methods=full,streaming:window=128", "--lengths=1024,1280", *SMALL, *OWN]
    whole = run(*args, "--out=whole")
    assert whole.exit_code == 0, whole.output
    assert whole.stdout == Path("whole/table.md").read_text()
    assert "estimate: about" in whole.stderr
    assert "ruler-late, 1,280 tokens: " in whole.stderr
    assert whole.stderr.index("estimate: about") < whole.stderr.index("seconds of the estimate")

    from tca_jax.lab.evaluation import run as running

    asked, ran = running._run_job, []

    def interrupted(*given):
        if len(ran) == 15:
            raise KeyboardInterrupt
        ran.append(given[2])
        return asked(*given)

    monkeypatch.setattr(running, "_run_job", interrupted)
    assert run(*args, "--out=parts").exit_code == 130
    assert "| full | here |" in Path("parts/table.md").read_text()
    finished = {path: path.stat().st_mtime_ns for path in Path("parts").glob("*/results/*/*.json")}
    assert len(finished) == 15
    monkeypatch.setattr(running, "_run_job", asked)
    message = error(*args, "--out=parts", "--samples=2")
    assert message.startswith("--out parts was made with samples = 1, this run has 2")
    assert "was made with suite = late" in error(
        "model", "--suite=leaderboard", "--methods=full", "--lengths=1024,1280", *SMALL, "--out=parts"
    )
    rates = Path("parts/rates.json").read_bytes()
    again = run(*args, "--out=parts", "--json")
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert Path("parts/rates.json").read_bytes() == rates
    assert Path("parts/table.md").read_text() == Path("whole/table.md").read_text()
    records = json.loads(again.stdout)["results"]
    assert {(record["part"], record["protocol"]) for record in records} == {("ruler-late", "late")}
    assert len(records) == len(list(Path("whole").glob("*/results/*/*.json")))


@pytest.mark.slow
def test_paper_runs_to_the_end_on_a_model_of_word_pieces(work, scorers):
    write_with_pieces(work / "pieces")
    args = ["--suite=paper", "--methods=full,streaming:window=128,sinks=8", "--lengths=1024", *SMALL, *OWN]
    result = run("pieces", *args, "--out=paper")
    assert result.exit_code == 0, result.output
    assert "| full | here | " in result.stdout
    assert "\n## LongBench-E, prefix\n" in result.stdout
    found = {path.name for path in Path("paper/longbench-e/results/full").iterdir()}
    assert found == {f"{data_set.name}-4096-prefix.json" for data_set in DATA_SETS}
    config = json.loads(Path("paper/longbench-e/config.json").read_text())
    assert set(config["sources"]) == {f"longbench/{data_set.name}" for data_set in DATA_SETS}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2", "2x1"])
def test_the_leaderboard_runs_to_the_end_on_a_mesh(work, mesh):
    write_samples(write_with_bytes(work / "bytes").parent / "data")
    args = ["--suite=leaderboard", "--methods=full,tova:window=128", f"--mesh={mesh}", *SMALL, f"--out=board-{mesh}"]
    result = run("bytes", *args)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ruler | 4096 | bytes | ")]
    assert len(rows) == 5
    assert all(line.endswith("| here |") and " | - | " not in line for line in rows)
    kept = [float(line.split("|")[-3].strip(" %")) for line in rows]
    assert kept[0] == 100
    assert kept == sorted(kept, reverse=True)
