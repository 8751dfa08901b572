"""``CODE_MANIFEST.json``: what a build lists of itself."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from glm4v_patched.patch.config_json import parse_json_object

from .layout import ADAPTER_WEIGHTS, COMMIT, ID, MANIFEST

Id = Annotated[str, Field(pattern=f"^{ID}$")]
FileName = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("expected one line that can be printed")
    return text


class _Strict(BaseModel):
    # The title is what pydantic's errors begin with.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, title=MANIFEST)


class Listed(_Strict):
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Origin(_Strict):
    """A repository of the Hub, at a commit."""

    repository: Id
    revision: Annotated[str, Field(pattern=f"^{COMMIT}$")]

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


class FineTune(_Strict):
    """What somebody says of trained weights: their base, and what of it was trained on what."""

    base: Id
    trained: Annotated[str, AfterValidator(_one_line)]


class Manifest(_Strict):
    """Every file of a build but this one. Weights that were in a folder have no origin."""

    version: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+){2}[A-Za-z0-9_.+-]*$")]
    weights_from: Origin | None
    fine_tune: FineTune | None
    files: dict[FileName, Listed]

    @property
    def names(self) -> set[str]:
        """All that a build with this manifest consists of."""
        return {MANIFEST, *self.files}

    @property
    def is_of_adapters(self) -> bool:
        return self.weights.keys() == {ADAPTER_WEIGHTS}

    @property
    def weights(self) -> dict[str, Listed]:
        return {name: file for name, file in self.files.items() if name.endswith(".safetensors")}


def read_manifest(content: bytes, name: str = MANIFEST) -> Manifest:
    """Raise ``ValueError`` for what no build wrote; it names the field."""
    return Manifest.model_validate(parse_json_object(content, name))


def to_json_bytes(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
