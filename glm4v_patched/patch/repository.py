"""What a folder or a repository of the Hub holds, told by its files and not by its name."""

import re
from contextlib import suppress
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TypeGuard

from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers
from transformers.utils import cached_file

from ..remote.processing_chatglm import DOWNLOAD_OPTIONS
from .config_json import is_glm4v, read_json_object

MODEL_CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
IMAGE_PROCESSOR_CONFIG_FILE = "preprocessor_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


class Repository:
    """A local folder or file, or a repository of the Hub, as ``from_pretrained`` takes it: by its
    first argument, and those of its keywords that say where to download from."""

    def __init__(self, name_or_path: object, options: dict):
        self.name_or_path = name_or_path
        self._options = {
            name: options[name]
            for name in DOWNLOAD_OPTIONS
            # Once is enough: from_pretrained itself will do it.
            if options.get(name) is not None and name != "force_download"
        }
        if options.get("use_auth_token") is not None:  # transformers 4 still takes that name
            self._options.setdefault("token", options["use_auth_token"])

    @cached_property
    def hub_timeout(self) -> str | None:
        """What to say of a Hub that does not answer; ``None`` if it does, or need not be asked.

        It is asked once, with a time-out. The client would wait a minute for each file, six times,
        and transformers 5 for ever for the commit.
        """
        name, offline = self.name_or_path, self._options.get("local_files_only")
        if constants.HF_HUB_OFFLINE or offline or not _is_name(name) or Path(name).exists():
            return None
        url = hf_hub_url(str(name), MODEL_CONFIG_FILE, revision=self._options.get("revision"))
        seconds = constants.HF_HUB_ETAG_TIMEOUT
        try:
            headers = build_hf_headers(token=self._options.get("token"))
            get_session().head(url, headers=headers, timeout=seconds)
        except Exception as error:  # whatever else it is, who needs the file will tell
            # requests, httpx and httpx2 have no base in common, but these names.
            if type(error).__name__.endswith("Timeout"):
                return (
                    f"{url_origin(url)} did not answer within {seconds:g} s (check the network and "
                    "HF_ENDPOINT, or wait longer with HF_HUB_ETAG_TIMEOUT)"
                )
        return None

    def read(self, file_name: str, ask_hub: bool = True) -> dict | None:
        """The contents of a JSON file, ``None`` where there is none; what :attr:`name_or_path`
        names, if that is a file itself.

        Args:
            ask_hub: Look further than folders and the cache. For ``config.json`` the errors of a
                Hub that cannot be reached are raised.
        """
        if not _is_name(self.name_or_path):
            return None
        path = Path(self.name_or_path)
        if not path.is_file():
            if ask_hub and self.hub_timeout is not None:
                raise TimeoutError(f"{self.silence}, and {path} is not in the cache")
            must_answer = ask_hub and file_name == MODEL_CONFIG_FILE
            cached = cached_file(
                str(self.name_or_path),
                file_name,
                _raise_exceptions_for_gated_repo=must_answer,
                _raise_exceptions_for_missing_entries=must_answer,  # no config.json: None
                _raise_exceptions_for_connection_errors=must_answer,
                **self._options | ({} if ask_hub else {"local_files_only": True}),
            )
            if cached is None:
                return None
            path = Path(cached)
        elif path.suffix != ".json":  # a file of weights, and no config
            return None
        with suppress(ValueError):
            return read_json_object(path)
        return None

    def contains_glm4v(self) -> bool:
        """True for a glm-4v, for an adapter of one, and for the tokenizer of one by itself.

        What is in the cache is not asked for again: a repository does not become another model.
        False if it cannot be found out: the call that comes after raises its own error. But where
        that would wait for many minutes, for a Hub that does not answer, ``TimeoutError``.
        """
        tokenizer = {}
        try:
            for ask_hub in (False, True):
                config = self.read(MODEL_CONFIG_FILE, ask_hub) or self._config_of_base(ask_hub)
                if config is not None:
                    return is_glm4v(config)
                tokenizer = self.read(TOKENIZER_CONFIG_FILE, ask_hub) or {}
                # The text models of GLM-4 have the same tokenizer, without a size of images.
                if "ChatGLM4Tokenizer" in str(tokenizer) and "image_size" in tokenizer:
                    return True
        except TimeoutError:
            if not tokenizer:
                raise
        except Exception:  # of the Hub's client, whose kinds differ by its version
            pass
        return False

    def _config_of_base(self, ask_hub: bool) -> dict | None:
        base = (self.read(ADAPTER_CONFIG_FILE, ask_hub) or {}).get("base_model_name_or_path")
        of_adapter = ("revision", "subfolder")
        options = {name: value for name, value in self._options.items() if name not in of_adapter}
        return Repository(base, options).read(MODEL_CONFIG_FILE, ask_hub) if base else None


def _is_name(name: object) -> TypeGuard[str | PathLike]:
    return isinstance(name, (str, PathLike))


def url_origin(url: str) -> str:
    """Scheme, host and port, not what may stand before them: HF_ENDPOINT can hold a password."""
    return re.sub(r"^(\w+://)(?:[^/]*@)?([^/]*).*", r"\1\2", url)
