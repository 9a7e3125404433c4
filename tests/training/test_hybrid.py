import math

import pytest
import torch

from convtools.errors import ConfigError, UsageError
from convtools.training.hybrid import mtp_loss
from tests.training.tiny import hybrid

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
EPS = 1e-5


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x**2).mean() + EPS) * weight


def naive_depth(state: dict[str, torch.Tensor], f: int, tokens: list[int], depth: int,
                hidden: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """One depth for one sequence, a position and a head at a time: attention, then latent MoE."""

    def w(name: str) -> torch.Tensor:
        return state[f"mtp.layers.{name}"]

    xs = []
    for i in range(len(tokens)):
        seen = tokens[i + depth + 1] if i + depth + 1 < len(tokens) else 0
        embedded = state["model.embeddings.weight"][seen]
        pair = torch.cat([rms(embedded, w(f"{f}.enorm.weight")), rms(hidden[i], w(f"{f}.hnorm.weight"))])
        xs.append(w(f"{f}.eh_proj.weight") @ pair)
    normed = [rms(x, w(f"{f}.norm.weight")) for x in xs]
    q, k, v = (torch.stack([w(f"{f}.mixer.{p}_proj.weight") @ x for x in normed]) for p in "qkv")
    for i in range(len(tokens)):
        heads = []
        for head in range(4):
            mine, theirs = slice(12 * head, 12 * head + 12), slice(12 * (head // 2), 12 * (head // 2) + 12)
            scores = torch.stack([q[i, mine] @ k[j, theirs] / math.sqrt(12) for j in range(i + 1)])
            heads.append(scores.softmax(0) @ v[: i + 1, theirs])
        xs[i] = xs[i] + w(f"{f}.mixer.o_proj.weight") @ torch.cat(heads)
    f, out = f + 1, []
    for x in xs:
        n = rms(x, w(f"{f}.norm.weight"))
        scores = (w(f"{f}.mixer.gate.weight") @ n).sigmoid()
        best = (scores + w(f"{f}.mixer.gate.e_score_correction_bias")).topk(2).indices
        latent = w(f"{f}.mixer.fc1_latent_proj.weight") @ n
        up, down = w(f"{f}.mixer.experts.up_proj"), w(f"{f}.mixer.experts.down_proj")
        routed = sum(
            scores[e] / scores[best].sum() * (down[e] @ (up[e] @ latent).relu() ** 2) for e in best.tolist()
        )
        shared = (w(f"{f}.mixer.shared_experts.up_proj.weight") @ n).relu() ** 2
        x = x + w(f"{f}.mixer.fc2_latent_proj.weight") @ routed
        x = x + w(f"{f}.mixer.shared_experts.down_proj.weight") @ shared
        out.append(rms(x, w(f"{f}.final_layernorm.weight")))
    return torch.stack(out)


def test_both_depths_against_a_naive_loop() -> None:
    model = hybrid().double()
    state = dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms that do something
            if name.startswith("mtp.") and parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
        found = model(TOKENS).mtp_logits
        hidden = model.model(input_ids=TOKENS, use_cache=False).last_hidden_state
        for b, row in enumerate(TOKENS.tolist()):
            deep = hidden[b]
            for depth in range(2):
                deep = naive_depth(state, 2 * depth, row, depth, deep)
                expected = (deep @ state["lm_head.weight"].T).float()
                torch.testing.assert_close(found[depth][b], expected, rtol=2e-5, atol=2e-6)


def test_the_loss_against_a_loop() -> None:
    model = hybrid()
    out = model(TOKENS)
    losses = []
    for depth in range(2):
        each = [
            -out.mtp_logits[depth][b, i].log_softmax(-1)[TOKENS[b, i + depth + 2]]
            for b in range(2) for i in range(8 - depth - 2)
        ]  # fmt: skip
        losses.append(torch.stack(each).mean())
    torch.testing.assert_close(mtp_loss(out.mtp_logits, TOKENS), torch.stack(losses).mean())


def test_a_depth_sees_one_token_more_and_no_later_one() -> None:
    model = hybrid().double()
    changed = TOKENS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 24
    with torch.no_grad():
        a, b = model(TOKENS), model(changed)
    for first, logits, others in (
        (5, a.logits, b.logits),
        *((4 - k, a.mtp_logits[k], b.mtp_logits[k]) for k in (0, 1)),
    ):
        same = (logits == others).all(-1)
        assert same[:, :first].all() and not same[:, first].any()


def test_the_trunk_is_transformers_own_and_the_head_sends_it_no_gradient() -> None:
    from transformers import NemotronHForCausalLM

    model = hybrid()
    theirs = NemotronHForCausalLM(model.config)
    theirs.load_state_dict({n: t for n, t in model.state_dict().items() if not n.startswith("mtp.")})
    out = model(TOKENS)
    assert torch.equal(out.logits, theirs(input_ids=TOKENS).logits)
    mtp_loss(out.mtp_logits, TOKENS).backward()
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {n for n, _ in model.named_parameters() if n.startswith("mtp.")} == moved


def test_a_model_that_predicts_one_token_has_no_such_loss() -> None:
    out = hybrid(num_nextn_predict_layers=0)(TOKENS)
    assert out.mtp_logits == ()
    with pytest.raises(UsageError, match="one token only"):
        mtp_loss(out.mtp_logits, TOKENS)


def test_a_head_of_mamba_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot build"):
        hybrid(mtp_layers_block_type=["linear_attention"])
