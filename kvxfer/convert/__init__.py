"""Moves bytes between a rank's live pages and canonical segments.

`gather` and `scatter` of `reference` (slow, obvious: it defines the answer) and `native` (libkvx) take the same
arguments and leave the same bytes; a test holds them to it. `pages.KVPages` is the rank's tensors, checked once. Pages
in a GPU's memory are moved by `launch` (Triton), which takes torch tensors and is held to the same bytes.
"""
