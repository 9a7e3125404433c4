"""Whether the config and the tensors of a slice describe one model: by its family, or layer by layer."""

from collections.abc import Iterator

from convtools.conversion.from_hf import model_of
from convtools.conversion.source import account
from convtools.errors import AccountingError, ConfigError, UnsupportedEncoding
from convtools.slicing.layers import find_layers, layer_count, text_part
from convtools.slicing.origin import Origin
from convtools.slicing.plan_slice import SlicePlan
from convtools.stores.encodings import find_encodings
from convtools.stores.hf import HFCheckpoint


def check_model(plan: SlicePlan, origin: Origin) -> str:
    """How it was checked, in a sentence. Raises AccountingError, ConfigError where they do not fit.

    A known family says which tensors its config asks for: they must be the slice's, each in its shape.
    """
    config = plan.config
    shapes = {name: tuple(shape) for name, shape in plan.target.shapes(origin).items()}
    find_layers(shapes, text_part(config), plan.layers.prefix)
    said = layer_count(text_part(config))
    if said is not None and said != len(plan.keep):
        raise ConfigError(f"the slice's config says {said} layers", expected=len(plan.keep))
    files = tuple(file.path for file in origin.side_files)
    if encodings := find_encodings(config, origin.tensors, files):
        kind = encodings[0].kind
        return f"layers counted; the tensors are encoded ({kind}), and were not held against a family"
    try:
        model_of(origin.config, origin.hf)
    except (ConfigError, UnsupportedEncoding) as error:
        return f"layers counted; not held against a family: {error.what}"
    model, outside = model_of(config, shapes)
    table = model.table(model.spec.vocab)
    expected = dict(table.hf) | {copy.name: table.hf[copy.of] for copy in model.copies()}
    found = {name: shape for name, shape in shapes.items() if name not in outside}
    account(expected, found, what="the slice")
    return f"every tensor is what {model.family.NAME} expects from the new config"


def model_faults(store: HFCheckpoint) -> Iterator[tuple[str, str]]:
    """(tensor, what is wrong) where a known family's config asks for other tensors than are there."""
    files = (*store.side_files, *store.weight_files)
    if find_encodings(store.config, store.tensors, files):
        return  # encoded tensors have names of their own
    try:
        model, outside = model_of(store.config, store.tensors)
        expected = dict(model.table(model.spec.vocab).hf)
        expected |= {copy.name: expected[copy.of] for copy in model.copies()}
    except (AccountingError, ConfigError):
        return  # no family that could tell
    for name, shape in expected.items():
        if name not in store.tensors:
            yield name, "missing: the config asks for it"
        elif tuple(store.tensors[name].shape) != tuple(shape):
            yield name, f"is {list(store.tensors[name].shape)}, the config asks for {list(shape)}"
    for name in store.tensors:
        if name not in expected and name not in outside:
            yield name, "the config does not ask for it"
