"""A text configuration for tests that need shapes but no checkpoint."""

from vlfit.checkpoint.text_config import TextConfig

TEXT = TextConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    mrope_section=(4, 4, 4),
    attention_bias=False,
    hidden_act="silu",
)
