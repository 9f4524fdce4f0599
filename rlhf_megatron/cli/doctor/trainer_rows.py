"""The trainer's paths as rows of the doctor's table: what is taken here, why nothing faster is,
what would bring it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlhf_megatron.cli.doctor.machine_facts import FLASH_PACKAGES, MachineFacts
from rlhf_megatron.config.schema import KernelsConfig, MegatronConfig
from rlhf_megatron.mcore_patch import (
    check_megatron_version,
    check_undeclared_dependencies,
)
from rlhf_megatron.ranks.models.fused_kernel_choice import (
    AdamKernel,
    AttentionKernel,
    DeviceType,
    KernelChoice,
    choose_adam_kernel,
    choose_attention_kernel,
    choose_compiled_activation,
    choose_gradient_fusion,
    choose_norm_kernel,
)
from rlhf_megatron.ranks.parallel import mcore_fixes
from rlhf_megatron.ranks.parallel.optional_packages import (
    DEEP_EP,
    INSTALL,
    NOT_NVIDIAS,
    OptionalPackage,
)

PathState = Literal["live", "not live", "broken"]
TE = "transformer_engine"
ATTENTION_NAMES = {
    "flash_attn_3": "flash attention 3, over document borders on the device",
    "torch": "torch's varlen flash attention",
    "flash_attn_2": "flash-attn 2, over document borders on the device",
    "by_length": "scaled_dot_product_attention, documents of one length at a time",
}
NORM_NAMES = {
    TE: "Transformer Engine's, inside its linear layers",
    "torch": "torch's kernel",
    "apex": "Apex's kernel",
}
ADAM_NAMES = {
    TE: "Transformer Engine's FusedAdam",
    "apex": "Apex's FusedAdam",
    "torch": "torch's AdamW, fused=True",
}
PACKAGE_NAMES = {
    TE: "Transformer Engine",
    "apex": "NVIDIA's Apex",
    "flash_attn_interface": "flash attention 3",
    "flash_attn": "flash-attn 2",
    "triton": "triton",
    DEEP_EP: "DeepEP",
}
FUSION_NAMES = {
    TE: "by Transformer Engine",
    "apex": "by Apex's extension",
    "torch": "by torch's addmm into float32",
}

SETTING_BY_PATH = {
    "tokens to experts": ("moe_token_dispatcher_type", "flex"),
    "sorting of tokens": ("moe_permute_fusion", "true"),
}
"""Path -> the key of a layout that asks for its kernels, and the value that does."""


@dataclass(frozen=True)
class DoctorRow:
    """A path or part of the machine in the doctor's table. `taken` is the variant in use, `why`
    says why the path is not live or nothing faster is used, and `fix` is a command or a setting.
    `is_for_gpus`: the path is not live because only GPUs have it and this machine has none.
    """

    area: str
    path: str
    state: PathState
    taken: str
    why: str = ""
    fix: str = ""
    is_for_gpus: bool = False


@dataclass(frozen=True)
class TrainerPathSettings:
    """The settings that decide the trainer's paths: the settings of a run, or by default those of
    most runs.
    """

    device: DeviceType
    dtype: str = "bfloat16"
    head_dim: int = 128
    has_sinks: bool = False  # of attention
    transformer_impl: str = "auto"
    gradient_fusion: bool | None = None
    kernels_config: KernelsConfig = field(default_factory=KernelsConfig)
    loss_mode: str = "ppo_clip"
    is_deterministic: bool = False
    # None: the model has none
    expert_config: MegatronConfig | None = field(default_factory=MegatronConfig)


def make_trainer_rows(facts: MachineFacts, path_settings: TrainerPathSettings) -> list[DoctorRow]:
    """Return the trainer's rows, in the order of a forward pass, its backward pass and the
    optimizer's step.
    """
    return [
        make_megatron_row(facts),
        make_patches_row(facts, path_settings),
        make_layers_row(facts, path_settings),
        make_attention_row(facts, path_settings),
        make_norm_row(facts, path_settings),
        _make_activation_row(facts, path_settings),
        DoctorRow(
            "trainer",
            "rotary positions",
            "live",
            "by our attention, from tables made once a micro-batch",
        ),
        *make_expert_rows(facts, path_settings),
        make_head_row(facts, path_settings),
        _make_fused_loss_row(facts, path_settings),
        make_gradient_fusion_row(facts, path_settings),
        make_adam_row(facts, path_settings),
        _make_deterministic_row(path_settings),
    ]


def make_package_rows(facts: MachineFacts, device: DeviceType) -> list[DoctorRow]:
    """Return a row for each package that speeds the trainer up, on whether it is installed and can
    be imported.
    """
    return [
        _make_package_row(facts, device, module, name) for module, name in PACKAGE_NAMES.items()
    ]


def make_megatron_row(facts: MachineFacts) -> DoctorRow:
    """Return the row on megatron-core; broken if it is missing, unsupported, or could not be
    imported where that was tried.
    """
    install = "pip install --no-deps 'megatron-core>=0.16.1,<0.20'"
    if not facts.megatron_version:
        return DoctorRow(
            "trainer",
            "megatron-core",
            "broken",
            "nothing can be trained",
            "it is not installed",
            install,
        )
    try:
        check_megatron_version(facts.megatron_version)
        check_undeclared_dependencies(facts.megatron_version)
    except RuntimeError as error:
        why, _, fix = str(error).partition("; run: ")
        return DoctorRow(
            "trainer", "megatron-core", "broken", facts.megatron_version, why, fix or install
        )
    if facts.megatron_error:
        fix = (
            "repair the package that the error names, or uninstall it; `--traceback` of a run shows"
            " the whole error"
        )
        return DoctorRow(
            "trainer", "megatron-core", "broken", facts.megatron_version, facts.megatron_error, fix
        )
    return DoctorRow("trainer", "megatron-core", "live", facts.megatron_version)


def make_patches_row(facts: MachineFacts, path_settings: TrainerPathSettings) -> DoctorRow:
    """Return the row on the patches of megatron-core that apply here: those for the CPU, and those
    for this version.
    """
    version = facts.megatron_version
    if not version:
        return DoctorRow("trainer", "patches", "not live", "none", "megatron-core is not installed")
    mended = [patch.symbol for patch in mcore_fixes.PATCHES if patch.covers_version(version)]
    on_cpu = (
        "all of parallel/cpu_platform"
        if path_settings.device == "cpu"
        else "none of parallel/cpu_platform"
    )
    return DoctorRow(
        "trainer", "patches", "live", f"{on_cpu}; of parallel/mcore_fixes: {', '.join(mended)}"
    )


def make_layers_row(facts: MachineFacts, path_settings: TrainerPathSettings) -> DoctorRow:
    """Return the row on whose linear layers and norms a model gets: Transformer Engine's or
    megatron-core's.
    """
    package = facts.packages[TE]
    asked = path_settings.transformer_impl == TE
    if path_settings.device == "cpu":
        taken = "plain torch under Transformer Engine's names" if asked else "megatron-core's own"
        return DoctorRow("trainer", "layers", "live", taken, "Transformer Engine runs on CUDA only")
    if package.is_usable and path_settings.transformer_impl != "local":
        return DoctorRow("trainer", "layers", "live", f"Transformer Engine {package.version}")
    if path_settings.transformer_impl == "local":
        return DoctorRow(
            "trainer", "layers", "live", "megatron-core's own", "transformer_impl is local"
        )
    state: PathState = "broken" if package.is_present or asked else "not live"
    return DoctorRow(
        "trainer", "layers", state, "megatron-core's own", package.why_not, INSTALL[TE]
    )


def make_attention_row(facts: MachineFacts, path_settings: TrainerPathSettings) -> DoctorRow:
    """Return the row on the kernel that computes attention over packed documents."""
    absent: dict[AttentionKernel, str] = {}
    for name, (module, _, _) in FLASH_PACKAGES.items():
        if not facts.packages[module].is_usable:
            absent[name] = facts.packages[module].why_not  # type: ignore[index]
    if facts.torch is None or facts.torch.flash_why_not:
        absent["torch"] = facts.torch.flash_why_not if facts.torch else facts.torch_error
    capability = facts.torch.capability if facts.torch else (0, 0)
    choice = choose_attention_kernel(
        path_settings.device,
        path_settings.dtype,
        path_settings.head_dim,
        capability,
        absent,
        path_settings.has_sinks,
    )
    # flash attention 2 on a Hopper GPU is not
    is_fastest = choice.name != "by_length" and not choice.fix
    return _make_choice_row(
        "attention", choice, ATTENTION_NAMES[choice.name], is_fastest, not facts.has_cuda
    )


def make_norm_row(facts: MachineFacts, path_settings: TrainerPathSettings) -> DoctorRow:
    """Return the row on the kernel that computes RMSNorm."""
    apex = facts.packages["apex"]
    has_kernel = bool(facts.torch and facts.torch.has_norm_kernel)
    choice = choose_norm_kernel(
        path_settings.device,
        _resolve_layer_implementation(facts, path_settings),
        has_kernel,
        apex.why_not,
        apex.is_usable,
    )
    taken = NORM_NAMES.get(choice.name, "plain torch")
    return _make_choice_row("norm", choice, taken, choice.name != "plain", not facts.has_cuda)


def make_gradient_fusion_row(facts: MachineFacts, path_settings: TrainerPathSettings) -> DoctorRow:
    """Return the row on how weight gradients are added to the float32 buffers; broken if the
    setting asks for a fusion that this machine lacks.
    """
    has_product = bool(facts.torch and facts.torch.has_float32_product)
    impl = _resolve_layer_implementation(facts, path_settings)
    dtype = path_settings.dtype
    path = "gradient accumulation fusion"
    try:
        choice = choose_gradient_fusion(
            path_settings.gradient_fusion,
            path_settings.device,
            impl,
            dtype,
            facts.has_gradient_extension,
            has_product,
        )
    except ValueError as error:
        why, _, fix = str(error).partition(": ")[2].partition("; ")
        return DoctorRow("trainer", path, "broken", "no rank would start", why, fix.rstrip("."))
    taken = FUSION_NAMES.get(choice.name, "gradients are made and then added")
    return _make_choice_row(path, choice, taken, choice.name != "off")


def make_adam_row(facts: MachineFacts, path_settings: TrainerPathSettings) -> DoctorRow:
    """Return the row on the Adam that megatron-core took when it was imported, or else
    would take.
    """
    found: AdamKernel = "torch"
    if facts.megatron is not None:
        found = facts.megatron.adam_name  # type: ignore[assignment]
    elif facts.packages[TE].is_usable:
        found = "transformer_engine"
    elif facts.packages["apex"].is_usable:
        found = "apex"
    choice = choose_adam_kernel(path_settings.device, found)
    return _make_choice_row("Adam", choice, ADAM_NAMES[choice.name], True)


def make_head_row(facts: MachineFacts, path_settings: TrainerPathSettings) -> DoctorRow:
    """Return the row on the backend that computes log-probs and entropies; broken if the setting
    asks for Triton and it cannot run.
    """
    backend = path_settings.kernels_config.backend
    why_not = facts.torch.triton_why_not.rstrip(".") if facts.torch else facts.torch_error
    names = {
        "triton": "Triton kernels",
        "chunked": "torch, by tiles",
        "reference": "torch, all logits at once",
    }
    if backend in ("chunked", "reference"):
        return DoctorRow(
            "trainer",
            "log-prob head",
            "live",
            names[backend],
            f"actor.kernels.backend is {backend}",
        )
    if not why_not:
        version = facts.torch.triton_version  # type: ignore[union-attr]
        return DoctorRow("trainer", "log-prob head", "live", f"Triton kernels ({version})")
    is_missing = facts.torch is not None and not facts.torch.triton_version
    fix = INSTALL["triton"] if is_missing and path_settings.device == "cuda" else ""
    if backend == "triton":
        return DoctorRow(
            "trainer",
            "log-prob head",
            "broken",
            "Triton kernels",
            why_not,
            fix or "actor.kernels.backend: auto",
        )
    return DoctorRow(
        "trainer",
        "log-prob head",
        "live",
        names["chunked"],
        why_not,
        fix,
    )


def _make_package_row(
    facts: MachineFacts, device: DeviceType, module: str, package_name: str
) -> DoctorRow:
    """Return the row on whether a package for GPUs is installed and can be imported."""
    package = facts.packages[module]
    is_for_gpus = device == "cpu" and not facts.has_cuda
    if not package.is_present:
        why = package.why_not if device == "cuda" else f"{package.why_not}; it is for GPUs"
        return DoctorRow(
            "packages",
            package_name,
            "not live",
            "not installed",
            why,
            INSTALL[module],
            is_for_gpus=is_for_gpus,
        )
    taken = package.version or "of an unknown version"
    if not package.is_usable:
        clean = "pip uninstall apex; " if package.why_not == NOT_NVIDIAS else ""
        return DoctorRow(
            "packages", package_name, "broken", taken, package.why_not, f"{clean}{INSTALL[module]}"
        )
    if device == "cpu":
        return DoctorRow(
            "packages",
            package_name,
            "not live",
            taken,
            "it is for GPUs",
            is_for_gpus=is_for_gpus,
        )
    return DoctorRow("packages", package_name, "live", taken)


def _make_fused_loss_row(facts: MachineFacts, path_settings: TrainerPathSettings) -> DoctorRow:
    """Return the row on whether the policy loss computes its gradient itself, in one pass, or
    leaves it to autograd.
    """
    explicit = facts.torch.explicit_losses if facts.torch else ()
    if path_settings.loss_mode not in explicit:
        why = (
            f"{path_settings.loss_mode} leaves its gradient to autograd;"
            f" {', '.join(explicit) or 'none'} does not"
        )
        return DoctorRow("trainer", "fused loss", "not live", "autograd", why)
    if not path_settings.kernels_config.fused_loss:
        return DoctorRow(
            "trainer",
            "fused loss",
            "not live",
            "torch",
            "actor.kernels.fused_loss is false",
            "set it to true",
        )
    how = "one Triton kernel" if facts.torch and not facts.torch.triton_why_not else "torch"
    return DoctorRow(
        "trainer",
        "fused loss",
        "live",
        f"{path_settings.loss_mode} with its gradient in one pass, in {how}",
    )


def _make_activation_row(facts: MachineFacts, path_settings: TrainerPathSettings) -> DoctorRow:
    """Return the row on whether activations are compiled by torch.compile."""
    choice = choose_compiled_activation(path_settings.device, facts.compiler_why_not)
    taken = (
        "bias, SwiGLU, dropout and residual compiled by torch.compile"
        if choice.name == "compiled"
        else "plain torch"
    )
    return _make_choice_row(
        "activation fusion", choice, taken, choice.name == "compiled", not facts.has_cuda
    )


def make_expert_rows(facts: MachineFacts, path_settings: TrainerPathSettings) -> list[DoctorRow]:
    """Return the rows on how experts multiply, how tokens reach them and how tokens are sorted;
    broken where a setting asks for a kernel that is missing.
    """
    settings = path_settings.expert_config
    if settings is None:
        return [DoctorRow("trainer", "experts", "not live", "not used", "the model has none")]
    by_te = _resolve_layer_implementation(facts, path_settings) == TE
    products = (
        "torch's grouped_mm, under Transformer Engine's names" if by_te else "torch's grouped_mm"
    )
    if by_te and path_settings.device == "cuda":
        products = "Transformer Engine's grouped layers"
    one = "one expert after the other"
    grouped = DoctorRow("trainer", "grouped GEMM of experts", "live", products)
    if not settings.moe_grouped_gemm:
        why = "actor.megatron.moe_grouped_gemm is false"
        fix = "actor.megatron.moe_grouped_gemm: true"
        grouped = DoctorRow("trainer", "grouped GEMM of experts", "not live", one, why, fix)
    is_flex = settings.moe_token_dispatcher_type == "flex"
    package = facts.packages[TE]
    plain = f"torch.distributed, {settings.moe_token_dispatcher_type}"
    permutation = package.why_not
    if package.is_usable and not is_version_at_least(package, (2, 1)):
        permutation = f"Transformer Engine is {package.version}, and 2.1 has it"
    return [
        grouped,
        _make_requested_kernel_row(
            "tokens to experts",
            is_flex,
            "DeepEP",
            plain,
            DEEP_EP,
            facts.packages[DEEP_EP].why_not,
            path_settings,
        ),
        _make_requested_kernel_row(
            "sorting of tokens",
            settings.moe_permute_fusion,
            "Transformer Engine",
            "torch",
            TE,
            permutation,
            path_settings,
        ),
    ]


def _make_requested_kernel_row(
    path_name: str,
    is_requested: bool,
    fast_name: str,
    plain_name: str,
    module: str,
    why_not: str,
    path_settings: TrainerPathSettings,
) -> DoctorRow:
    """Return the row on a kernel that runs only if a setting requests it: broken if it is requested
    and cannot run (`why_not`), else with the fast or the plain variant that is used.
    """
    why_not = why_not if path_settings.device == "cuda" else f"{fast_name} runs on CUDA only"
    if is_requested and why_not:
        return DoctorRow(
            "trainer", path_name, "broken", "no rank would start", why_not, INSTALL[module]
        )
    if is_requested:
        return DoctorRow("trainer", path_name, "live", fast_name)
    return DoctorRow(
        "trainer",
        path_name,
        "live",
        plain_name,
        why_not,
        "" if why_not else "actor.megatron.{}: {}".format(*SETTING_BY_PATH[path_name]),
    )


def is_version_at_least(package: OptionalPackage, version: tuple[int, int]) -> bool:
    """Return whether a package's version is at least `version`; True for a version that cannot be
    read.
    """
    numbers = [int(part) for part in package.version.split(".")[:2] if part.isdigit()]
    return len(numbers) < 2 or tuple(numbers) >= version


def _make_deterministic_row(path_settings: TrainerPathSettings) -> DoctorRow:
    """Return the row on whether the run is deterministic."""
    if path_settings.is_deterministic:
        return DoctorRow(
            "trainer",
            "deterministic mode",
            "live",
            "trainer.deterministic: bit for bit on one layout",
        )
    why = "trainer.deterministic is false; it costs speed, and is for finding out what went wrong"
    return DoctorRow(
        "trainer", "deterministic mode", "not live", "off", why, "trainer.deterministic: true"
    )


def _make_choice_row(
    path_name: str,
    choice: KernelChoice,
    taken_text: str,
    is_live: bool,
    is_for_gpus: bool = False,
) -> DoctorRow:
    """Return the row on a choice of kernel, with the choice's reason and fix. `is_live`: the fast
    kernel is the one that is taken; the state of the row is live or not live. `is_for_gpus`: only
    GPUs have the fast kernel, and this machine has none.
    """
    state: PathState = "live" if is_live else "not live"
    return DoctorRow(
        "trainer",
        path_name,
        state,
        taken_text,
        choice.why_not,
        choice.fix,
        is_for_gpus=is_for_gpus and not is_live and not choice.fix,
    )


def _resolve_layer_implementation(
    facts: MachineFacts, path_settings: TrainerPathSettings
) -> Literal["local", "transformer_engine"]:
    """Return whose layers a model gets, as `ranks.models.layer_specs.resolve_layer_impl` does, but
    without megatron-core; "local" where Transformer Engine is missing.
    """
    if path_settings.device == "cpu":
        return "transformer_engine" if path_settings.transformer_impl == TE else "local"
    return (
        "transformer_engine"
        if path_settings.transformer_impl != "local" and facts.packages[TE].is_usable
        else "local"
    )
