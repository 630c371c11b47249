"""Attention over a paged KV cache: each fast path beside its slow reference.

This package imports nothing by itself; `kernels.cache` and `kernels.attention` need torch.
"""
