"""Decoders of the Llama family in plain torch, over the paged cache of `kernels`.

Nothing is imported here: `import engine.models` stays light, and the modules below need torch.
"""
