import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from convtools.errors import AccountingError, ConfigError
from convtools.training.checkpoint_names import checkpoint_shapes, checkpoint_tensors
from tests.nemotron_checkpoints import inventory
from tests.training.tiny import hybrid


def test_names_and_shapes_are_the_published_ones() -> None:
    """Against an inventory that was written by hand."""
    config = hybrid().config.to_dict()
    pattern = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    spelled = config | {
        "hybrid_override_pattern": "".join(pattern[k] for k in config["layers_block_type"]),
        "mtp_hybrid_override_pattern": "*E",
    }
    assert checkpoint_shapes(config) == {n: s for n, (_, s) in inventory(spelled).items()}


def test_every_tensor_is_a_view_of_the_module() -> None:
    model = hybrid()
    state = model.state_dict()
    named = checkpoint_tensors(state, checkpoint_shapes(model.config.to_dict()))
    owned = {t.untyped_storage().data_ptr() for t in state.values()}
    assert {t.untyped_storage().data_ptr() for t in named.values()} == owned
    assert sum(t.numel() for t in named.values()) == sum(t.numel() for t in state.values())
    named["mtp.layers.1.mixer.experts.2.up_proj.weight"].fill_(7)
    assert (state["mtp.layers.1.mixer.experts.up_proj"][2] == 7).all()
    assert not (state["mtp.layers.1.mixer.experts.up_proj"][1] == 7).any()


def test_transformers_writes_the_same_names_and_bytes(tmp_path: Path) -> None:
    from transformers import NemotronHForCausalLM

    model = hybrid()
    theirs = NemotronHForCausalLM(model.config)
    theirs.load_state_dict({n: t for n, t in model.state_dict().items() if not n.startswith("mtp.")})
    theirs.save_pretrained(tmp_path)
    ours = checkpoint_tensors(model.state_dict(), checkpoint_shapes(model.config.to_dict()))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {n for n in ours if not n.startswith("mtp.")}
        assert [n for n in file.keys() if not torch.equal(file.get_tensor(n), ours[n])] == []  # noqa: SIM118


def test_what_does_not_fit_is_refused_by_name() -> None:
    model = hybrid()
    shapes, state = checkpoint_shapes(model.config.to_dict()), dict(model.state_dict())

    def refused(state: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> str:
        with pytest.raises(AccountingError) as error:
            checkpoint_tensors(state, shapes)
        return str(error.value.found)

    less = {n: t for n, t in state.items() if n != "mtp.layers.0.enorm.weight"}
    assert refused(less, shapes) == "not in the module: `mtp.layers.0.enorm.weight`"
    more = state | {"rotary": torch.zeros(3)}
    assert refused(more, shapes) == "`rotary` has 3 elements that the checkpoint has not"
    expert = "backbone.layers.1.mixer.experts.3.up_proj.weight"
    fewer = {n: s for n, s in shapes.items() if n != expert}
    assert refused(state, fewer) == (
        "`model.layers.1.mixer.experts.up_proj` has 320 elements that the checkpoint has not"
    )
    turned = shapes | {expert: shapes[expert][::-1]}
    assert refused(state, turned) == f"`{expert}` is [20, 16] in the module, not [16, 20]"
    with pytest.raises(ConfigError, match="no family"):
        checkpoint_shapes({"architectures": ["Unknown"]})


def test_the_model_holds_what_a_real_checkpoint_holds() -> None:
    """Names and shapes of a file that Megatron's own weights were exported to, MTP included."""
    from transformers import NemotronHConfig

    from convtools.training.hybrid import Hybrid

    root = Path(__file__).parents[2] / "fixtures/oracle/nemotron_mtp/hf"
    config = NemotronHConfig(**json.loads((root / "config.json").read_text()))
    with safe_open(root / "model.safetensors", "pt") as file:
        real = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = Hybrid(config)
    named = checkpoint_tensors(model.state_dict(), checkpoint_shapes(config.to_dict()))
    assert {n: t.shape for n, t in named.items()} == {n: t.shape for n, t in real.items()}
    with torch.no_grad():
        for name, tensor in named.items():
            tensor.copy_(real[name])  # views: this loads the model
        out = model(torch.arange(12)[None])
    assert any(name.startswith("mtp.") for name in real)
    assert [x.shape for x in (out.logits, *out.mtp_logits)] == [(1, 12, config.vocab_size)] * 2
    assert all(x.isfinite().all() for x in (out.logits, *out.mtp_logits))
