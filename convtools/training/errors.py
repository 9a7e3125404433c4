"""What a training step may fail of."""

from convtools.errors import ConvtoolsError


class TrainingError(ConvtoolsError):
    """A loss or a gradient that no optimizer may see; the weights were not touched."""
