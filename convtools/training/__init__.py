"""A training loop around a distributed model: an eager engine, labels for multi-token prediction, names."""
