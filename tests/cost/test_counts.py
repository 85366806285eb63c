"""The cost model equals the published counts of MiniMax-M1, integer by integer, and its own laws."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from minimax_hybrid.cache import LightningCacheLayer
from minimax_hybrid.config import MiniMaxM1Config
from minimax_hybrid.cost.counts import (
    break_even,
    cache_bytes,
    flops,
    inference_bytes,
    layer_parameters,
    parameters,
    softmax_twin,
    weight_bytes,
)
from minimax_hybrid.cost.roofline import DEVICES, Device, decode_bound, prefill_bound, this_cpu
from minimax_hybrid.model import MiniMaxM1ForCausalLM
from minimax_kernels import BLOCK

GOLDENS = Path(__file__).parent.parent / "goldens"
REFERENCE = json.loads((GOLDENS / "flops_reference.json").read_text())
LENGTHS = {"1K": 1024, "32K": 32 * 1024, "128K": 128 * 1024, "1M": 1024 * 1024}


def leaves(tree, path=()):
    """Every number of a nested dictionary, as {path: value}."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {p: v for name, branch in tree.items() for p, v in leaves(branch, (*path, name)).items()}


def ours() -> dict:
    """The reference file's tree, recomputed from the configuration of M1."""
    config = MiniMaxM1Config.m1()
    twin = softmax_twin(config)
    models = {"hybrid": config, "softmax_twin": twin}
    total, twins = parameters(config), parameters(twin)
    layer = layer_parameters(config)
    kinds = config.attn_type_list
    even = break_even(config)
    return {
        "config": {
            "hidden": config.hidden_size,
            "layers": config.num_hidden_layers,
            "lightning_layers": kinds.count(0),
            "softmax_layers": kinds.count(1),
            "softmax_layer_indices": [i for i, kind in enumerate(kinds) if kind == 1],
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "intermediate": config.intermediate_size,
            "experts": config.num_local_experts,
            "top_k": config.num_experts_per_tok,
            "vocab": config.vocab_size,
        },
        "params_total_by_component": total.components,
        "params_total": total.total,
        "params_total_bytes_bf16": weight_bytes(config, "bfloat16"),
        "safetensors_index_total_size_bytes": weight_bytes(config, "bfloat16", router_dtype="float32"),
        "params_per_layer": {
            "lightning_attn": sum(layer["lightning"].values()),
            "softmax_attn": sum(layer["softmax"].values()),
            "one_expert": layer["every"]["moe_experts"] // config.num_local_experts,
            "moe_all_experts": layer["every"]["moe_experts"],
            "router": layer["every"]["moe_router"],
            "two_block_norms": layer["every"]["block_rmsnorms"],
        },
        "params_active_by_component": total.active_components,
        "params_active_incl_embed_table": total.active_with_embedding,
        "params_active_excl_embed_table": total.active_with_head,
        "params_active_excl_embed_and_head": total.active,
        "softmax_twin_params_total": twins.total,
        "softmax_twin_params_active_incl_embed_table": twins.active_with_embedding,
        "softmax_twin_params_active_excl_embed_table": twins.active_with_head,
        "flops_per_token": {
            mode: {
                label: {name: counted(model, n, mode) for name, model in models.items()}
                for label, n in LENGTHS.items()
            }
            for mode in ("prefill", "decode")
        },
        "memory_bytes_per_sequence": {label: memory(config, twin, n) for label, n in LENGTHS.items()},
        "memory_break_even_tokens_hybrid_vs_twin": even.memory,
        "decode_flops_breakeven_n_lightning_layer_vs_softmax_layer": even.decode_flops,
    }


def counted(config, length, mode):
    counts = flops(config, length, mode)
    return counts.components | {
        "total": counts.total,
        "total_without_lm_head": counts.total_without_lm_head,
    }


def memory(config, twin, length):
    hybrid, softmax = cache_bytes(config, length), cache_bytes(twin, length)
    return {
        "n": length,
        "hybrid_kv_bf16": hybrid.keys_values,
        "hybrid_lightning_state_fp32": hybrid.state,
        "hybrid_total": hybrid.total,
        "softmax_twin_kv_bf16": softmax.keys_values,
        "ratio_hybrid_over_twin": hybrid.total / softmax.total,
    }


PUBLISHED = leaves({name: tree for name, tree in REFERENCE.items() if name != "_conventions"})


def test_every_published_number_of_m1_is_met_exactly():
    computed = leaves(ours())
    assert set(PUBLISHED) <= set(computed), sorted(set(PUBLISHED) - set(computed))
    wrong = {path: (computed[path], value) for path, value in PUBLISHED.items() if computed[path] != value}
    assert not wrong
    assert len(PUBLISHED) > 200 and set(computed) == set(PUBLISHED), "we list what the file does not"


def test_the_report_s_headline_sizes():
    config = MiniMaxM1Config.m1()
    assert parameters(config).total == 456_089_655_296
    assert parameters(config).active == 45_944_920_064
    one, two = cache_bytes(config, 1), cache_bytes(config, 2)
    assert one.state == 293_601_280 and two.keys_values - one.keys_values == 40_960


def test_training_is_three_prefills_and_the_block_enters_only_there():
    config = MiniMaxM1Config.tiny()
    prefill, training = flops(config, 512, "prefill"), flops(config, 512, "training")
    assert training.components == {name: 3 * n for name, n in prefill.components.items()}
    intra = "lightning_intra_chunk"
    halved = flops(config, 512, "prefill", block=128)
    assert 2 * halved.components[intra] == prefill.components[intra] > 0
    assert halved.total - prefill.total == halved.components[intra] - prefill.components[intra]
    assert flops(config, 512, "decode").components[intra] == 0


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_prefill_is_the_mean_of_the_decode_steps_but_for_the_block_form(length):
    config = MiniMaxM1Config.tiny()
    prefill = flops(config, length, "prefill")
    steps = sum(flops(config, n, "decode").total for n in range(1, length + 1))
    assert steps == length * (prefill.total - prefill.components["lightning_intra_chunk"])


def test_break_even_is_where_the_layers_cost_the_same():
    config = MiniMaxM1Config.m1()
    even = break_even(config)
    one_of_each = MiniMaxM1Config.m1(num_hidden_layers=1, attn_type_list=[0])
    twin = softmax_twin(one_of_each)
    at = int(even.memory)
    assert cache_bytes(one_of_each, at).total == cache_bytes(twin, at).total
    at = int(even.decode_flops)
    assert flops(one_of_each, at, "decode").total == flops(twin, at, "decode").total


def test_a_tied_table_is_counted_once_and_still_multiplied():
    free, tied = MiniMaxM1Config.tiny(), MiniMaxM1Config.tiny(tie_word_embeddings=True)
    table = free.vocab_size * free.hidden_size
    assert parameters(free).total - parameters(tied).total == table
    assert parameters(free).active == parameters(tied).active
    assert flops(free, 10, "decode").total == flops(tied, 10, "decode").total


def test_a_shared_expert_is_active_for_every_token():
    plain = MiniMaxM1Config.tiny()
    shared = MiniMaxM1Config.tiny(shared_intermediate_size=8)
    extra = parameters(shared).total - parameters(plain).total
    one_expert = 3 * plain.hidden_size * plain.intermediate_size
    assert extra == plain.num_hidden_layers * (one_expert + plain.hidden_size)
    assert parameters(shared).active - parameters(plain).active == extra


def test_inference_memory_is_weights_caches_and_open_blocks():
    config = MiniMaxM1Config.tiny()
    cache = cache_bytes(config, 100, dtype="float32")
    expected = 4 * parameters(config).total + 3 * (cache.keys_values + cache.state + cache.open_block)
    assert inference_bytes(config, 100, dtype="float32", sequences=3) == expected
    assert cache.keys_values == 2 * cache_bytes(config, 100).keys_values
    assert cache.state == cache_bytes(config, 100).state


def test_wrong_arguments_are_refused_in_words():
    config = MiniMaxM1Config.tiny()
    with pytest.raises(ValueError, match="'infer'.*'decode'"):
        flops(config, 8, "infer")
    with pytest.raises(ValueError, match="length is 0"):
        flops(config, 0, "decode")
    with pytest.raises(ValueError, match="'bf16'.*bfloat16"):
        cache_bytes(config, 8, dtype="bf16")
    with pytest.raises(ValueError, match="int8 on H100"):
        decode_bound(config, 8, DEVICES["H100"], dtype="int8")


def test_the_roofline_is_the_larger_time_and_divides_over_devices():
    config = MiniMaxM1Config.tiny()
    slow_memory = Device("slow memory", {"float32": 1e18}, 1e6, 1e9)
    slow_compute = Device("slow compute", {"float32": 1e6}, 1e18, 1e9)
    for bound in (decode_bound, prefill_bound):
        assert bound(config, 1000, slow_memory, dtype="float32").limit == "memory"
        compute = bound(config, 1000, slow_compute, dtype="float32")
        assert compute.limit == "compute" and compute.seconds == compute.compute
        two = bound(config, 1000, slow_compute, dtype="float32", devices=2)
        assert two.seconds == pytest.approx(compute.seconds / 2)
    each = flops(config, 1000, "prefill", block=BLOCK)
    head = each.components["lm_head"]  # of the last token alone
    work = 1000 * (each.total - head) + head
    assert prefill_bound(config, 1000, slow_compute, dtype="float32").seconds == pytest.approx(work / 1e6)


def test_a_prefill_bound_counts_the_kernels_own_blocks():
    config, device = MiniMaxM1Config.m1(), DEVICES["H200"]
    per_token = {C: flops(config, 8192, "prefill", block=C) for C in (BLOCK, 256)}
    head = per_token[BLOCK].components["lm_head"]
    work = 8192 * (per_token[BLOCK].total - head) + head
    bound = prefill_bound(config, 8192, device)
    assert bound.compute == pytest.approx(work / device.peak("bfloat16"), rel=1e-12)
    assert work < 8192 * (per_token[256].total - head) + head


def test_this_machine_is_measured():
    machine = this_cpu(size=256, repeats=2)
    assert machine.name.endswith(" cores") and machine.memory > 2**28
    assert all(1e8 < rate < 1e14 for rate in (machine.peak("float32"), machine.peak("bfloat16")))
    assert 1e8 < machine.bytes_per_second < 1e13
    config = MiniMaxM1Config.tiny()
    assert 0 < decode_bound(config, 100, machine, dtype="float32").seconds < 1


def test_a_decode_step_reads_no_more_than_all_experts_and_no_less_than_the_chosen():
    config = MiniMaxM1Config.m1()
    counts, device = parameters(config), DEVICES["H200"]
    cache = cache_bytes(config, 1)
    sequence = cache.total + cache.open_block / 2 + cache.state / 64
    one = decode_bound(config, 1, device).memory * device.bytes_per_second - sequence
    assert one == pytest.approx(2 * counts.active_with_head)
    prompt_of_one = prefill_bound(config, 1, device).memory * device.bytes_per_second - cache.total
    assert prompt_of_one == pytest.approx(one)
    many = decode_bound(config, 1, device, batch=4096).memory * device.bytes_per_second - 4096 * sequence
    assert many == pytest.approx(2 * (counts.total - counts.components["embed_tokens"]), rel=1e-6)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"shared_intermediate_size": 8}])
def test_counts_are_those_of_the_built_model(changes):
    config = MiniMaxM1Config.tiny(**changes)
    model = MiniMaxM1ForCausalLM(config)
    assert parameters(config).total == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("twin", [False, True])
def test_cache_bytes_are_those_of_a_real_cache(twin):
    config = softmax_twin(MiniMaxM1Config.tiny()) if twin else MiniMaxM1Config.tiny()
    model = MiniMaxM1ForCausalLM(config).eval()
    with torch.inference_mode():
        held = model(torch.zeros(1, 80, dtype=torch.long), use_cache=True).past_key_values
        model(torch.zeros(1, 1, dtype=torch.long), past_key_values=held)  # the prompt's block is now folded
    counted = cache_bytes(config, 81, dtype="float32")
    found = {"keys_values": 0, "state": 0, "open_block": 0}
    for layer in held.layers:
        if isinstance(layer, LightningCacheLayer):
            found["state"] += layer.stored.state.nbytes
            found["open_block"] += layer.stored.k_cache.nbytes + layer.stored.v_cache.nbytes
        else:
            found["keys_values"] += layer.keys.nbytes + layer.values.nbytes
    assert found == dataclasses.asdict(counted)
