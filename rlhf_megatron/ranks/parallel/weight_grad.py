"""The functions of Apex's extension `fused_weight_gradient_mlp_cuda` that megatron-core calls,
in plain torch.

A linear layer's weight gradient is added to the float32 buffer by the matrix product itself: no
gradient in the weight's type is made, rounded and added in a pass of its own. On CUDA in half
precision torch has such a product from 2.10 on; elsewhere operands of the buffer's own type can do
it on any torch.
"""

# T tokens, I input features, O output features

from __future__ import annotations

import torch
from torch import Tensor


def has_float32_accumulating_product() -> bool:
    """Return whether torch can add a product of half-precision matrices on CUDA to a float32
    matrix.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return version >= (2, 10) and "dtype_out" in torch.ops.aten.addmm.overloads()


def wgrad_gemm_accum_fp32(input_TI: Tensor, grad_output_TO: Tensor, main_grad_OI: Tensor) -> None:
    """Add grad_output^T input to `main_grad_OI` in place, which is float32 or has the type of the
    operands. The name is the name of Apex's function.
    """
    grad_OT = grad_output_TO.t()
    if input_TI.dtype == main_grad_OI.dtype:
        main_grad_OI.addmm_(grad_OT, input_TI)
    elif (
        input_TI.is_cuda
        and input_TI.dtype.itemsize < main_grad_OI.dtype.itemsize
        and has_float32_accumulating_product()
    ):
        torch.addmm(main_grad_OI, grad_OT, input_TI, out_dtype=main_grad_OI.dtype, out=main_grad_OI)
    elif input_TI.dtype.itemsize < main_grad_OI.dtype.itemsize:
        main_grad_OI.addmm_(grad_OT.to(main_grad_OI.dtype), input_TI.to(main_grad_OI.dtype))
    else:  # a float64 model: multiplied in its own type, as without the fusion
        main_grad_OI.add_(grad_OT.matmul(input_TI))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32  # the buffer has the type of the operands
