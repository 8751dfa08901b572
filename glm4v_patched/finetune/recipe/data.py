"""Section ``data`` of a recipe: the data sets, and how they are read."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ...data.boxes import BOX_FORMATS
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
BoxFormat = Literal[BOX_FORMATS]  # type: ignore[valid-type]
FormatName = Literal[("auto", *ROW_FORMATS)]  # type: ignore[valid-type]
SETS_IN_WORDS = "a file, a folder, an id of the Hub, a list of sets"
# Number of rows of a stream that are checked before training if ``check`` is null.
DEFAULT_CHECKED_ROWS = 1000
# With ``check: none``, a few rows are still read, because the memory is planned for their length.
ROWS_READ_WITHOUT_CHECK = 20


CheckExtent = Annotated[
    str,
    Field(pattern="^(all|none|first [1-9][0-9]{0,8})$"),
    Expected("all, none, first N with N > 0"),
]


class Data(Section):
    """The section ``data``."""

    train: Annotated[PathText | list[Any], Expected(SETS_IN_WORDS), MAY_CHANGE]
    """Conversations to train on: a file (JSONL, JSON, CSV, TSV, Parquet, Arrow, WebDataset's tar),
    a pattern (rows/*.jsonl), a folder (of such files or of images) or an id of the Hub; or a list
    of these and of {path: FILE, weight: 2.0}, where weight is how often an epoch contains each row.
    Each set may have its own format, columns, image_folder, ignore, allow_urls and max_samples.
    Data sets that the library datasets reads may also have split, subset and revision."""
    eval: Annotated[
        PathText | list[Any] | EvalFraction | None,
        Expected(f"{SETS_IN_WORDS}, a share of the rows such as 0.05 or null"),
        MAY_CHANGE,
    ] = None
    """Conversations to evaluate on, in the same forms as data.train; or the share of the training
    rows to hold out. Digests of the rows decide which are held out: always the same ones, and
    duplicates together."""
    eval_answers: Annotated[AtLeastZero, MAY_CHANGE] = 8
    """Number of rows of data.eval that the model also answers at each evaluation; 0 for none. The
    share of exact matches is logged, and answers.png in out shows the images with their answers."""
    eval_max_new_tokens: Annotated[AtLeastOne, MAY_CHANGE] = 64
    """Maximum number of tokens of an answer to a row of data.eval."""
    format: Annotated[FormatName, MAY_CHANGE] = "auto"
    """Format of the rows; "auto": by the keys of a file's first row."""
    columns: Annotated[
        dict[str, str | list[str]] | None,
        Expected("{question: COLUMN, answer: COLUMN, image: COLUMN}"),
        MAY_CHANGE,
    ] = None
    """For rows of another format: which columns are question, answer, image, system, turns (a list)
    and history, such as {question: "Question: {question}", answer: answer, image: image}."""
    max_samples: Annotated[AtLeastOne | None, MAY_CHANGE] = None
    """Maximum number of rows of each set to read, from the first on; null: all."""
    image_folder: Annotated[Folder | None, MAY_CHANGE] = None
    """Folder to which image paths are relative; null: the folder of the file with the rows."""
    image_root: Annotated[Text | None, MAY_CHANGE] = None
    """For images that were moved: the beginning of the rows' image paths, such as /old/images or
    C:\\old\\images, in place of which image_folder is used."""
    ignore: Annotated[list[Text], Expected("a list of names"), MAY_CHANGE] = []
    """Keys of rows, or columns, to leave out."""
    boxes: Annotated[BoxFormat | None, MAY_CHANGE] = None
    """Unit and order of a box's numbers in the rows. They are converted to thousandths of the
    image's width and height (docs/grounding.md). null: texts stay as they are."""
    allow_urls: Annotated[bool, MAY_CHANGE] = False
    """Download images that rows name by http:// or https://, once; they stay in the cache."""
    pack_to: AtLeastOne | None = None
    """Pack conversations into sequences of at most this many tokens; no conversation may be longer.
    The batch size then counts packed sequences."""
    check: CheckExtent | None = None
    """Which rows of each set are read and decoded before the first step: all, none or first N; the
    others are checked while training. null: all, or "first 1000" of a stream."""
    stream: bool | None = None
    """Read the rows while training instead of before it, so that the first step does not wait for
    them. The run's length is then trainer.max_steps, and a set's weight is how often it is sampled,
    relative to the others. null: stream if data.check is none or first N."""
    shuffle_buffer: AtLeastOne = 1000
    """For a stream: the number of rows that each process reads ahead, of all sets together. The
    next row is picked at random from them."""
    on_bad: Annotated[Literal["fail", "skip"], MAY_CHANGE] = "fail"
    """What to do about rows that cannot be used: fail with a list of them, or skip them. The run of
    a stream fails at such a row: it saves a checkpoint, and reports the row's file and line."""
    reuse_features: Annotated[bool | Folder, MAY_CHANGE] = False
    """Run each image through the vision tower only once, and cache its features; the tower must be
    frozen. A folder: cache them there. true: cache up to 16 GiB in the memory of each process,
    which only helps a single process, because each of several gets other images in each epoch."""

    @property
    def is_streamed(self) -> bool:
        """Return whether rows are read while training."""
        return bool(self.stream) or self.check not in (None, "all")

    @property
    def saves_at_bad_row(self) -> bool:
        """Return whether a row that cannot be used ends the run, which then saves a checkpoint."""
        return self.is_streamed and self.on_bad == "fail"

    @property
    def num_checked(self) -> int | None:
        """Return how many rows of each training set are checked before training; None for all."""
        if not self.is_streamed:
            return None
        if self.check is None:
            return DEFAULT_CHECKED_ROWS
        return ROWS_READ_WITHOUT_CHECK if self.check == "none" else int(self.check.split()[1])

    def sources(self) -> tuple[DataSource, ...]:
        """Return the sets of ``train``."""
        return make_sources(self.train, self._common_fields())

    def eval_sources(self) -> float | tuple[DataSource, ...] | None:
        """Return the sets of ``eval``, or the share to hold out."""
        if self.eval is None or isinstance(self.eval, float):
            return self.eval
        return make_sources(self.eval, self._common_fields())

    def files(self) -> list[Path]:
        """Return the local files and folders of all sets."""
        return [Path(source.path) for source in self.all_sources() if source.is_local]

    def all_sources(self) -> list[DataSource]:
        """Return the sets of ``train`` and ``eval``."""
        eval_sources = self.eval_sources()
        return [*self.sources(), *(eval_sources if isinstance(eval_sources, tuple) else ())]

    def _common_fields(self) -> dict[str, Any]:
        """Return the fields of this section that are the defaults of each set."""
        names = "format columns ignore boxes image_folder image_root allow_urls max_samples"
        return {name: getattr(self, name) for name in names.split()}
