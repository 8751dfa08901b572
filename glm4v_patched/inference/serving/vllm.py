"""Make the command ``vllm serve`` from the options of ``glm4v-patched serve``.

vLLM finds this package's plug-in by its entry point; the plug-in gives images the right positions.
vLLM also loads :class:`guard.Guard` as middleware, for limits that vLLM itself does not have. This
module does not import vLLM.
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
from .limits import LIMITS_VARIABLE, ServerLimits
from .requests import ALIASES

PLUGIN_GROUP = "vllm.general_plugins"
MIDDLEWARE = f"{Guard.__module__}.{Guard.__name__}"
# Values of --max-lora-rank: MaxLoRARanks in vllm/config/lora.py of vLLM 0.32.0, which cannot be
# imported without torch. test_vllm_model.py compares them with the installed vLLM.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# vLLM also seeds numpy, which accepts no larger seed.
MAX_VLLM_SEED = 2**32 - 1
VLLM_MAX_REQUESTS = 1024
"""Requests that wait or are being answered; more than on our own server, because vLLM's batches are
larger."""
VLLM_MAX_BUFFERED_BODIES = 64
# The only domain from which vLLM may fetch images. No host has this name (RFC 6761). An empty list
# would allow any domain.
NO_DOMAIN = "fetching.is.invalid"


def find_vllm() -> str | None:
    """Return the path of vLLM's program, in this Python's environment or on PATH, or None."""
    program = Path(sys.executable).with_name("vllm")
    return str(program) if program.is_file() else shutil.which("vllm")


def vllm_command(
    program: str,
    base: ModelSource,
    name: str,
    adapters: Mapping[str, ModelSource],
    address: tuple[str, int],
    generation: Generation,
) -> list[str]:
    """Return the command that starts vLLM's server.

    Args:
        program: Path of vLLM's program.
        name: Name of the model for clients.
        adapters: Adapters to serve besides the model, by the names that clients use.
        address: Host and port.

    Raises:
        RuntimeError: Our plug-in is not installed.
        ValueError: vLLM does not support the seed or an adapter.
    """
    from ..vllm_plugin import ARCHITECTURE  # imports torch

    plugins = entry_points(group=PLUGIN_GROUP)
    if not any(plugin.module.startswith("glm4v_patched.") for plugin in plugins):
        raise RuntimeError(
            f"vLLM would compute wrong positions for glm-4v: this installation of glm4v-patched "
            f"has no vLLM plug-in ({PLUGIN_GROUP}); install it again: "
            f"{pip_install('--force-reinstall', '--no-deps', 'glm4v-patched')}"
        )
    if not 0 <= generation.seed <= MAX_VLLM_SEED:
        raise ValueError(f"--seed {generation.seed}: expected 0 to {MAX_VLLM_SEED} with vLLM")
    command = [program, "serve", base.model, "--trust-remote-code"]
    # A published config names another class, for which vLLM has a model without images.
    command += ["--hf-overrides", json.dumps({"architectures": [ARCHITECTURE]})]
    command += ["--host", address[0], "--port", str(address[1])]
    if base.revision is not None:
        command += ["--revision", base.revision]
    adapter_folders = {key: source.adapters for key, source in adapters.items() if source.adapters}
    names = [name, *(alias for alias in ALIASES if alias not in (name, *adapter_folders))]
    if base.adapters is not None:
        adapter_folders[name] = base.adapters
        names = [f"{name}:base"]
    command += ["--served-model-name", *names]
    if adapter_folders:
        max_rank = max(map(_rank_for_vllm, adapter_folders.values()))
        command += ["--enable-lora", "--max-lora-rank", str(max_rank), "--lora-modules"]
        command += [f"{key}={folder}" for key, folder in adapter_folders.items()]
        command += ["--max-loras", str(len(adapter_folders))]
    # With the value "vllm", vLLM ignores the generation options in the model's folder, as our other
    # commands do.
    command += ["--generation-config", "vllm"]
    options = ["max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty"]
    defaults = {key: value for key, value in generation.to_kwargs().items() if key in options}
    if not generation.do_sample:
        defaults["temperature"] = 0
    command += ["--override-generation-config", json.dumps(defaults)]
    # vLLM's pages about its API are disabled, because they load scripts from other hosts.
    command += ["--seed", str(generation.seed), "--disable-fastapi-docs"]
    # The middleware fetches images itself and passes on data URLs.
    return [*command, "--middleware", MIDDLEWARE, "--allowed-media-domains", NO_DOMAIN]


def vllm_environment(limits: ServerLimits) -> dict[str, str]:
    """Return the environment of vLLM's server, with limits and API key.

    The key is in the environment, because other users of the machine can see the command.
    """
    limits = replace(
        limits, max_requests=VLLM_MAX_REQUESTS, max_buffered_bodies=VLLM_MAX_BUFFERED_BODIES
    )
    variables = {LIMITS_VARIABLE: limits.to_json(), "VLLM_MAX_IMAGE_PIXELS": str(limits.max_pixels)}
    if limits.api_key is not None:
        variables["VLLM_API_KEY"] = limits.api_key
    return os.environ | variables


def _rank_for_vllm(folder: Path) -> int:
    """Return the smallest of :data:`LORA_RANKS` that is at least the rank of the adapters.

    vLLM pads the adapters to this rank with zeros.

    Raises:
        ValueError: vLLM would not apply the adapters correctly.
    """
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    header = read_header(folder / ADAPTER_WEIGHTS)
    problem = None
    if num_on_tower := sum(".vision." in name for name in header):
        problem = (
            f"{num_on_tower} of the adapters' weights are on the vision tower, where vLLM does not "
            "apply adapters"
        )
    # vLLM 0.32.0 reads these patterns; other versions ignore them and use r and lora_alpha alone.
    elif patterns := [key for key in ("rank_pattern", "alpha_pattern") if config.get(key)]:
        problem = f"the adapters have {' and '.join(patterns)}, which some vLLM versions ignore"
    elif config["r"] > LORA_RANKS[-1]:
        problem = (
            f"the adapters have rank {config['r']}, but vLLM supports at most {LORA_RANKS[-1]}"
        )
    if problem:
        merge = own_command("merge", str(folder), "--out", "merged")
        advice = f"merge them ({merge}) and serve the result, or use --engine transformers"
        raise ValueError(f"{folder}: {problem}; {advice}")
    return next(rank for rank in LORA_RANKS if rank >= config["r"])
