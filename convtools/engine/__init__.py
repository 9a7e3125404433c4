"""The reference engine: transformers behind a small HTTP server, whose weights a trainer can replace.

Tests, the demo and the training example generate with it. It is made to be right, not fast.
"""
