"""``CODE_MANIFEST.json``: what a build lists of itself."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import printable
from .layout import ID, MANIFEST, SHARD

Id = Annotated[str, Field(pattern=f"^{ID}$")]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
CodeName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\.py$")]
FileName = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
ShardName = Annotated[str, Field(pattern=f"^{SHARD}$")]
Version = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+){2}[A-Za-z0-9_.+-]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Weight(_Strict):
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256


class Weights(_Strict):
    """Repository and commit to copy them from are None where they came from a folder."""

    repository: Id | None
    revision: Commit | None
    files: dict[ShardName, Weight]


class FineTune(_Strict):
    """What somebody says of trained weights: their base, and what of it was trained on what."""

    base: Id
    trained: str


class Manifest(_Strict):
    version: Version
    upstream_revision: str | None
    # Builds of before fine-tunes had cards of their own lack this one.
    fine_tune: FineTune | None = None
    code: Annotated[dict[CodeName, Sha256], Field(min_length=1)]
    weights: Weights
    files: dict[FileName, Sha256]

    @property
    def names(self) -> list[str]:
        """All that a build with this manifest consists of."""
        return [MANIFEST, *self.code, *self.files, *self.weights.files]

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "Manifest":
        repository, revision = self.weights.repository, self.weights.revision
        if self.upstream_revision != revision or (repository is None) != (revision is None):
            raise ValueError(f"names {repository}@{revision} and {self.upstream_revision}")
        if len(self.names) != len(set(self.names)):
            raise ValueError("lists a file twice")
        return self


def read_manifest(content: bytes, name: str = MANIFEST) -> Manifest:
    """Raise ``ValueError`` for what no build wrote; it names the field."""
    try:
        return Manifest.model_validate(read_object(content, name))
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3]]
        told = f"{name} is none that `hub_upload build` wrote ({'; '.join(wrong)})"
        raise ValueError(printable(told)) from error


def read_object(content: bytes, name: str) -> dict[str, Any]:
    """The JSON object in a file; ``ValueError`` if it holds none."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON ({error}): download it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} holds a {type(values).__name__}, expected a JSON object")
    return values
