"""Checks sets of conversations before anything is trained on them, and says what was found.

Every row is read, rendered and counted, every picture decoded to its end (:func:`check_sets`). The
rows go to a file, from which training processes read them, and what was found beside it
(:class:`checked_data.CheckedData`). What was good once is remembered (:mod:`check_cache`) and not
looked at again until it changes.

No more rows are held in memory than are worked on at once; of all, their sizes and digests are.
"""

import hashlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL
from tqdm import tqdm

from ..terminal_text import shorten
from .check_cache import Memory, default_path
from .checked_data import RULES, CheckedData, FileStamp, digest_file, stamp_of
from .collate import ConversationCollator, Size
from .decoding import Facts, read_facts_of_all
from .messages import pictures_of, replace_pictures
from .pictures import Picture
from .rendering import measure_all
from .rows import Fault, Row, as_source, cure_of, describe_faults, read_rows
from .source import Source
from .stored_rows import RowsWriter, StoredRows
from .temporary_folder import make_workplace

FEW_PICTURES = 64
PICTURES_A_PROCESS, BYTES_A_PROCESS = 1000, 32 * 2**20
# So much of the work is not lost if it is stopped.
KEPT_AT_ONCE = 1000
# Rendered in as many seconds as a process takes to start, which imports torch.
ROWS_A_PROCESS = 10_000
# Whose ids take a second. With one id for 100 blanks they would fit into 8,192 positions.
MOST_CHARACTERS = 2**20
# A file that changes twice within a tick of its file system's clock has one time for both.
NANOSECONDS_UNTIL_SURE = 2 * 10**9

Sources = Sequence[Source]
# Anew for each row would take longer than the row.
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass
class _Read:
    """Rows as they were read."""

    sources: Sources
    files: list[FileStamp]
    rows: StoredRows
    pictures: dict[str, None]
    """Their paths."""
    faults: list[list[Fault]] = field(default_factory=list)
    """Of each set."""
    dropped: set[int] = field(default_factory=set)
    """Rows that were read and cannot be used."""

    @property
    def skipped(self) -> int:
        return sum(map(len, self.faults))


def check_file(path: str | Path, *arguments: Any, **options: Any) -> CheckedData:
    """:func:`check_sets` for one set."""
    return check_sets([as_source(path)], *arguments, **options)


def check_sets(
    sources: Sources,
    processor,
    max_positions: int,
    *,
    evaluate: float | Sources | None = None,
    pack_to: int | None = None,
    on_bad: Literal["fail", "skip"] = "fail",
    memory: Path | None = None,
) -> CheckedData:
    """Read, render and count every row of some sets, and decode every picture once.

    Pictures and rows that are new, and more than a few, are decoded and rendered by processes of
    their own, at most one a core. Rows that are left out are printed, up to 20 of a set.

    Args:
        processor: A ``ChatGLMProcessor``.
        max_positions: Of the model's position table.
        evaluate: Sets to evaluate on; or a share of the rows, which is not trained on: those whose
            digests are the lowest, wherever they stand, so that equal rows are on one side.
        pack_to: Length of a packed row, which no conversation may exceed.
        on_bad: Raise for rows that cannot be used, or leave them out.
        memory: Where what was found is kept; default :func:`memory.default_path`.

    Raises:
        ValueError: a set cannot be read, or rows of it cannot be used: lists up to 20. Or no row is
            left for training or for evaluation.
    """
    workplace = make_workplace()
    folder = Path(workplace.name)
    share = evaluate if isinstance(evaluate, float) else None
    others = () if evaluate is None or isinstance(evaluate, float) else evaluate
    given = [_read(of, folder / f"read{n}.arrow") for n, of in enumerate([sources, others]) if of]
    _require_some_of_each(sources, given[0].rows)
    collator = ConversationCollator(processor)
    with closing(Memory(memory or default_path())) as remembered:
        facts = _check_pictures([path for read in given for path in read.pictures], remembered)
        sizes = [_check_rows(read.rows, collator, remembered) for read in given]
    for read, of_rows in zip(given, sizes, strict=True):
        _add_faults(read, of_rows, facts, max_positions, pack_to)
    _refuse_or_tell(given, on_bad)
    made = []
    for number, (read, of_rows) in enumerate(zip(given, sizes, strict=True)):
        sides: list[Callable[[bytes], bool]] = [lambda digest: True]
        if share is not None:
            sides = [lambda digest: not _is_held_out(digest, share)]
            sides += [lambda digest: _is_held_out(digest, share)]
        for side, takes in enumerate(sides):
            path = folder / f"kept{number}{side}.arrow"
            made.append(_keep(read, of_rows, facts, path, takes, pack_to))
        read.rows.path.unlink()
    checked, *rest = [replace(one, workplace=workplace) for one in made]
    _require_some_of_each(sources, checked.rows)
    if not rest:
        return checked
    asked = share if share is not None else [source.path for source in others]
    evaluated = replace(
        rest[0],
        sources=tuple(replace(source, weight=1.0) for source in rest[0].sources),
        skipped=0 if share is not None else rest[0].skipped,
    )
    _require_both(checked, evaluated, share)
    return replace(checked, eval=evaluated, asked=asked)


def require_pictures(
    path: str | Path | Source, memory: Path | None = None, to_learn: bool = True
) -> None:
    """Decode every picture of a file's rows, as :func:`check_file` does.

    Args:
        to_learn: As :func:`read_rows` takes it.

    Raises:
        ValueError: some cannot be learned from: lists up to 20 rows.
    """
    rows = [row for row in read_rows(path, to_learn=to_learn) if isinstance(row, Row)]
    shown = dict.fromkeys(picture for row in rows for picture in row.pictures)
    with closing(Memory(memory or default_path())) as remembered:
        pictures = _check_pictures(shown, remembered)
    found = [(row.line, _fault_of_pictures(row.pictures, pictures)) for row in rows]
    if faults := [Fault(line, fault) for line, fault in found if fault is not None]:
        text = describe_faults(path, faults, len(rows))
        raise ValueError(f"{text}\n{cure_of(text, '--image-folder')}")


def digest_row(messages: list[dict], pictures: dict[str, Facts]) -> bytes:
    """sha256 of a row's JSON, with the sha256 of each picture for its path.

    The keys of a message are sorted; those in tools are not, for the template writes them as they
    stand.
    """
    return _digest_messages(messages, lambda path: pictures[path].sha256)


def _digest_messages(messages: list[dict], name_of: Callable[[str], str]) -> bytes:
    if pictures_of(messages):
        messages = replace_pictures(messages, name_of)
    messages = [dict(sorted(message.items())) for message in messages]
    text = ENCODER.encode(messages)
    return hashlib.sha256(text.encode()).digest()


def _is_held_out(digest: bytes, share: float) -> bool:
    return int.from_bytes(digest[:8], "big") < share * 2**64


# Sets


def _read(sources: Sources, path: Path) -> _Read:
    """Read sets to a file; digests in it are of rows without their pictures."""
    writer = RowsWriter(path)
    files: list[FileStamp] = []
    pictures: dict[str, None] = {}
    faults: list[list[Fault]] = []
    for number, source in enumerate(sources):
        if os.path.isfile(source.path):
            found = stamp_of(source.path) or (-1, -1)
            files.append(FileStamp(source.path, *found, digest_file(source.path)))
        faults.append([])
        for row in tqdm(read_rows(source), desc="reading rows", disable=None, delay=5):
            if isinstance(row, Fault):
                faults[-1].append(row)
                continue
            text = ENCODER.encode(row.messages)
            if len(text) > MOST_CHARACTERS:
                told = f"has {len(text):,} characters; expected {MOST_CHARACTERS:,} at most"
                faults[-1].append(Fault(row.line, f"{told}: shorten the conversation"))
                continue
            pictures |= dict.fromkeys(row.pictures)
            writer.add(
                messages=text,
                source=number,
                line=row.line,
                digest=_digest_messages(row.messages, lambda path: ""),
            )
    return _Read(sources, files, writer.close(), pictures, faults)


def _require_some_of_each(sources: Sources, rows: StoredRows) -> None:
    """Raise ``ValueError`` if a set has rows and a weight so small that none of them comes."""
    counts = np.bincount(rows.column("source"), minlength=len(sources)).tolist()
    for source, count in zip(sources, counts, strict=True):
        if count and not round(source.weight * count):
            raise ValueError(
                f"{source.path}: weight {source.weight:g} of {count:,} rows is less than one row; "
                f"expected a weight of at least {math.ceil(1e4 / count) / 1e4:g}, or the set left "
                "out"
            )


def _add_faults(
    read: _Read,
    sizes: "_Sizes",
    facts: dict[str, Facts],
    max_positions: int,
    pack_to: int | None,
) -> None:
    """What is wrong with rows that were read."""
    for start, part in read.rows.parts():
        for at, (text, source, line) in enumerate(
            zip(part["messages"], part["source"], part["line"], strict=True)
        ):
            shown = pictures_of(json.loads(text)) if read.pictures else []
            fault = _fault_of_pictures(shown, facts)
            if fault is None:
                size = sizes.of(start + at)
                fault = _fault_of_size(len(shown), size, max_positions, pack_to)
            if fault is not None:
                read.faults[source].append(Fault(line, fault))
                read.dropped.add(start + at)
    for faults in read.faults:
        faults.sort()


def _refuse_or_tell(given: list[_Read], on_bad: Literal["fail", "skip"]) -> None:
    told = []
    for read in given:
        of_set = read.rows.column("source")
        good = np.delete(of_set, [*read.dropped])
        counts = np.bincount(good, minlength=len(read.sources)).tolist()
        for source, faults, count in zip(read.sources, read.faults, counts, strict=True):
            total = count + len(faults)
            if faults:
                told.append(describe_faults(source, faults, total))
    if not told:
        return
    text = "\n".join(told)
    if any(len(read.rows) == len(read.dropped) for read in given):
        raise ValueError(f"{text}\n{cure_of(text)}")
    if on_bad == "fail":
        raise ValueError(f"{text}\n{cure_of(text)}, or leave them out (data.on_bad: skip)")
    print(f"{text}\nthey are left out", flush=True)


def _keep(
    read: _Read,
    sizes: "_Sizes",
    facts: dict[str, Facts],
    path: Path,
    takes: Callable[[bytes], bool],
    pack_to: int | None,
) -> CheckedData:
    """Write the rows that can be used, and are on this side, with what was found of them."""
    writer = RowsWriter(path)
    shown: dict[str, None] = {}
    for start, part in read.rows.parts():
        columns = (part[name] for name in ("messages", "source", "line", "digest"))
        for row, (text, source, line, digest) in enumerate(zip(*columns, strict=True), start):
            if row in read.dropped:
                continue
            pictures = []
            if read.pictures:
                messages = json.loads(text)
                pictures = pictures_of(messages)
                digest = digest_row(messages, facts) if pictures else digest
            if takes(digest):
                shown |= dict.fromkeys(pictures)
                size = sizes.of(row)
                assert isinstance(size, Size)
                of_row = {"messages": text, "source": source, "line": line, "digest": digest}
                writer.add(**of_row, **size._asdict())
    return CheckedData(
        sources=tuple(read.sources),
        files=tuple(read.files),
        pack_to=pack_to,
        rows=writer.close(),
        pictures=tuple(Picture(path, *facts[path][:4]) for path in shown),
        skipped=read.skipped,
    )


def _require_both(checked: CheckedData, evaluated: CheckedData, share: float | None) -> None:
    rows, held_out = len(checked.rows), len(evaluated.rows)
    if share is None:
        there = {bytes(digest) for digest in checked.rows.column("digest")}
        same = sum(bytes(digest) in there for digest in evaluated.rows.column("digest"))
        if same:
            print(f"{same:,} of the {held_out:,} rows of data.eval are trained on, too", flush=True)
    elif not (rows and held_out):
        raise ValueError(
            f"data.eval is {share:g}, and of {rows + held_out:,} rows {held_out:,} are held out "
            f"and {rows:,} left to train on; expected at least 1 of each: give another share, or a "
            "file"
        )


# Pictures


def _check_pictures(paths: Iterable[str], memory: Memory) -> dict[str, Facts]:
    """What is found of each picture, by its path."""
    paths = dict.fromkeys(paths)
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


def _fault_of_pictures(shown: list[str], pictures: dict[str, Facts]) -> str | None:
    for path in shown:
        if pictures[path].fault is not None:
            return f"the image {shorten(path)} {pictures[path].fault}"
    return None


# Rows


class _Sizes:
    """Of rows by their numbers, or why they cannot be rendered."""

    def __init__(self, number: int):
        self.sizes = np.full((number, len(Size._fields)), -1, np.int32)
        self.faults: dict[int, str] = {}

    def set(self, row: int, size: Size | str) -> None:
        if isinstance(size, str):
            self.faults[row] = size
        else:
            self.sizes[row] = size

    def of(self, row: int) -> Size | str:
        if row in self.faults:
            return self.faults[row]
        return Size(*self.sizes[row].tolist())


def _check_rows(rows: StoredRows, collator: ConversationCollator, memory: Memory) -> _Sizes:
    """The size of each row, or why it cannot be rendered."""
    renderer = _digest_renderer(collator.processor)
    sizes = _Sizes(len(rows))
    new = 0
    for start, part in rows.parts():
        keys = [f"row {renderer} {digest.hex()}" for digest in part["digest"]]
        known = memory.get(dict.fromkeys(keys))
        for row, key in enumerate(keys, start):
            if key in known:
                sizes.set(row, Size(*known[key]))
        new += len({*keys} - known.keys())
    processes = min(new // ROWS_A_PROCESS, os.cpu_count() or 1)
    waiting: deque[tuple[str, list[int]]] = deque()
    measured = measure_all(_new_rows(rows, sizes, waiting), collator, processes)
    learned: dict[str, Any] = {}
    with (
        closing(measured),
        tqdm(total=new, desc="rendering rows", disable=None, delay=1) as bar,
    ):
        for size in measured:
            bar.update()
            digest, same = waiting.popleft()
            for row in same:
                sizes.set(row, size)
            if isinstance(size, Size):
                learned[f"row {renderer} {digest}"] = size
            if len(learned) == KEPT_AT_ONCE:
                memory.put(learned)
                learned = {}
    memory.put(learned)
    return sizes


def _new_rows(
    rows: StoredRows, sizes: _Sizes, waiting: deque[tuple[str, list[int]]]
) -> Iterator[list[dict]]:
    """Rows without a size, each once in a part; ``waiting`` gets their digests and numbers."""
    for start, part in rows.parts():
        same: dict[bytes, list[int]] = {}
        for at, digest in enumerate(part["digest"]):
            if sizes.sizes[start + at, 0] < 0:
                same.setdefault(digest, []).append(start + at)
        for digest, numbers in same.items():
            waiting.append((digest.hex(), numbers))
            yield json.loads(part["messages"][numbers[0] - start])


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
    pictures: int, size: Size | str, max_positions: int, pack_to: int | None
) -> str | None:
    if isinstance(size, str):
        return size
    if size.images != pictures:
        return (
            f"has {pictures} pictures, and the model's chat template makes places for "
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
