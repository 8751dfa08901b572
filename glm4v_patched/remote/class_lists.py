"""Entries of our classes in transformers' lists of class names.

Other code decides by these lists alone what a class is. A Trainer with ``label_smoothing_factor``
takes the labels out of the batch and shifts them for the listed causal language models only: any
other class learns to repeat its input. Classes loaded from a folder or the Hub are in no list, so
each class enters its own name where it is defined.
"""

import transformers
from transformers.models.auto import modeling_auto

from .configuration_chatglm import TESTED_TRANSFORMERS


def enter_class(cls: type, kind: str, key: str | None = None) -> None:
    """Enter the name of ``cls`` in the list of ``kind``; ``ImportError`` if there is no such list.

    Args:
        kind: As in ``MODEL_FOR_{kind}_MAPPING_NAMES``.
        key: Default the class name, which is no model type: what other models of the type
            "chatglm" enter stays, and no Auto class finds anything by it.
    """
    name = f"MODEL_FOR_{kind}_MAPPING_NAMES"
    names = getattr(modeling_auto, name, None)
    if not isinstance(names, dict):
        raise ImportError(
            f"transformers {transformers.__version__} has no {name}, by which a Trainer decides "
            "whether labels are shifted; install a tested one: "
            f"pip install 'transformers{TESTED_TRANSFORMERS}'"
        )
    names[key or cls.__name__] = cls.__name__
