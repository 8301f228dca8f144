"""Plots: what they show, and that nothing of it is cut off."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from tca_jax import plots
from tca_jax.loading import checkpoint_folder
from tca_jax.plots import results
from tca_jax.plots.attention import cumulative_shares, mean_attention
from tca_jax.plots.selected import lay_out

NEEDLE_RGB = np.array([0xD5, 0x5E, 0x00]) / 255


def make_share(layers: int = 6, heads: int = 2) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.02, 1, (layers, heads))


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """Figures in place of the files they would be written to."""
    drawn: list[Figure] = []
    monkeypatch.setattr(plots.figures, "write", lambda figure, path: drawn.append(figure) or Path(path))
    return drawn


def assert_nothing_touches_the_border(path) -> None:
    image = imread(path)[..., :3]
    for edge in (image[:2], image[-2:], image[:, :2], image[:, -2:]):
        assert edge.min() == 1.0


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (6, 2), (32, 8), (80, 8)])
def test_the_heat_map_is_a_png_with_nothing_cut_off(tmp_path, layers, heads):
    name = "somebody/a-model-with_a_long_$name$-and-what-it-was-tuned-for-" * 2
    path = plots.plot_kept_share(make_share(layers, heads), 4096, name, tmp_path / "new" / "map.png")
    assert path == tmp_path / "new" / "map.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert_nothing_touches_the_border(path)


def test_the_heat_map_shows_the_kept_share_of_every_head(figures):
    share = make_share()
    plots.plot_kept_share(share, 4096, "tiny", "unused.png")
    axes, bar = figures[0].axes
    np.testing.assert_array_equal(axes.images[0].get_array(), share.T)
    assert axes.images[0].get_clim() == (0, 1)
    labels = {text.get_position(): text.get_text() for text in axes.texts}
    assert labels == {(i, j): f"{100 * share[i, j]:.0f}%" for i, j in np.ndindex(6, 2)}
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("layer", "KV head", "tokens kept")
    assert axes.get_title() == f"KV cache kept after 4,096 tokens: {share.mean():.1%} on average (tiny)"


def test_the_heat_map_of_what_a_prompt_attends_to_stands_beneath_that_of_the_cache(figures, tmp_path):
    share = make_share()
    plots.plot_kept_share(share, 4096, "tiny", "unused.png", prefill_share=share / 2)
    cache, prefill, *bars = figures[0].axes
    assert len(bars) == 2
    np.testing.assert_array_equal(cache.images[0].get_array(), share.T)
    np.testing.assert_array_equal(prefill.images[0].get_array(), share.T / 2)
    assert cache.get_title() == f"KV cache kept after 4,096 tokens: {share.mean():.1%} on average (tiny)"
    assert prefill.get_title() == f"Attended to while such a prompt is read: {share.mean() / 2:.1%} on average"
    assert cache.get_position().y0 > prefill.get_position().y0


def test_the_heat_map_of_worth_is_logarithmic_and_outlines_the_chosen_heads(figures):
    share, nats, chosen = (
        make_share(3, 2),
        np.array([[2.0, 0.0], [0.02, np.nan], [0.0005, 1e-6]]),
        np.zeros((3, 2), bool),
    )
    chosen[0, 0] = chosen[1, 1] = True
    worth = [plots.WorthMap("worth", nats, chosen), plots.WorthMap("unmeasured", nats * np.nan, chosen)]
    plots.plot_kept_share(share, 4096, "tiny", "unused.png", worth=worth)
    cache, worths, *bars = figures[0].axes
    assert (len(bars), worths.get_title(), bars[1].get_ylabel()) == (2, "worth", "nats")
    (image,) = worths.images
    scale = image.norm
    assert (scale.vmin, scale.vmax) == (2e-4, 2.0)
    np.testing.assert_allclose(np.diff(scale([0.02, 0.2, 2.0])), 1 / 4)
    shown = image.get_array()
    assert shown.mask.T.tolist() == [[False, False], [False, True], [False, False]]
    np.testing.assert_allclose(shown.compressed(), [2, 0.02, 0.0005, 2e-4, 2e-4])
    assert [patch.get_xy() for patch in worths.patches] == [pytest.approx(at) for at in ((-0.44, -0.42), (0.56, 0.58))]
    labels = {text.get_position(): text.get_text() for text in worths.texts}
    assert labels == {(0, 0): "2", (1, 0): "0.02", (2, 0): "5e-4"}
    assert not cache.patches


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (32, 8)])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0])
def test_heat_maps_of_worth_are_a_png_with_nothing_cut_off(tmp_path, layers, heads, scale):
    share = make_share(layers, heads)
    nats = (share * scale).astype(np.float32)
    worth = [plots.WorthMap("Worth of reading blocks", nats, share > 0.5)] * 2
    path = plots.plot_kept_share(share, 4096, "tiny", tmp_path / "m.png", prefill_share=share, worth=worth)
    assert_nothing_touches_the_border(path)


def test_numbers_are_left_out_where_they_would_not_fit(figures):
    plots.plot_kept_share(make_share(80, 8), 4096, "tiny", "unused.png")
    assert texts(figures[0].axes[0]) == []


def make_kept(layers: int, heads: int, num_tokens: int, *preferring: tuple[int, int], at: range) -> np.ndarray:
    """Each head holds every tenth token and its window, the `preferring` ones hold the tokens `at` too."""
    kept = np.zeros((layers, heads, num_tokens), bool)
    kept[..., ::10] = True
    kept[..., (num_tokens // 16 - 64 // 16) * 16 :] = True
    for head in preferring:
        kept[head][list(at)] = True
    return kept


def test_a_plot_of_kept_tokens_is_a_png_with_the_needle_marked_and_nothing_cut_off(tmp_path):
    tokens = ("The code of the harbor is 482913.\n$x$\t日" * 20)[:500]
    kept = make_kept(6, 2, 500, (1, 1), at=range(78, 111))
    path = plots.plot_kept_tokens(
        kept, tokens, (78, 111), "$a$ harbor", "a-model-" * 20, tmp_path / "new" / "demo.png", window_start=432
    )
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert_nothing_touches_the_border(path)
    marked = (np.abs(imread(path)[..., :3] - NEEDLE_RGB) < 0.01).all(axis=-1)
    assert marked.sum() > 500


def test_a_plot_of_kept_tokens_shows_what_heads_keep_of_the_prompt_and_of_the_needle(figures):
    kept = make_kept(2, 2, 500, (1, 0), at=range(100, 120))
    plots.plot_kept_tokens(kept, "x" * 500, (100, 120), "harbor", "tiny", "unused.png", block_size=16, window_start=432)
    heat_map, strip, zoom = figures[0].axes[:3]
    assert "'harbor'" in figures[0].get_suptitle()
    np.testing.assert_array_equal(heat_map.images[0].get_array(), kept.mean(axis=-1).T)
    shown = [kept[1, 0], kept[0, 0], kept[0, 1], kept[1, 1]]
    blocks = np.array([[row[i : i + 16].mean() for i in range(0, 500, 16)] for row in shown])
    np.testing.assert_allclose(strip.collections[0].get_array(), blocks)
    left, right = np.ceil(zoom.get_xlim()).astype(int)
    assert left < 100 < 120 < right
    np.testing.assert_array_equal(zoom.collections[0].get_array(), np.stack(shown)[:, left:right])
    (outline,) = zoom.patches
    assert (outline.get_x(), outline.get_width()) == (99.5, 20)
    assert texts(strip) == ["needle", "local window"]


def test_the_heads_that_prefer_the_needle_are_shown_and_the_one_that_does_least(figures):
    kept = make_kept(8, 1, 500, (7, 0), (2, 0), at=range(100, 120))
    kept[3, 0, 100:120] = False
    kept[5, 0, 101:105] = True
    plots.plot_kept_tokens(kept, "x" * 500, (100, 120), "harbor", "tiny", "unused.png", block_size=16, window_start=432)
    for axes in figures[0].axes[1:3]:
        rows = [label.get_text() for label in axes.get_yticklabels()]
        assert rows == [f"layer {i}, head 0" for i in (2, 7, 5, 0, 3)]


def test_the_text_of_the_needle_stands_under_its_tokens(figures):
    tokens = [*"x" * 200, *"key\n= 日7", "a-very-long-token", *"y" * 291]
    kept = make_kept(6, 2, 500, at=range(0))
    plots.plot_kept_tokens(kept, tokens, (200, 209), "key", "tiny", "unused.png", block_size=16, window_start=432)
    zoom = figures[0].axes[2]
    labels = {round(p): t.get_text() for p, t in zip(zoom.get_xticks(), zoom.get_xticklabels(), strict=True)}
    assert "".join(labels[p] for p in range(200, 208)) == "key↵=·□7"
    assert labels[208] == "a-very-long…"


def test_positions_stand_under_a_needle_too_long_for_its_text(figures):
    kept = make_kept(6, 2, 500, at=range(0))
    plots.plot_kept_tokens(kept, "x" * 500, (100, 300), "key", "tiny", "unused.png", block_size=16, window_start=432)
    assert figures[0].axes[2].get_xlabel() == "token position"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"needle_span": (10, 10)}, r"needle_span = \(10, 10\): must be a range inside the 500 tokens"),
        ({"needle_span": (490, 501)}, r"needle_span = \(490, 501\)"),
        ({"tokens": "x" * 499}, r"tokens has 499 entries: must have one for each of the 500 in kept"),
    ],
)
def test_a_plot_of_kept_tokens_of_wrong_arguments_is_refused(tmp_path, changes, message):
    kept = np.zeros((6, 2, 500), bool)
    arguments = {"tokens": "x" * 500, "needle_span": (10, 20), "needle_name": "key", "name": "tiny", **changes}
    with pytest.raises(ValueError, match=message):
        plots.plot_kept_tokens(kept, path=tmp_path / "demo.png", **arguments)
    assert not (tmp_path / "demo.png").exists()


def spread_tokens(count: int = 3000) -> list[str]:
    return ["ab ", "c\n", "日", "$x$", "\t"] * (count // 5)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (6, 4), (40, 8)])
def test_a_plot_of_selected_tokens_is_a_png_with_nothing_cut_off(tmp_path, layers, heads):
    tokens = spread_tokens()
    kept = make_kept(layers, heads, len(tokens), at=range(0))
    path = plots.plot_selected_tokens(kept, tokens, "a-model-" * 20, tmp_path / "new" / "s.png", window_start=2900)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert_nothing_touches_the_border(path)


def test_selected_tokens_are_shaded_by_the_heads_that_drop_something(figures):
    kept = make_kept(2, 2, 500, (1, 0), at=range(100, 120))
    kept[0, 0] = True  # dense: tells no token from another
    plots.plot_selected_tokens(kept, "x" * 500, "tiny", "unused.png", block_size=16, window_start=432)
    overview, page = figures[0].axes[:2]
    blocks = np.array([[row[i : i + 16].mean() for i in range(0, 500, 16)] for row in kept.reshape(4, 500)])
    np.testing.assert_allclose(overview.collections[0].get_array(), blocks)
    shades = page.collections[0].get_array().compressed()
    np.testing.assert_allclose(shades, kept.reshape(4, 500)[1:].mean(axis=0))
    assert "3 of 4 heads" in page.get_title()


def test_a_page_of_selected_tokens_begins_where_it_is_asked_to_and_shows_one_head(figures):
    kept = make_kept(2, 2, 500, (1, 0), at=range(100, 120))
    plots.plot_selected_tokens(kept, "x" * 500, "tiny", "unused.png", start=90, layer=1, head=0)
    page = figures[0].axes[1]
    np.testing.assert_allclose(page.collections[0].get_array().compressed(), kept[1, 0, 90:])
    assert "Tokens 90 to 499" in page.get_title()
    assert "layer 1, KV head 0" in page.get_title()


def test_a_page_breaks_lines_where_the_text_does_and_at_its_width():
    pieces, shown = lay_out(["ab\n", "c", "d" * 110, "e"])
    assert [(piece.line, piece.column, piece.text) for piece in pieces] == [
        (0, 0, "ab↵"),
        (1, 0, "c"),
        (2, 0, "d" * 110),
        (3, 0, "e"),
    ]
    assert shown == 4


def test_a_page_ends_with_a_whole_token():
    pieces, shown = lay_out(["x\n"] * 35 + ["y\nz\n", "w"])
    assert shown == 35
    assert {piece.token for piece in pieces} == set(range(35))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": "x" * 499}, r"tokens has 499 entries: must have one for each of the 500 in kept"),
        ({"start": 500}, r"start = 500: must lie in \[0, 499\]"),
        ({"layer": 6}, r"layer = 6: must lie in \[0, 5\]"),
        ({"head": -1}, r"head = -1: must lie in \[0, 1\]"),
    ],
)
def test_a_plot_of_selected_tokens_of_wrong_arguments_is_refused(tmp_path, changes, message):
    arguments = {"tokens": "x" * 500, "name": "tiny", **changes}
    with pytest.raises(ValueError, match=message):
        plots.plot_selected_tokens(np.zeros((6, 2, 500), bool), path=tmp_path / "s.png", **arguments)
    assert not (tmp_path / "s.png").exists()


def make_received(layers: int = 6, heads: int = 2, num_tokens: int = 2000) -> np.ndarray:
    received = np.random.default_rng(1).exponential(size=(layers, heads, num_tokens)).astype(np.float32)
    return received / received.sum(axis=-1, keepdims=True) * num_tokens


@pytest.mark.parametrize(("layers", "heads", "num_tokens"), [(1, 1, 16), (6, 2, 2000), (40, 8, 600)])
def test_a_plot_of_attention_is_a_png_with_nothing_cut_off(tmp_path, layers, heads, num_tokens):
    path = plots.plot_attention(make_received(layers, heads, num_tokens), "a-model-" * 20, tmp_path / "a.png")
    assert_nothing_touches_the_border(path)


def test_attention_is_the_mean_of_the_queries_that_see_a_key_without_the_window(figures):
    received = make_received(2, 2, 400)
    plots.plot_attention(received, "tiny", "unused.png", window=100)
    heat_map, curves = figures[0].axes[:2]
    mean = received / np.arange(400, 0, -1)
    np.testing.assert_allclose(heat_map.collections[0].get_array(), mean.reshape(4, 400)[:, :300])
    assert len(curves.lines) == 4 + 2  # a line a head, and two shares of the mass
    np.testing.assert_allclose(mean_attention(received), mean)


def test_cumulative_shares_count_the_tokens_of_the_most_mass_first():
    shares = cumulative_shares(np.array([[[1.0, 6.0, 0.0, 3.0]]]))
    np.testing.assert_allclose(shares[0, 0], [0.6, 0.9, 1.0, 1.0])


@pytest.mark.parametrize(
    ("tokens", "window", "message"),
    [(8, None, "received has 8 tokens: must have at least 16"), (32, 32, r"window = 32: must lie in \[0, 31\]")],
)
def test_a_plot_of_attention_of_wrong_arguments_is_refused(tmp_path, tokens, window, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_attention(make_received(1, 1, tokens), "tiny", tmp_path / "a.png", window=window)


LAYER = {"model": "llama3.1-8b", "tokens": 4096, "backend": "mosaic", "kept": 0.181, "full ms": 10.0, "TCA ms": 3.0}
LAYER |= {"scores ms": 0.1, "budgets ms": 0.2, "select ms": 0.3, "attention ms": 2.5}
MODEL = {"model": "llama3.1-8b", "tokens": 4096, "attention": "TCA 18%", "kept": 0.182, "TTFT s": 0.5, "ms/token": 5.0}
FULL = {**MODEL, "attention": "full", "kept": 1.0, "TTFT s": 0.9}


def test_bars_of_a_layer_are_its_selection_and_the_rest_of_one_program():
    bars = results.latency_bars({"a.json": {"rows": [LAYER, {**LAYER, "tokens": 1024}]}})
    full, tca = bars.values()
    assert full == {"attention": 0.01}
    assert tca == pytest.approx({"selection": 0.0006, "attention": 0.0024})
    (_, timed) = results.latency_bars({"a": {"rows": [{**LAYER, "selection in all ms": 0.5}]}}).values()
    assert timed == pytest.approx({"selection": 0.0005, "attention": 0.0025})


def test_bars_of_models_are_in_parts_where_their_layer_was_timed():
    records = {"a": {"rows": [LAYER]}, "b": {"rows": [FULL, MODEL, {**MODEL, "attention": "TCA 39%", "kept": 0.39}]}}
    full, tca, other = results.latency_bars(records, new_tokens=100).values()
    assert full == pytest.approx({"attention": 0.32, results.REST: 0.58, "decoding 100 tokens": 0.5})
    expected = {"selection": 32 * 0.0006, "attention": 32 * 0.0024, results.REST: 0.5 - 32 * 0.003}
    assert tca == pytest.approx({**expected, "decoding 100 tokens": 0.5})
    assert other == pytest.approx({"reading the prompt": 0.5, "decoding 100 tokens": 0.5})


def test_bars_of_a_call_are_reading_and_decoding():
    stats = {"new_tokens": [3, 10], "prefill_seconds": 2.0, "seconds_per_token": 0.1}
    assert results.latency_bars({"x.json": {"stats": stats}}) == {
        "x.json": {"reading the prompt": 2.0, "decoding": pytest.approx(1.0)}
    }


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({"x.json": {"rows": [{"tokens": 1}]}}, "x.json: must be a result of `tca-jax bench attention`"),
        ({"x.json": {"rows": [LAYER]}}, "tokens = 7: none of these results is of that prompt length"),
    ],
)
def test_other_results_are_no_bars(records, message):
    with pytest.raises(ValueError, match=message):
        results.latency_bars(records, tokens=7)


def test_a_plot_of_latency_has_a_bar_a_stage_and_says_all_figures(figures):
    bars = {"full": {"attention": 2.0, "rest": 1.0}, "tca": {"selection": 0.01, "attention": 0.5, "rest": 1.0}}
    plots.plot_latency(bars, "title", "unused.png")
    axes = figures[0].axes[0]
    widths = {drawn.get_label(): [bar.get_width() for bar in drawn] for drawn in axes.containers}
    assert widths == {"selection": [0, 0.01], "attention": [2, 0.5], "rest": [1, 1]}
    assert list(widths) == ["selection", "attention", "rest"]
    assert texts(axes)[-2:] == [" 3 s", " 1.51 s (selection 0.01)"]
    assert axes.get_xlabel() == "s"


def test_a_plot_of_latency_takes_the_unit_of_its_longest_bar(figures, tmp_path):
    plots.plot_latency({"a": {"x": 0.004}, "b": {"x": 0.0005}}, "title", "unused.png")
    assert figures[0].axes[0].get_xlabel() == "ms"
    assert texts(figures[0].axes[0])[-2:] == [" 4 ms", " 0.5 ms"]


@pytest.mark.parametrize("bars", [{}, {"a": {}}, {"a": {"x": -1.0}}, {"a": {"x": float("nan")}}])
def test_bars_without_times_are_refused(tmp_path, bars):
    with pytest.raises(ValueError, match="bars"):
        plots.plot_latency(bars, "title", tmp_path / "l.png")


PANELS = {"prefix": [("full", 1.0, 0.9), ("tca", 0.3, 0.8), ("tca", 0.1, 0.5)], "late": [("tca", 0.3, 0.7)]}


def test_a_plot_of_accuracy_joins_the_points_of_a_method_by_their_bytes(figures):
    plots.plot_accuracy(PANELS, "title", "unused.png")
    prefix, late = figures[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in prefix.lines}
    assert lines["tca"] == [[0.1, 0.5], [0.3, 0.8]]
    assert lines["full"] == [[1.0, 0.9]]
    assert [line.get_xydata().tolist() for line in late.lines] == [[[0.3, 0.7]]]
    assert (prefix.get_title(), late.get_title()) == ("prefix", "late")
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["full", "tca"]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_plots_of_accuracy_and_latency_are_pngs_with_nothing_cut_off(tmp_path, count):
    panels = {f"panel {i}": [(f"method {j}", j / 20, j / 20) for j in range(1, 15)] for i in range(count)}
    assert_nothing_touches_the_border(plots.plot_accuracy(panels, "title", tmp_path / "a.png"))
    bars = {f"a-model-of-a-long-name-{i}, 131,072 tokens": {"attention": 1.0, "$rest$": i / 50} for i in range(count)}
    assert_nothing_touches_the_border(plots.plot_latency(bars, "title", tmp_path / "l.png"))


@pytest.mark.parametrize("panels", [{}, {"a": []}, {"a": [("tca", -0.1, 0.5)]}, {"a": [("tca", 0.1, 50.0)]}])
def test_points_that_are_no_shares_are_refused(tmp_path, panels):
    with pytest.raises(ValueError, match="panels"):
        plots.plot_accuracy(panels, "title", tmp_path / "a.png")


def point(method, share=0.2, inside=0.55, late=0.5):
    measured = {"attended_share": share, "inside": inside, "inside_full": 0.5, "kv_share": share, "late": late}
    return {"method": method, "knob": "k=1", **measured}


MODELS = {
    "one": {"tokens": 8192, "points": [point("full", 1.0, 0.5, 1.0), point("tca", 0.4, 0.51), point("tca", late=None)]},
    "two": {"points": [point("tca"), point("streaming", inside=None), point("streaming", 0.1, 1.0, 0.0)]},
}


def test_a_plot_of_reading_joins_the_points_of_a_method_by_the_attended_share(figures):
    plots.plot_reading(MODELS, "unused.png")
    one, two = figures[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in one.lines}
    assert lines["tca"] == [[0.2, pytest.approx(0.1)], [0.4, pytest.approx(0.02)]]
    assert lines["full"] == [[1.0, 0.0]]
    assert two.lines[1].get_xydata().tolist() == [[0.1, 1.0]]
    assert (one.get_title(), two.get_title()) == ("one, 8,192 tokens", "two")
    assert (one.get_xscale(), one.get_yscale()) == ("log", "symlog")
    assert one.get_ylim()[0] < 0 < 1 < one.get_ylim()[1]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["full", "tca", "streaming"]
    figures[0].draw_without_rendering()
    assert "+10%" in [label.get_text() for label in one.get_yticklabels()]
    assert [label.get_text() for label in two.get_xticklabels()] == ["10%", "20%", "50%", "100%"]


def test_a_plot_of_keeping_joins_the_points_of_a_method_by_their_bytes(figures):
    plots.plot_keeping(MODELS, "unused.png")
    one, two = figures[0].axes
    assert {line.get_label(): line.get_xydata().tolist() for line in one.lines} == {
        "full": [[1.0, 1.0]],
        "tca": [[0.4, 0.5]],
    }
    assert {line.get_label(): line.get_xydata().tolist() for line in two.lines} == {
        "tca": [[0.2, 0.5]],
        "streaming": [[0.1, 0.0], [0.2, 0.5]],
    }


@pytest.mark.parametrize("count", [1, 2, 7])
def test_plots_of_reading_and_keeping_are_pngs_with_nothing_cut_off(tmp_path, count):
    points = [point(f"method {i}", share, 0.5 + 0.1 * i, i / 14) for i in range(14) for share in (0.1, 0.3)]
    models = {f"model {i}": {"tokens": 8192, "points": points} for i in range(count)}
    for plot in (plots.plot_reading, plots.plot_keeping):
        assert_nothing_touches_the_border(plot(models, tmp_path / "t.png"))


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({}, "models is empty"),
        ({"m": {"points": [point("tca", share=None)]}}, r"models\['m'\] has no point with (attended|kv)_share and"),
        ({"m": {"points": [point("tca", share=0.0)]}}, r"models\['m'\]: \w+_share = 0.0: must be a positive number"),
        ({"m": {"points": [point("tca", share="a")]}}, r"_share = 'a': must be a positive number"),
        ({"m": {"points": [point("tca", inside=float("nan"), late=50)]}}, r"inside = nan: must|late = 50: must lie in"),
    ],
)
@pytest.mark.parametrize("plot", [plots.plot_reading, plots.plot_keeping])
def test_points_that_cannot_be_drawn_are_refused(tmp_path, plot, models, message):
    with pytest.raises(ValueError, match=message):
        plot(models, tmp_path / "t.png")
    assert not (tmp_path / "t.png").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "holds no models"),
        ('{"models": {}}', "holds no models"),
        ('{"models": {"m": []}}', r"models\['m'\] must hold 'points'"),
        ('{"models": {"m": {"points": [{"knob": "x"}]}}}', r"models\['m'\] must hold 'points'"),
    ],
)
def test_models_are_read_from_a_file_that_has_them(tmp_path, text, message):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"models": MODELS}))
    assert results.model_points(path) == MODELS
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path}.*{message}"):
        results.model_points(path)


def test_accuracy_is_read_from_the_results_of_the_model_that_ships():
    panels = results.accuracy_panels(checkpoint_folder("recall-tiny") / "evaluation.json")
    assert list(panels) == ["prefix", "preamble", "late"]
    assert panels["late"][0][:2] == ("full", 1.0)
    assert all(0 <= right <= 1 for panel in panels.values() for *_, right in panel)


def test_accuracy_is_read_from_a_folder_of_results_over_the_tasks_that_all_methods_have(tmp_path):
    for method, task, length, score in [
        ("full", "a", 64, 90.0),
        ("full", "b", 64, 70.0),
        ("tca", "a", 64, 80.0),
        ("tca", "a", 128, 60.0),
    ]:
        path = tmp_path / "results" / method / f"{task}-{length}-late.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"method": method, "task": task, "length": length, "protocol": "late", "score": score}
        path.write_text(json.dumps({**record, "kv_cache_bytes": 10 * length, "full_kv_cache_bytes": 40 * length}))
    loss = {"method": "tca", "task": "loss", "length": 64, "protocol": "text", "score": 1.5}
    (tmp_path / "results" / "tca" / "loss-64-text.json").write_text(json.dumps(loss))
    (tmp_path / "results" / "tca" / ".b-64-late.1.json").write_text('{"method": ')  # of a run that was killed
    assert results.accuracy_panels(tmp_path) == {
        "late, 64 tokens": [("full", 0.25, 0.9), ("tca", 0.25, 0.8)],
        "late, 128 tokens": [("tca", 0.25, 0.6)],
    }


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[]", "holds a list"), ("{}", "no accuracy")]
)
def test_files_that_hold_no_results_are_named(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path}.*{message}"):
        results.accuracy_panels(path)


def test_plots_need_no_display_and_leave_pyplot_alone():
    code = "import sys; from tca_jax import plots; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
