"""One attention layer's prefill under TCA (selection and attention) against cuDNN full attention, causal, same inputs.

tca-jax bench attention                                     # the committed table, a few minutes on one GPU
tca-jax bench attention --lengths 32768 --models llama3.1-8b --block-shares 0.2 --repeats 3
tca-jax bench attention --lengths 131072 --models llama3.1-8b --block-shares 0.05:0.25   # prefill's and the cache's
tca-jax bench attention --lengths 131072 --models llama3.1-8b --block-shares 0.05:0.25 --fetching 1  # of 8 heads
tca-jax bench attention --lengths 131072 --methods xattention --methods minference --attended 0.18   # and other methods
tca-jax bench attention --lengths 131072 --mesh 1x4         # the layer's heads on four devices
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import Mesh
from jaxtyping import Array
from matplotlib.figure import Figure

import tca_jax
from tca_jax.cli.options import MeshOption
from tca_jax.engine.mesh import CACHES, ROWS, HeadShards, heads_of, mean_of_devices, mesh_entry, parse_mesh
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.common import (
    CHECKED_TOKENS,
    Layer,
    agreement,
    attention_inputs,
    check_sizes,
    find_layers,
    full_attention,
    group_rows,
    plot_line,
    print_row,
    tca_config,
    time_alternating,
    token_axis,
    write_results,
)
from tca_jax.lab.benchmarks.fetching import FETCH_STAGES, OneHead
from tca_jax.lab.benchmarks.layer_mesh import (
    INPUTS,
    SEQUENCES,
    check_layer,
    describe_layer_mesh,
    heads_over,
    inputs_over,
    program_over,
)
from tca_jax.lab.benchmarks.options import (
    RESULTS,
    LengthsOption,
    ModelsOption,
    NameOption,
    OutOption,
    RepeatsOption,
    WindowOption,
)
from tca_jax.lab.benchmarks.prefill_methods import Wanted, check_attended, describe_methods, measure_methods
from tca_jax.lab.benchmarks.shares import (
    BlockSharesOption,
    FetchingOption,
    Share,
    check_fetching,
    check_shares,
    describe_config,
    describe_fetching,
    with_fetching,
)
from tca_jax.lab.plots import figures
from tca_jax.methods.base import Heads, Method, last_queries, per_head, selection_for_prefill
from tca_jax.methods.pairs import causal_pairs
from tca_jax.methods.regions import Regions, Selected, Selection
from tca_jax.methods.selection import PromptScores, row_budgets
from tca_jax.methods.tca import TCACache
from tca_jax.methods.tca_prefill import TCAPrefill
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.backends import can_run, resolve_backend
from tca_jax.pallas_kernels.observation_scores import observation_scores
from tca_jax.pallas_kernels.reserve_tokens import reserve_tokens
from tca_jax.pallas_kernels.token_scores import token_scores

#: Stages of a prefill in their order, and all of the selection as one program.
STAGES = (
    "selection in all",
    "token scores",
    "observation scores",
    "reserve",
    "budgets",
    "select",
    "select for prefill",
    "attention",
)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A layer's prefill as a model runs it under TCA, whole and in stages.

    Attributes:
        policy: What the cache keeps and the prompt's queries attend to.
        backend: Of attention; selection runs on it too where it has the kernels.
        mesh: Devices that share the layer; None for one. Functions below are then traced for each of them.
        shards: How its KV heads are dealt out to them.
    """

    policy: TCACache
    backend: str
    mesh: Mesh | None = None
    shards: HeadShards | None = None

    @classmethod
    def create(
        cls, layer: Layer, share: Share, backend: str, config: tca_jax.TCAConfig, mesh: Mesh | None = None
    ) -> Prefill:
        """The prefill of a layer whose ranked blocks keep a share."""
        policy = share.method(config, layer.kv_heads).cache
        assert isinstance(policy, TCACache)
        return cls(policy, backend, mesh, heads_over(mesh, policy, layer.kv_heads))

    @property
    def method(self) -> Method:
        """The method of the policy."""
        return Method("tca", TCAPrefill(self.policy), self.policy)

    @property
    def selecting(self) -> np.ndarray:
        """Which KV heads attend to what they select, in the order in which they lie."""
        kv_heads = self.policy.num_heads(0)
        selects = self.policy.reads(0, kv_heads, "sparse")
        return selects if self.shards is None else selects[list(self.shards.order[0])]

    def program(self, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any = CACHES) -> Callable[..., Any]:
        """One of the functions below, or a stage of theirs, as a program; `inputs` say how its arguments lie."""
        return program_over(self.mesh, function, inputs, outputs)

    @property
    def whole(self) -> Callable[..., Any]:
        """The program of `run`."""
        return self.program(self.run, INPUTS, (SEQUENCES, CACHES))

    def run(self, q: Array, k: Array, v: Array, n: Array) -> tuple[Array, Selected]:
        """The whole layer: its output, and what the cache keeps."""
        selected = self.select(q, k, v, n)
        return self.attend(q, k, v, n, selected[-1]), selected[0]

    def select(self, q: Array, k: Array, v: Array, n: Array) -> tuple[Selected, ...]:
        """All of the selection, up to filled pools: the cache's, and that of the prompt's queries if it is another."""
        queries = last_queries(q, n, self.policy.num_queries)
        selection = self.policy.select(0, self.heads(k), queries, k, v, n, resolve_backend(self.backend))
        cached = self.fill(selection, k, v)
        readable = self.fill_for_prefill(selection, cached, k, v)
        return (cached,) if readable is cached else (cached, readable)

    def attend(self, q: Array, k: Array, v: Array, n: Array, selected: Selected) -> Array:
        """The attention alone."""
        return self.method.prefill.attend(0, self.heads(k), q, k, v, n, selected, resolve_backend(self.backend)).out

    def area(self, q: Array, k: Array, v: Array, n: Array, selected: Selected) -> Array:
        """Share of each prompt's pairs that the attention takes, mean over the layer's heads."""
        attended = self.method.prefill.attend(0, self.heads(k), q, k, v, n, selected, resolve_backend(self.backend))
        return mean_of_devices(attended.pairs / causal_pairs(n), self.shards)

    def heads(self, k: Array) -> Heads:
        """The KV heads that a program sees."""
        return heads_of(self.shards, 0, k.shape[2])

    def fill(self, selection: Selection, k: Array, v: Array) -> Selected:
        """The cache's selection in its pool."""
        (batch, tokens, *_), heads = k.shape, self.heads(k)
        capacities = per_head(self.policy.capacities(0, tokens), heads.of_model, "capacities")
        regions = Regions.plan(batch, heads.widest(capacities), self.policy.block_size)
        return regions.fill(selection, k, v, block_size=self.policy.block_size, backend=resolve_backend(self.backend))

    def fill_for_prefill(self, selection: Selection, cached: Selected, k: Array, v: Array) -> Selected:
        """The selection of the prompt's queries in a pool of its own, or `cached` where it is the same."""
        readable = selection_for_prefill(
            self.method, 0, self.heads(k), selection, cached, k, v, resolve_backend(self.backend)
        )
        assert readable is not None
        return readable

    def stages(self, q: Array, k: Array, v: Array, n: Array) -> dict[str, Callable[[], Any]]:
        """Calls of the stages, each a jitted program, by what they do; without those that have nothing to do here."""
        config, kernels = self.policy.config, resolve_backend(self.backend)
        calls: dict[str, Callable[[], Any]] = {}

        def add(name: str, function: Callable[..., Any], *args: Any, lie: Sequence[Any], result: Any = CACHES) -> Any:
            calls[name] = functools.partial(self.program(function, lie, result), *args)
            return calls[name]()

        last = functools.partial(last_queries, count=self.policy.num_queries)
        queries = self.program(last, (SEQUENCES, ROWS), SEQUENCES)(q, n)
        score = functools.partial(token_scores, block_size=config.block_size, backend=kernels)
        newest = self.program(lambda queries: queries[:, -1], (SEQUENCES,))(queries)
        scores = PromptScores(add("token scores", score, newest, k, n, lie=(CACHES, SEQUENCES, ROWS)), None)
        if config.reserve_tokens:
            observe = functools.partial(observation_scores, spread=config.spread, backend=kernels)
            observed = add("observation scores", observe, queries, k, n, lie=(SEQUENCES, SEQUENCES, ROWS))
            choose = functools.partial(reserve_tokens, reserve=config.reserve_tokens, backend=kernels)
            ranked_tokens = config.num_ranked_blocks(n) * config.block_size
            scores = scores._replace(reserved=add("reserve", choose, observed, ranked_tokens, lie=(CACHES, ROWS)))
        selection = add("budgets", self._budget, scores, n, lie=(CACHES, ROWS))
        filling = CACHES, CACHES, SEQUENCES, SEQUENCES
        selected = add("select", self.fill, selection, k, v, lie=filling[1:])
        if selection.prefill_budgets is not None:
            selected = add("select for prefill", self.fill_for_prefill, selection, selected, k, v, lie=filling)
        add("selection in all", self.select, q, k, v, n, lie=INPUTS)
        add("attention", self.attend, q, k, v, n, selected, lie=(*INPUTS, CACHES), result=SEQUENCES)
        return calls

    def _budget(self, scores: PromptScores, n: Array) -> Selection:
        """Budgets of both rows, as `select_by_candidates` makes them of the scores."""
        heads = heads_of(self.shards, 0, scores.scored.scores.shape[1])
        rows, prefill_rows = self.policy.rows(0, heads.of_model), self.policy.prefill_rows(0, heads.of_model)
        budgets = row_budgets(scores, jnp.asarray(heads.of(rows)), n, self.policy.config)
        if prefill_rows is None:
            return Selection(scores.ranking, budgets)
        prefill = row_budgets(scores, jnp.asarray(heads.of(prefill_rows)), n, self.policy.config)
        return Selection(scores.ranking, jnp.maximum(budgets, prefill), prefill)


def measure(
    layer: Layer,
    length: int,
    settings: Sequence[tuple[str, Share]],
    config: tca_jax.TCAConfig,
    repeats: int,
    mesh: Mesh | None = None,
) -> list[dict[str, Any]]:
    """A row for each setting, a backend and a kept share; all take turns with full attention on the same inputs."""
    inputs = inputs_over(mesh, layer, length, seed=length)
    full = program_over(mesh, full_attention, INPUTS[:3], SEQUENCES)
    calls: dict[Any, Callable[[], Any]] = {"full": lambda: full(*inputs[:3])}
    rows: dict[tuple[str, Share], dict[str, Any]] = {}
    fetched = any(share.fetching for _, share in settings)
    for backend, share in settings:
        error = _check(layer, share, backend, config, min(length, CHECKED_TOKENS), mesh)
        prefill = Prefill.create(layer, share, backend, config, mesh)
        calls[backend, share, "TCA"] = functools.partial(prefill.whole, *inputs)
        stages = prefill.stages(*inputs)
        calls |= {(backend, share, name): call for name, call in stages.items()}
        if share.fetching and (backend, FETCH_STAGES[0]) not in calls:
            parts = OneHead(layer, backend, config, mesh).stages(*inputs)
            calls |= {(backend, name): call for name, call in parts.items()}
        selected = stages["selection in all"]()
        area = prefill.program(prefill.area, (*INPUTS, CACHES), ROWS)(*inputs, selected[-1])
        rows[backend, share] = {
            "model": layer.name,
            **mesh_entry(mesh),
            "tokens": length,
            "backend": backend,
            "share": share.cell,
            **({"fetching": share.fetching} if fetched else {}),
            "kept": _kept(selected[0], length, config),
            "kept in prefill": _kept(selected[-1], length, config, prefill.selecting) or "",
            "area": float(np.asarray(area).mean()),
            "error": error,
        }
    seconds = time_alternating(calls, repeats)
    flops = 4 * layer.head_dim * layer.heads * inputs[0].shape[0] * length**2 / 2
    for setting, row in rows.items():
        times = {name: seconds[*setting, name] for name in ("TCA", *STAGES) if (*setting, name) in seconds}
        row |= {"full ms": 1e3 * seconds["full"], "speed-up": seconds["full"] / times["TCA"]}
        row |= {f"{name} ms": 1e3 * times[name] if name in times else "" for name in ("TCA", *STAGES)}
        if fetched:
            row |= _fetching_columns(setting, seconds)
        row["TFLOP/s on area"] = flops * row["area"] / times["attention"] / 1e12
        row["full TFLOP/s"] = flops / seconds["full"] / 1e12
        row["error"] = row.pop("error")
    return list(rows.values())


def _fetching_columns(setting: tuple[str, Share], seconds: dict[Any, float]) -> dict[str, Any]:
    """How much longer a layer takes than where no head fetches, and the parts of a head that does."""
    backend, share = setting
    alone = seconds.get((backend, dataclasses.replace(share, fetching=0), "TCA"))
    parts = {name: 1e3 * seconds[backend, name] if share.fetching else "" for name in FETCH_STAGES}
    return {
        "over fetching 0": "" if alone is None else seconds[backend, share, "TCA"] / alone,
        **{f"{name} ms": value for name, value in parts.items()},
    }


def _kept(selected: Selected, length: int, config: tca_jax.TCAConfig, heads: np.ndarray | EllipsisType = ...) -> float:
    """Share of the prompt's tokens that lie in a pool or the window, mean over some heads; 0 for none."""
    lengths = np.asarray(selected.pool.lengths)[:, heads]
    return float(lengths.mean() + config.window) / length if lengths.size else 0.0


@functools.cache
def _check(
    layer: Layer, share: Share, backend: str, config: tca_jax.TCAConfig, length: int, mesh: Mesh | None
) -> float:
    """Relative error against the XLA oracle on fresh inputs; heads that fetch are compared by their parts."""
    if share.fetching:
        error = OneHead(layer, backend, config, mesh).error(length)
        return max(error, _check(layer, dataclasses.replace(share, fetching=0), backend, config, length, mesh))
    return agreement(backend, *(_output(layer, share, name, config, length, mesh) for name in (backend, "xla")))


@functools.cache
def _output(
    layer: Layer, share: Share, backend: str, config: tca_jax.TCAConfig, length: int, mesh: Mesh | None
) -> Array:
    prefill, inputs = Prefill.create(layer, share, backend, config, mesh), inputs_over(mesh, layer, length, seed=1)
    return prefill.whole(*inputs)[0]


def _declines(layer: Layer, backend: str, fetching: int, config: tca_jax.TCAConfig, mesh: Mesh | None) -> str | None:
    """Why the kernels of a backend do not take a layer, of whose heads some fetch, or None."""
    length = config.window + config.block_size
    inputs = jax.eval_shape(lambda: attention_inputs(layer, length, 0, axis_size(mesh, DATA)))
    try:
        jax.eval_shape(Prefill.create(layer, Share(0.1, fetching=fetching), backend, config, mesh).whole, *inputs)
    except NotImplementedError as error:
        return str(error)
    return None


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed-up over full attention by prompt length: a panel a model, a colour a share, a stroke a backend."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(5.5 * len(models), 4.5), dpi=150, layout="constrained")
    for axes, model in zip(np.atleast_1d(figure.subplots(1, len(models), sharey=True)), models, strict=True):
        named = ({**row, "drawn": _drawn(row)} for row in rows if row["model"] == model)
        lines = group_rows(named, "drawn", "backend")
        for (drawn, backend), line in lines.items():
            plot_line(axes, line, "speed-up", f"{drawn}, {backend}", (drawn, backend), lines)
        axes.axhline(1, color="black", linewidth=1, zorder=1)
        token_axis(axes, [row["tokens"] for row in rows], "prompt tokens")
        axes.set_title(model)
        axes.legend(fontsize=8)
    figures.label_lone_points(figure.axes, "{:.3g}".format)
    figure.axes[0].set_ylabel("times as fast as full attention")
    figure.suptitle("One attention layer's prefill, selection included")
    figures.write(figure, path)


def _drawn(row: dict[str, Any]) -> str:
    """What a line of the plot has, in words."""
    share = dataclasses.replace(Share.parse(row["share"]), fetching=row.get("fetching", 0))
    return f"{share.percent} of ranked blocks{share.fetching_suffix}"


def describe(
    config: tca_jax.TCAConfig, repeats: int, mesh: Mesh | None = None, fetching: Sequence[int] | None = None
) -> str:
    """What the columns mean."""
    observed = (
        f" and which the last {config.observation} queries choose, spread over {config.spread} tokens"
        if config.reserve_tokens
        else ""
    )
    text = (
        f"Times are medians over {repeats} rounds that alternate with the baseline in one process: full causal "
        "attention on the same inputs, by cuDNN on an NVIDIA GPU. TCA has budgets of a given `share` "
        f"{describe_config(config)}{observed}. `kept` is the share of the prompt's tokens that cache and window hold, "
        "`kept in prefill` those that queries of heads which select can attend to; `area` the query-key pairs that are "
        "attended to over those of full attention. `TCA ms` is the whole pipeline in one program, `selection in all "
        "ms` all of it up to filled pools in one program; the other columns are its stages, each a program of its own. "
        "`error` is relative to the XLA oracle."
    )
    if fetched := describe_fetching(config, fetching):
        text += (
            f"{fetched} `over fetching 0` is `TCA ms` over that without them; one head's `estimate` is that of its "
            "blocks' attention, its `lists` the same and what is made of it, its `fetch attention` what follows, each "
            "for one KV head alone."
        )
    return text + describe_layer_mesh(mesh, "a prompt for each on data; `TFLOP/s` are of all together")


def main(
    lengths: LengthsOption = None,
    models: ModelsOption = None,
    shares: BlockSharesOption = None,
    fetching: FetchingOption = None,
    backend: Annotated[list[str] | None, typer.Option(help="Prefill backends.", show_default="all kernels")] = None,
    window: WindowOption = tca_jax.TCAConfig.window,
    reserve: Annotated[
        int | None, typer.Option(help="Tokens of the reserve.", show_default="an eighth of the window", min=0)
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help="Methods beside TCA: minference, flexprefill, xattention.")
    ] = None,
    attended: Annotated[float, typer.Option(help="Share of all pairs that they attend to.")] = 0.18,
    mesh: MeshOption = None,
    repeats: RepeatsOption = 5,
    out: OutOption = RESULTS,
    name: NameOption = "attention",
) -> None:
    """Time one layer's prefill, selection included, against full attention.

    Example: [bold]tca-jax bench attention --lengths 32768 --block-shares 0.2[/]
    """
    lengths = lengths or [8192, 32768, 131072]
    shares, backends = shares or [Share(0.1), Share(0.155), Share(0.4)], backend or prefill_kernels()
    layers, config = find_layers(models), tca_config(window, reserve)
    check_shares(shares)
    tested = with_fetching(shares, fetching)
    check_attended(attended)
    wanted = [Wanted.parse(text) for text in methods or ()]
    devices = None if mesh is None else parse_mesh(mesh, "--mesh")
    for layer in layers:
        check_layer(devices, layer)
        check_fetching(fetching, layer.kv_heads, f"a layer of {layer.name}")
    check_sizes(lengths, config, backends, out)
    settings, most = {}, max(fetching or [0])
    for layer in layers:
        declined = {name: reason for name in backends if (reason := _declines(layer, name, most, config, devices))}
        if declined and backend:
            raise UserError("; ".join(f"--backend {name}: {reason}" for name, reason in declined.items()))
        settings[layer] = list(itertools.product([name for name in backends if name not in declined], tested))
    rows = []
    for layer, length in itertools.product(layers, lengths):
        for row in measure(layer, length, settings[layer], config, repeats, devices):
            rows.append(row)
            print_row(row)
    places = itertools.product(layers, lengths) if wanted else ()
    others = [measure_methods(*place, wanted, attended, repeats, devices) for place in places]
    more = {"Other methods": list(itertools.chain(*others))} if wanted else {}
    note = describe(config, repeats, devices, fetching) + (f" {describe_methods(attended)}" if wanted else "")
    write_results(name, "Prefill attention of one layer against full attention", rows, out, note, more)
    plot(rows, out / f"{name}.png")


def prefill_kernels() -> list[str]:
    """Backends whose prefill kernels this device runs, best first; the oracle where there is none."""
    return [name for name in ("mosaic", "triton") if can_run(name)] or ["xla"]
