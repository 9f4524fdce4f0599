"""Which fused path is taken: the rules, what is found of packages in real directories, and the
adapters to kernels.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_models_build_attention import documents
from torch import Tensor

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.models.flash_attention import (
    choose_flash_kernel,
    wrap_flash_attn_package,
    wrap_torch_varlen,
)
from rlhf_megatron.ranks.models.fused_kernel_choice import (
    KernelChoice,
    choose_adam_kernel,
    choose_attention_kernel,
    choose_compiled_activation,
    choose_gradient_fusion,
    choose_norm_kernel,
)
from rlhf_megatron.ranks.models.packed_attention import (
    _attend_by_length,
    _attend_with_flash,
    make_packed_documents,
)
from rlhf_megatron.ranks.parallel import optional_packages
from rlhf_megatron.ranks.parallel.optional_packages import (
    OptionalPackage,
    find_apex,
    find_package,
    find_transformer_engine,
    try_import_attribute,
)
from rlhf_megatron.ranks.parallel.weight_grad import (
    has_float32_accumulating_product,
    wgrad_gemm_accum_fp32,
)

NO_FLASH: dict[Any, str] = {
    name: f"{name} is not here" for name in ("flash_attn_3", "torch", "flash_attn_2")
}
HOPPER = (9, 0)
AMPERE = (8, 0)
ADA = (8, 9)
TURING = (7, 5)
BLACKWELL = (10, 0)


def without(*names: str) -> dict[Any, str]:
    return {name: why_not for name, why_not in NO_FLASH.items() if name not in names}


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "absent", "name"),
    [
        (HOPPER, "bfloat16", 128, {}, "flash_attn_3"),
        (HOPPER, "float16", 64, without("torch", "flash_attn_2"), "torch"),
        (HOPPER, "bfloat16", 128, without("flash_attn_2"), "flash_attn_2"),
        (AMPERE, "bfloat16", 128, {}, "torch"),  # the third one has kernels for Hopper only
        (BLACKWELL, "bfloat16", 128, {}, "torch"),
        (ADA, "bfloat16", 192, {}, "torch"),
        (AMPERE, "bfloat16", 256, {}, "torch"),
        (ADA, "bfloat16", 256, {}, "by_length"),
        (HOPPER, "float32", 128, {}, "by_length"),
        (HOPPER, "bfloat16", 264, {}, "by_length"),
        (HOPPER, "bfloat16", 100, {}, "by_length"),
        (TURING, "float16", 64, {}, "by_length"),
        (HOPPER, "bfloat16", 128, NO_FLASH, "by_length"),
    ],
)
def test_attention(
    capability: tuple[int, int], dtype: str, head_dim: int, absent: Mapping[Any, str], name: str
) -> None:
    choice = choose_attention_kernel("cuda", dtype, head_dim, capability, absent)
    assert choice.name == name
    is_best = name == "flash_attn_3" or (name == "torch" and capability != HOPPER)
    assert bool(choice.why_not) is not is_best, choice


def test_attention_says_what_is_missing() -> None:
    assert choose_attention_kernel("cpu", "bfloat16", 64, (0, 0), {}) == KernelChoice(
        "by_length", "flash attention runs on CUDA only"
    )
    choice = choose_attention_kernel("cuda", "bfloat16", 64, HOPPER, NO_FLASH)
    assert choice.why_not == "torch's: torch is not here; flash-attn: flash_attn_2 is not here"
    assert "pip install --no-build-isolation flash-attn" in choice.fix
    assert "hopper" in choose_attention_kernel("cuda", "bfloat16", 64, HOPPER, without("torch")).fix
    assert (
        "head dimension (100)"
        in choose_attention_kernel("cuda", "bfloat16", 100, HOPPER, {}).why_not
    )


def test_sinks_go_around_the_kernel_of_torch() -> None:
    choice = choose_attention_kernel("cuda", "bfloat16", 64, HOPPER, {}, has_sinks=True)
    assert choice.name == "torch" and not choice.fix and "two passes" in choice.why_not
    choice = choose_attention_kernel("cuda", "bfloat16", 64, HOPPER, NO_FLASH, has_sinks=True)
    assert choice.name == "by_length" and choice.fix == "torch 2.11 or newer"


def test_norm() -> None:
    assert choose_norm_kernel("cpu", "transformer_engine", True, "", True).name == "plain"
    assert choose_norm_kernel("cuda", "transformer_engine", False, "absent", False) == KernelChoice(
        "transformer_engine"
    )
    assert choose_norm_kernel("cuda", "local", True, "", True) == KernelChoice("torch")
    assert choose_norm_kernel("cuda", "local", False, "", True) == KernelChoice("apex")
    plain = choose_norm_kernel("cuda", "local", False, "apex is not installed", False)
    assert plain == KernelChoice(
        "plain",
        "this torch has no kernel for RMSNorm; Apex: apex is not installed",
        "torch 2.9 or newer",
    )
    assert "without its norms" in choose_norm_kernel("cuda", "local", False, "", False).why_not


def test_adam() -> None:
    assert choose_adam_kernel("cuda", "transformer_engine") == KernelChoice("transformer_engine")
    assert choose_adam_kernel("cuda", "torch") == KernelChoice("torch")
    assert choose_adam_kernel("cpu", "apex").name == "torch"


@pytest.mark.parametrize(
    ("setting", "device", "impl", "dtype", "has_extension", "has_product", "name"),
    [
        (None, "cpu", "local", "bfloat16", True, True, "off"),
        (True, "cpu", "local", "bfloat16", False, False, "torch"),
        (
            True,
            "cpu",
            "transformer_engine",
            "float32",
            False,
            False,
            "torch",
        ),  # plain torch under its names
        (None, "cuda", "transformer_engine", "bfloat16", False, False, "transformer_engine"),
        (None, "cuda", "local", "bfloat16", True, True, "apex"),
        (None, "cuda", "local", "float64", True, False, "torch"),
        (None, "cuda", "local", "bfloat16", False, True, "torch"),
        (None, "cuda", "local", "bfloat16", False, False, "off"),
        (None, "cuda", "local", "float32", False, False, "torch"),
        (False, "cuda", "transformer_engine", "bfloat16", True, True, "off"),
    ],
)
def test_gradient_fusion(
    setting: bool | None,
    device: Any,
    impl: Any,
    dtype: str,
    has_extension: bool,
    has_product: bool,
    name: str,
) -> None:
    choice = choose_gradient_fusion(setting, device, impl, dtype, has_extension, has_product)
    assert choice.name == name
    assert bool(choice.why_not) is (name == "off")


def test_a_gradient_fusion_that_nothing_can_do_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"gradient_accumulation_fusion \(true\).*bfloat16.*torch 2.10.*leave it null",
    ):
        choose_gradient_fusion(True, "cuda", "local", "bfloat16", False, False)


def test_compiled_activations() -> None:
    assert choose_compiled_activation("cpu", "").name == "plain"
    assert choose_compiled_activation("cuda", "") == KernelChoice("compiled")
    assert (
        "triton is not installed"
        in choose_compiled_activation("cuda", "triton is not installed").why_not
    )


@pytest.mark.parametrize("setting", [None, True, False])
def test_the_configuration_of_megatron_follows(setting: bool | None) -> None:
    import models_build_jobs as jobs

    from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
    from rlhf_megatron.ranks.parallel.world import create_world, destroy_world
    from rlhf_megatron.weights.parallel_layout import ParallelLayout

    world = create_world(ParallelLayout(1), torch.device("cpu"))
    try:
        megatron = MegatronConfig(gradient_accumulation_fusion=setting)
        config = build_megatron_model(
            jobs.hf_config(), world, torch.float32, megatron
        ).transformer_config
    finally:
        destroy_world()
    # on a CPU only where it is asked for
    assert config.gradient_accumulation_fusion is bool(setting)
    assert not config.bias_activation_fusion and not config.bias_dropout_fusion
    assert (
        not config.apply_rope_fusion
        and not config.masked_softmax_fusion
        and not config.persist_layer_norm
    )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """Writes modules into a directory that comes first on the path; forgets them afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(tmp_path))
    try_import_attribute.cache_clear()

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()

    yield write
    sys.path.remove(str(tmp_path))
    try_import_attribute.cache_clear()
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]
    importlib.invalidate_caches()


Site = Callable[[str, str], None]


def test_a_package_and_its_version(site: Site) -> None:
    assert find_package("some_kernels") == OptionalPackage(
        "some_kernels", False, "", "some_kernels is not installed"
    )
    site("some_kernels/__init__.py", "raise RuntimeError('imported')")
    site(
        "some_kernels-1.2.dist-info/METADATA",
        "Metadata-Version: 2.1\nName: some-kernels\nVersion: 1.2\n",
    )
    assert find_package("some_kernels", ("no-such-name", "some-kernels")) == OptionalPackage(
        "some_kernels", True, "1.2"
    )
    assert find_package("some_kernels").is_usable  # found without running it


def test_apex_of_pypi_is_not_nvidias(site: Site) -> None:
    site("apex/__init__.py", "")
    site("apex/models.py", "raise RuntimeError('another project')")
    found = find_apex()
    assert found.is_present and not found.is_usable
    assert found.why_not == optional_packages.NOT_NVIDIAS


def test_apex_without_its_extensions_is_of_no_use(site: Site) -> None:
    for part in ("", "optimizers/", "multi_tensor_apply/"):
        site(f"apex/{part}__init__.py", "")
    assert "amp_C" in find_apex().why_not
    site("amp_C.py", "")
    assert find_apex().is_usable
    assert not optional_packages.has_gradient_extension()
    site("fused_weight_gradient_mlp_cuda.py", "")
    assert optional_packages.has_gradient_extension()


def test_an_adam_that_cannot_run_is_refused(site: Site) -> None:
    from rlhf_megatron.ranks.workers.megatron_optimizer import refuse_broken_adam

    for part in ("", "optimizers/", "multi_tensor_apply/"):
        site(f"apex/{part}__init__.py", "")
    refuse_broken_adam("torch", find_apex())
    refuse_broken_adam("transformer_engine", find_apex())
    with pytest.raises(
        ValueError, match=r"FusedAdam of Apex.*amp_C.*uninstall apex, or build it again: git clone"
    ):
        refuse_broken_adam("apex", find_apex())
    site("amp_C.py", "")
    refuse_broken_adam("apex", find_apex())


def test_transformer_engine_without_its_torch_part(site: Site) -> None:
    site(
        "transformer_engine/__init__.py",
        "raise AssertionError('Could not find transformer-engine')",
    )
    assert "has no transformer_engine.pytorch" in find_transformer_engine().why_not
    site("transformer_engine/pytorch/__init__.py", "")
    assert find_transformer_engine().is_usable  # what importing says is another question
    assert try_import_attribute("transformer_engine.pytorch", "Linear") == (
        None,
        "AssertionError: Could not find transformer-engine",
    )


def test_a_transformer_engine_that_cannot_be_imported_is_said(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """megatron-core is silent about an ImportError."""
    from rlhf_megatron.ranks.models.layer_specs import has_transformer_engine, resolve_layer_impl

    if has_transformer_engine():
        pytest.skip("megatron-core found the real one")
    site(
        "transformer_engine/__init__.py",
        "raise ImportError('libtransformer_engine.so: undefined symbol: nvte')",
    )
    site("transformer_engine/pytorch/__init__.py", "")
    assert resolve_layer_impl("auto", torch.device("cuda")) == "local"
    assert (
        "cannot be imported: ImportError: libtransformer_engine.so: undefined symbol" in caplog.text
    )
    with pytest.raises(
        ValueError, match=r"undefined symbol: nvte\); pip install --no-build-isolation"
    ):
        resolve_layer_impl("transformer_engine", torch.device("cuda"))


def test_a_broken_kernel_is_one_line(site: Site) -> None:
    site("flash_attn.py", "raise OSError('libx.so: undefined symbol: _ZN3c104cuda\\nand more')")
    assert try_import_attribute("flash_attn", "flash_attn_varlen_func") == (
        None,
        "OSError: libx.so: undefined symbol: _ZN3c104cuda",
    )
    assert try_import_attribute("torch.nn.functional", "no_such_function")[1].startswith(
        "AttributeError: "
    )


def test_nothing_is_imported_for_a_cpu(site: Site) -> None:
    site("flash_attn_interface.py", "raise SystemExit('imported')")
    assert choose_flash_kernel(torch.device("cpu"), torch.bfloat16, 64).attention_call is None


def oracle(query: Tensor, key: Tensor, value: Tensor, borders: Any, scale: float) -> Tensor:
    """Causal attention by sequence, the last query at the last key, in float64."""
    outputs = []
    for number in range(len(borders[0]) - 1):
        rows = slice(int(borders[0][number]), int(borders[0][number + 1]))
        columns = slice(int(borders[1][number]), int(borders[1][number + 1]))
        q = query[rows].double()
        k, v = (t[columns].double() for t in (key, value))
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qnd,knd->nqk", q, k.repeat_interleave(group, 1)) * scale
        num_keys = k.shape[0]
        num_queries = q.shape[0]
        seen = (
            torch.arange(num_keys)[None]
            <= torch.arange(num_queries)[:, None] + num_keys - num_queries
        )
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("nqk,knd->qnd", weights, v.repeat_interleave(group, 1)))
    return torch.cat(outputs).to(query.dtype)


def torch_2_10(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None
):  # type: ignore[no-untyped-def]
    assert is_causal
    return oracle(query, key, value, (cu_seq_q, cu_seq_k), query.shape[-1] ** -0.5)


def torch_2_11(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
    assert window_size == (-1, 0)
    return oracle(query, key, value, (cu_q, cu_k), scale)


def torch_2_13(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    cu_q,
    cu_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    assert window_size == (-1, 0) and enable_gqa is (query.shape[1] != key.shape[1])
    return oracle(query, key, value, (cu_q, cu_k), scale)


def flash_attn_2(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False,
    window_size=(-1, -1), deterministic=False,
):  # fmt: skip
    assert causal and deterministic is torch.are_deterministic_algorithms_enabled()
    return oracle(q, k, v, (cu_seqlens_q, cu_seqlens_k), softmax_scale)


def flash_attn_3(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    softmax_scale=None, causal=False,
):  # fmt: skip
    assert causal
    return oracle(q, k, v, (cu_seqlens_q, cu_seqlens_k), softmax_scale), "sums of the softmax"


@pytest.mark.parametrize(
    "call",
    [
        *(wrap_torch_varlen(function) for function in (torch_2_10, torch_2_11, torch_2_13)),
        *(wrap_flash_attn_package(function) for function in (flash_attn_2, flash_attn_3)),
    ],
    ids=["torch-2.10", "torch-2.11", "torch-2.13", "flash-attn-2", "flash-attn-3"],
)
@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize(
    "scale", [0.125, 0.3]
)  # what a function without that option takes for 64, and another
def test_every_kernel_gets_what_it_asks_for(call: Any, num_groups: int, scale: float) -> None:
    """Functions with the signatures of real releases, computed in float64, against the path
    that a CPU takes.
    """
    torch.manual_seed(0)
    lengths = [3, 17, 1, 5]
    q, k, v = (
        torch.randn(sum(lengths), heads, 64, dtype=torch.float64)
        for heads in (4, num_groups, num_groups)
    )
    docs = documents(lengths)
    got = _attend_with_flash(q, k, v, docs, scale, call)
    torch.testing.assert_close(got, _attend_by_length(q, k, v, docs, scale), atol=1e-12, rtol=0)


def test_deterministic_gradients_are_asked_for() -> None:
    docs = make_packed_documents(torch.tensor([0, 2], dtype=torch.int32), 2, torch.arange(2))
    q = torch.randn(2, 1, 8)
    torch.use_deterministic_algorithms(True)
    try:
        # which asserts that it is told
        _attend_with_flash(q, q, q, docs, 0.3, wrap_flash_attn_package(flash_attn_2))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("dtype", "buffer", "bound"),
    [
        (torch.float32, torch.float32, 1e-6),
        (
            torch.bfloat16,
            torch.float32,
            1e-6,
        ),  # operands are exact in bfloat16: nothing is rounded but sums
        (torch.float64, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 2e-2),
    ],
)
def test_a_weight_gradient_is_added_in_the_buffers_precision(
    dtype: torch.dtype, buffer: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 12).to(dtype)
    grad = torch.randn(50, 7).to(dtype)
    main_grad = torch.randn(7, 12).to(buffer)
    want = main_grad.double() + grad.double().t() @ x.double()
    place = main_grad.data_ptr()
    wgrad_gemm_accum_fp32(x, grad, main_grad)
    assert main_grad.data_ptr() == place and main_grad.dtype == buffer
    assert float((main_grad - want).norm() / want.norm()) <= bound


@pytest.mark.gpu
def test_a_weight_gradient_on_cuda_makes_no_copy_of_the_buffer() -> None:
    assert has_float32_accumulating_product(), f"torch {torch.__version__} is older than 2.8"
    torch.manual_seed(0)
    x, grad = (torch.randn(512, size, device="cuda", dtype=torch.bfloat16) for size in (1024, 2048))
    main_grad = torch.randn(2048, 1024, device="cuda")
    want = main_grad.double() + grad.double().t() @ x.double()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    wgrad_gemm_accum_fp32(x, grad, main_grad)
    assert torch.cuda.max_memory_allocated() - before < main_grad.nbytes // 4
    assert float((main_grad - want).norm() / want.norm()) <= 1e-5


def test_rank_0_says_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    import models_build_jobs as jobs

    from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
    from rlhf_megatron.ranks.parallel.world import create_world, destroy_world
    from rlhf_megatron.weights.parallel_layout import ParallelLayout

    world = create_world(ParallelLayout(1), torch.device("cpu"))
    try:
        with caplog.at_level("INFO", logger="rlhf_megatron.ranks.models.megatron_model_builder"):
            build_megatron_model(
                jobs.hf_config(),
                world,
                torch.float32,
                MegatronConfig(gradient_accumulation_fusion=True),
            )
    finally:
        destroy_world()
    messages = [
        record.getMessage()
        for record in caplog.records
        if record.name == "rlhf_megatron.ranks.models.megatron_model_builder"
    ]
    assert messages == [
        "local layers; attention: by_length (flash attention runs on CUDA only); norm: plain"
        " (fused norms run on CUDA only; here its gradient is written out by hand); weight"
        " gradients added by: torch"
    ]
