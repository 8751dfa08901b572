"""``vllm serve`` with our plug-in, our limits, and the options of ``glm4v-patched serve``.

The plug-in (an entry point of this package) gives images the positions that they have; limits that
vLLM does not have are kept by :class:`guard.Guard`, as its middleware. Imports no vLLM.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from ...models.base import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ModelSource
from ...models.weight_files import read_header
from ...terminal_text import own_command, pip_install
from ..questions import Generation
from .guard import Guard
from .limits import VARIABLE, ServerLimits
from .requests import ALIASES

GROUP = "vllm.general_plugins"
MIDDLEWARE = f"{Guard.__module__}.{Guard.__name__}"
# What --max-lora-rank may be: MaxLoRARanks in vllm/config/lora.py of vLLM 0.32.0, which cannot be
# imported without torch. test_vllm_model.py compares them with the vLLM that is installed.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# vLLM seeds numpy, too, which takes no more.
MOST_SEED = 2**32 - 1
MOST_AT_ONCE = 1024
"""Requests that vLLM answers or has waiting: of several times as many tokens as our own batches."""
LARGEST_AT_ONCE = 64
# vLLM takes an empty list for "any": no host has this name (RFC 6761).
NO_DOMAIN = "fetching.is.invalid"


def find_vllm() -> str | None:
    """The program, of this Python's environment or on PATH."""
    beside = Path(sys.executable).with_name("vllm")
    return str(beside) if beside.is_file() else shutil.which("vllm")


def vllm_command(
    program: str,
    base: ModelSource,
    name: str,
    others: Mapping[str, ModelSource],
    address: tuple[str, int],
    generation: Generation,
) -> list[str]:
    """The command of vLLM's server."""
    if not any(each.module.startswith("glm4v_patched.") for each in entry_points(group=GROUP)):
        raise RuntimeError(
            f"vLLM would compute other positions than glm-4v has: this installation of "
            f"glm4v-patched has no plug-in for it ({GROUP}); install it again: "
            f"{pip_install('--force-reinstall', '--no-deps', 'glm4v-patched')}"
        )
    if not 0 <= generation.seed <= MOST_SEED:
        raise ValueError(f"--seed {generation.seed}: vLLM takes 0 to {MOST_SEED}")
    command = [program, "serve", base.model, "--trust-remote-code"]
    command += ["--host", address[0], "--port", str(address[1])]
    if base.revision is not None:
        command += ["--revision", base.revision]
    adapters = {key: found.adapters for key, found in others.items() if found.adapters}
    names = [name, *(each for each in ALIASES if each not in (name, *adapters))]
    if base.adapters is not None:
        adapters[name] = base.adapters
        names = [f"{name}:base"]
    command += ["--served-model-name", *names]
    if adapters:
        largest = max(map(_rank_for_vllm, adapters.values()))
        command += ["--enable-lora", "--max-lora-rank", str(largest), "--lora-modules"]
        command += [f"{key}={folder}" for key, folder in adapters.items()]
        command += ["--max-loras", str(len(adapters))]
    # What the model's folder says of sampling is for other uses, as in our other commands.
    command += ["--generation-config", "vllm"]
    names = ["max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty"]
    given = {name: value for name, value in generation.given().items() if name in names}
    given |= {} if generation.do_sample else {"temperature": 0}
    command += ["--override-generation-config", json.dumps(given)]
    # Its pages of the API load scripts from elsewhere.
    command += ["--seed", str(generation.seed), "--disable-fastapi-docs"]
    # Its middleware fetches, and hands on data URLs.
    return [*command, "--middleware", MIDDLEWARE, "--allowed-media-domains", NO_DOMAIN]


def environment_of(limits: ServerLimits) -> dict[str, str]:
    """The environment of vLLM's server; a key is not in its command, which other users see."""
    limits = replace(limits, most_at_once=MOST_AT_ONCE, largest_at_once=LARGEST_AT_ONCE)
    variables = {VARIABLE: limits.to_json(), "VLLM_MAX_IMAGE_PIXELS": str(limits.max_pixels)}
    if limits.api_key is not None:
        variables["VLLM_API_KEY"] = limits.api_key
    return os.environ | variables


def _rank_for_vllm(folder: Path) -> int:
    """The least of :data:`LORA_RANKS` that has room for adapters: the rest is zeros."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    header = read_header(folder / ADAPTER_WEIGHTS)
    fault = None
    if on_tower := sum(".vision." in name for name in header):
        fault = f"{on_tower} of the adapters' weights are on the vision tower, where vLLM does not "
        fault += "compute adapters"
    # vLLM 0.32.0 reads them, others take no notice and scale by r and lora_alpha alone.
    elif patterns := [key for key in ("rank_pattern", "alpha_pattern") if config.get(key)]:
        fault = f"the adapters have {' and '.join(patterns)}, which not every vLLM heeds"
    elif config["r"] > LORA_RANKS[-1]:
        fault = f"the adapters have rank {config['r']}, and vLLM takes {LORA_RANKS[-1]} at most"
    if fault:
        merge = own_command("merge", str(folder), "--out", "merged")
        cure = f"merge them ({merge}) and serve that, or take --engine transformers"
        raise ValueError(f"{folder}: {fault}; {cure}")
    return next(each for each in LORA_RANKS if each >= config["r"])
