"""What others measured, for the charts: the paper's points and dense vLLM's on our machine. Nothing here is ours."""

from __future__ import annotations

PAPER = "OasisKV, arXiv 2608.08097: Qwen3-8B, H100 80 GB, PCIe Gen5, vLLM 0.12.0"

PAPER_ROWS_16K = [(16, 836), (128, 1398)]
"""Fig. 11: requests at once and tokens a second of OasisKV at 16K; at 128, 90 to 95 of them fit."""

PAPER_DENSE_16K = [(16, 649), (22, 676)]
"""Fig. 11: the same of dense vLLM with FlashAttention-3; 22 fit, whatever is asked."""

PAPER_FETCH = {0.01: (0.30e9, 2178, 74.9), 0.05: (None, 2083, 75.94), 1.0: (5.05e9, 824, 77.4)}
"""Table 2: bytes over the link a step, tokens a second and AIME24 avg@32 by fetch ratio."""

PAPER_LINK = (30e9, 34e9)
"""Table 2: effective bandwidth of the link past a fetch ratio of 0.1."""

PAPER_REASONING = (2083, 1235)
"""Fig. 13: tokens a second of a reasoning load (AIME24 requests), OasisKV and dense vLLM."""

VLLM = "vLLM 0.20.0, FlashAttention-3, CUDA graphs, torch.compile; the same shape and H200; 80 GB, median of 64 steps"

VLLM_DENSE = {16384: [(8, 836), (16, 1154), (24, 1258)], 32768: [(8, 579), (12, 628), (13, 670)]}
"""Rows and tokens a second by context: measured once on one H200 with dummy weights, greedy, no prefix caching,
`gpu_memory_utilization` 0.56; 24 rows at 16K and 13 at 32K are about all that 80 GB hold."""
