"""Operators that CUDA alone has and the trainer uses, in plain torch on the CPU. `install` makes
them, and all that `kernels.cpp` takes over, the CUDA kernels of this process.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import host_kernels
import torch
from torch import Tensor

aten = torch.ops.aten


def on_host(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if tensor is None else host_kernels.host_view(tensor) for tensor in tensors)


def back(tensor: Tensor, like: Tensor) -> Tensor:
    return host_kernels.to_device(tensor, like.device.index)


# ---- products of half-precision matrices into float32 ----
def mm_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    x, y = on_host(a, b)
    return back(torch.mm(x.to(dtype), y.to(dtype)), a)


def mm_dtype_out(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    x, y, o = on_host(a, b, out)
    o.copy_(torch.mm(x.to(dtype), y.to(dtype)))
    return out


def addmm_dtype(
    c: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    z, x, y = (t.to(dtype) for t in on_host(c, a, b))
    return back(torch.addmm(z, x, y, beta=beta, alpha=alpha), a)


def addmm_dtype_out(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    z, x, y, o = on_host(c, a, b, out)
    o.copy_(torch.addmm(z.to(dtype), x.to(dtype), y.to(dtype), beta=beta, alpha=alpha))
    return out


def bmm_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    x, y = on_host(a, b)
    return back(torch.bmm(x.to(dtype), y.to(dtype)), a)


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Of whole numbers, too."""
    (v,) = on_host(x)
    return back(torch.histc(v.double(), bins, min, max).to(x.dtype), x)


# ---- RMSNorm ----
def rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    v, w = on_host(x, weight)
    root = torch.rsqrt(
        v.float().pow(2).mean(-1, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)
    )
    y = v.float() * root
    return back((y if w is None else y * w.float()).to(x.dtype), x), back(root, x)


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], root: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor, Tensor | None]:
    g, v, w, r = (None if t is None else t.double() for t in on_host(grad, x, weight, root))
    r = r.reshape(*v.shape[:-1], 1)
    normed = v * r
    h = g if w is None else g * w
    dx = back((r * (h - normed * (h * normed).mean(-1, keepdim=True))).to(x.dtype), x)
    if weight is None:
        return dx, None
    return dx, back((g * normed).reshape(-1, v.shape[-1]).sum(0).to(weight.dtype), x)


# ---- flash attention: of a batch, and of packed documents ----
def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: Any = None,
) -> tuple[Any, ...]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *on_host(q, k, v), dropout, causal, scale=scale
    )
    seeds = (
        torch.zeros(2, dtype=torch.uint64),
        torch.zeros((), dtype=torch.uint64),
        torch.empty(0),
    )
    return (
        back(out, q),
        back(lse, q),
        None,
        None,
        q.shape[2],
        k.shape[2],
        *(back(t, q) for t in seeds),
    )


def sdpa_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *more: Any,
    scale: Any = None,
) -> tuple[Tensor, ...]:
    # after two offsets and two lengths
    dropout = more[4]
    causal = more[5]
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return tuple(
        back(t, q) for t in backward(*on_host(g, q, k, v, out, lse), dropout, causal, scale=scale)
    )


def weights_of(
    q: Tensor, k: Tensor, causal: bool, scale: float, left: int | None, right: int | None
) -> Any:
    """[heads, T, S] attention weights of one document and [heads, T] their logarithm's base; q, k:
    [T, heads, d].
    """
    scores = (
        torch.einsum("tnd,snd->nts", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    )
    row = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    column = torch.arange(k.shape[0])[None]
    seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    if causal or (right is not None and right >= 0):
        seen &= column <= row + (0 if causal else right or 0)
    if left is not None and left >= 0:
        seen &= column >= row - left
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]).nan_to_num(0.0), lse


def documents(starts_q: Tensor, starts_k: Tensor) -> list[tuple[slice, slice]]:
    pairs = zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True)
    return [(slice(*a), slice(*b)) for a, b in pairs]


def flash(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int,
    dropout: float,
    causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert starts_q is not None and dropout == 0, (
        "the trainer calls it for packed documents, without dropout"
    )
    Q, K, V, SQ, SK = on_host(q, k, v, starts_q, starts_k)
    group = Q.shape[1] // V.shape[1]
    out = torch.zeros_like(Q)
    lse = torch.zeros(Q.shape[1], Q.shape[0])
    for a, b in documents(SQ, SK):
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        weights, lse[:, a] = weights_of(
            Q[a].float(), K[b].float(), causal, factor, window_size_left, window_size_right
        )
        out[a] = torch.einsum("nts,snd->tnd", weights, V[b].float().repeat_interleave(group, 1)).to(
            Q.dtype
        )
    seeds = (
        torch.zeros(2, dtype=torch.uint64),
        torch.zeros((), dtype=torch.uint64),
        torch.empty(0, dtype=q.dtype),
    )
    return back(out, q), back(lse, q), *(back(t, q) for t in seeds)


def flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts_q: Tensor,
    starts_k: Tensor,
    max_q: int, max_k: int, dropout: float, causal: bool, *seeds: Tensor,
    scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    G, Q, K, V, OUT, LSE, SQ, SK = on_host(g, q, k, v, out, lse, starts_q, starts_k)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    dq, dk, dv = (torch.zeros_like(t) for t in (Q, K, V))
    group = Q.shape[1] // K.shape[1]

    def fold(t: Tensor) -> Tensor:  # the query heads of a key head
        return t.reshape(t.shape[0], -1, group, t.shape[-1]).sum(2)

    for a, b in documents(SQ, SK):
        g_, q_, o_, k_, v_ = (t.float() for t in (G[a], Q[a], OUT[a], K[b], V[b]))
        weights, own = weights_of(q_, k_, causal, factor, window_size_left, window_size_right)
        # as the kernel: by the base that it is given
        weights = weights * torch.exp(own - LSE[:, a])[..., None]
        d_weights = torch.einsum("tnd,snd->nts", g_, v_.repeat_interleave(group, 1))
        d_scores = weights * (d_weights - (g_ * o_).sum(-1).T[..., None]) * factor
        dq[a] = torch.einsum("nts,snd->tnd", d_scores, k_.repeat_interleave(group, 1)).to(Q.dtype)
        dk[b] = fold(torch.einsum("nts,tnd->snd", d_scores, q_)).to(K.dtype)
        dv[b] = fold(torch.einsum("nts,tnd->snd", weights, g_)).to(V.dtype)
    return back(dq, q), back(dk, q), back(dv, q)


OPERATORS: dict[str, Callable[..., Any]] = {
    "mm.dtype": mm_dtype,
    "mm.dtype_out": mm_dtype_out,
    "addmm.dtype": addmm_dtype,
    "addmm.dtype_out": addmm_dtype_out,
    "bmm.dtype": bmm_dtype,
    "histc": histc,
    "_fused_rms_norm": rms_norm,
    "_fused_rms_norm_backward": rms_norm_backward,
    "_scaled_dot_product_flash_attention": sdpa,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash,
    "_flash_attention_backward": flash_backward,
}
_replaced: list[torch.library.Library] = []


def install() -> None:
    """Raises RuntimeError where torch has no operator of that name."""
    if _replaced:
        return
    host_kernels.install()
    _replaced.append(torch.library.Library("aten", "IMPL", "CUDA"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a kernel is replaced: that is meant
        for name, function in OPERATORS.items():
            _replaced[0].impl(name, function, "CUDA", allow_override=True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
