"""Triton kernels, each beside its slow torch reference."""
