"""References, then the layouts one after the other on warm worker processes; rows and dumps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.parity.cases import (
    CUTS,
    FAMILIES,
    Cut,
    Recipe,
    Role,
    add_past,
    add_values,
    make_batch,
    make_state,
    orders_of,
)
from benchmarks.parity.dumps import EXACT, Dumps, run_name, single_name
from benchmarks.parity.forced_routes import force
from benchmarks.parity.layouts import Axes, critic_cells, divides, in_turns
from benchmarks.parity.measure import Result, Row, measure
from benchmarks.parity.reference import (
    COLUMNS,
    NearKinkError,
    make_model,
    run_in_float32,
    run_reference,
)
from benchmarks.parity.rounding import renumbered
from benchmarks.parity.sharded import assemble, run_on_rank

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from dist_pool import DistPool, JobError

LAYOUT_TIMEOUT_S = 600.0
NUM_DRAWS = 8  # of the noise of a case, at most


@dataclass(frozen=True)
class Case:
    """A family in a role, with its inputs and the references of every cut."""

    family: str
    role: Role
    state: dict[str, Tensor]
    batch: dict[str, Tensor]
    references: dict[str, tuple[Result, list[Result]]]  # cut -> float64, draws of float32

    @property
    def name(self) -> str:
        return self.family if self.role == "actor" else f"{self.family} (critic)"


def make_case(
    family: str,
    recipe: Recipe,
    cuts: Sequence[Cut] = CUTS,
    role: Role = "actor",
    draw: int = 0,
    routes: Tensor | None = None,
) -> Case:
    """Runs the references, in this process. Noise that rounding could decide is drawn again: `draw`
    is its number. `routes`: [T, layers with experts, top-k], experts that tokens must
    meet; -1: any.
    """
    hf_config = FAMILIES[family]
    state = make_state(family, role)
    batch = make_batch()
    with torch.no_grad():
        model = make_model(hf_config, state, torch.float64, role)
        if routes is not None:
            batch["routes"] = routes
            force(model, routes, batch["offsets"])
        columns = COLUMNS[role](model, batch, range(batch["offsets"].numel() - 1), recipe)
    is_actor = role == "actor"
    batch = (
        add_past(batch, columns["log_probs"], draw)
        if is_actor
        else add_values(batch, columns["values"], draw)
    )
    try:
        exact = [
            run_reference(hf_config, state, batch, cut, recipe, torch.float64, role) for cut in cuts
        ]
        float32 = [run_in_float32(hf_config, state, batch, cut, recipe, role) for cut in cuts]
    except NearKinkError:
        if draw + 1 == NUM_DRAWS:
            raise
        return make_case(family, recipe, cuts, role, draw + 1, routes)
    names = [cut.name for cut in cuts]
    return Case(
        family, role, state, batch, dict(zip(names, zip(exact, float32, strict=True), strict=True))
    )


def run_cell(
    pool: DistPool,
    case: Case,
    axes: Axes,
    recipe: Recipe,
    cuts: Sequence[Cut] = CUTS,
    job: Callable[..., Any] = run_on_rank,
    **arguments: Any,
) -> dict[str, Result]:
    """cut name -> the result of one family in one layout. Raises JobError. `arguments`: more of
    them for `job`.
    """
    results = pool.run(
        job,
        tp=axes.tp,
        pp=axes.pp,
        dp=axes.dp,
        cp=axes.cp,
        vpp=axes.vpp,
        sequence_parallel=axes.sequence_parallel,
        ep=axes.ep,
        etp=axes.etp,
        first_layers=axes.first_layers,
        chunk_layers=axes.chunk_layers,
        timeout_s=LAYOUT_TIMEOUT_S,
        hf_config=FAMILIES[case.family],
        state=case.state,
        batch=case.batch,
        cuts=list(cuts),
        recipe=recipe,
        megatron=replace(axes.megatron, **recipe.router_terms),
        role=case.role,
        **arguments,
    )
    return {
        cut.name: assemble(
            [rank[i] for rank in results],
            FAMILIES[case.family],
            case.batch["offsets"],
            axes,
            case.role,
        )
        for i, cut in enumerate(cuts)
    }


def rows_of(case: Case, axes: Axes, *runs: dict[str, Result]) -> list[Row]:
    """The figures of what `run_cell` returned, of the cuts that the last call had."""
    mask = case.batch["response_mask"]
    rows = []
    for cut in runs[-1]:
        exact, draws = case.references[cut]
        results = [run[cut] for run in runs]
        rows += measure(
            case.family, axes.name, cut, case.state, mask, exact, draws, results, case.role
        )
    return rows


def settle(
    pool: DistPool,
    case: Case,
    axes: Axes,
    recipe: Recipe,
    cuts: Sequence[Cut] = CUTS,
    **arguments: Any,
) -> tuple[list[Row], list[dict[str, Result]]]:
    """The figures of one family in one layout, and the runs that they are of: more than one where a
    figure was over the bar, by cut (see `measure`). Raises JobError.
    """
    runs = [run_cell(pool, case, axes, recipe, cuts, **arguments)]
    rows = rows_of(case, axes, *runs)
    if missed := {row.cut for row in rows if not row.ok}:
        again = [cut for cut in cuts if cut.name in missed]
        for order in orders_of(FAMILIES[case.family])[1:]:
            turned = replace(case, state=renumbered(case.state, order))
            found = run_cell(pool, turned, axes, recipe, again, **arguments)
            runs.append({cut: renumbered(result, order.argsort()) for cut, result in found.items()})
        rows = [row for row in rows if row.cut not in missed] + rows_of(case, axes, *runs)
    return rows, runs


@dataclass(frozen=True)
class Failure:
    """A cell that ended in an error."""

    family: str
    layout: str
    error: str


def run_parity(
    families: Sequence[str],
    layouts: Sequence[Axes],
    roles: Sequence[Role],
    recipe: Recipe,
    dumps: Dumps,
    report: Callable[[str], None],
    device: Literal["cpu", "cuda"] = "cpu",
    is_in_turns: bool = False,
) -> tuple[list[Row], list[Failure]]:
    """The actor of every family in every layout that it can be split into, and the critic
    in `critic_cells`.

    Tensors go to `dumps`, one line a cell to `report`. `is_in_turns`: of each layout one family
    (see `in_turns`).
    """
    configs = {family: FAMILIES[family] for family in families}
    cells = _cells(configs, layouts, roles, is_in_turns)
    wanted = {(family, role) for family, role, _ in cells}
    pairs = [(family, role) for family in families for role in roles if (family, role) in wanted]
    cases = [_reference(family, role, recipe, dumps, report) for family, role in pairs]
    rows: list[Row] = []
    failures: list[Failure] = []
    done: dict[str, dict[Role, list[str]]] = {
        axes.name: {"actor": [], "critic": []} for axes in layouts
    }
    pool = DistPool(device)
    try:
        for axes in sorted(layouts, key=lambda axes: axes.num_ranks):
            for case in cases:
                if (case.family, case.role, axes.name) not in cells:
                    continue
                start = time.monotonic()
                try:
                    found, runs = settle(pool, case, axes, recipe)
                except JobError as error:
                    failures.append(Failure(case.name, axes.name, str(error)))
                    report(f"{axes.name}, {case.name}: FAILED\n{error}")
                    continue
                for number, results in enumerate(runs):
                    for cut, result in results.items():
                        dumps.result(
                            case.family, case.role, cut, run_name(axes.name, number), result
                        )
                misses = [row.quantity for row in found if not row.ok]
                state = f"over the bar: {', '.join(misses)}" if misses else "ok"
                state += f" in {len(runs)} orders" if len(runs) > 1 else ""
                report(f"{axes.name}, {case.name}: {time.monotonic() - start:.1f} s, {state}")
                rows += found
                done[axes.name][case.role].append(case.family)
    finally:
        pool.close()
    dumps.describe(
        {
            "families": configs,
            "layouts": {
                axes.name: {
                    **asdict(axes),
                    "families": done[axes.name]["actor"],
                    "critic_families": done[axes.name]["critic"],
                }
                for axes in layouts
            },
            "cuts": {cut.name: asdict(cut) for cut in CUTS},
            "recipe": asdict(recipe),
            "failures": [asdict(failure) for failure in failures],
        }
    )
    return rows, failures


def _cells(
    configs: dict[str, Any], layouts: Sequence[Axes], roles: Sequence[Role], is_in_turns: bool
) -> set[tuple[str, Role, str]]:
    """(family, role, name of a layout) of each cell."""
    if is_in_turns:
        fitting = {(family, axes.name) for family, axes in in_turns(layouts, configs)}
    else:
        fitting = {
            (family, axes.name)
            for family, one in configs.items()
            for axes in layouts
            if divides(axes, one)
        }
    of: dict[Role, set[tuple[str, str]]] = {
        "actor": fitting,
        "critic": fitting & critic_cells(layouts, configs),
    }
    return {(family, role, layout) for role in roles for family, layout in of[role]}


def _reference(
    family: str, role: Role, recipe: Recipe, dumps: Dumps, report: Callable[[str], None]
) -> Case:
    start = time.monotonic()
    case = make_case(family, recipe, role=role)
    dumps.inputs(family, role, case.state, case.batch)
    for cut, (exact, draws) in case.references.items():
        dumps.result(family, role, cut, EXACT, exact)
        for number, draw in enumerate(draws):
            dumps.result(family, role, cut, single_name(number), draw)
    report(f"{case.name}: reference in {time.monotonic() - start:.1f} s")
    return case
