"""What the stores of the loggers say of a run, read back with the services' own readers, and what
metrics.jsonl says: both as {(metric, step): value}.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from service_files import records

StoredValues = dict[tuple[str, int], float]

MLFLOW_STORE = "mlflow_store"  # beside the run directories
SERVICES = ("mlflow", "wandb", "swanlab")


def list_installed_services() -> list[str]:
    return [name for name in SERVICES if importlib.util.find_spec(name) is not None]


def offline_environment(directory: Path) -> dict[str, str]:
    """Variables under which each service writes below the directory alone."""
    return {
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (directory / MLFLOW_STORE).as_uri(),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HOME": str(directory),  # no keys, no settings
    }


def read_metrics_file(run_dir: Path) -> StoredValues:
    """All metrics of all rows of metrics.jsonl. No two rows of a step have one metric."""
    values: StoredValues = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key, value in row.items():
            if "/" in key:
                assert (key, row["step"]) not in values, (key, row["step"])
                values[key, row["step"]] = value
    return values


def read_tensorboard(run_dir: Path) -> StoredValues:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: StoredValues = {}
    for folder in sorted((run_dir / "tensorboard").iterdir()):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            values |= {(tag, event.step): event.value for event in events.Scalars(tag)}
    return values


def read_mlflow(run_dir: Path) -> StoredValues:
    from mlflow import MlflowClient

    client = MlflowClient((run_dir.parent.parent / MLFLOW_STORE).as_uri())
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    return {
        (name, point.step): point.value
        for name in client.get_run(run_id).data.metrics
        for point in client.get_metric_history(run_id, name)
    }


def read_wandb(run_dir: Path) -> StoredValues:
    from wandb.proto import wandb_internal_pb2

    values: StoredValues = {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("history"):
                row = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                values |= _select_wandb_metrics(row)
    return values


def _select_wandb_metrics(row: Mapping[str, Any]) -> StoredValues:
    """Without the axes, and what is no number: histograms and tables."""
    axis = "warmup/step" if "warmup/step" in row else "step"
    return {
        (key, int(row[axis])): float(value)
        for key, value in row.items()
        if "/" in key
        and key != "warmup/step"
        and not key.startswith(("histogram/", "samples/", "held_out_samples/"))
        and isinstance(value, int | float | str)
    }


def read_swanlab(run_dir: Path) -> StoredValues:
    from swanlab.proto.swanlab.record.v1 import record_pb2

    values: StoredValues = {}
    for path in sorted((run_dir / "swanlab").glob("run-*/run-*.swanlab")):
        for data in records(path):
            record = record_pb2.Record.FromString(data)
            scalar = record.scalar
            # figures of the machine are SwanLab's own
            if record.HasField("scalar") and not scalar.key.startswith("__swanlab__"):
                values[scalar.key, scalar.step] = scalar.value.number
    return values


READERS: Mapping[str, Callable[[Path], StoredValues]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
    "swanlab": read_swanlab,
}


def expect_in_store(logger_name: str, values: StoredValues) -> StoredValues:
    """The values of metrics.jsonl as a store has them: TensorBoard's are float32, and MLflow has
    names of its own for "@".
    """
    if logger_name == "tensorboard":
        with np.errstate(over="ignore"):
            return {place: float(np.float32(value)) for place, value in values.items()}
    if logger_name == "mlflow":
        return {(key.replace("@", "_at_"), step): value for (key, step), value in values.items()}
    return values


def iter_store_differences(logger_name: str, run_dir: Path) -> Iterator[str]:
    """What is missing in the store, is in it alone, or has another value there."""
    expected = expect_in_store(logger_name, read_metrics_file(run_dir))
    stored = READERS[logger_name](run_dir)
    for place in sorted(expected.keys() | stored.keys()):
        if place not in stored:
            yield f"{place} is not in {logger_name}"
        elif place not in expected:
            yield f"{place} is in {logger_name} alone"
        elif not _are_same(stored[place], expected[place]):
            yield f"{place} is {stored[place]} in {logger_name}, not {expected[place]}"


def _are_same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
