"""Tensor and expert parallelism by transformers' plans: which weight is cut where.

    heads      q, k, v, fused qkv and output gate by columns, out projections by rows: a rank has whole heads
    norm       of a lightning layer by channels; one sum of squares is added up over the ranks
    experts    by width (tensor parallel) or by expert (expert parallel); the router is whole, in float32
    embedding, head    by vocabulary; logits are gathered

Caches follow the heads of their rank by themselves. `tensor.py` has the two styles that are ours.
"""

from typing import Any

TENSOR_PLAN = {
    "layers.*.self_attn": "lightning_heads",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.qkv_proj": "colwise",  # head-major: columns are whole heads
    "layers.*.self_attn.output_gate": "colwise",
    "layers.*.self_attn.norm": "lightning_norm",
    "layers.*.self_attn.out_proj": "rowwise",
    "layers.*.block_sparse_moe.experts.gate_up_proj": "packed_colwise",
    "layers.*.block_sparse_moe.experts.down_proj": "rowwise",
    "layers.*.block_sparse_moe.experts": "moe_tp_experts",
    "layers.*.shared_mlp.gate_proj": "colwise",
    "layers.*.shared_mlp.up_proj": "colwise",
    "layers.*.shared_mlp.down_proj": "rowwise",
}
EXPERT_PLAN = {
    "layers.*.block_sparse_moe.experts.gate_up_proj": "grouped_gemm",
    "layers.*.block_sparse_moe.experts.down_proj": "grouped_gemm",
    "layers.*.block_sparse_moe.experts": "ep_dispatch_experts",
}


def check_counts(config: Any, *, tensor: int, expert: int, pipeline: int) -> None:
    """Refuse numbers of ranks that the model's counts do not divide by; nothing is read before."""
    if pipeline > 1:
        raise ValueError(
            f"pp_size is {pipeline}, and pipeline parallelism does not carry this model's cache; use tp_size"
        )
    counts = {
        "num_attention_heads": tensor,
        "num_key_value_heads": tensor,
        "intermediate_size": 1 if expert > 1 and not config.shared_intermediate_size else tensor,
        "num_local_experts": expert,
    }
    for name, ranks in counts.items():
        count = getattr(config, name)
        if count % ranks:
            fitting = [n for n in range(1, ranks) if count % n == 0]
            raise ValueError(
                f"{name} = {count} does not divide by {ranks} ranks, and a rank has whole heads, experts and "
                f"columns; use {fitting[-1]} ranks or fewer of {fitting}"
            )


HEAD_TENSOR_PLAN = {"lm_head": "colwise_gather_output"}
HEAD_FSDP_PLAN = {"lm_head": "keep_full_weight"}  # layers, embedding and norm are in transformers' default
