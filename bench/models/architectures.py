"""Tiny versions of the zoo's architectures: two layers of width 32, under the names of each config."""

from __future__ import annotations

from typing import Any

NAMES = (
    "llama", "mistral", "ministral", "mixtral", "llama4_text", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
    "gemma", "gemma2", "gemma3_text", "vaultgemma", "phi", "phi3", "phimoe", "deepseek_v2", "deepseek_v3", "glm", "glm4",
    "glm4_moe", "internlm3", "minicpm3", "cohere", "cohere2", "granite", "granitemoe", "olmo", "olmo2", "olmo3", "olmoe",
    "flex_olmo", "exaone4", "ernie4_5", "ernie4_5_moe", "falcon", "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode",
    "gpt_oss", "opt", "bloom", "mpt", "codegen", "stablelm", "starcoder2", "smollm3", "nemotron", "helium", "seed_oss",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "arcee", "apertus", "bitnet", "persimmon", "dbrx", "jetmoe", "minimax",
    "minimax_m2", "dots1", "nanochat", "diffllama", "doge", "biogpt", "xglm", "mamba", "mamba2", "falcon_mamba", "jamba",
    "bamba", "zamba2", "lfm2", "rwkv", "recurrent_gemma",
)  # fmt: skip

WIDTH, HEADS, HEAD = 32, 4, 8
# By the name that a config gives it; only names that it has are set.
_TINY: dict[str, Any] = {
    "hidden_size": WIDTH, "n_embd": WIDTH, "d_model": WIDTH, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_layers": 2, "num_attention_heads": HEADS, "n_head": HEADS, "n_heads": HEADS, "num_heads": HEADS,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": HEAD, "intermediate_size": 64, "intermediate_size_mlp": 64,
    "n_inner": 64, "ffn_dim": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "ffn_hidden_size": 64,
    "shared_intermediate_size": 32, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16,
    "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256, "initializer_range": 0.2, "init_std": 0.2,
    "sliding_window": 256, "attention_window_size": 256, "word_embed_proj_dim": WIDTH, "state_size": 8, "conv_kernel": 4,
    "time_step_rank": 4, "context_length": 256, "attention_hidden_size": WIDTH, "lru_width": WIDTH, "rotary_dim": HEAD,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "resid_dropout": 0.0, "embedding_dropout": 0.0, "embd_dropout": 0.0, "dropout": 0.0, "activation_dropout": 0.0,
    "layerdrop": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_layers": None,
}  # fmt: skip
# What else an architecture needs to be so small.
_OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 256},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1], "layer_types": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "use_mamba_kernels": False, "mamba_d_state": 8},
    "zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8, "mamba_d_state": 8, "layers_block_type": ["mamba", "hybrid"],
               "hybrid_layer_ids": [1], "num_mem_blocks": 1, "attention_head_dim": 16, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3, "layer_types": None},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "llama4_text": {"num_local_experts": 2, "interleave_moe_layer_step": 2, "attention_chunk_size": 256},
    "jetmoe": {"num_key_value_heads": 2, "kv_channels": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_key_value_heads": HEADS}, "deepseek_v3": {"num_key_value_heads": HEADS},
    "minicpm3": {"num_key_value_heads": HEADS}, "dots1": {"n_shared_experts": 1},
    "gptj": {"rotary_dim": 4}, "codegen": {"rotary_dim": 4},
    "doge": {"num_experts": 4}, "biogpt": {"scale_embedding": False},
}  # fmt: skip


def make_config(kind: str) -> dict[str, Any]:
    """Return the `model.config` of a tiny architecture."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(kind)
    known = {*usual.to_dict(), *getattr(usual, "attribute_map", {})}
    chosen = {name: value for name, value in _TINY.items() if name in known and value is not None}
    for name in [key for key in chosen if (getattr(usual, "attribute_map", {}) or {}).get(key) in chosen]:
        del chosen[name]  # another name of the same
    if (types := getattr(usual, "layer_types", None)) and "layer_types" in known:
        chosen["layer_types"] = [types[0], "full_attention" if "full_attention" in types else types[-1]]
    chosen |= _OWN.get(kind, {})
    return {"model_type": kind, **{name: value for name, value in chosen.items() if value is not None}}
