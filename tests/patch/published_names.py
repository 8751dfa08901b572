"""Public names of the published code, by the class or file that has them: facts, for a test.

Read off the revisions of June to October 2024, whose modules are ``modeling_chatglm``, ``visual``,
``configuration_chatglm`` and ``tokenization_chatglm``. Without what transformers' and torch's own
base classes define, and without what begins with an underscore but ``_reorder_cache``, which
callers of beam search used.
"""

FILES = {
    "modeling_chatglm": """
        LANGUAGE_TOKEN_TYPE VISION_TOKEN_TYPE CORE_ATTENTION_CLASSES
        default_init split_tensor_along_last_dim apply_rotary_pos_emb is_empty
        InvalidScoreLogitsProcessor PrefixEncoder RotaryEmbedding RMSNorm CoreAttention
        SdpaAttention FlashAttention2 SelfAttention MLP GLMBlock GLMTransformer Embedding
        ChatGLMPreTrainedModel ChatGLMModel ChatGLMForConditionalGeneration
        ChatGLMForSequenceClassification
        """,
    "visual": """
        standard_attention PatchEmbedding Attention MLP TransformerLayer Transformer GLU
        EVA2CLIPModel
        """,
    "configuration_chatglm": "ChatGLMConfig",
    "tokenization_chatglm": "ChatGLM4Tokenizer",
}

# What an object of each class has, methods and what its ``__init__`` sets.
OBJECTS = {
    "ChatGLMForConditionalGeneration": """
        transformer config max_sequence_length forward prepare_inputs_for_generation _reorder_cache
        get_masks get_position_ids get_multimodal_position_ids
        """,
    "ChatGLMForSequenceClassification": "transformer config num_labels classifier_head dropout",
    "ChatGLMModel": """
        embedding rotary_pos_emb encoder output_layer vision num_layers multi_query_group_num
        kv_channels seq_length pre_seq_len prefix_projection prefix_tokens prefix_encoder dropout
        get_input_embeddings set_input_embeddings get_prompt forward
        """,
    "Embedding": "word_embeddings hidden_size fp32_residual_connection",
    "RotaryEmbedding": "inv_freq dim original_impl rope_ratio impl forward_impl",
    "GLMTransformer": """
        layers final_layernorm num_layers post_layer_norm fp32_residual_connection
        gradient_checkpointing
        """,
    "GLMBlock": """
        input_layernorm self_attention post_attention_layernorm mlp layer_number hidden_dropout
        fp32_residual_connection apply_residual_connection_post_layernorm
        """,
    "SelfAttention": """
        query_key_value dense core_attention layer_number projection_size original_rope
        hidden_size_per_attention_head num_attention_heads_per_partition multi_query_attention
        qkv_hidden_size num_multi_query_groups_per_partition
        """,
    "MLP": "dense_h_to_4h dense_4h_to_h add_bias activation_func",
    "RMSNorm": "weight eps",
    "EVA2CLIPModel": "patch_embedding transformer linear_proj conv boi eoi scaling_factor",
    "PatchEmbedding": "proj cls_embedding position_embedding",
    "Transformer": "layers",
    "TransformerLayer": "input_layernorm attention mlp post_attention_layernorm",
    "Attention": "query_key_value dense num_heads scale output_dropout",
    "visual.MLP": "fc1 fc2 config activation_fn",
    "GLU": "linear_proj norm1 act1 act2 dense_h_to_4h gate_proj dense_4h_to_h",
    "ChatGLMConfig": """
        num_layers padded_vocab_size vocab_size hidden_size ffn_hidden_size kv_channels
        num_attention_heads seq_length hidden_dropout classifier_dropout attention_dropout
        layernorm_epsilon rmsnorm apply_residual_connection_post_layernorm post_layer_norm
        add_bias_linear add_qkv_bias bias_dropout_fusion multi_query_attention
        multi_query_group_num rope_ratio apply_query_key_layer_scaling attention_softmax_in_fp32
        fp32_residual_connection pre_seq_len prefix_projection boi_token_id eoi_token_id
        original_rope vision_config
        """,
    "ChatGLM4Tokenizer": """
        name vocab_file pat_str encode_special_tokens image_size mergeable_ranks tokenizer decoder
        n_words vocab_size get_vocab convert_tokens_to_string save_vocabulary get_prefix_tokens
        build_single_message apply_chat_template build_inputs_with_special_tokens
        """,
}
