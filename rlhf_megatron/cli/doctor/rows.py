"""The trainer's paths as rows of the doctor's table: what is taken here, why nothing faster is, what would bring it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlhf_megatron.cli.doctor.facts import FLASH, Facts
from rlhf_megatron.config.schema import KernelsConfig, MegatronConfig
from rlhf_megatron.models.fused import (
    Adam,
    Attention,
    Choice,
    DeviceType,
    choose_adam,
    choose_attention,
    choose_compiled_activation,
    choose_gradient_fusion,
    choose_norm,
)
from rlhf_megatron.parallel import mcore_fixes
from rlhf_megatron.parallel.mcore_patch import check_undeclared_needs, check_version
from rlhf_megatron.parallel.packages import DEEP_EP, INSTALL, NOT_NVIDIAS, Package

State = Literal["live", "not live", "broken"]
TE = "transformer_engine"
ATTENTION_NAMES = {
    "flash_attn_3": "flash attention 3, over document borders on the device",
    "torch": "torch's varlen flash attention",
    "flash_attn_2": "flash-attn 2, over document borders on the device",
    "by_length": "scaled_dot_product_attention, documents of one length at a time",
}
NORM_NAMES = {TE: "Transformer Engine's, inside its linear layers", "torch": "torch's kernel", "apex": "Apex's kernel"}
ADAM_NAMES = {TE: "Transformer Engine's FusedAdam", "apex": "Apex's FusedAdam", "torch": "torch's AdamW, fused=True"}
PACKAGE_NAMES = {
    TE: "Transformer Engine",
    "apex": "NVIDIA's Apex",
    "flash_attn_interface": "flash attention 3",
    "flash_attn": "flash-attn 2",
    "triton": "triton",
    DEEP_EP: "DeepEP",
}
FUSION_NAMES = {TE: "by Transformer Engine", "apex": "by Apex's extension", "torch": "by torch's addmm into float32"}


@dataclass(frozen=True)
class Row:
    """One path. `why` says why it is not live, or why nothing faster is; `fix` is a command or a setting."""

    area: str
    path: str
    state: State
    taken: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Wanted:
    """The settings that decide about the trainer's paths: those of a run, or those that most runs have."""

    device: DeviceType
    dtype: str = "bfloat16"
    head_dim: int = 128
    has_sinks: bool = False  # of attention
    transformer_impl: str = "auto"
    gradient_fusion: bool | None = None
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    loss_mode: str = "ppo_clip"
    is_deterministic: bool = False
    experts: MegatronConfig | None = field(default_factory=MegatronConfig)  # None: the model has none


def trainer_rows(facts: Facts, wanted: Wanted) -> list[Row]:
    """Return the trainer's rows in the order of a forward pass, its backward pass and the optimizer's step."""
    return [
        megatron_row(facts),
        patches_row(facts, wanted),
        layers_row(facts, wanted),
        attention_row(facts, wanted),
        norm_row(facts, wanted),
        _activation_row(facts, wanted),
        Row("trainer", "rotary positions", "live", "by our attention, from tables made once a micro-batch"),
        *expert_rows(facts, wanted),
        head_row(facts, wanted),
        _loss_row(facts, wanted),
        gradient_row(facts, wanted),
        adam_row(facts, wanted),
        _deterministic_row(wanted),
    ]


def package_rows(facts: Facts, device: DeviceType) -> list[Row]:
    """Say of each package that speeds the trainer up whether it is installed and can be imported."""
    return [_package_row(facts, device, module, name) for module, name in PACKAGE_NAMES.items()]


def megatron_row(facts: Facts) -> Row:
    """Whether megatron-core is there, of a supported version, and can be imported where that was tried."""
    install = "pip install --no-deps 'megatron-core>=0.16.1,<0.20'"
    if not facts.megatron_version:
        return Row("trainer", "megatron-core", "broken", "nothing can be trained", "it is not installed", install)
    try:
        check_version(facts.megatron_version)
        check_undeclared_needs(facts.megatron_version)
    except RuntimeError as error:
        why, _, fix = str(error).partition("; run: ")
        return Row("trainer", "megatron-core", "broken", facts.megatron_version, why, fix or install)
    if facts.megatron_error:
        fix = "repair the package that the error names, or uninstall it; `--traceback` of a run shows the whole error"
        return Row("trainer", "megatron-core", "broken", facts.megatron_version, facts.megatron_error, fix)
    return Row("trainer", "megatron-core", "live", facts.megatron_version)


def patches_row(facts: Facts, wanted: Wanted) -> Row:
    """Tell which of the two lists of replaced symbols hold here."""
    version = facts.megatron_version
    if not version:
        return Row("trainer", "patches", "not live", "none", "megatron-core is not installed")
    mended = [patch.symbol for patch in mcore_fixes.PATCHES if patch.is_for(version)]
    on_cpu = "all of parallel/cpu_platform" if wanted.device == "cpu" else "none of parallel/cpu_platform"
    return Row("trainer", "patches", "live", f"{on_cpu}; of parallel/mcore_fixes: {', '.join(mended)}")


def layers_row(facts: Facts, wanted: Wanted) -> Row:
    """Tell whose linear layers and norms a model gets."""
    package, asked = facts.packages[TE], wanted.transformer_impl == TE
    if wanted.device == "cpu":
        taken = "plain torch under Transformer Engine's names" if asked else "megatron-core's own"
        return Row("trainer", "layers", "live", taken, "Transformer Engine runs on CUDA only")
    if package.is_usable and wanted.transformer_impl != "local":
        return Row("trainer", "layers", "live", f"Transformer Engine {package.version}")
    if wanted.transformer_impl == "local":
        return Row("trainer", "layers", "live", "megatron-core's own", "transformer_impl is local")
    state: State = "broken" if package.is_present or asked else "not live"
    return Row("trainer", "layers", state, "megatron-core's own", package.why_not, INSTALL[TE])


def attention_row(facts: Facts, wanted: Wanted) -> Row:
    """Tell which kernel computes attention over packed documents."""
    absent: dict[Attention, str] = {}
    for name, (module, _, _) in FLASH.items():
        if not facts.packages[module].is_usable:
            absent[name] = facts.packages[module].why_not  # type: ignore[index]
    if facts.torch is None or facts.torch.flash_why_not:
        absent["torch"] = facts.torch.flash_why_not if facts.torch else facts.torch_error
    capability = facts.torch.capability if facts.torch else (0, 0)
    choice = choose_attention(wanted.device, wanted.dtype, wanted.head_dim, capability, absent, wanted.has_sinks)
    is_fastest = choice.name != "by_length" and not choice.fix  # flash attention 2 on a Hopper GPU is not
    return _of_choice("attention", choice, ATTENTION_NAMES[choice.name], is_fastest)


def norm_row(facts: Facts, wanted: Wanted) -> Row:
    """Tell which RMSNorm a model gets."""
    apex, has_kernel = facts.packages["apex"], bool(facts.torch and facts.torch.has_norm_kernel)
    choice = choose_norm(wanted.device, _impl(facts, wanted), has_kernel, apex.why_not, apex.is_usable)
    return _of_choice("norm", choice, NORM_NAMES.get(choice.name, "plain torch"), choice.name != "plain")


def gradient_row(facts: Facts, wanted: Wanted) -> Row:
    """Say who adds weight gradients to the float32 buffers; broken where the setting asks for a way that this machine
    lacks.
    """
    has_product = bool(facts.torch and facts.torch.has_float32_product)
    impl, dtype = _impl(facts, wanted), wanted.dtype
    path = "gradient accumulation fusion"
    try:
        choice = choose_gradient_fusion(
            wanted.gradient_fusion, wanted.device, impl, dtype, facts.has_gradient_extension, has_product
        )
    except ValueError as error:
        why, _, fix = str(error).partition(": ")[2].partition("; ")
        return Row("trainer", path, "broken", "no rank would start", why, fix.rstrip("."))
    taken = FUSION_NAMES.get(choice.name, "gradients are made and then added")
    return _of_choice(path, choice, taken, choice.name != "off")


def adam_row(facts: Facts, wanted: Wanted) -> Row:
    """Name the Adam that megatron-core took when it was imported, else the one that it would take."""
    found: Adam = "torch"
    if facts.megatron is not None:
        found = facts.megatron.adam  # type: ignore[assignment]
    elif facts.packages[TE].is_usable:
        found = "transformer_engine"
    elif facts.packages["apex"].is_usable:
        found = "apex"
    choice = choose_adam(wanted.device, found)
    return _of_choice("Adam", choice, ADAM_NAMES[choice.name], True)


def head_row(facts: Facts, wanted: Wanted) -> Row:
    """Tell which backend computes log-probs and entropies."""
    backend = wanted.kernels.backend
    why_not = facts.torch.triton_why_not.rstrip(".") if facts.torch else facts.torch_error
    names = {"triton": "Triton kernels", "chunked": "torch, by tiles", "reference": "torch, all logits at once"}
    if backend in ("chunked", "reference"):
        return Row("trainer", "log-prob head", "live", names[backend], f"actor.kernels.backend is {backend}")
    if not why_not:
        return Row("trainer", "log-prob head", "live", f"Triton kernels ({facts.torch.triton_version})")  # type: ignore[union-attr]
    fix = INSTALL["triton"] if facts.torch and not facts.torch.triton_version else ""
    if backend == "triton":
        return Row(
            "trainer", "log-prob head", "broken", "Triton kernels", why_not, fix or "actor.kernels.backend: auto"
        )
    return Row("trainer", "log-prob head", "live", names["chunked"], why_not, fix if wanted.device == "cuda" else "")


def _package_row(facts: Facts, device: DeviceType, module: str, name: str) -> Row:
    package = facts.packages[module]
    if not package.is_present:
        why = package.why_not if device == "cuda" else f"{package.why_not}; it is for GPUs"
        return Row("packages", name, "not live", "not installed", why, INSTALL[module])
    taken = package.version or "of an unknown version"
    if not package.is_usable:
        clean = "pip uninstall apex; " if package.why_not == NOT_NVIDIAS else ""
        return Row("packages", name, "broken", taken, package.why_not, f"{clean}{INSTALL[module]}")
    if device == "cpu":
        return Row("packages", name, "not live", taken, "it is for GPUs")
    return Row("packages", name, "live", taken)


def _loss_row(facts: Facts, wanted: Wanted) -> Row:
    explicit = facts.torch.explicit_losses if facts.torch else ()
    if wanted.loss_mode not in explicit:
        why = f"{wanted.loss_mode} leaves its gradient to autograd; {', '.join(explicit) or 'none'} does not"
        return Row("trainer", "fused loss", "not live", "autograd", why)
    if not wanted.kernels.fused_loss:
        return Row("trainer", "fused loss", "not live", "torch", "actor.kernels.fused_loss is false", "set it to true")
    how = "one Triton kernel" if facts.torch and not facts.torch.triton_why_not else "torch"
    return Row("trainer", "fused loss", "live", f"{wanted.loss_mode} with its gradient in one pass, in {how}")


def _activation_row(facts: Facts, wanted: Wanted) -> Row:
    choice = choose_compiled_activation(wanted.device, facts.compiler_why_not)
    taken = (
        "bias, SwiGLU, dropout and residual compiled by torch.compile" if choice.name == "compiled" else "plain torch"
    )
    return _of_choice("activation fusion", choice, taken, choice.name == "compiled")


def expert_rows(facts: Facts, wanted: Wanted) -> list[Row]:
    """Say how experts multiply, and how tokens reach them; broken where a setting asks for what is not there."""
    settings = wanted.experts
    if settings is None:
        return [Row("trainer", "experts", "not live", "not used", "the model has none")]
    by_te = _impl(facts, wanted) == TE
    products = "torch's grouped_mm, under Transformer Engine's names" if by_te else "torch's grouped_mm"
    if by_te and wanted.device == "cuda":
        products = "Transformer Engine's grouped layers"
    one = "one expert after the other"
    grouped = Row("trainer", "grouped GEMM of experts", "live", products)
    if not settings.moe_grouped_gemm:
        why, fix = "actor.megatron.moe_grouped_gemm is false", "actor.megatron.moe_grouped_gemm: true"
        grouped = Row("trainer", "grouped GEMM of experts", "not live", one, why, fix)
    is_flex, package = settings.moe_token_dispatcher_type == "flex", facts.packages[TE]
    plain = f"torch.distributed, {settings.moe_token_dispatcher_type}"
    permutation = package.why_not
    if package.is_usable and not is_at_least(package, (2, 1)):
        permutation = f"Transformer Engine is {package.version}, and 2.1 has it"
    return [
        grouped,
        _asked_row("tokens to experts", is_flex, "DeepEP", plain, DEEP_EP, facts.packages[DEEP_EP].why_not, wanted),
        _asked_row(
            "sorting of tokens", settings.moe_permute_fusion, "Transformer Engine", "torch", TE, permutation, wanted
        ),
    ]


SETTINGS = {
    "tokens to experts": ("moe_token_dispatcher_type", "flex"),
    "sorting of tokens": ("moe_permute_fusion", "true"),
}
"""Path -> the key of a layout that asks for its kernels, and the value that does."""


def _asked_row(path: str, is_asked: bool, fast: str, plain: str, module: str, why_not: str, wanted: Wanted) -> Row:
    """Tell of kernels that run where a setting asks for them."""
    why_not = why_not if wanted.device == "cuda" else f"{fast} runs on CUDA only"
    if is_asked and why_not:
        return Row("trainer", path, "broken", "no rank would start", why_not, INSTALL[module])
    if is_asked:
        return Row("trainer", path, "live", fast)
    return Row(
        "trainer", path, "live", plain, why_not, "" if why_not else "actor.megatron.{}: {}".format(*SETTINGS[path])
    )


def is_at_least(package: Package, version: tuple[int, int]) -> bool:
    """Whether a package's version is so high; one that nobody knows is."""
    numbers = [int(part) for part in package.version.split(".")[:2] if part.isdigit()]
    return len(numbers) < 2 or tuple(numbers) >= version


def _deterministic_row(wanted: Wanted) -> Row:
    if wanted.is_deterministic:
        return Row("trainer", "deterministic mode", "live", "trainer.deterministic: bit for bit on one layout")
    why = "trainer.deterministic is false; it costs speed, and is for finding out what went wrong"
    return Row("trainer", "deterministic mode", "not live", "off", why, "trainer.deterministic: true")


def _of_choice(path: str, choice: Choice, taken: str, is_live: bool) -> Row:
    state: State = "live" if is_live else "not live"
    return Row("trainer", path, state, taken, choice.why_not, choice.fix)


def _impl(facts: Facts, wanted: Wanted) -> Literal["local", "transformer_engine"]:
    """Resolve the layers as `models.backend.resolve_impl` does, without megatron-core; local where Transformer Engine
    is missing.
    """
    if wanted.device == "cpu":
        return "transformer_engine" if wanted.transformer_impl == TE else "local"
    return "transformer_engine" if wanted.transformer_impl != "local" and facts.packages[TE].is_usable else "local"
