"""The three families: their Hugging Face configurations, which the modules here, the converter and the card share."""

from __future__ import annotations

from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "dtype": "float32",
}

CONFIGS: dict[str, dict] = {
    # full attention in every layer
    "qwen3": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": 512,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 17408,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    # a window of 512; after every three a global layer of twice the head dimension whose values are its keys
    "gemma4": {
        **_COMMON,
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "intermediate_size": 512,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 128,
        "global_head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8704,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "attention_k_eq_v": True,
        "use_bidirectional_attention": None,
    },
    # gated delta net, gated full attention in every fourth layer, one NextN block
    "qwen35": {
        **_COMMON,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "intermediate_size": 384,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 8704,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
            "mrope_section": [6, 5, 5], "mrope_interleaved": True,
        },
    },
}
