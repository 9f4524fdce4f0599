"""A small model configuration whose dimensions all differ, for tests of tables and conversions."""

SMALL_QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 21,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
