"""The random states of a rank in a safetensors file: python's, numpy's, torch's, the device's,
megatron's tracker's.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_megatron.data.direct_file_io import fsync_path
from rlhf_megatron.weights.tensor_file import write_tensor_file

_TRACKER = "tracker."
_PLAIN = "state"  # key of the metadata: what is no tensor, as JSON


def save_rng_states(path: Path, device: torch.device) -> None:
    """Write the present random states of this rank to `path`, flushed to disk, and make the parent
    directory. Raise OSError.
    """
    path.parent.mkdir(exist_ok=True)
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    tensors: dict[str, Tensor] = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "torch": torch.get_rng_state(),
        **{
            _TRACKER + name: _rng_state_to_tensor(state).clone()
            for name, state in _get_rng_tracker().get_states().items()
        },
    }
    if device.type == "cuda":
        tensors["device"] = torch.cuda.get_rng_state(device)
    plain = {
        "python": [version, gauss],
        "numpy": [numpy_state["state"]["pos"], numpy_state["has_gauss"], numpy_state["gauss"]],
    }
    write_tensor_file(path, tensors, {_PLAIN: json.dumps(plain)})
    fsync_path(path)


def load_rng_states(path: Path, device: torch.device) -> None:
    """Set the random states of this rank from a file of `save_rng_states`. Raise ValueError, with
    the file's name, when the file holds no states of this model; some states may be set by then.
    """
    try:
        with safe_open(path, framework="pt") as file:
            plain = json.loads(file.metadata()[_PLAIN])
            # (not a dict)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        version, gauss = plain["python"]
        random.setstate((version, tuple(tensors["python"].tolist()), gauss))
        position, has_gauss, numpy_gauss = plain["numpy"]
        key = tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, position, has_gauss, numpy_gauss))
        torch.set_rng_state(tensors["torch"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensors["device"], device)
        stored = {
            name.removeprefix(_TRACKER): state
            for name, state in tensors.items()
            if name.startswith(_TRACKER)
        }
        if stored.keys() != _get_rng_tracker().get_states().keys():
            raise ValueError(f"its tracked states are {sorted(stored)}")
        _restore_rng_tracker(stored)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} holds no random states of this model: {error!r}") from error


def _get_rng_tracker() -> Any:
    """Return megatron's tracker of the device's random states."""
    return tensor_parallel.get_cuda_rng_tracker()


def _rng_state_to_tensor(state: Any) -> Tensor:
    """Return a state of megatron's tracker as a tensor; with CUDA graphs the tracker holds
    generators.
    """
    found: Tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return found


def _restore_rng_tracker(stored_states: dict[str, Tensor]) -> None:
    """Set the states of megatron's tracker, as generators where the tracker holds generators."""
    now = _get_rng_tracker().get_states()
    for name, state in now.items():
        if isinstance(state, torch.Generator):
            state.set_state(stored_states[name])
        else:
            now[name] = stored_states[name]
    _get_rng_tracker().set_states(now)
