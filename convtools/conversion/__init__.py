"""Families and stores to a plan, a plan to bytes.

source.py            an opened checkpoint in Hugging Face terms; from_hf, from_torch_dist, from_torch
plan.py              every payload of every target file resolved to moves; to_hf, to_torch_dist, to_torch
run.py, world.py     threads, and ranks
api.py               `convert` itself
"""
