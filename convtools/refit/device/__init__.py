"""Buckets in the memory of a device: packed, checked and applied there, and never copied to the host."""
