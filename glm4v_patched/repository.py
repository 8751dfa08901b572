"""What a folder or a repository of the Hub holds, told by its files and not by its name."""

import json
from os import PathLike
from pathlib import Path

from transformers.utils import cached_file

from .remote.processing_chatglm import DOWNLOAD_OPTIONS

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
IMAGE_PROCESSOR_CONFIG = "preprocessor_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


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


class Repository:
    """A local folder or file, or a repository of the Hub, as ``from_pretrained`` takes it.

    Args:
        name_or_path: Its first argument.
        options: Its keywords; those that say where to download from are used.
    """

    def __init__(self, name_or_path: str | PathLike, options: dict):
        self.name_or_path = name_or_path
        self._options = {
            name: options[name]
            for name in DOWNLOAD_OPTIONS
            # Once is enough: from_pretrained itself will do it.
            if options.get(name) is not None and name != "force_download"
        }

    def read(self, file_name: str) -> dict | None:
        """The contents of a JSON file, ``None`` where there is none.

        Errors of the connection are also ``None``: the call that comes after raises its own.
        """
        path = Path(self.name_or_path)
        if path.is_file():  # a config itself, or a file of weights
            return _json_object(path) if path.suffix == ".json" else None
        try:
            found = cached_file(
                str(self.name_or_path),
                file_name,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
                **self._options,
            )
        except (OSError, ValueError):  # no such repository, or no name of one
            return None
        return None if found is None else _json_object(Path(found))

    def holds_glm4v(self) -> bool:
        """True for a glm-4v, for an adapter of one, and for the tokenizer of one by itself."""
        config = self.read(CONFIG) or self._config_of_base()
        if config is not None:
            return is_glm4v(config)
        tokenizer = self.read(TOKENIZER_CONFIG) or {}
        # The text models of GLM-4 have the same tokenizer, without a size of images.
        return "ChatGLM4Tokenizer" in str(tokenizer) and "image_size" in tokenizer

    def _config_of_base(self) -> dict | None:
        base = (self.read(ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
        of_adapter = ("revision", "subfolder")
        options = {name: value for name, value in self._options.items() if name not in of_adapter}
        return Repository(base, options).read(CONFIG) if base else None


def _json_object(path: Path) -> dict | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
