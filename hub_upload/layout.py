"""The models that are published, the names of files in a build, and patterns of ids."""

from typing import NamedTuple

from glm4v_patched.models.base import ADAPTER_CONFIG as ADAPTER_CONFIG
from glm4v_patched.models.base import ADAPTER_WEIGHTS as ADAPTER_WEIGHTS
from glm4v_patched.models.weight_files import SINGLE_FILE as SINGLE_FILE
from glm4v_patched.models.weight_files import WEIGHTS_INDEX as INDEX  # noqa: F401

UPSTREAM = "zai-org/glm-4v-9b"
MANIFEST = "CODE_MANIFEST.json"
ID_PATTERN, COMMIT_PATTERN = "[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", "[0-9a-f]{40}"
SHARD_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors"


class PublishedModel(NamedTuple):
    """A model whose weights are published with our code.

    Attributes:
        id: Its id on the Hub.
        architectures: Those in its config.json; saving a loaded model writes another class.
        name: Its name in the model card, and in the default ``--name``.
    """

    id: str
    architectures: list[str]
    name: str


# By original_rope of the config.
PUBLISHED_MODELS = {
    True: PublishedModel(UPSTREAM, ["ChatGLMModel"], "glm-4v-9b"),
    False: PublishedModel(
        "zai-org/cogagent-9b-20241220", ["ChatGLMForConditionalGeneration"], "cogagent-9b"
    ),
}
