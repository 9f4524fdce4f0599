"""What others have published for the same work, as text beside our figures: other machines,
shapes and days.
"""

PUBLISHED = (
    "bare lm_head GEMMs, forward + backward, H100, T=8192 H=4096 V=151936: 42 ms (TRL #7244)",
    "naive cross entropy, forward + backward, the same: 59 ms, 19.9 GiB (TRL #7244)",
    "row kernel for log-prob and entropy, 16-bit logits, the same: 0.89 ms (TRL #7244)",
    (
        "Liger fused linear cross entropy, the same: 192 ms, 6.1 GiB; TRL chunked: 167 ms, 13.1 GiB"
        " (TRL #7244)"
    ),
    (
        "verl Triton linear_cross_entropy, forward, Hopper, T=8192 H=4096 V=262144: 208 to 411"
        " TFLOP/s (Liger #1422)"
    ),
    (
        "verl Triton linear_cross_entropy, backward, Hopper, T=8192 H=4096 V=131072: 511 TFLOP/s"
        " (Liger #1422)"
    ),
    "verl torch, H100, T=8192 H=4096 V=131072: forward 45.6 ms, backward 121 ms (Liger README)",
    (
        "Liger SM90 CuTe, the same: forward 12.3 ms (715 TFLOP/s), backward 37.9 ms (696 TFLOP/s),"
        " both 50.2 ms"
    ),
    "Liger SM90 CuTe, forward, Hopper, T=8192 H=4096 V=262144: 788 TFLOP/s (Liger #1422)",
    (
        "verl Triton linear_cross_entropy, extra peak at T=8192: 2752 MiB at tp 1, 400 MiB at tp 8"
        " (Liger #1458)"
    ),
    "verl Megatron, Qwen3-30B-A3B: training MFU 0.31 to 0.40 (verl documentation)",
)
