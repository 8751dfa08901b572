"""Registration of our classes in transformers' lists of class names.

Other code looks only at these lists to learn what a class is. For example, a Trainer with
``label_smoothing_factor`` computes the loss itself, and shifts the labels only if the class is in
``MODEL_FOR_CAUSAL_LM_MAPPING_NAMES``. transformers adds no class that was loaded from a folder or
the Hub, so each of our classes adds its name when it is defined.
"""

import transformers
from transformers.models.auto import modeling_auto

from .configuration_chatglm import TESTED_TRANSFORMERS


def add_to_mapping_names(cls: type, kind: str, key: str | None = None) -> None:
    """Add the name of ``cls`` to transformers' ``MODEL_FOR_{kind}_MAPPING_NAMES``.

    Args:
        kind: The middle of the list's name, such as "CAUSAL_LM".
        key: The key of the entry. Default: the class name. transformers' own keys are model types,
            so an entry with a class name replaces none of them, and no Auto class finds it.

    Raises:
        ImportError: The installed transformers has no such list.
    """
    list_name = f"MODEL_FOR_{kind}_MAPPING_NAMES"
    names = getattr(modeling_auto, list_name, None)
    if not isinstance(names, dict):
        raise ImportError(
            f"transformers {transformers.__version__} has no {list_name}, which tells a Trainer "
            "whether to shift labels; install a tested version: "
            f"pip install 'transformers{TESTED_TRANSFORMERS}'"
        )
    names[key or cls.__name__] = cls.__name__
