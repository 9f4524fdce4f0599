"""All figures again, from the dumps alone: \
`python -m benchmarks.parity.recompute DUMPS [--against FILE]`.

numpy and the standard library only; it shares no code with what wrote the dumps. Exit code 1 when a
figure is over its bar, or differs from the one in the result file.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

BAR = 3.0
AGREEMENT = 1e-6  # relative, between two ways to sum
Arrays = dict[str, np.ndarray]


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """L2 norm of the difference over the L2 norm of y, in float64."""
    return float(np.sqrt(np.sum((x - y) ** 2)) / max(np.sqrt(np.sum(y**2)), 1e-300))


def farthest(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> float:
    return float(np.max(np.abs(x - y)[mask]))


def tensors_of(start: Arrays) -> dict[str, list[str]]:
    """Tensor of a row -> the arrays that it is made of: one, but for a critic's head."""
    head = ["score.weight", "score.bias"]
    parts = {name: [name] for name in sorted(start) if name not in head}
    return {**parts, "score": head} if head[0] in start else parts


def whole(arrays: Arrays, prefix: str, parts: list[str]) -> np.ndarray:
    return np.concatenate([arrays[prefix + part].ravel() for part in parts])


def own(errors: list[float]) -> float:
    """Float32's own error: the root mean square over the dumped draws of it."""
    return float(np.sqrt(np.mean(np.square(errors))))


def settled(runs: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """`figures` of each run of a layout -> the root mean square of their errors."""
    return {
        quantity: [
            (name, own([run[quantity][n][1] for run in runs]), f)
            for n, (name, _, f) in enumerate(values)
        ]
        for quantity, values in runs[0].items()
    }


def figures(
    start: Arrays, mask: np.ndarray, exact: Arrays, draws: list[Arrays], result: Arrays
) -> dict[str, list[Any]]:
    """quantity -> [(tensor, error, float32 error)], of an actor or of a critic."""
    is_critic = "values" in exact
    found: dict[str, list[Any]] = {}
    for name in (
        ("values", "values_after") if is_critic else ("log_probs", "entropies", "log_probs_after")
    ):
        error, *errors = (farthest(x[name], exact[name], mask) for x in (result, *draws))
        found[name] = [(name, error, own(errors))]
    of = "value_" if is_critic else ""
    tensors = tensors_of(start)
    found[f"{of}gradient"] = []
    found[f"{of}update"] = []
    for name, parts in tensors.items():
        of_name = {
            "update": [
                whole(x, "weights/", parts) - whole(start, "", parts)
                for x in (exact, result, *draws)
            ]
        }
        if f"gradient/0/{parts[0]}" in exact:  # a buffer has none
            of_name["gradient"] = [whole(x, "gradient/0/", parts) for x in (exact, result, *draws)]
        for quantity, (truth, *others) in of_name.items():
            error, *errors = (distance(x, truth) for x in others)
            found[of + quantity].append((name, error, own(errors)))
    found[f"{of}grad_norm"] = []
    trained = [name for name in sorted(start) if f"gradient/0/{name}" in exact]
    for step, norm in enumerate(exact["grad_norms"]):
        truth, *others = (whole(x, f"gradient/{step}/", trained) for x in (exact, *draws))
        error = abs(result["grad_norms"][step] - norm) / norm
        found[f"{of}grad_norm"].append(
            (f"step {step}", float(error), own([distance(x, truth) for x in others]))
        )
    copies = [key.split("/") for key in result if key.startswith("copies/")]
    found[f"{of}copies"] = [
        (
            f"{n} ({copy})",
            float(np.max(np.abs(result[f"copies/{copy}/{n}"] - result[f"weights/{n}"]))),
            0.0,
        )
        for _, copy, n in copies
    ]
    if "routes" in exact:
        others = [
            (x["routes"] != exact["routes"]).any(-1).sum(0).tolist() for x in (result, *draws)
        ]
        found[f"{of}routes"] = [
            (f"router {n}", e, own(list(o))) for n, (e, *o) in enumerate(zip(*others))
        ]
    return {quantity: values for quantity, values in found.items() if values}


def recompute(dumps: Path) -> dict[tuple[str, str, str, str], dict[str, tuple[float, float]]]:
    """(family, layout, cut, quantity) -> tensor -> (error, float32 error)."""
    run = json.loads((dumps / "run.json").read_text())
    table = {}
    roles = (("families", ""), ("critic_families", "critic"))
    for family, cut, (families, place) in product(run["families"], run["cuts"], roles):
        layouts = [layout for layout, about in run["layouts"].items() if family in about[families]]
        if not layouts:
            continue
        directory = dumps / family / place
        start, batch = (read(directory / f"{name}.safetensors") for name in ("start", "batch"))
        exact = read(directory / cut / "float64.safetensors")
        draws = [read(file) for file in sorted((directory / cut).glob("float32_*.safetensors"))]
        if not draws:
            raise SystemExit(
                f"{directory / cut} holds no float32_*.safetensors; run `python -m"
                " benchmarks.parity` again."
            )
        for layout in layouts:
            files = [
                directory / cut / f"{layout}.safetensors",
                *(directory / cut).glob(f"{layout}.order_*.safetensors"),
            ]
            mask = batch["response_mask"].astype(bool)
            found = settled([figures(start, mask, exact, draws, read(file)) for file in files])
            for quantity, values in found.items():
                table[family, layout, cut, quantity] = {name: (e, f) for name, e, f in values}
    return table


def read(path: Path) -> Arrays:
    """All tensors in float64."""
    return {name: array.astype(np.float64) for name, array in load_file(path).items()}


def compare(table: dict[Any, dict[str, tuple[float, float]]], file: dict[str, Any]) -> list[str]:
    """Where the result file says something else than the dumps. It may hold a part of the rows,
    and then says so.
    """
    said = {
        (row["family"], row["layout"], row["cut"], row["quantity"]): row for row in file["rows"]
    }
    wrong = [f"{key} is not in the dumps" for key in said.keys() - table.keys()]
    if len(table) != file.get("num_rows", len(said)):
        wrong.append(
            f"{len(table)} quantities in the dumps, {file.get('num_rows', len(said))} in the file"
        )
    for key in said.keys() & table.keys():
        row = said[key]
        error, float32_error = table[key].get(said[key]["tensor"], (np.nan, np.nan))
        if not np.allclose(
            [row["error"], row["float32_error"]], [error, float32_error], rtol=AGREEMENT, atol=0
        ):
            wrong.append(
                f"{key} {row['tensor']}: {row['error']:.6e} in the file, {error:.6e} in the dumps"
            )
        is_ok = all(e <= BAR * f for e, f in table[key].values())
        if row["ok"] != is_ok:
            wrong.append(f"{key}: the file says ok={row['ok']}, the dumps say {is_ok}")
    return sorted(wrong)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parity.recompute", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "dumps", type=Path, help="directory that `python -m benchmarks.parity` wrote"
    )
    parser.add_argument(
        "--against", type=Path, help="its result file, or DUMPS/rows.json, to compare with"
    )
    args = parser.parse_args(argv)
    table = recompute(args.dumps)
    failures = json.loads((args.dumps / "run.json").read_text())["failures"]
    for failure in failures:
        print(f"FAILED {failure['family']} {failure['layout']}: it has no dump")
    misses = []
    num_figures = 0
    for key, values in table.items():
        num_figures += len(values)
        misses += [(key, name, e, f) for name, (e, f) in values.items() if not e <= BAR * f]
    for (family, layout, cut, quantity), name, error, float32_error in misses:
        print(
            f"MISS {family} {layout} {cut} {quantity} {name}: {error:.3e} > {BAR:g}"
            f" x {float32_error:.3e}"
        )
    wrong = compare(table, json.loads(args.against.read_text())) if args.against else []
    for line in wrong:
        print(f"DIFFERS {line}")
    print(
        f"{len(table)} quantities, {num_figures} figures: {len(misses)} over the bar, {len(wrong)}"
        " unlike the file"
    )
    return 1 if misses or wrong or failures or not table else 0


if __name__ == "__main__":
    sys.exit(main())
