"""Statistics of the samples of one prompt, over its valid samples, for group estimators and
filters. Pure.

The filter keeps groups that teach something: dynamic sampling (DAPO, arXiv
2503.14476, equation 11).
"""
# B samples, G groups, V valid samples

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.lazy import Tensor, torch


@dataclass(frozen=True)
class PromptGroups:
    """The samples of a step by prompt. All statistics are float64; what an invalid sample
    has is not read.
    """

    index_B: Tensor  # int64, the group of each sample, in [0, num_groups)
    is_valid_B: Tensor  # bool
    num_groups: int

    @staticmethod
    def from_ids(group_ids_B: Tensor, is_valid_B: Tensor) -> PromptGroups:
        """Return the groups in the order of their ids, which may be any integers."""
        _, index_B = group_ids_B.unique(return_inverse=True)
        return PromptGroups(index_B, is_valid_B, int(index_B.max()) + 1 if index_B.numel() else 0)

    def sum_by_group(self, column_B: Tensor) -> Tensor:
        """Return the sum over the valid samples of each group, [G] float64."""
        column_B = column_B.to(torch.float64).masked_fill(~self.is_valid_B, 0.0)
        sums_G = torch.zeros(self.num_groups, dtype=torch.float64, device=column_B.device)
        return sums_G.index_add_(0, self.index_B, column_B)

    def count_valid_samples(self) -> Tensor:
        """Return the number of valid samples of each group, [G] float64."""
        return self.sum_by_group(self.is_valid_B)

    def center_by_group(self, column_B: Tensor) -> Tensor:
        """Return each sample's distance from the mean of its group's valid samples, [B] float64; 0
        where not valid.
        """
        mean_G = self.sum_by_group(column_B) / self.count_valid_samples().clamp(min=1)
        return (column_B.to(torch.float64) - mean_G[self.index_B]).masked_fill(
            ~self.is_valid_B, 0.0
        )

    def compute_advantages(self, rewards_B: Tensor, epsilon: float | None = None) -> Tensor:
        """Return (r - mean_g) / (std_g + epsilon), or r - mean_g where `epsilon` is None, [B]
        float64.

        It is exactly 0 for an invalid sample, in a group with one valid sample, and in a group of
        equal rewards.
        """
        advantages_B = self.center_by_group(rewards_B)
        if epsilon is not None:
            advantages_B = (
                advantages_B / (self.compute_deviations(advantages_B) + epsilon)[self.index_B]
            )
        return advantages_B.masked_fill(~self.have_differing_entries(rewards_B)[self.index_B], 0.0)

    def compute_deviations(self, centered_B: Tensor) -> Tensor:
        """Return the unbiased standard deviation of each group of a `center_by_group` column, [G]
        float64; 0 of fewer than two samples.
        """
        return (
            self.sum_by_group(centered_B.square()) / (self.count_valid_samples() - 1).clamp(min=1)
        ).sqrt()

    def have_differing_entries(self, column_B: Tensor) -> Tensor:
        """Return whether some valid entries of the group differ, [G] bool. Entries are compared,
        since a mean of equal numbers is rounded.
        """
        column_B = column_B.to(torch.float64)
        bounds_G = torch.full(
            (self.num_groups,), torch.inf, dtype=torch.float64, device=column_B.device
        )
        low_G = bounds_G.scatter_reduce(
            0, self.index_B, column_B.masked_fill(~self.is_valid_B, torch.inf), "amin"
        )
        high_G = (-bounds_G).scatter_reduce(
            0, self.index_B, column_B.masked_fill(~self.is_valid_B, -torch.inf), "amax"
        )
        return high_G > low_G

    def find_top_two(self, column_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest valid entry of each group and the one after it, which may be equal to
        it, [G] float64 each.

        They are -inf where there is no such entry.
        """
        column_V = column_B[self.is_valid_B].to(torch.float64)
        index_V = self.index_B[self.is_valid_B]
        order_V = column_V.argsort(stable=True)
        order_V = order_V[index_V[order_V].argsort(stable=True)]
        count_G = index_V.bincount(minlength=self.num_groups)
        last_G = count_G.cumsum(0) - 1
        found = []
        for rank in (0, 1):
            has_entry_G = count_G > rank
            entries_G = torch.full(
                (self.num_groups,), -torch.inf, dtype=torch.float64, device=column_B.device
            )
            entries_G[has_entry_G] = column_V[order_V[last_G[has_entry_G] - rank]]
            found.append(entries_G)
        return found[0], found[1]


def compute_group_advantages(
    rewards_B: Tensor, group_ids_B: Tensor, is_valid_B: Tensor, epsilon: float | None
) -> Tensor:
    """Return `PromptGroups.compute_advantages` over the valid samples, [B] float64."""
    return PromptGroups.from_ids(group_ids_B, is_valid_B).compute_advantages(rewards_B, epsilon)


def mark_informative_samples(metric_B: Tensor, group_ids_B: Tensor, is_valid_B: Tensor) -> Tensor:
    """Return whether the metric differs between valid samples of the sample's group, [B] bool.

    All samples of a group get one answer, those of masked status too, so that a group is kept or
    left out whole. A group with fewer than two valid samples gets False. `metric_B` is not read
    where not valid.
    """
    groups = PromptGroups.from_ids(group_ids_B, is_valid_B)
    return groups.have_differing_entries(metric_B)[groups.index_B]
