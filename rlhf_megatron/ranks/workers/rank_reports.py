"""Reports of a rank on its memory, numbers that are not finite, replicas that differ and its head.
The controller reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.data import codec

MAX_REPORTED_ENTRIES = 1000  # entries of a list of findings
# directories that the ranks write into a capsule
WEIGHTS = "weights"
RNG = "rng"


@codec.register("BadTensor")
@dataclass(frozen=True)
class BadTensor:
    """A tensor of this rank that holds numbers that are not finite."""

    name: str
    num_nan: int
    num_inf: int
    num_elements: int

    def __str__(self) -> str:
        """Return the name with the counts of NaN and Inf elements."""
        counts = [f"{self.num_nan} NaN"] * bool(self.num_nan) + [f"{self.num_inf} Inf"] * bool(
            self.num_inf
        )
        return f"{self.name} ({' and '.join(counts)} of {self.num_elements})"


@codec.register(
    "Findings",
    {
        "rank_name": "where",
        "bad_tokens": "tokens",
        "num_bad_tokens": "num_tokens",
        "first_bad_tensor": "first",
    },
)
@dataclass(frozen=True)
class NonFiniteReport:
    """The findings of one rank in an update with numbers that are not finite. It has losses and
    tokens on the last stage only.
    """

    rank_name: str  # "dp1 pp0 tp0"
    grad_norm: float  # global; nan or inf
    # at most MAX_REPORTED_ENTRIES; a distributed optimizer's: of all that this rank summed up
    gradients: tuple[BadTensor, ...]
    parameters: tuple[BadTensor, ...]
    losses: tuple[float, ...]  # of each micro-batch, this rank's share
    # of the shard: those with a log-prob (a value) that is not finite, at most MAX_REPORTED_ENTRIES
    bad_tokens: tuple[int, ...]
    num_bad_tokens: int  # of them, without that limit
    # the first tensor that was not finite, where the pass was watched (`ranks.workers.nonfinite`)
    first_bad_tensor: str = ""
    has_weights: bool = False  # the capsule's weights were written
    error: str = ""  # why they were not


@codec.register("Difference")
@dataclass(frozen=True)
class ReplicaDifference:
    """One tensor that is not the same on all ranks that should hold it alike."""

    tensor: str
    group: str  # what these ranks are to each other
    # that differ from most of the others: all, where no value is that of a majority
    ranks: tuple[str, ...]
    num_ranks: int  # of the group
    max_abs_diff: float | None  # from a rank of the majority; None: not measured

    def __str__(self) -> str:
        """Return a sentence that says which ranks differ, from which others, and by how much."""
        others = self.num_ranks - len(self.ranks)
        verb = "differs" if len(self.ranks) == 1 else "differ"
        size = "" if self.max_abs_diff is None else f", by up to {self.max_abs_diff:.3g}"
        whom = f"the other {others}" if others else "each other"
        return f"{self.tensor}: {' and '.join(self.ranks)} {verb} from {whom} ({self.group}){size}"


@codec.register("ReplicaReport", {"rank_name": "where", "bad_parameters": "not_finite"})
@dataclass(frozen=True)
class ReplicaReport:
    """The report of one rank. One rank of the group reports a difference."""

    rank_name: str
    num_tensors: int  # that were compared
    num_bytes: int
    seconds: float
    differences: tuple[ReplicaDifference, ...]
    bad_parameters: tuple[BadTensor, ...]  # parameters


@codec.register("HeadReport", {"rank_name": "where"})
@dataclass(frozen=True)
class HeadReport:
    """The report of a rank of the last stage on its head."""

    rank_name: str  # "actor dp1 pp0 tp3"
    choice: str  # backend, why, stash
    backend: str  # in use now
    num_checks_left: int
    notices: tuple[str, ...]  # one a fall-back


@codec.register("MemoryReport")
@dataclass(frozen=True)
class MemoryReport:
    """The memory of one model on one rank. Figures of the process or the device are the same in the
    reports of all its models.
    """

    # of the model's own storages on the device: parameters, gradients, optimizer state
    held_bytes: int
    copied_bytes: int  # of the copies of these in host memory
    process_bytes: int  # that this process has allocated on the device; 0 on a CPU
    used_bytes: int  # of the device, by all processes; 0 on a CPU
    resident_bytes: int  # of this process in host memory
    peak_allocated_bytes: int = 0  # most that this process had allocated on the device; 0 on a CPU
    peak_reserved_bytes: int = 0  # the same with what torch keeps in reserve
    device_name: str = ""  # as its vendor spells it; "" of a CPU
