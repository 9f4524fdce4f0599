"""The warning of a run whose engines do not see the adapter that is trained."""

from __future__ import annotations

from collections.abc import Callable

MAX_LOST_SHARE = 0.1  # of the norm of the adapter's change of the weights; above it a run warns


class LostAdapterWarning:
    """Callable: (share of the adapter that rounding lost in a sync). Shows one note in the life of
    a process, at the first sync whose share is above MAX_LOST_SHARE.
    """

    def __init__(self, engine_dtype: str, show_note: Callable[[str], None]) -> None:
        """Prepare the warning for engines whose weights have the type `engine_dtype`."""
        self._engine_dtype = engine_dtype
        self._show_note = show_note
        self._has_warned = False

    def __call__(self, lost_share: float) -> None:
        """Show the note where the share is too large and no note was shown before."""
        if self._has_warned or lost_share <= MAX_LOST_SHARE:
            return
        self._has_warned = True
        self._show_note(
            f"WARNING: the engines lack {lost_share:.0%} of the adapter's change"
            f" (policy/lost_update_share {lost_share:.3f}, above {MAX_LOST_SHARE:g}): the adapter"
            f" is added to weights that engines hold in {self._engine_dtype}, and rounding drops"
            " what is smaller than half a unit of their last place. The engines sample a policy"
            " that is not the trained one. " + _describe_remedies(self._engine_dtype)
        )


def _describe_remedies(engine_dtype: str) -> str:
    """Return a sentence with what a user can do."""
    remedies = [
        "raise actor.optim.lr (adapters take about ten times the rate of full training): a larger"
        " change loses less, and the share falls as the adapter grows",
        "correct for the difference with algorithm.rollout_correction",
    ]
    if engine_dtype != "float32":
        remedies.append(
            "set rollout.dtype to float32, which loses next to nothing and costs the engines twice"
            " the memory for weights"
        )
    return "Remedies: " + "; or ".join(remedies) + "."
