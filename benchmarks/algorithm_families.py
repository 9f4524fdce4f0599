"""What `benchmarks.algorithm_curves` runs: families of algorithms, and the settings of each
member over a base.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BASE = (
    "trainer.runtime=inline",
    "trainer.n_gpus_per_node=1",
    "actor.megatron.tensor_model_parallel_size=1",
    "actor.megatron.pipeline_model_parallel_size=1",
)
"""Over configs/quickstart.yaml: one process for the trainer."""

TRAINING = ("actor.optim.lr=4e-4", "trainer.test_freq=10", "trainer.test_samples=500")
"""Over configs/quickstart_warm.yaml, for every algorithm."""

GRPO = "algorithm.adv_estimator=grpo"
CENTERED = "algorithm.params={norm_adv_by_std_in_grpo: false}"
SEQUENCE_MEAN = "actor.loss_agg_mode=seq-mean-token-mean"
CONSTANT_NORM = "actor.loss_agg_mode=seq-mean-token-sum-norm"
ON_POLICY = "actor.mini_batch_size=512"
BFLOAT16_ENGINE = "rollout.dtype=bfloat16"
DIGITS = (
    "{name: function, weight: 0.0, params: {path: 'benchmarks.algorithm_families:right_digits'}}"
)


@dataclass(frozen=True)
class Member:
    """One algorithm. What `overrides` does not say is as in the quickstart: grpo,
    ppo_clip, token-mean.
    """

    name: str
    overrides: tuple[str, ...]
    note: str = ""  # settings beside the algorithm's name, and why


@dataclass(frozen=True)
class Family:
    title: str
    members: tuple[Member, ...] = field(default=())


def right_digits(response: str, label: str) -> float:
    """The second reward of gdpo: the share of the label's digits that stand in their place."""
    return sum(a == b for a, b in zip(response.strip(), label, strict=False)) / len(label)


def estimator(name: str, *overrides: str, note: str = "") -> Member:
    return Member(name, (f"algorithm.adv_estimator={name}", *overrides), note)


def loss(name: str, *overrides: str, note: str = "", adv_estimator: str = "grpo") -> Member:
    """A policy loss without parameters of its own in `overrides` has its defaults, not
    the quickstart's.
    """
    chosen = (
        f"algorithm.adv_estimator={adv_estimator}",
        f"actor.policy_loss={{loss_mode: {name}, params: {{}}}}",
    )
    return Member(name, (*chosen, *overrides), note)


FAMILIES: tuple[Family, ...] = (
    Family(
        "Critic",
        (
            estimator(
                "gae",
                "algorithm.params={gamma: 1.0, lam: 1.0}",
                "critic.optim.lr=1e-3",
                "trainer.critic_warmup=2",
                note=(
                    "critic of the policy's size, learning rate 1e-3; the first two steps"
                    " train only it"
                ),
            ),
        ),
    ),
    Family(
        "Group baselines",
        (
            estimator("grpo"),
            Member(
                "dr_grpo",
                (GRPO, CENTERED, CONSTANT_NORM),
                "no division by the deviation; seq-mean-token-sum-norm",
            ),
            estimator("rloo"),
            estimator("opo"),
            Member(
                "gpg",
                (
                    "algorithm.adv_estimator=gpg",
                    "actor.policy_loss={loss_mode: gpg, params: {}}",
                    ON_POLICY,
                ),
                "estimator and loss; one optimizer step a step, since the loss has no ratio",
            ),
        ),
    ),
    Family(
        "Pass@k",
        (
            estimator(
                "grpo_passk",
                "data.train_batch_size=128",
                "rollout.n=4",
                note=(
                    "128 prompts x 4 samples: with 16 samples hardly a group has exactly one"
                    " right answer"
                ),
            ),
        ),
    ),
    Family(
        "Whitened over the step",
        (estimator("reinforce_plus_plus_baseline"), estimator("reinforce_plus_plus")),
    ),
    Family("Greedy baseline", (estimator("remax"),)),
    Family(
        "Several rewards",
        (
            estimator(
                "gdpo",
                (
                    "algorithm.params={gdpo_reward_keys: [exact_match, function],"
                    " gdpo_reward_weights: [1.0, 1.0]}"
                ),
                f"reward.terms=[{DIGITS}]",
                "reward.num_workers=1",
                note="exact_match and a second reward, the share of right digits, in equal weights",
            ),
        ),
    ),
    Family(
        "Token baselines",
        (
            estimator("optimal_token_baseline"),
            estimator(
                "tir_optimal_token_baseline",
                note="the same as optimal_token_baseline where there are no tools",
            ),
        ),
    ),
    Family("Sequence ratio", (loss("gspo", SEQUENCE_MEAN), loss("geo_mean", SEQUENCE_MEAN))),
    Family("Soft gate", (loss("sapo", SEQUENCE_MEAN),)),
    Family("Covariance", (loss("clip_cov"), loss("kl_cov"))),
    Family("Truncated weights", (loss("cispo"),)),
    Family(
        "Divergence",
        (
            loss(
                "dppo_tv",
                CENTERED,
                CONSTANT_NORM,
                note="advantages and aggregation of the authors' runs, as dr_grpo",
            ),
            loss("dppo_kl", CENTERED, CONSTANT_NORM, note="likewise"),
        ),
    ),
    Family("Quadratic", (loss("dro"),)),
    Family(
        "Plain policy gradient",
        (
            loss(
                "reinforce",
                ON_POLICY,
                note="one optimizer step a step, since the loss has no ratio",
            ),
        ),
    ),
    Family(
        "Rollout correction",
        (
            Member(
                "decoupled_token_is",
                (BFLOAT16_ENGINE, "algorithm.rollout_correction.preset=decoupled_token_is"),
                "grpo; bfloat16 engine, float32 trainer",
            ),
            Member(
                "bypass_ppo_clip",
                (BFLOAT16_ENGINE, "algorithm.rollout_correction.preset=bypass_ppo_clip"),
                "likewise",
            ),
            Member("uncorrected", (BFLOAT16_ENGINE,), "likewise, and nothing is corrected"),
        ),
    ),
)
"""The first member of a family stands for it: it runs before any second one."""


def members(only: tuple[str, ...] = ()) -> list[Member]:
    """In the order of running: the first of each family, then the others. `only`: names;
    raises KeyError.
    """
    firsts = [family.members[0] for family in FAMILIES]
    ordered = [*firsts, *(member for family in FAMILIES for member in family.members[1:])]
    by_name = {member.name: member for member in ordered}
    assert len(by_name) == len(ordered), "names of members are their keys"
    return [by_name[name] for name in only] if only else ordered
