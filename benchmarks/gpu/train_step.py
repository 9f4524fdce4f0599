"""G10: an optimizer step of a small model through `ActorModel` on one rank, beside a plain
transformers loop.

Packed samples, the quickstart's loss, both from the same weights. Model FLOP utilisation is of the
operations that the step cannot do without (`arithmetic.step_flop`), over the device's data-sheet
peak and over the bare GEMM of this run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.arithmetic import HeadShape, peak_flops, percent, step_flop
from benchmarks.gpu.gemm import measure_gemms
from benchmarks.gpu.head import (
    DEFAULT_CHUNK_SIZE,
    FULL,
    QUICK,
    QUICK_CHUNK_SIZES,
    HeadInputs,
    MainGrad,
    OurHead,
    backends,
)
from benchmarks.gpu.recorder import MissingError, Recorder
from benchmarks.gpu.small_models import (
    CONFIGS,
    QUICK_CONFIG,
    DeviceWeights,
    make_batch,
    make_lengths,
)
from benchmarks.gpu.stash import DEFAULT_STASH_BYTES
from benchmarks.gpu.timing import Spread
from benchmarks.kernels.case import Case, CaseResult
from rlhf_megatron.config.schema import ActorConfig, OptimConfig
from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.data.replica_plan import ReplicaPlan, plan_replicas, take_replica_shard
from rlhf_megatron.device import measure_device_memory, synchronize_device
from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.ranks.workers.actor import ActorModel
from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
from rlhf_megatron.ranks.workers.trained_model import TrainingPhase
from rlhf_megatron.weights.parallel_layout import ParallelLayout

NUM_TOKENS = 32768
LONGEST = 2048
PROMPT_SHARE = 0.25
TOKEN_BUDGETS = (16384, 8192, 32768)  # of our micro-batches; the first one is the default
PADDED_ROWS = (8, 16, 4)  # samples of a padded batch of the plain loop
LR = 1e-6
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.95)
EPS = 1e-8
CLIP_GRAD = 1.0
NUM_WARMUPS = 2
NUM_RUNS = 7
SPEED_BAR = 1.3
MFU_BAR = 45.0
HEAD_BAR = 1.15
AGREEMENT = 0.1  # bound on the relative difference of the first gradient norms: bfloat16 in both


@dataclass(frozen=True)
class Work:
    """What one step of either side does."""

    hf_config: dict[str, Any]
    batch: MiniBatch
    token_budgets: tuple[int, ...]
    padded_rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return int(self.batch.response_mask.sum())


@dataclass(frozen=True)
class StepTimes:
    """Of one setting: seconds, and (loss, gradient norm) of its very first step."""

    setting: str
    times: Spread
    first: tuple[float, float]


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    shape = QUICK if is_quick else FULL
    bare = (
        shape.gemm_flop / measure_gemms(HeadInputs.make(shape, recorder.device), recorder).forward
    )
    recorder.note("bare GEMM, TFLOP/s", bare / 1e12)
    recorder.free()
    world = create_world(ParallelLayout(1), recorder.device)
    try:
        for name, hf_config in {"tiny": QUICK_CONFIG}.items() if is_quick else CONFIGS.items():
            work = make_work(hf_config, is_quick)
            recorder.attempt(
                name, lambda name=name, work=work: _model(recorder, name, work, world, bare)
            )
    finally:
        destroy_world()
    return recorder.result()


def make_work(hf_config: dict[str, Any], is_quick: bool) -> Work:
    num_tokens, longest = (256, 64) if is_quick else (NUM_TOKENS, LONGEST)
    batch = make_batch(make_lengths(num_tokens, longest), hf_config["vocab_size"], PROMPT_SHARE)
    return Work(
        hf_config,
        batch,
        (128, 256) if is_quick else TOKEN_BUDGETS,
        (4,) if is_quick else PADDED_ROWS,
    )


def _model(recorder: Recorder, name: str, work: Work, world: World, bare_flops: float) -> None:
    weights = DeviceWeights(recorder.device)
    ours = our_steps(recorder, name, work, weights, world)
    recorder.free()
    add_utilisation(recorder, name, work, ours[0], bare_flops)
    recorder.attempt(f"{name}, head", lambda: _head_share(recorder, name, work, ours[0].times))
    plain: list[StepTimes] = []
    for precision in ("bfloat16", "autocast"):
        found = recorder.attempt(
            f"{name}, transformers {precision}",
            lambda precision=precision: _plain_steps(recorder, name, work, weights, precision),
        )
        plain += found or []
    if plain:
        compare(recorder, name, work, ours, plain)


def our_steps(
    recorder: Recorder, name: str, work: Work, weights: DeviceWeights, world: World
) -> list[StepTimes]:
    """The default budget first. The others are left out where they do not fit."""
    before = measure_device_memory(recorder.device).allocated_bytes
    actor = make_actor(work.hf_config, weights, world, recorder.dtype)
    steps = []
    for budget in work.token_budgets:
        plan = plan_replicas(work.batch.lengths.tolist(), 1, budget)[0]
        shard = take_replica_shard(work.batch, plan)
        setting = f"{name}, ours, micro-batches of {budget}"
        found = recorder.attempt(
            setting,
            lambda setting=setting, shard=shard, plan=plan: time_steps(
                recorder, setting, work, lambda: our_step(actor, shard, plan), before
            ),
        )
        steps += [found] if found else []
    if not steps:
        raise RuntimeError("no budget fits")
    return steps


def make_actor(
    hf_config: dict[str, Any], weights: DeviceWeights, world: World, dtype: torch.dtype
) -> ActorModel:
    optim = OptimConfig(lr=LR, weight_decay=WEIGHT_DECAY, betas=BETAS, eps=EPS, clip_grad=CLIP_GRAD)
    config = ActorConfig(optim=optim)
    backend = MegatronBackend(hf_config, weights, world, dtype, config.megatron)
    return ActorModel(backend, config, {"rl": TrainingPhase(optim, 1000)})


def our_step(actor: ActorModel, shard: MiniBatch, plan: ReplicaPlan) -> tuple[float, float]:
    result = actor.update(shard, plan, temperature=1.0)
    assert result is not None and not result.is_skipped, result
    return result.sums["actor/loss"], result.grad_norm


def time_steps(
    recorder: Recorder,
    setting: str,
    work: Work,
    step: Callable[[], tuple[float, float]],
    bytes_before: int,
) -> StepTimes:
    """Seconds of whole steps, host included. `bytes_before`:
    on the device before the model came.
    """
    if recorder.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(recorder.device)
    first = step()
    seconds = []
    num_warmups, num_runs = (0, 1) if recorder.is_quick else (NUM_WARMUPS, NUM_RUNS)
    for index in range(num_warmups + num_runs):
        synchronize_device(recorder.device)
        start = time.perf_counter()
        step()
        synchronize_device(recorder.device)
        if index >= num_warmups:
            seconds.append(time.perf_counter() - start)
    times = Spread.of(seconds)
    recorder.add_times(setting, times)
    recorder.add(f"{setting}, speed", work.batch.num_tokens / times.median, "tokens/s")
    peak = measure_device_memory(recorder.device).peak_allocated_bytes - bytes_before
    recorder.add(f"{setting}, peak memory", peak / 2**30, "GiB", "weights and optimizer included")
    return StepTimes(setting, times, first)


def add_utilisation(
    recorder: Recorder, name: str, work: Work, ours: StepTimes, bare_flops: float
) -> None:
    """Of the default setting."""
    lengths = (work.batch.lengths - 1).tolist()  # nothing predicts from a sample's last token
    flop = step_flop(work.hf_config, lengths, work.num_rows)
    recorder.note(f"{name}, operations of a step", vars(flop))
    rate = flop.total / ours.times.median
    device_name = torch.cuda.get_device_name() if recorder.device.type == "cuda" else ""
    peak = peak_flops(device_name)
    recorder.note("data-sheet peak, TFLOP/s", None if peak is None else peak / 1e12)
    if peak is not None:
        bar = MFU_BAR if name == "1.5B" else None
        recorder.add(
            f"{name}, MFU",
            percent(rate, peak),
            "%",
            "bf16 data-sheet peak",
            bar,
            is_more_better=True,
        )
    recorder.add(
        f"{name}, utilisation of the bare GEMM's rate",
        percent(rate, bare_flops),
        "%",
        "measured here",
    )


def _head_share(recorder: Recorder, name: str, work: Work, step: Spread) -> None:
    """The head alone on as many rows, in as many micro-batches, against its share of the
    step's operations.
    """
    num_micro_batches = len(
        plan_replicas(work.batch.lengths.tolist(), 1, work.token_budgets[0])[0].micro_batches
    )
    config = work.hf_config
    shape = HeadShape(
        work.num_rows // num_micro_batches, config["hidden_size"], config["vocab_size"]
    )
    inputs = HeadInputs.make(shape, recorder.device)
    chunk_size = QUICK_CHUNK_SIZES[0] if recorder.is_quick else DEFAULT_CHUNK_SIZE
    head = OurHead(
        inputs,
        backends(recorder.device)[-1],
        chunk_size,
        MainGrad(inputs.weight_VH),
        DEFAULT_STASH_BYTES,
        with_entropy=False,
    )
    both = head.time_both(recorder.device, recorder.limit_s)
    share = percent(both.median * num_micro_batches, step.median)
    flop_share = (
        100.0 * step_flop(config, (work.batch.lengths - 1).tolist(), work.num_rows).head_share
    )
    recorder.add(
        f"{name}, head's share of the step", share, "%", f"of the operations {flop_share:.1f} %"
    )
    recorder.add(
        f"{name}, head's share over that of the operations", share / flop_share, "x", "", HEAD_BAR
    )


def _plain_steps(
    recorder: Recorder, name: str, work: Work, weights: DeviceWeights, precision: Any
) -> list[StepTimes]:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingError("the package transformers") from error
    from benchmarks.gpu.plain_loop import PlainLoop

    before = measure_device_memory(recorder.device).allocated_bytes
    named = weights.named(work.hf_config)
    loop = PlainLoop(
        work.hf_config, named, work.batch, work.padded_rows[0], precision, recorder.device
    )
    steps = []
    for rows in work.padded_rows:
        loop.use_rows(rows)
        setting = f"{name}, transformers {precision}, {rows} padded samples"
        found = recorder.attempt(
            setting,
            lambda setting=setting: time_steps(recorder, setting, work, loop, before),
        )
        steps += [found] if found else []
    return steps


def compare(
    recorder: Recorder, name: str, work: Work, ours: list[StepTimes], plain: list[StepTimes]
) -> None:
    """Our default setting against the plain loop's fastest. Raises RuntimeError where the two
    do other work.
    """
    fastest = min(plain, key=lambda step: step.times.median)
    pairs = [(a, b) for a, b in zip(ours[0].first, plain[0].first, strict=True)]
    recorder.note(f"{name}, first loss and gradient norm, ours and plain", pairs)
    our_norm = ours[0].first[1]
    plain_norm = plain[0].first[1]
    if abs(our_norm - plain_norm) > AGREEMENT * plain_norm:
        raise RuntimeError(f"gradient norms {our_norm} and {plain_norm} differ: not the same work.")
    ratio = fastest.times.median / ours[0].times.median
    recorder.add(
        f"{name}, tokens/s over the plain loop's",
        ratio,
        "x",
        fastest.setting,
        SPEED_BAR,
        is_more_better=True,
    )


CASE = Case("G10", "training step of a small model beside a plain loop", run)
