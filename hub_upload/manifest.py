"""``CODE_MANIFEST.json``: version, origin and files of a build."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from glm4v_patched.patch.config_json import parse_json_object

MANIFEST = "CODE_MANIFEST.json"
ID_PATTERN, COMMIT_PATTERN = "[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", "[0-9a-f]{40}"
Id = Annotated[str, Field(pattern=f"^{ID_PATTERN}$")]
FileName = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("expected one line that can be printed")
    return text


class _ManifestModel(BaseModel):
    # pydantic's error messages begin with the title.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, title=MANIFEST)


class ListedFile(_ManifestModel):
    """Size in bytes and sha256 of a file."""

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class WeightsOrigin(_ManifestModel):
    """Repository and commit on the Hub that weights come from."""

    repository: Id
    revision: Annotated[str, Field(pattern=f"^{COMMIT_PATTERN}$")]

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"


OneLine = Annotated[str, AfterValidator(_one_line)]


class FineTune(_ManifestModel):
    """The base model of trained weights, and what was trained on which data."""

    base: Id
    trained: OneLine


class Evaluation(_ManifestModel):
    """Mean scores by metric, over the rows of a data set; ``dataset`` is an id or a description."""

    dataset: OneLine
    rows: Annotated[int, Field(ge=1)]
    scores: dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], FiniteFloat]


class Manifest(_ManifestModel):
    """The files of a build except the manifest. Weights from a folder have no origin."""

    version: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+){2}[A-Za-z0-9_.+-]*$")]
    weights_from: WeightsOrigin | None
    fine_tune: FineTune | None
    evaluation: Evaluation | None
    files: dict[FileName, ListedFile]

    @property
    def names(self) -> set[str]:
        """Names of all files of the build, including the manifest."""
        return {MANIFEST, *self.files}

    @property
    def weights(self) -> dict[str, ListedFile]:
        """The files of weights, by name."""
        return {name: file for name, file in self.files.items() if name.endswith(".safetensors")}


def parse_manifest(content: bytes, name: str = MANIFEST) -> Manifest:
    """Parse a manifest; raise ``ValueError`` that names an invalid field."""
    return Manifest.model_validate(parse_json_object(content, name))
