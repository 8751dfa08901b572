"""Checks a file of conversations before anything is trained on it, and says what was found.

Every row is read, rendered and counted, every picture decoded to its end (:func:`check_file`).
What was found goes to a file (:class:`CheckedData`), by which training processes know which rows to
take, and that neither these nor their pictures have changed since. What was good once is remembered
(:mod:`memory`) and not looked at again until it changes.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import PIL
from tqdm import tqdm

from ..printed import own_command
from .collate import ConversationCollator, Size
from .decoding import Facts, read_facts_of_all
from .memory import Memory, default_path
from .messages import replace_pictures, shorten
from .rendering import measure_all
from .sources import Fault, Row, describe_faults, read_rows

RULES = 2
"""Raised with every change after which what was good may no longer be."""
FEW_PICTURES = 64
PICTURES_A_PROCESS, BYTES_A_PROCESS = 1000, 32 * 2**20
# So much of the work is not lost if it is stopped.
KEPT_AT_ONCE = 1000
# Rendered in as many seconds as a process takes to start, which imports torch.
ROWS_A_PROCESS = 10_000
# A file that changes twice within a tick of its file system's clock has one time for both.
NANOSECONDS_UNTIL_SURE = 2 * 10**9


class Counts(NamedTuple):
    """Of all rows that are kept."""

    rows: int
    pictures: int
    """As often as they are shown."""
    positions: int
    """With all that the pictures take."""
    learned: int
    """Positions that are labels."""


class Picture(NamedTuple):
    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class CheckedData:
    """Which rows of a file are trained on, and what they were when they were checked.

    Attributes:
        path: The file, absolute.
        sha256: Of its bytes.
        pack_to: The length of a packed row that the rows were checked against.
        row_lines: The line of each row that is kept, from 1, in order.
        row_digests: Of each, by :func:`digest_row`.
        row_sizes: Of each.
        pictures: Each file that is shown.
        skipped: How many rows cannot be used.
        counts: Of the rows that are kept.
    """

    path: str
    sha256: str
    pack_to: int | None
    row_lines: tuple[int, ...]
    row_digests: tuple[str, ...]
    row_sizes: tuple[Size, ...]
    pictures: tuple[Picture, ...]
    skipped: int

    @property
    def counts(self) -> Counts:
        sums = [sum(of_all) for of_all in zip(*self.row_sizes, strict=True)]
        positions, _, pictures, learned = sums
        return Counts(len(self.row_lines), pictures, positions, learned)

    @property
    def stamps(self) -> dict[str, tuple[int, int]]:
        """Size and time of change of each picture, by its path."""
        return {path: (size, mtime_ns) for path, size, mtime_ns in self.pictures}

    def write(self, path: Path) -> None:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(vars(self) | {"rules": RULES}), encoding="utf-8")
        os.replace(partial, path)

    @classmethod
    def read(cls, path: Path) -> "CheckedData":
        """What :meth:`write` wrote.

        Raises:
            ValueError: it is not there, or it is no such file.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("rules") != RULES:
                raise ValueError("it was written by another version of this package")
            made = {"row_sizes": Size, "pictures": Picture}
            for name, value in values.items():
                if name in made:
                    value = [made[name](*item) for item in value]
                values[name] = tuple(value) if isinstance(value, list) else value
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} does not say which rows were checked ({error}): start the training with "
                f"{own_command('train')}, which checks them first"
            ) from error

    def conversations(self) -> list[list[dict]]:
        """The rows, read again.

        Raises:
            ValueError: the file or a picture is not what was checked.
        """
        cure = "start the training again, so that it is checked"
        if _sha256(self.path) != self.sha256:
            raise ValueError(f"{self.path} has changed since it was checked: {cure}")
        for picture in self.pictures:
            if Picture(picture.path, *_size_and_time(picture.path)[:2]) != picture:
                raise ValueError(f"{picture.path} has changed since it was checked: {cure}")
        lines = set(self.row_lines)
        of_lines = [row for row in read_rows(self.path) if row.line in lines]
        rows = [row for row in of_lines if isinstance(row, Row)]
        assert [row.line for row in rows] == [*self.row_lines]
        return [row.messages for row in rows]


def check_file(
    path: str | Path,
    processor,
    max_positions: int,
    *,
    pack_to: int | None = None,
    on_bad: Literal["fail", "skip"] = "fail",
    memory: Path | None = None,
) -> CheckedData:
    """Read, render and count every row of a file, and decode every picture once.

    Pictures and rows that are new, and more than a few, are decoded and rendered by processes of
    their own, at most one a core. Rows that are left out are printed, up to 20.

    Args:
        processor: A ``ChatGLMProcessor``.
        max_positions: Of the model's position table.
        pack_to: Length of a packed row, which no conversation may exceed.
        on_bad: Raise for rows that cannot be used, or leave them out.
        memory: Where what was found is kept; default :func:`memory.default_path`.

    Raises:
        ValueError: the file cannot be read, or rows of it cannot be used: lists up to 20.
    """
    digest = _sha256(path)
    rows: list[Row] = []
    faults: list[Fault] = []
    for found in read_rows(path):
        if isinstance(found, Row):
            rows.append(found)
        else:
            faults.append(found)
    remembered = Memory(memory or default_path())
    with closing(remembered):
        pictures = _check_pictures(rows, remembered)
        sizes = _check_rows(rows, ConversationCollator(processor), remembered)
    kept: list[tuple[Row, Size]] = []
    for row, size in zip(rows, sizes, strict=True):
        fault = _fault_of_pictures(row, pictures)
        if fault is None:
            fault = _fault_of_size(row, size, max_positions, pack_to)
        if fault is None:
            assert isinstance(size, Size)
            kept.append((row, size))
        else:
            faults.append(Fault(row.line, fault))
    faults.sort()
    if faults:
        told = describe_faults(path, faults, len(kept) + len(faults))
        if not kept:
            raise ValueError(f"{told}\ncorrect them")
        if on_bad == "fail":
            raise ValueError(f"{told}\ncorrect them, or leave them out (data.on_bad: skip)")
        print(f"{told}\nthey are left out", flush=True)
    shown = dict.fromkeys(picture for row, _ in kept for picture in row.pictures)
    return CheckedData(
        path=os.path.abspath(path),
        sha256=digest,
        pack_to=pack_to,
        row_lines=tuple(row.line for row, _ in kept),
        row_digests=tuple(digest_row(row, pictures) for row, _ in kept),
        row_sizes=tuple(size for _, size in kept),
        pictures=tuple(Picture(path, *pictures[path][:2]) for path in shown),
        skipped=len(faults),
    )


def require_pictures(path: str | Path, memory: Path | None = None, to_learn: bool = True) -> None:
    """Decode every picture of a file's rows, as :func:`check_file` does.

    Args:
        to_learn: As :func:`read_rows` takes it.

    Raises:
        ValueError: some cannot be learned from: lists up to 20 rows.
    """
    rows = [row for row in read_rows(path, to_learn=to_learn) if isinstance(row, Row)]
    with closing(Memory(memory or default_path())) as remembered:
        pictures = _check_pictures(rows, remembered)
    found = [(row.line, _fault_of_pictures(row, pictures)) for row in rows]
    if faults := [Fault(line, fault) for line, fault in found if fault is not None]:
        raise ValueError(f"{describe_faults(path, faults, len(rows))}\ncorrect them")


def digest_row(row: Row, pictures: dict[str, Facts]) -> str:
    """sha256 of a row's JSON, with the sha256 of each picture for its path.

    The keys of a message are sorted; those in tools are not, for the template writes them as they
    stand.
    """
    return _digest_messages([pictures[picture].sha256 for picture in row.pictures], row)


def _digest_messages(pictures: Sequence[str], row: Row) -> str:
    names = iter(pictures)
    messages = replace_pictures(row.messages, lambda picture: next(names))
    messages = [dict(sorted(message.items())) for message in messages]
    text = json.dumps(messages, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# Pictures


def _check_pictures(rows: list[Row], memory: Memory) -> dict[str, Facts]:
    """What is found of each picture, by its path."""
    paths = dict.fromkeys(picture for row in rows for picture in row.pictures)
    keys = {path: _picture_key(path) for path in paths}
    known = memory.get(keys.values())
    found: dict[str, Facts] = {}
    new: dict[str, int] = {}
    for path in paths:
        stamp = _size_and_time(path)
        size, mtime_ns, ctime_ns, sha256 = known.get(keys[path], (-1, -1, -1, ""))
        if stamp == (size, mtime_ns, ctime_ns) and size >= 0:
            found[path] = Facts(*stamp, sha256, None)
        else:
            new[path] = max(stamp[0], 0)
    processes = _processes(len(new), sum(new.values()))
    sure_before = time.time_ns() - NANOSECONDS_UNTIL_SURE
    learned: dict[str, Any] = {}
    with (
        closing(read_facts_of_all([*new], processes)) as answers,
        tqdm(total=len(new), desc="decoding pictures", disable=None, delay=1) as bar,
    ):
        for path, facts in zip(new, answers, strict=True):
            bar.update()
            found[path] = facts
            if facts.fault is None and max(facts.mtime_ns, facts.ctime_ns) < sure_before:
                learned[keys[path]] = facts[:4]
            if len(learned) == KEPT_AT_ONCE:
                memory.put(learned)
                learned = {}
    memory.put(learned)
    return found


def _picture_key(path: str) -> str:
    name = hashlib.sha256(os.fsencode(path)).hexdigest()
    return f"picture {RULES} {PIL.__version__} {name}"


def _size_and_time(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return -1, -1, -1
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _processes(number: int, size: int) -> int:
    """For so many pictures of so many bytes; starting one costs as much as some hundred take."""
    if number <= FEW_PICTURES and size < BYTES_A_PROCESS:
        return 0
    worth = 1 + number // PICTURES_A_PROCESS + size // BYTES_A_PROCESS
    return min(worth, os.cpu_count() or 1)


def _fault_of_pictures(row: Row, pictures: dict[str, Facts]) -> str | None:
    for path in row.pictures:
        if pictures[path].fault is not None:
            return f"the image {shorten(path)} {pictures[path].fault}"
    return None


# Rows


def _check_rows(
    rows: list[Row], collator: ConversationCollator, memory: Memory
) -> list[Size | str]:
    """The size of each row, or why it cannot be rendered."""
    renderer = _digest_renderer(collator.processor)
    keys = [f"row {renderer} {_digest_messages([''] * len(row.pictures), row)}" for row in rows]
    known: dict[str, Size | str] = {
        key: Size(*size) for key, size in memory.get(dict.fromkeys(keys)).items()
    }
    new = {key: row for key, row in zip(keys, rows, strict=True) if key not in known}
    processes = min(len(new) // ROWS_A_PROCESS, os.cpu_count() or 1)
    sizes = measure_all([row.messages for row in new.values()], collator, processes)
    learned = {}
    with (
        closing(sizes),
        tqdm(total=len(new), desc="rendering rows", disable=None, delay=1) as bar,
    ):
        for key, size in zip(new, sizes, strict=True):
            bar.update()
            known[key] = size
            if isinstance(size, Size):
                learned[key] = size
    memory.put(learned)
    return [known[key] for key in keys]


def _digest_renderer(processor) -> str:
    """The same where a row has the same ids."""
    facts = [
        RULES,
        processor.chat_template,
        processor.num_image_tokens,
        processor.tokenizer.backend_tokenizer.to_str(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _fault_of_size(
    row: Row, size: Size | str, max_positions: int, pack_to: int | None
) -> str | None:
    if isinstance(size, str):
        return size
    if size.images != len(row.pictures):
        return (
            f"has {len(row.pictures)} pictures, and the model's chat template makes places for "
            f"{size.images}: use the template of this package's tokenizer"
        )
    if size.in_table > max_positions:
        return (
            f"takes {size.in_table:,} entries of the position table (a picture takes 3), which has "
            f"{max_positions:,} (seq_length): shorten the conversation"
        )
    if pack_to is not None and size.positions > pack_to:
        return (
            f"takes {size.positions:,} positions of a row, with all of its pictures, and a row has "
            f"{pack_to:,} (pack_to): make rows longer, or shorten the conversation"
        )
    if not size.learned:
        return "nothing of it would be learned: the chat template writes 0 words of the assistant"
    return None


def _sha256(path: str | Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
