"""Multi-head latent attention (DeepSeek)."""

from convtools.families.table import Block, columns, copied, norm, rows


def mla(
    *, heads: int, hidden: int, q_rank: int, kv_rank: int, qk_nope: int, qk_rope: int, v_head_dim: int
) -> Block:
    """Queries and keys/values pass through narrow spaces; both sides hold the same matrices.

    `linear_q_up_proj [heads * (qk_nope + qk_rope), q_rank]` and
    `linear_kv_up_proj [heads * (qk_nope + v_head_dim), kv_rank]` are cut by heads; the down
    projections are whole on every rank. Without a `q_rank` there is one `linear_q_proj`.
    """
    by_head, a = ("num_attention_heads", heads), "self_attention."
    q_dim, kv_dim = qk_nope + qk_rope, qk_nope + v_head_dim
    q_cut, kv_cut = rows(by_head, ("qk_head_dim", q_dim)), rows(by_head, ("kv_head_dim", kv_dim))
    kv_down, kv_up, proj = f"{a}linear_kv_down_proj", f"{a}linear_kv_up_proj", f"{a}linear_proj"
    if q_rank:
        down, up = f"{a}linear_q_down_proj", f"{a}linear_q_up_proj"
        queries = [
            copied(f"{down}.weight", "q_a_proj.weight", (q_rank, hidden), te=True),
            norm(f"{up}.layer_norm_weight", "q_a_layernorm.weight", q_rank, f"{a}q_layernorm.weight"),
            copied(f"{up}.weight", "q_b_proj.weight", (heads * q_dim, q_rank), q_cut, te=True),
        ]
    else:
        queries = [
            copied(f"{a}linear_q_proj.weight", "q_proj.weight", (heads * q_dim, hidden), q_cut, te=True)
        ]
    return [
        *queries,
        copied(f"{kv_down}.weight", "kv_a_proj_with_mqa.weight", (kv_rank + qk_rope, hidden), te=True),
        norm(f"{kv_up}.layer_norm_weight", "kv_a_layernorm.weight", kv_rank, f"{a}kv_layernorm.weight"),
        copied(f"{kv_up}.weight", "kv_b_proj.weight", (heads * kv_dim, kv_rank), kv_cut, te=True),
        copied(
            f"{proj}.weight", "o_proj.weight", (hidden, heads * v_head_dim),
            columns(by_head, ("v_head_dim", v_head_dim)), te=True, memory_state=f"{a}core_attention",
        ),
    ]  # fmt: skip
