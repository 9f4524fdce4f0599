"""Clocks, power and temperature of the device, as nvidia-smi tells them; nothing is changed."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_event_reasons.active",
    "memory.used",
)
TIMEOUT_S = 20


def device_state() -> dict[str, Any]:
    """Of the first device; {"error": why} where nvidia-smi is missing or fails."""
    command = [
        "nvidia-smi",
        "--id=0",
        f"--query-gpu={','.join(FIELDS)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    if done.returncode:
        return {"error": (done.stdout + done.stderr).strip()[-300:]}
    return parse_state(done.stdout)


def parse_state(line: str) -> dict[str, Any]:
    """Field -> number, or text where it is none ("[N/A]")."""
    return {
        name: _number(value.strip())
        for name, value in zip(FIELDS, line.strip().split(","), strict=True)
    }


def describe_device() -> dict[str, Any]:
    """What torch knows of the first CUDA device; {} without one."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
