"""What a ``config.json`` is of; needs no transformers."""


def is_glm4v(config: dict) -> bool:
    """True for the contents of a glm-4v's ``config.json``.

    The model type is shared with chatglm2, chatglm3 and the text models of GLM-4, which have no
    vision part, and with cogagent-9b, which has one but another rotary embedding.
    """
    return (
        config.get("model_type") == "chatglm"
        and isinstance(config.get("vision_config"), dict)
        and config.get("original_rope", True) is True
    )
