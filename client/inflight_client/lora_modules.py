"""TensorRT-LLM's ids of linear layers.

Written by scripts/write_configs from inflight/models/families/ and inflight/adapters/: change those.
"""

from __future__ import annotations

MLP_GATE_UP = 18
"""The id of layers that fuse gate and up: the rows of their B have up first."""
MODULE_IDS = {
    "self_attn.q_proj": 1,
    "self_attn.k_proj": 2,
    "self_attn.v_proj": 3,
    "mlp.gate_proj": 5,
    "mlp.up_proj": 7,
    "self_attn.o_proj": 4,
    "mlp.down_proj": 6,
    "self_attn.qkv_proj": 0,
    "mlp.gate_up_proj": 18,
    "feed_forward.gate_proj": 5,
    "feed_forward.up_proj": 7,
    "feed_forward.down_proj": 6,
    "shared_mlp.input_linear": 18,
    "shared_mlp.output_linear": 6,
    "feed_forward.w1": 5,
    "feed_forward.w3": 7,
    "self_attn.out_proj": 4,
    "feed_forward.w2": 6,
    "mixer.q_proj": 1,
    "mixer.k_proj": 2,
    "mixer.v_proj": 3,
    "mixer.up_proj": 5,
    "mixer.o_proj": 4,
    "mixer.down_proj": 6,
    "attn.c_attn": 0,
    "mlp.c_fc": 5,
    "attn.c_proj": 4,
    "mlp.c_proj": 6,
    "mlp.dense_h_to_4h": 5,
    "attention.dense": 4,
    "mlp.dense_4h_to_h": 6,
    "fc1": 5,
    "fc2": 6,
    "self_attention.dense": 4,
}
"""By the layers' names in checkpoints."""
