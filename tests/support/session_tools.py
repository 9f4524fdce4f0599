"""Sessions under test: servers whose weights of version v are `tiny_qwen3(v)`, a thread that polls,
and the proof of each token's version by log-probs of transformers.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rollout_tools import tiny_qwen3, weights_of, with_entry, write_buckets
from torch import Tensor

from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    GeneratedSample,
    GenerateRequest,
    InferenceEngine,
)
from rlhf_megatron.rollout.fleet.chunk_generation import get_version_spans
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.engine_supervisor import SupervisionSettings
from rlhf_megatron.rollout.fleet.generation_session import GenerationSession
from rlhf_megatron.rollout.fleet.request_balancer import RequestBalancer
from rlhf_megatron.rollout.fleet.server_process import EngineServers

Groups = list[list[GeneratedSample]]
Work = Mapping[int, Sequence[GenerateRequest]]
FITS = 1e-4
WAIT_S = 240.0


class Rig:
    """A fleet of those servers and what a controller does to it."""

    def __init__(
        self,
        servers: EngineServers,
        transfer: Path,
        connect: Callable[[EngineAddress], InferenceEngine],
        *,
        num_engines: int = 2,
        is_killing: bool = True,
        request_timeout_s: float = 120.0,
        health_interval_s: float = 0.3,
        balancer: RequestBalancer | None = None,
    ) -> None:
        self.servers = servers
        self.transfer = transfer
        self.resynced: list[str] = []
        # why samples ended that engines sent, also those that nobody read
        self.reasons: Counter[str] = Counter()
        connect = partial(self._watched, connect)
        limits = (health_interval_s, 15.0)
        supervision = SupervisionSettings(
            servers if is_killing else None, connect, *limits, max_restarts=4
        )
        engines = [connect(address) for address in servers.addresses[:num_engines]]
        versions = [engine.get_served_version() for engine in engines]
        self.version = max(version or 0 for version in versions)
        self.fleet = EngineFleet(
            engines, request_timeout_s, 3, supervision=supervision, balancer=balancer
        )
        self.fleet.resync_engines = self.resync

    def _watched(
        self, connect: Callable[[EngineAddress], InferenceEngine], address: EngineAddress
    ) -> InferenceEngine:
        engine = connect(address)
        generate = engine.generate_async

        async def watched(
            requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
        ) -> Groups:
            groups = await generate(requests, timeout_s, name)
            self.reasons.update(sample.finish_reason for group in groups for sample in group)
            return groups

        engine.generate_async = watched  # type: ignore[method-assign]
        return engine

    def sync(
        self, spoil: str = "", hold_s: float = 0.0, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """All engines to the next version; the one named `spoil` gets a damaged bucket. It takes
        `hold_s` at least.
        """
        with self.fleet.hold_exclusively():
            self.fleet.begin_weight_update(self.version + 1)
            time.sleep(hold_s)
            for engine in self.fleet.live_engines:
                try:
                    self.send(engine, self.version + 1, engine.address.name == spoil)
                except EngineError as error:
                    self.fleet.set_engine_aside(engine.address.name, str(error))
            meanwhile()
            self.fleet.commit_weight_update(self.version + 1)
        self.version += 1

    def send(self, engine: InferenceEngine, version: int, is_spoilt: bool = False) -> None:
        for manifest in write_buckets(weights_of(tiny_qwen3(version)), self.transfer, version):
            engine.update_weights(
                with_entry(manifest, 0, digest="0" * 16) if is_spoilt else manifest
            )

    def resync(self, engines: Sequence[InferenceEngine]) -> None:
        for engine in engines:
            engine.begin_weight_update(self.version, is_full_resync=True)
            self.send(engine, self.version)
            engine.commit_weight_update(self.version)
            self.resynced.append(engine.address.name)


class Poller:
    """The thread of a session. `results`: what came, in order."""

    def __init__(self, session: GenerationSession, work: Work) -> None:
        self.session = session
        self.results: list[tuple[int, Groups]] = []
        self.error: BaseException | None = None
        self.num_before_abort = 0  # results that had come when the last abort was ordered
        self._orders: list[tuple[str, object]] = [("submit", work)]
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        self._orders.append(("submit", work))

    def abort(self, keys: Collection[int]) -> None:
        self._orders.append(("abort", keys))

    @property
    def came(self) -> list[int]:
        return [key for key, _ in self.results]

    @property
    def came_after_abort(self) -> set[int]:
        return set(self.came[self.num_before_abort :])

    def wait(
        self, is_done: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_done():
            if self.error is not None:
                raise self.error
            assert time.monotonic() < deadline, (
                f"it takes too long; {len(self.results)} keys have come"
            )
            meanwhile()
            time.sleep(0.02)

    def wait_for(
        self, keys: Collection[int], meanwhile: Callable[[], None] = lambda: None
    ) -> dict[int, Groups]:
        """Until these have come, each once and no others."""
        self.wait(lambda: set(keys) <= set(self.came), meanwhile)
        assert Counter(self.came) == Counter(list(keys))
        return dict(self.results)

    def end(self) -> None:
        self._is_ended = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_ended:
                while self._orders:
                    verb, what = self._orders.pop(0)
                    if verb == "abort":
                        self.num_before_abort = len(self.results)
                        self.session.abort_keys(what)  # type: ignore[arg-type]
                    else:
                        for key, requests in what.items():  # type: ignore[attr-defined]
                            self.session.submit_requests(key, requests)
                start = time.monotonic()
                self.results += self.session.poll_finished()
                assert time.monotonic() - start < 20, "a poll waits for a moment only"
        except BaseException as error:
            self.error = error


@dataclass
class Proof:
    """How the reported log-probs of all tokens fit the weights of each version."""

    num_samples: int = 0
    num_tokens: int = 0
    num_spans: Counter[int] = field(default_factory=Counter)  # spans of a sample -> samples
    right: float = 0.0  # largest |difference| under the weights of the token's version
    num_pairs: int = 0  # tokens x other versions
    num_wrong_fits: int = 0  # of them within FITS: tokens that are almost certain under both
    # of spans of at least 8 tokens under other versions: the smallest worst |difference|
    wrong: float = float("inf")

    def __str__(self) -> str:
        spans = ", ".join(
            f"{count} of {number}" for number, count in sorted(self.num_spans.items())
        )
        return (
            f"{self.num_samples} samples, {self.num_tokens} tokens, samples by versions in them:"
            f" {spans}; largest |difference| under the right version {self.right:.1e}; under other"
            f" versions {self.num_wrong_fits / max(1, self.num_pairs):.2%} of the tokens fit"
            f" within {FITS:g}, and the span that fits best is off by {self.wrong:.2f}"
        )


def prove(work: Work, found: Mapping[int, Groups], versions: Collection[int]) -> Proof:
    """Every token of every sample against the weights of each of `versions`."""
    proof = Proof()
    models = {version: tiny_qwen3(version) for version in versions}
    for key, groups in found.items():
        for asked, group in zip(work[key], groups, strict=True):
            assert len(group) == len(asked.seeds)
            by_version = {
                version: differences(model, asked, group) for version, model in models.items()
            }
            for row, sample in enumerate(group):
                _add(proof, sample, {version: off[row] for version, off in by_version.items()})
    print(f"\n{proof}")
    return proof


def differences(
    model: torch.nn.Module, asked: GenerateRequest, group: Sequence[GeneratedSample]
) -> list[Tensor]:
    """Per sample |reported log-prob - transformers' one| of each token, in float32."""
    longest = max(len(sample.token_ids) for sample in group)
    ids = [[*asked.prompt_ids, *s.token_ids, *[0] * (longest - len(s.token_ids))] for s in group]
    with torch.no_grad():
        rows = (
            model(torch.tensor(ids)).logits.float() / (asked.params.temperature or 1.0)
        ).log_softmax(-1)
    first = len(asked.prompt_ids) - 1
    found = []
    for row, sample in zip(rows, group, strict=True):
        picked = row[first : first + len(sample.token_ids)].gather(
            1, torch.tensor(sample.token_ids)[:, None]
        )[:, 0]
        found.append((picked - torch.tensor(sample.log_probs)).abs())
    return found


def _add(proof: Proof, sample: GeneratedSample, off: Mapping[int, Tensor]) -> None:
    spans = get_version_spans(sample)
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(sample.token_ids) == len(sample.log_probs)
    proof.num_samples += 1
    proof.num_tokens += len(sample.token_ids)
    proof.num_spans[len(spans)] += 1
    for span in spans:
        for version, differing in off.items():
            part = differing[span.start : span.end]
            if version == span.version:
                proof.right = max(proof.right, float(part.max()))
                continue
            proof.num_pairs += len(part)
            proof.num_wrong_fits += int((part <= FITS).sum())
            if len(part) >= 8:
                proof.wrong = min(proof.wrong, float(part.max()))
