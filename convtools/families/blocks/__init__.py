"""The reusable blocks, one file each: functions from sizes to rows.

Names are relative to a layer: on the Megatron side to `decoder.layers.{i}.`, on the Hugging Face
side to the module that holds the block (`backbone.layers.{i}.mixer.`).
"""
