"""Pictures and their commands: the values that are drawn, and complete PNG files."""

import functools
import json
import re
from pathlib import Path

import commands
import numpy as np
import pytest
from matplotlib.image import imread
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax.lab import plots
from tca_jax.lab.benchmarks.models import CONFIGS
from tca_jax.lab.plots import results, selected
from tca_jax.lab.plots.figures import METHOD_COLORS
from tca_jax.loading import checkpoint_folder

run, error = (functools.partial(each, "plot") for each in (commands.run, commands.error))


@pytest.fixture
def figures(monkeypatch):
    """Figures in place of the files they would be written to."""
    drawn = []
    monkeypatch.setattr("tca_jax.lab.plots.figures.write", lambda figure, path: drawn.append(figure) or Path(path))
    return drawn


def texts(axes):
    return [text.get_text() for text in axes.texts]


# --- budgets, selected ------------------------------------------------------------------------------


def test_budgets_have_a_number_in_each_cell(figures):
    share = np.array([[0.0, 0.5], [1.0, 0.25]])
    plots.plot_kept_share(share, 4096, "tiny", "unused.png")
    kept = figures[0].axes[0]
    assert kept.get_title() == "KV cache kept after 4,096 tokens: 43.8% on average (tiny)"
    assert texts(kept) == ["0%", "50%", "100%", "25%"]


def test_selected_shades_heads_and_outlines_a_span():
    kept = np.zeros((2, 2, 500), bool)
    kept[:, :, 432:] = True
    kept[0, 0] = True  # dense: does not count
    kept[1, :, 100:110] = True
    page = selected.draw(kept, "x" * 500, block_size=16, window_start=432).axes[1]
    assert "(3 of 4 heads)" in page.get_title()
    np.testing.assert_allclose(page.collections[0].get_array().reshape(-1)[100:110], 2 / 3)
    page = selected.draw(kept, "x" * 500, span=(200, 209)).axes[1]
    assert "(4 of 4 heads)" in page.get_title()  # the dense head alone keeps the span
    assert sum(patch.get_width() for patch in page.patches if not patch.get_fill()) == 9


CONFIG = tca_jax.TCAConfig(window=32, block_size=16, reserve=5, observation=8, spread=2)
SNAPKV = {"window": 32, "block_size": 16, "share": 0.3, "observation": 8}
KVZIP = {"window": 32, "block_size": 16, "share": 0.3, "chunk": 90}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("snapkv", SNAPKV),
        pytest.param("tca", {"candidates": [[2, 9], [14, 0]], "config": CONFIG}, marks=pytest.mark.integration),
        pytest.param("kvzip", KVZIP, marks=pytest.mark.integration),
    ],
)
def test_kept_tokens_are_as_many_as_the_engines(name, options):
    lm, prompt = tiny_lm().with_method(name, **options), random_prompt(0, 227)  # 12 ranked blocks
    held = tca_jax.prefill(lm, prompt).stats.kept_share
    assert plots.kept_tokens(lm, prompt).mean() == pytest.approx(held, abs=1e-6)
    assert held < 0.7


def test_the_line_with_words():
    lines = [f"line {i} of many\n" for i in range(60)]
    assert selected.find_line("40 of", lines) == (40, 41)
    assert selected.find_line("59", list("".join(lines))) == (sum(map(len, lines[:59])), sum(map(len, lines)) - 1)
    assert selected.find_line("line 0", ["line 0"]) == (0, 1)


def test_a_page_is_cut_at_ends_of_lines():
    lines = selected.lay_out(["a\n\tb", "", "\U0001f600", *["x" * 70] * 50])
    assert ["".join(char for char, _ in line) for line in lines[:2]] == ["a↵", "    b□□" + "x" * 103]
    assert [len(line) for line in lines[1:]] == [110] * 23
    assert lines[1][4:9] == [("b", 0), ("□", 1), ("□", 2), ("x", 3), ("x", 3)]


# --- curves and bars --------------------------------------------------------------------------------


METHODS = {
    "methods": [
        {"method": name, "kv_cache_share": share, "right": {"late": {"a": right, "b": 1.0}, "prefix": {"a": 1.0}}}
        for name, share, right in (("full", 1.0, 1.0), ("tca", 0.5, 0.8), ("tca", 0.2, 0.6))
    ]
}


def lines_of(axes):
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


def test_curves_keep_their_color(figures, tmp_path):
    path = tmp_path / "methods.json"
    path.write_text(json.dumps(METHODS))
    plots.plot_accuracy(results.accuracy_panels(path), "unused.png")
    assert [axes.get_title() for axes in figures[0].axes] == ["late", "prefix"]
    late = lines_of(figures[0].axes[0])
    assert {name: line.get_color() for name, line in late.items()} == {n: METHOD_COLORS[n] for n in ("full", "tca")}
    np.testing.assert_allclose(late["tca"].get_xdata(), [0.2, 0.5])
    np.testing.assert_allclose(late["tca"].get_ydata(), [0.8, 0.9])
    assert texts(figures[0].axes[0]) == ["tca", "full"]  # at their ends


def test_at_most_six_curves(figures):
    names = ["zz", "quest", "snapkv", "keydiff", "streaming", "kvzip", "duoattention", "tca", "full", "tca"]
    plots.plot_accuracy({"late": [(name, 0.1 * i, 0.5) for i, name in enumerate(names)]}, "unused.png")
    shown = ["full", "tca", "duoattention", "kvzip", "keydiff", "snapkv"]  # those with a color of their own first
    assert list(lines_of(figures[0].axes[0])) == shown
    assert figures[0].get_suptitle().endswith(" (3 more methods in the file)")


LAYER = {"model": next(iter(CONFIGS)), "tokens": 131072, "kept": 0.2, "attention": "TCA 0.2", "backend": "triton"}
LAYERS = {"rows": [LAYER | {"full ms": 240.0, "total ms": 60.0, "selection ms": 5.0, "attention ms": 55.0}]}
CALL = {"model": next(iter(CONFIGS)), "tokens": 131072, "kept": 0.2, "ms/token": 10.0}
WHOLE = {"rows": [CALL | {"attention": "full", "TTFT s": 10.0}, CALL | {"attention": "TCA", "TTFT s": 5.0}]}


def test_bars_have_the_same_parts():
    full, tca = results.latency_bars({"a": LAYERS, "b": WHOLE}, new_tokens=100).values()
    assert full == pytest.approx({"attention": 7.68, results.REST: 2.32, "decoding 100 tokens": 1.0})
    assert tca["selection"] == pytest.approx(0.16)
    rows = [CALL | {"attention": "TCA", "kept": 0.5, "TTFT s": 7.0, "fp8": x} for x in ("nothing", "kv", "both")]
    bars = results.latency_bars({"a": LAYERS, "b": {"rows": WHOLE["rows"] + rows}})
    assert [x.partition("TCA")[2] for x in bars] == ["", "", ", run 2", ", cache in fp8", ", weights and cache in fp8"]
    for stages in bars.values():  # one cannot be split: none is
        assert list(stages) == [results.READING, "decoding 256 tokens"]
    with pytest.raises(ValueError, match="a: no times of models or calls"):
        results.latency_bars({"a": LAYERS})
    with pytest.raises(ValueError, match="c: must be a result of"):
        results.latency_bars({"c": {"rows": []}})


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_files_without_results_are_named(text, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=str(path)):
        results.accuracy_panels(path)


# --- commands ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work(work):
    """With results."""
    (work / "methods.json").write_text(json.dumps(METHODS))
    stats = {"new_tokens": [4], "prefill_seconds": 1.0, "seconds_per_token": 0.1}
    (work / "call.json").write_text(json.dumps({"stats": stats}))
    return work


@pytest.mark.integration
@pytest.mark.parametrize(
    "args",
    [
        ("budgets", "profile", "--tokens=64"),
        ("selected", "model", "--file=text.txt", "--profile=profile", "--question=why?", "--around=fox"),
        ("latency", "call.json"),
        ("accuracy", checkpoint_folder("recall-tiny") / "evaluation.json"),
    ],
    ids=lambda args: args[0],
)
@pytest.mark.usefixtures("in_work")
def test_commands_write_pictures(args, tmp_path):
    path = tmp_path / "new" / "picture.png"
    result = run(*args, "--out", path)
    assert (result.exit_code, result.stdout) == (0, f"Picture: {path}\n"), result.output
    image = imread(path)[..., :3]
    assert min(edge.min() for edge in (image[:2], image[-2:], image[:, :2], image[:, -2:])) == 1  # an empty border


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("selected", "model", "--file=text.txt", "--around=cat"), r"--around 'cat': these words are not in the text"),
        (("latency", "text.txt"), r"text.txt is not valid JSON"),
        (("selected", "model", "--file=text.txt", "--start=999"), r"^--start 999: must lie in \[0, "),
        (("selected", "missing", "--file=missing", "--out=new/map.jpg"), r"^--out new/map.jpg: pictures are PNG files"),
        (("accuracy", "methods.json", "--protocol=early"), r"methods.json: holds no accuracy of methods under"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("in_work")
def test_errors_of_pictures(args, message):
    assert re.search(message, error(*args))
