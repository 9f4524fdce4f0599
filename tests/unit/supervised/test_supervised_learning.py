"""What the supervised job sends to a backend, against plain losses of padded data and of
papers, in float64.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
import workers_reference as reference
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_megatron.algorithms.preferences import PREFERENCE_LOSSES, PreferencePairs
from rlhf_megatron.algorithms.preferences.dpo import DPOParams
from rlhf_megatron.algorithms.preferences.reward_model_loss import (
    BradleyTerryParams,
    RegressionParams,
)
from rlhf_megatron.controller.supervised.supervised_learners import (
    AnswerLearner,
    DistillationLearner,
    PreferenceLearner,
    RewardModelLearner,
    compute_held_out_metrics,
)
from rlhf_megatron.data.assistant_turns import TokenDocument
from rlhf_megatron.data.batch import (
    CriticValues,
    MiniBatch,
    TokenBatch,
    TokenLogProbs,
    TopLogProbs,
    ValueMiniBatch,
)
from rlhf_megatron.data.document_samples import (
    DocumentSample,
    DocumentSampleBatch,
    InMemorySampleSet,
    SampleSource,
)
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult

LOSSES = [("sigmoid", 0.0), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.1)]


class Backend:
    """The two verbs of the worker contract on a transformers model in float64. `grads`: of
    the last update.
    """

    def __init__(self, seed: int) -> None:
        self.model = reference.make_model("llama").double()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.01 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(seed)
                )
        self.grads: list[Tensor] = []

    def token_log_probs(self, batch: TokenBatch) -> Tensor:
        return reference.token_log_probs(self.model, batch)[0]

    def log_probs(
        self, batch: TokenBatch, token_budget: int, temperature: float
    ) -> Future[TokenLogProbs]:
        with torch.no_grad():
            found = self.token_log_probs(batch)
        return done(TokenLogProbs(found))

    def update(
        self, batch: MiniBatch, token_budget: int, temperature: float, loss: str
    ) -> Future[UpdateResult]:
        assert loss == "sft"
        log_probs = self.token_log_probs(batch)
        value = -(log_probs * batch.loss_weights.double()).sum()
        self.grads = self.grads_of(value)
        return done(
            UpdateResult(
                {"actor/loss": float(value.detach()), "actor/sft_loss": 0.0}, 1.0, 0.1, False
            )
        )

    def grads_of(self, value: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(value, list(self.model.parameters())))


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


@pytest.fixture(autouse=True)
def _at_temperature_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TEMPERATURE", 1.0)


def samples(width: int, count: int = 5) -> DocumentSampleBatch:
    draw = torch.Generator().manual_seed(4)
    made = []
    for i in range(count):
        documents = []
        for _ in range(width):
            length = int(torch.randint(3, 9, (1,), generator=draw))
            ids = torch.randint(0, reference.VOCAB, (length,), generator=draw).tolist()
            documents.append(TokenDocument(tuple(ids), ((1 + i % 2, length),)))
        made.append(DocumentSample(tuple(documents), "ab"[i % 2], 1.0 + 0.5 * (i % 3)))
    return InMemorySampleSet(made).make_batch(range(count))


def apart(got: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((g - e).norm() / e.norm().clamp(min=1e-12))
        for g, e in zip(got, expected, strict=True)
    )


def test_weights_of_samples_and_one_denominator() -> None:
    """sum of weight x negative log-prob over all documents, divided by all tokens that train."""
    backend = Backend(1)
    batch = samples(1)
    log_probs = backend.token_log_probs(batch.tokens)
    by_sample = torch.stack([part.sum() for part in log_probs.split(batch.tokens.lengths.tolist())])
    expected = -(by_sample * batch.weights.double()).sum() / int(batch.tokens.response_mask.sum())
    _result, metrics = AnswerLearner(backend, 1000).update_model(batch)  # type: ignore[arg-type]
    assert metrics["sft/loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert apart(backend.grads, backend.grads_of(expected)) < 1e-6  # loss weights travel as float32


def test_a_teacher_that_rows_bring_is_not_asked() -> None:
    """Its columns go to the backend as they are, with the weights of the supervised loss."""
    batch = samples(1)
    num_tokens = batch.tokens.num_tokens
    told = TopLogProbs(torch.arange(2 * num_tokens).view(-1, 2).int(), -torch.rand(num_tokens, 2))
    sent: list[MiniBatch] = []

    class Student:
        def update(
            self, batch: MiniBatch, token_budget: int, temperature: float, loss: str
        ) -> Future[UpdateResult]:
            assert (loss, temperature) == ("distillation", 1.0)
            sent.append(batch)
            return done(UpdateResult({"actor/loss": 2.5}, 1.0, 0.1, False))

    learner = DistillationLearner(Student(), 1000, teacher=None, top_k=2)  # type: ignore[arg-type]
    _, metrics = learner.update_model(replace(batch, teacher_columns=told))
    assert metrics == {"sft/loss": 2.5} and sent[0].teacher_ids is told.teacher_ids
    assert sent[0].teacher_log_probs is told.teacher_log_probs
    weights = batch.tokens.response_mask * torch.repeat_interleave(
        batch.weights, batch.tokens.lengths
    )
    torch.testing.assert_close(sent[0].loss_weights, weights / batch.tokens.response_mask.sum())


@pytest.mark.parametrize(("kind", "smoothing"), LOSSES)
def test_slopes_make_the_gradient_of_a_preference_loss(kind: Any, smoothing: float) -> None:
    """What two verbs make of a pair is the gradient of the loss written out over both answers."""
    policy = Backend(1)
    frozen = Backend(2)
    batch = samples(2)
    params = DPOParams(beta=0.3, loss_type=kind, label_smoothing=smoothing)
    learner = PreferenceLearner(
        policy, frozen, PREFERENCE_LOSSES.get("dpo").build, params, 1000, 1000
    )  # type: ignore[arg-type]
    sums = [
        torch.stack(
            [
                part.sum()
                for part in backend.token_log_probs(batch.tokens).split(
                    batch.tokens.lengths.tolist()
                )
            ]
        )
        for backend in (policy, frozen)
    ]
    ratios = (sums[0] - sums[1].detach()).view(-1, 2)
    if kind == "ipo":
        ratios = ratios / torch.stack(
            [p.sum() for p in batch.tokens.response_mask.split(batch.tokens.lengths.tolist())]
        ).view(-1, 2)
    h = ratios[:, 0] - ratios[:, 1]
    loss = {
        "sigmoid": -logsigmoid(0.3 * h),
        "hinge": torch.relu(1 - 0.3 * h),
        "ipo": (h - 1 / 0.6) ** 2,
        "robust": (-0.9 * logsigmoid(0.3 * h) + 0.1 * logsigmoid(-0.3 * h)) / 0.8,
    }[kind]
    expected = (loss * batch.weights.double()).mean()
    _, metrics = learner.update_model(batch)
    assert metrics["sft/loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert apart(policy.grads, policy.grads_of(expected)) < 1e-6
    assert metrics["rewards/accuracies"] == float((h > 0).double().mean()) or kind == "ipo"


class ValueBackend:
    """The two verbs of a value model, in float64. `grads`: of the last update."""

    def __init__(self) -> None:
        self.model = reference.make_value_model("llama").double()
        self.grads: list[Tensor] = []

    def values(self, batch: TokenBatch, token_budget: int) -> Future[CriticValues]:
        with torch.no_grad():
            found = reference.all_values(self.model, batch)
        return done(CriticValues(found))

    def update(self, batch: ValueMiniBatch, token_budget: int, loss: str) -> Future[UpdateResult]:
        assert loss == "linear"
        value = (reference.all_values(self.model, batch) * batch.loss_weights.double()).sum()
        self.grads = list(torch.autograd.grad(value, list(self.model.parameters())))
        return done(UpdateResult({"actor/loss": 0.0}, 1.0, 0.1, False))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("bradley_terry", BradleyTerryParams(margin=0.2, center_coef=0.01)),
        ("regression", RegressionParams(high=2.0, low=-1.0)),
    ],
)
def test_slopes_make_the_gradient_of_a_reward_model(name: str, params: Any) -> None:
    """Against the loss written out over the value behind each whole document, one
    document at a time.
    """
    backend = ValueBackend()
    batch = samples(2)
    documents = batch.tokens.token_ids.split(batch.tokens.lengths.tolist())
    rewards = torch.stack([backend.model(ids[None].long())[0, -1] for ids in documents]).view(-1, 2)
    chosen, rejected = rewards.unbind(1)
    loss = ((chosen - 2.0) ** 2 + (rejected + 1.0) ** 2) / 2
    if name == "bradley_terry":
        loss = -logsigmoid(chosen - rejected - 0.2) + 0.01 * (chosen + rejected) ** 2
    expected = (loss * batch.weights.double()).mean()
    learner = RewardModelLearner(backend, PREFERENCE_LOSSES.get(name).build, params, 1000)  # type: ignore[arg-type]
    _, metrics = learner.update_model(batch)
    assert metrics["sft/loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert metrics["rewards/accuracies"] == float((chosen > rejected).double().mean())
    assert (
        apart(backend.grads, list(torch.autograd.grad(expected, list(backend.model.parameters()))))
        < 1e-6
    )


def test_losses_of_pairs_by_hand() -> None:
    """A margin of 2 at beta 0.5: log-sigmoid of 1; ipo means over 2 and 4 tokens:
    (3/2 - 1/4 - 1)^2.
    """
    one = torch.tensor
    pairs = PreferencePairs(
        one([-1.0]), one([-6.0]), one([-4.0]), one([-7.0]), one([2.0]), one([4.0])
    )
    dpo = PREFERENCE_LOSSES.get("dpo").build
    assert float(dpo(pairs, DPOParams(beta=0.5)).loss_P) == pytest.approx(0.3132617)
    assert float(dpo(pairs, DPOParams(beta=0.5, loss_type="ipo")).loss_P) == pytest.approx(0.0625)
    assert float(dpo(pairs, DPOParams(beta=0.25, loss_type="hinge")).loss_P) == pytest.approx(0.5)
    found = dpo(pairs, DPOParams(beta=0.5))
    assert (float(found.chosen_rewards_P), float(found.rejected_rewards_P)) == (1.5, 0.5)
    zero = torch.zeros(1)
    rewards = PreferencePairs(one([1.5]), one([0.5]), zero, zero, zero, zero)
    bradley_terry = PREFERENCE_LOSSES.get("bradley_terry").build
    assert float(bradley_terry(rewards, BradleyTerryParams()).loss_P) == pytest.approx(0.3132617)
    assert float(bradley_terry(rewards, BradleyTerryParams(margin=1.0)).loss_P) == pytest.approx(
        0.6931472
    )


def test_held_out_losses_are_means_over_tokens() -> None:
    """The parts that are asked at once, and their number, change nothing."""
    backend = Backend(1)
    made = [
        DocumentSample((TokenDocument((5, 6, 7, 8)[: 2 + i], ((1, 2 + i),)),), "s", 3.0)
        for i in range(3)
    ]
    learner = AnswerLearner(backend, 1000)  # type: ignore[arg-type]
    sets = [
        SampleSource("s", 1.0, InMemorySampleSet(made)),
        SampleSource("t", 1.0, InMemorySampleSet(made[:1])),
    ]
    whole, parts = (compute_held_out_metrics(learner, sets, size, None) for size in (10, 1))
    assert whole == pytest.approx(parts)
    sums = [
        float(-backend.token_log_probs(InMemorySampleSet([one]).make_batch([0]).tokens).sum())
        for one in made
    ]
    assert whole["val/s/loss"] == pytest.approx(sum(sums) / 6)
    assert whole["val/loss"] == pytest.approx((sum(sums) + sums[0]) / 7)
    assert whole["val/t/perplexity"] == pytest.approx(2.718281828 ** sums[0])
    assert compute_held_out_metrics(learner, sets, 10, 1)["val/s/loss"] == pytest.approx(sums[0])
