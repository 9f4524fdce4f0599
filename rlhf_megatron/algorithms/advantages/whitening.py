"""Advantages of a step to mean 0 and (unbiased) variance 1 over its response tokens.

As they are where there are fewer than two tokens, which have no variance. Equal advantages become exactly 0.
"""

# B samples, N entries

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.lazy import Tensor, torch

WHITEN_EPSILON = 1e-8  # added to the variance; the field's


@dataclass(frozen=True)
class Moments:
    """Of numbers that come in parts. Equal numbers have a variance of exactly 0."""

    count: int = 0
    mean: float = 0.0
    sum_squares: float = 0.0  # of the distances from the mean

    @property
    def variance(self) -> float:
        """The unbiased one; 0 of fewer than two numbers."""
        return self.sum_squares / (self.count - 1) if self.count > 1 else 0.0

    def joined_by(self, column_N: Tensor) -> Moments:
        """With the entries of `column_N`, float64 (Chan, Golub and LeVeque, "Updating formulae", 1979)."""
        if not column_N.numel():
            return self
        # From an entry on: equal numbers are exactly 0 there, and no other entry is so far that digits are lost.
        count, shifted_N = column_N.numel(), column_N - column_N[0]
        total = float(shifted_N.sum())
        sum_squares = max(float(shifted_N.dot(shifted_N)) - total * total / count, 0.0)
        step = float(column_N[0]) + total / count - self.mean
        share = count / (self.count + count)
        return Moments(
            self.count + count,
            self.mean + step * share,
            self.sum_squares + sum_squares + step * step * self.count * share,
        )


def whiten_(advantages_N: Tensor) -> Tensor:
    """Whiten a float64 column of tokens that all count, in place."""
    moments = Moments().joined_by(advantages_N)
    if moments.count < 2:
        return advantages_N
    return advantages_N.sub_(moments.mean).mul_((moments.variance + WHITEN_EPSILON) ** -0.5)


def whitened_samples(advantages_B: Tensor, lengths_B: Tensor, is_kept_B: Tensor) -> Tensor:
    """[B] float64: what `whiten_` makes of each sample's advantage on all its response tokens, without the tokens.

    Args:
        lengths_B: response tokens of each sample, any type; a sample counts as often as it has tokens.
        is_kept_B: bool; the others are in no statistic, and 0.
    """
    weights_B = lengths_B.to(torch.float64).masked_fill(~is_kept_B, 0.0)
    count = float(weights_B.sum())
    kept = (weights_B > 0).nonzero().view(-1)
    if count < 2:
        return advantages_B.to(torch.float64).masked_fill(~is_kept_B, 0.0)
    # From an entry on: equal numbers are exactly 0 there.
    shifted_B = (advantages_B.to(torch.float64) - advantages_B[kept[0]]).masked_fill(~is_kept_B, 0.0)
    centered_B = (shifted_B - weights_B.dot(shifted_B) / count).masked_fill(~is_kept_B, 0.0)
    variance = weights_B.dot(centered_B.square()) / (count - 1)
    return centered_B * (variance + WHITEN_EPSILON) ** -0.5
