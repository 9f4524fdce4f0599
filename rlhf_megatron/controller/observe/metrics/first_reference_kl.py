"""The divergence of the policy from its reference before the first update: 0, or a note says why
not.
"""

from __future__ import annotations

from collections.abc import Callable

from rlhf_megatron.data.batch import AnnotatedBatch

FIRST_STEP = 1  # of a run; later ones begin with a policy that has learned


class FirstReferenceKLCheck:
    """Callable: (step, batch). At the first step of a run whose reference is the policy as it
    starts, shows a note where log-probs of the two differ in any bit.

    `reference_path`: reference.path, which names another model, so that nothing is checked.
    `replays_routes`: whether the policy replays recorded expert routes.
    """

    def __init__(
        self,
        reference_path: str | None,
        replays_routes: bool,
        show_note: Callable[[str], object],
    ) -> None:
        self._is_policy_itself = reference_path is None
        self._replays_routes = replays_routes
        self._show_note = show_note

    def __call__(self, step: int, batch: AnnotatedBatch) -> None:
        """Compare the log-probs of the response tokens, where the batch has those of both."""
        policy_log_probs = batch.old_log_probs
        reference_log_probs = batch.ref_log_probs
        if step != FIRST_STEP or not self._is_policy_itself:
            return
        if policy_log_probs is None or reference_log_probs is None:
            return
        differences = (policy_log_probs - reference_log_probs)[batch.response_mask]
        if not bool((differences != 0).any()):
            return
        reason = (
            "with actor.router_replay the tokens of the policy go to the experts that were"
            " recorded, and those of the reference to the experts that its own routers pick"
            if self._replays_routes
            else "both hold the same weights, so that their forward passes are not computed alike:"
            " compare the notes on the head of the actor and of the reference"
        )
        self._show_note(
            "the policy differs from its reference before the first update, where the two are the"
            f" same model: log-probs by at most {differences.abs().max().item():.2e}, so that the"
            f" KL is {differences.mean().item():.2e} nats a token and not 0. Reason: {reason}."
        )
