"""Detection of a glm-4v in a folder or a Hub repository, by its files instead of its name."""

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
    """A local folder or file, or a Hub repository, as ``from_pretrained`` takes it.

    Args:
        name_or_path: The first argument of ``from_pretrained``.
        kwargs: Its keyword arguments, of which only the download options are used.
    """

    def __init__(self, name_or_path: object, kwargs: dict):
        self.name_or_path = name_or_path
        self._download_options = {
            name: kwargs[name]
            for name in DOWNLOAD_OPTIONS
            # from_pretrained obeys force_download; here it would download files a second time.
            if kwargs.get(name) is not None and name != "force_download"
        }
        if kwargs.get("use_auth_token") is not None:  # transformers 4 still takes that name
            self._download_options.setdefault("token", kwargs["use_auth_token"])

    @cached_property
    def hub_timeout_error(self) -> str | None:
        """Error message if the Hub does not answer in time, else ``None``.

        It is also ``None`` for local folders and when offline. This property sends one request with
        a short timeout. Without this request, huggingface_hub would try six times for each file and
        wait a minute each time, and transformers 5 would wait for the commit without a limit.
        """
        name, offline = self.name_or_path, self._download_options.get("local_files_only")
        if constants.HF_HUB_OFFLINE or offline or not _is_name(name) or Path(name).exists():
            return None
        revision = self._download_options.get("revision")
        url = hf_hub_url(str(name), MODEL_CONFIG_FILE, revision=revision)
        seconds = constants.HF_HUB_ETAG_TIMEOUT
        try:
            headers = build_hf_headers(token=self._download_options.get("token"))
            get_session().head(url, headers=headers, timeout=seconds)
        except Exception as error:  # other errors are raised again when a file is loaded
            # The timeout classes of requests, httpx and httpx2 have no common base class.
            if type(error).__name__.endswith("Timeout"):
                return (
                    f"{url_origin(url)} did not answer within {seconds:g} s (check the network and "
                    "HF_ENDPOINT, or wait longer with HF_HUB_ETAG_TIMEOUT)"
                )
        return None

    def read(self, file_name: str, ask_hub: bool = True) -> dict | None:
        """Read a JSON file of the repository, or :attr:`name_or_path` itself if that is a file.

        Args:
            file_name: Name of the file inside the repository.
            ask_hub: Download the file if it is neither in a local folder nor in the cache.

        Returns:
            The object in the file; ``None`` if there is no such file or it is not readable JSON.

        Raises:
            TimeoutError: the Hub did not answer in time.
            OSError: ``config.json`` cannot be downloaded.
        """
        if not _is_name(self.name_or_path):
            return None
        path = Path(self.name_or_path)
        if not path.is_file():
            if ask_hub and self.hub_timeout_error is not None:
                raise TimeoutError(f"{self.hub_timeout_error}, and {path} is not in the cache")
            raise_errors = ask_hub and file_name == MODEL_CONFIG_FILE
            cached = cached_file(
                str(self.name_or_path),
                file_name,
                _raise_exceptions_for_gated_repo=raise_errors,
                # Connection errors need this flag, too. A missing config.json raises no error.
                _raise_exceptions_for_missing_entries=raise_errors,
                _raise_exceptions_for_connection_errors=raise_errors,
                **self._download_options | ({} if ask_hub else {"local_files_only": True}),
            )
            if cached is None:
                return None
            path = Path(cached)
        elif path.suffix != ".json":  # a weights file
            return None
        with suppress(ValueError):
            return read_json_object(path)
        return None

    def contains_glm4v(self) -> bool:
        """Return whether the files belong to a glm-4v, its adapter, or only its tokenizer.

        Cached files are read first, without a request to the Hub. Return ``False`` if the files
        cannot be read; ``from_pretrained`` then raises its own error.

        Raises:
            TimeoutError: the Hub did not answer in time. (``from_pretrained`` would wait for
                minutes.)
        """
        tokenizer_config = {}
        try:
            for ask_hub in (False, True):
                config = self.read(MODEL_CONFIG_FILE, ask_hub) or self._config_of_base(ask_hub)
                if config is not None:
                    return is_glm4v(config)
                tokenizer_config = self.read(TOKENIZER_CONFIG_FILE, ask_hub) or {}
                # The text models of GLM-4 have the same tokenizer, without an image size.
                names_our_class = "ChatGLM4Tokenizer" in str(tokenizer_config)
                if names_our_class and "image_size" in tokenizer_config:
                    return True
        except TimeoutError:
            if not tokenizer_config:
                raise
            # The cache has a tokenizer, which is that of another model.
        except Exception:  # error classes differ between versions of huggingface_hub
            pass
        return False

    def _config_of_base(self, ask_hub: bool) -> dict | None:
        """Return the config of this adapter's base model, ``None`` if this is no adapter.

        The adapter's revision and subfolder do not apply to the base model.
        """
        base = (self.read(ADAPTER_CONFIG_FILE, ask_hub) or {}).get("base_model_name_or_path")
        options = {
            name: value
            for name, value in self._download_options.items()
            if name not in ("revision", "subfolder")
        }
        return Repository(base, options).read(MODEL_CONFIG_FILE, ask_hub) if base else None


def _is_name(name: object) -> TypeGuard[str | PathLike]:
    return isinstance(name, (str, PathLike))


def url_origin(url: str) -> str:
    """Return scheme, host and port of a URL, without the credentials that HF_ENDPOINT may have."""
    return re.sub(r"^(\w+://)(?:[^/]*@)?([^/]*).*", r"\1\2", url)
