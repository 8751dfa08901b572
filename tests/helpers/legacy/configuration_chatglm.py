"""Configuration of the stand-in for the published repository (see legacy_repository.py)."""

from transformers import PretrainedConfig


class ChatGLMConfig(PretrainedConfig):
    model_type = "chatglm"

    def __init__(
        self,
        num_layers=28,
        padded_vocab_size=65024,
        hidden_size=4096,
        ffn_hidden_size=13696,
        kv_channels=128,
        num_attention_heads=32,
        multi_query_group_num=1,
        seq_length=2048,
        rope_ratio=1,
        layernorm_epsilon=1e-5,
        add_qkv_bias=False,
        boi_token_id=None,
        eoi_token_id=None,
        vision_config=None,
        **kwargs,
    ):
        self.num_layers = num_layers
        self.padded_vocab_size = padded_vocab_size
        self.vocab_size = padded_vocab_size
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.kv_channels = kv_channels
        self.num_attention_heads = num_attention_heads
        self.multi_query_group_num = multi_query_group_num
        self.seq_length = seq_length
        self.rope_ratio = rope_ratio
        self.layernorm_epsilon = layernorm_epsilon
        self.add_qkv_bias = add_qkv_bias
        self.boi_token_id = boi_token_id
        self.eoi_token_id = eoi_token_id
        self.vision_config = vision_config
        super().__init__(**kwargs)
