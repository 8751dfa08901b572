"""``data:`` of a recipe: the sets of rows, and what becomes of them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ...data.formats import ROW_FORMATS
from ...data.source import DataSource, make_sources
from .types import (
    MAY_CHANGE,
    AtLeastOne,
    AtLeastZero,
    Expected,
    Folder,
    PathText,
    Section,
    Text,
)

EvalFraction = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
FormatName = Literal[("auto", *ROW_FORMATS)]  # type: ignore[valid-type]
SETS_IN_WORDS = "a file, a folder, an id of the Hub, a list of sets"
# How many rows are looked at before a training whose rows are read as it goes: where it is not
# said, and where none are to be checked, which still tell how long rows are.
DEFAULT_CHECKED_ROWS, MIN_CHECKED_ROWS = 1000, 20


CheckExtent = Annotated[
    str,
    Field(pattern="^(all|none|first [1-9][0-9]{0,8})$"),
    Expected("all, none or first N, N > 0"),
]


class Data(Section):
    """What is learned."""

    train: Annotated[PathText | list[Any], Expected(SETS_IN_WORDS), MAY_CHANGE]
    """Conversations: a file (JSONL, JSON, CSV, TSV, Parquet, Arrow, tar of WebDataset), files by a
    pattern (rows/*.jsonl), a folder (of these, of images, of LLaMA-Factory's) or an id of the
    Hub; or a list of these and of {path: FILE, weight: 2.0}, where weight says how often each row
    comes in an epoch. Of a set may also be given: format, columns, image_folder, ignore,
    allow_urls, max_samples, and split, subset and revision of what datasets reads."""
    eval: Annotated[
        PathText | list[Any] | EvalFraction | None,
        Expected(f"{SETS_IN_WORDS}, a share of the rows as 0.05 or null"),
        MAY_CHANGE,
    ] = None
    """Conversations to evaluate on, named as those to train on; or the share of the rows that is
    held out, by their digests: always the same rows, and equal rows together."""
    eval_answers: Annotated[AtLeastZero, MAY_CHANGE] = 8
    """Of the rows for evaluation, so many are also answered at each evaluation: the share of exact
    answers is logged, and the images with answers are drawn to answers.png in out; 0 for none."""
    eval_max_new_tokens: Annotated[AtLeastOne, MAY_CHANGE] = 64
    """Tokens of such an answer, at most."""
    format: Annotated[FormatName, MAY_CHANGE] = "auto"
    """Of the rows; "auto": by the keys of a file's first row."""
    columns: Annotated[
        dict[str, str | list[str]] | None,
        Expected("{question: COLUMN, answer: COLUMN, image: COLUMN}"),
        MAY_CHANGE,
    ] = None
    """Of rows of no format: which columns are question, answer, image, system, turns (a list) and
    history, as {question: "Question: {question}", answer: answer, image: image}."""
    max_samples: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Read so many rows of each set, the first ones; null: all."""
    image_folder: Annotated[Folder | None, MAY_CHANGE] = None
    """What paths of images are relative to; null: the folder of their file."""
    ignore: Annotated[list[Text], Expected("a list of names"), MAY_CHANGE] = []
    """Keys of rows, or columns, that are left out."""
    allow_urls: Annotated[bool, MAY_CHANGE] = False
    """Fetch images that rows name by http:// or https://, once; they are kept in the cache."""
    pack_to: AtLeastOne | None = None
    """Pack conversations into rows of at most so many positions, none longer; the batch size then
    counts such rows."""
    check: CheckExtent | None = None
    """Which rows of each set are read and decoded before the first step: all, none or first N; the
    rest is then checked as it is learned. null: all, or "first 1000" of a stream."""
    stream: bool | None = None
    """Read the rows while they are learned, in place of all of them before: the first step comes at
    once, however many there are. The run's length is then trainer.max_steps, and a set's weight is
    how often it is drawn from, beside the others. null: if not all rows are checked."""
    shuffle_buffer: AtLeastOne = 1000
    """Of a stream: the next row is drawn from so many, of all sets together, that each process has
    read ahead."""
    on_bad: Annotated[Literal["fail", "skip"], MAY_CHANGE] = "fail"
    """What to do about rows that cannot be used: end with their list, or leave them out. Of a
    stream: end with a checkpoint and the row's place, or leave it out."""
    reuse_features: Annotated[bool | Folder, MAY_CHANGE] = False
    """An image goes through the vision tower, which must be frozen, only the first time. What came
    out is kept in the folder named; or, if true, in the memory of each process, up to 16 GiB, which
    is of use to a single process: others draw other images in each epoch."""

    @property
    def is_streamed(self) -> bool:
        """Whether rows are read while they are learned."""
        return bool(self.stream) or self.check not in (None, "all")

    @property
    def ends_at_bad_row(self) -> bool:
        """Whether a row that cannot be used ends the run, with a checkpoint."""
        return self.is_streamed and self.on_bad == "fail"

    @property
    def first(self) -> int | None:
        """How many rows of each set to train on are checked before; None for all."""
        if not self.is_streamed:
            return None
        word = self.check or f"first {DEFAULT_CHECKED_ROWS}"
        return MIN_CHECKED_ROWS if word == "none" else int(word.split()[1])

    def sources(self) -> tuple[DataSource, ...]:
        """The sets of ``train``."""
        return make_sources(self.train, self._of_every_set())

    def evaluated(self) -> float | tuple[DataSource, ...] | None:
        """The sets of ``eval``, or the share that is held out."""
        if self.eval is None or isinstance(self.eval, float):
            return self.eval
        return make_sources(self.eval, self._of_every_set())

    def files(self) -> list[Path]:
        """The files and folders of all sets."""
        return [Path(source.path) for source in self.all_sources() if source.is_local]

    def all_sources(self) -> list[DataSource]:
        """The sets of ``train`` and ``eval``."""
        evaluated = self.evaluated()
        return [*self.sources(), *(evaluated if isinstance(evaluated, tuple) else ())]

    def _of_every_set(self) -> dict[str, Any]:
        names = ("format", "image_folder", "ignore", "allow_urls", "columns", "max_samples")
        return {name: getattr(self, name) for name in names}
