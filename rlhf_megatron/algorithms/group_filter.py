"""Which samples are of a prompt that teaches something: dynamic sampling (DAPO, arXiv 2503.14476, equation 11).

A group whose samples all have the same metric (all right, all wrong) has advantages of 0 and no gradient; it is left
out, and another prompt generated in its place.
"""

# B samples

from __future__ import annotations

from torch import Tensor

from rlhf_megatron.algorithms.groups import Groups


def teaches(metric_B: Tensor, group_ids_B: Tensor, is_valid_B: Tensor) -> Tensor:
    """[B] bool: the metric of the sample's group is not the same for all its valid samples.

    All samples of a group have one answer, those of masked status too: a group is kept or left out whole. A group with
    less than two valid samples is left out. `metric_B` is not read where not valid.
    """
    groups = Groups.of(group_ids_B, is_valid_B)
    return groups.have_spread(metric_B)[groups.index_B]
