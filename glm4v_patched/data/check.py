"""Checks sets of conversations before anything is trained on them, and says what was found.

Every row is read, rendered and counted, every image decoded to its end (:func:`check_sources`). The
rows go to a file (:mod:`stored_rows`), from which training processes read them, and what was found
beside it (:class:`checked_data.CheckedData`). Images that were good once are remembered
(:mod:`check_cache`) and not decoded again until they change.

No more rows are held in memory than are worked on at once; of all, the paths of their images are.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import PIL
from tqdm import tqdm

from ..terminal_text import shorten
from .check_cache import Memory, default_path
from .checked_data import RULES, CheckedData, row_digests
from .collate import ConversationCollator, SampleSize
from .decoding import Facts, check_image_files
from .image_files import FileStamp, times_of
from .messages import images_of, replace_images
from .rows import CURE, RowProblem, ConversationRow, describe_problems, iter_rows
from .source import DataSource
from .stored_rows import ROWS_AT_ONCE, StoredRows, column, store_rows, values

# So much of the work is not lost if it is stopped.
KEPT_AT_ONCE = 1000
# Whose ids take a second. With one id for 100 blanks they would fit into 8,192 positions.
MOST_CHARACTERS = 2**20
# A file that changes twice within a tick of its file system's clock has one time for both.
NANOSECONDS_UNTIL_SURE = 2 * 10**9

Sources = Sequence[DataSource]
# Anew for each row would take longer than the row.
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class _Read(NamedTuple):
    """Rows as they were read, and which of them are good."""

    sources: Sources
    files: list[FileStamp]
    rows: StoredRows
    faults: list[list[RowProblem]]
    """Of each set."""
    good: list[int]


def check_sources(
    sources: Sources,
    processor,
    max_positions: int,
    *,
    evaluate: float | Sources | None = None,
    pack_to: int | None = None,
    on_bad: Literal["fail", "skip"] = "fail",
    memory: Path | None = None,
    first: int | None = None,
) -> CheckedData:
    """Read, render and count every row of some sets, and decode every image once.

    Rows that are left out are printed, up to 20 of a set.

    Args:
        processor: A ``ChatGLMProcessor``.
        max_positions: Of the model's position table.
        evaluate: Sets to evaluate on; or a share of the rows, which is not trained on: those whose
            digests are the lowest, wherever they stand, so that equal rows are on one side.
        pack_to: Length of a packed row, which no conversation may exceed.
        on_bad: Raise for rows that cannot be used, or leave them out.
        memory: Where what was found of images is kept; default :func:`check_cache.default_path`.
        first: Of each set to train on, only so many rows are looked at; all others are read as they
            are learned (:mod:`stream`).

    Raises:
        ValueError: a set cannot be read, or rows of it cannot be used: lists up to 20. Or no row is
            left for training or for evaluation.
    """
    share = evaluate if isinstance(evaluate, float) else None
    others = () if evaluate is None or isinstance(evaluate, float) else evaluate
    collator = ConversationCollator(processor)
    memory = memory or default_path()
    if first is not None:  # weights are of draws then, and each row is looked at once
        sources = [replace(source, weight=1.0) for source in sources]
    stored = [(sources, *_read(sources, collator, memory, first))]
    if others:
        stored.append((others, *_read(others, collator, memory)))
    _require_some_of_each(sources, stored[0][-1])  # before images are decoded
    shown = [path for *_, rows in stored for path in _images_of(rows)]
    facts = _check_images(shown, memory)
    given = [
        _Read(*of, *_find_faults(of[0], of[2], facts, max_positions, pack_to)) for of in stored
    ]
    _refuse_or_tell(given, on_bad)
    checked, *rest = [made for read in given for made in _keep(read, facts, pack_to, share)]
    _require_some_of_each(sources, checked.rows)
    if not rest:
        return checked
    evaluated = replace(
        rest[0], sources=tuple(replace(source, weight=1.0) for source in rest[0].sources)
    )
    _require_both(checked, evaluated, share)
    asked = [source.path for source in others] if share is None else share
    return replace(checked, eval=evaluated, asked=asked)


def require_images(path: str | Path | DataSource, memory: Path | None = None) -> None:
    """Decode every image of a file's rows, as :func:`check_sources` does, of rows to be answered.

    Raises:
        ValueError: some cannot be used: lists up to 20 rows.
    """
    rows = [row for row in iter_rows(path, for_training=False) if isinstance(row, ConversationRow)]
    images = _check_images([of for row in rows for of in row.images], memory or default_path())
    found = [(row.line, _fault_of_images(row.images, images)) for row in rows]
    if faults := [RowProblem(line, fault) for line, fault in found if fault is not None]:
        text = describe_problems(path, faults, len(rows))
        raise ValueError(f"{text}\n{CURE}")


# Sets


def _read(
    sources: Sources,
    collator: ConversationCollator,
    memory: Path | None,
    first: int | None = None,
) -> tuple[list[FileStamp], StoredRows]:
    """The files of sets, and their rows, read and measured; or the first ones."""
    streamed = first is not None
    files = [] if streamed else [FileStamp.of(path) for source in sources for path in source.files]
    rows = store_rows(_rows_of(sources, collator, first), memory and memory.parent)
    if changed := next((stamp for stamp in files if stamp.has_changed()), None):
        raise ValueError(f"{changed.path} has changed while it was read: start again")
    return files, rows


def _rows_of(
    sources: Sources, collator: ConversationCollator, first: int | None
) -> Iterator[list[dict[str, Any]]]:
    """The rows of sets as they are stored, some at a time."""
    for number, source in enumerate(sources):
        if first is not None:
            source = replace(source, max_samples=min(first, source.max_samples or first))
        read = iter(tqdm(iter_rows(source), desc="reading rows", disable=None, delay=5))
        while some := [*islice(read, ROWS_AT_ONCE)]:
            stored = [_as_stored(row, number) for row in some]
            good = [at for at, row in enumerate(stored) if row["fault"] is None]
            sizes = measure([some[at].messages for at in good], collator)  # type: ignore[union-attr]
            for at, size in zip(good, sizes, strict=True):
                stored[at] |= {"fault": size} if isinstance(size, str) else size._asdict()
            yield stored


def _as_stored(row: ConversationRow | RowProblem, source: int) -> dict[str, Any]:
    messages = [] if isinstance(row, RowProblem) else row.messages
    text = ENCODER.encode(messages)
    fault = row.text if isinstance(row, RowProblem) else fault_of_text(text)
    if fault is not None:  # Arrow takes no half of a surrogate pair
        text, fault = "", fault.encode("utf-8", "backslashreplace").decode()
    return {
        "messages": text,
        "images": images_of(messages),
        "source": source,
        "line": row.line,
        "digest": _digest_messages(messages),
        "fault": fault,
        **dict.fromkeys(SampleSize._fields, 0),
    }


def _digest_messages(messages: list[dict]) -> bytes:
    """sha256 of a row's JSON, without its images.

    The keys of a message are sorted; those in tools are not, for the template writes them as they
    stand.
    """
    if images_of(messages):
        messages = replace_images(messages, lambda path: "")
    messages = [dict(sorted(message.items())) for message in messages]
    return hashlib.sha256(ENCODER.encode(messages).encode()).digest()


def fault_of_text(text: str) -> str | None:
    """What is wrong with the length of a row, as JSON."""
    if len(text) <= MOST_CHARACTERS:
        return None
    told = f"has {len(text):,} characters; expected {MOST_CHARACTERS:,} at most"
    return f"{told}: shorten the conversation"


def measure(conversations: list[list[dict]], collator: ConversationCollator) -> list[SampleSize | str]:
    """The size of each conversation, or why it cannot be rendered."""
    if not conversations:
        return []
    try:
        return [*collator.measure(conversations)]
    except Exception as error:  # a template and its filters raise what they like
        if len(conversations) == 1:
            return [f"cannot be rendered by the model's chat template: {error}"]
        return [measure([conversation], collator)[0] for conversation in conversations]


def _images_of(rows: StoredRows) -> Iterator[str]:
    return (path for (images,) in values(rows, "images") for path in images)


def _counts(sources: Sources, rows: StoredRows) -> list[int]:
    """How many rows each set has."""
    return np.bincount(column(rows, "source"), minlength=len(sources)).tolist()


def _require_some_of_each(sources: Sources, rows: StoredRows) -> None:
    """Raise ``ValueError`` if a set has rows and a weight so small that none of them comes."""
    for source, count in zip(sources, _counts(sources, rows), strict=True):
        if count and not round(source.weight * count):
            raise ValueError(
                f"{source.path}: weight {source.weight:g} of {count:,} rows is less than one row; "
                f"expected a weight of at least {math.ceil(1e4 / count) / 1e4:g}, or the set left "
                "out"
            )


def _find_faults(
    sources: Sources,
    rows: StoredRows,
    facts: dict[str, Facts],
    max_positions: int,
    pack_to: int | None,
) -> tuple[list[list[RowProblem]], list[int]]:
    """What is wrong with rows of each set, and which rows are good."""
    faults: list[list[RowProblem]] = [[] for _ in sources]
    good = []
    found = values(rows, "source", "line", "fault", "images", *SampleSize._fields)
    for row, (source, line, fault, images, *size) in enumerate(found):
        fault = fault or _fault_of_images(images, facts)
        fault = fault or fault_of_size(len(images), SampleSize(*size), max_positions, pack_to)
        if fault is None:
            good.append(row)
        else:
            faults[source].append(RowProblem(line, fault))
    return faults, good


def _refuse_or_tell(given: list[_Read], on_bad: Literal["fail", "skip"]) -> None:
    told = [
        describe_problems(source, faults, count)
        for read in given
        for source, faults, count in zip(
            read.sources, read.faults, _counts(read.sources, read.rows), strict=True
        )
        if faults
    ]
    if not told:
        return
    text = "\n".join(told)
    if not all(read.good for read in given):
        raise ValueError(f"{text}\n{CURE}")
    if on_bad == "fail":
        raise ValueError(f"{text}\n{CURE}, or leave them out (data.on_bad: skip)")
    print(f"{text}\nthey are left out", flush=True)


def _keep(
    read: _Read, facts: dict[str, Facts], pack_to: int | None, share: float | None
) -> Iterator[CheckedData]:
    """The rows that can be used, with what was found of them: all; or those to train on, and the
    share that is held out."""
    rows = read.rows.select(read.good)
    held_out = np.zeros(len(rows), bool)
    if share is not None:
        held_out[:] = [_is_held_out(digest, share) for digest in row_digests(rows, facts)]
    skipped = sum(map(len, read.faults))
    for side in (False, True)[: 1 if share is None else 2]:
        mine = rows.select(np.flatnonzero(held_out == side))
        shown = dict.fromkeys(_images_of(mine))
        yield CheckedData(
            sources=tuple(read.sources),
            files=tuple(read.files),
            pack_to=pack_to,
            rows=mine,
            images=tuple(FileStamp(path, *facts[path][:4]) for path in shown),
            skipped=0 if side else skipped,
        )


def _is_held_out(digest: str, share: float) -> bool:
    return int(digest[:16], 16) < share * 2**64


def _require_both(checked: CheckedData, evaluated: CheckedData, share: float | None) -> None:
    rows, held_out = len(checked.rows), len(evaluated.rows)
    if share is None:
        there = {*checked.row_digests}
        same = sum(digest in there for digest in evaluated.row_digests)
        if same:
            print(f"{same:,} of the {held_out:,} rows of data.eval are trained on, too", flush=True)
    elif not (rows and held_out):
        raise ValueError(
            f"data.eval is {share:g}, and of {rows + held_out:,} rows {held_out:,} are held out "
            f"and {rows:,} left to train on; expected at least 1 of each: give another share, or a "
            "file"
        )


# Images


def _check_images(paths: Iterable[str], memory: Path | None) -> dict[str, Facts]:
    """What is found of each image, by its path."""
    keys = {path: _image_key(path) for path in paths}
    found: dict[str, Facts] = {}
    learned: dict[str, Any] = {}
    sure_before = time.time_ns() - NANOSECONDS_UNTIL_SURE
    with closing(Memory(memory)) as remembered:
        known = remembered.get([*keys.values()])
        for path, key in keys.items():
            times, (*before, sha256) = times_of(path), known.get(key, [""])
            if times == tuple(before):
                found[path] = Facts(*times, sha256, None)
        new = [path for path in keys if path not in found]
        answers = check_image_files(new)
        bar = tqdm(answers, "decoding images", len(new), disable=None, delay=1)
        # Said, for Python holds what a generator holds until nobody holds the generator.
        with closing(answers):
            for path, facts in zip(new, bar, strict=True):
                found[path] = facts
                if facts.fault is None and max(facts.mtime_ns, facts.ctime_ns) < sure_before:
                    learned[keys[path]] = facts[:4]
                if len(learned) == KEPT_AT_ONCE:
                    remembered.put(learned)
                    learned = {}
        remembered.put(learned)
    return found


def _image_key(path: str) -> str:
    name = hashlib.sha256(os.fsencode(path)).hexdigest()
    return f"image {RULES} {PIL.__version__} {name}"


def _fault_of_images(shown: list[str], images: dict[str, Facts]) -> str | None:
    return next((fault for path in shown if (fault := fault_of_image(path, images[path]))), None)


def fault_of_image(path: str, facts: Facts) -> str | None:
    return None if facts.fault is None else f"the image {shorten(path)} {facts.fault}"


def fault_of_size(
    num_images: int, size: SampleSize, max_positions: int, pack_to: int | None
) -> str | None:
    """What is wrong with what a conversation takes, with so many images."""
    if size.num_images != num_images:
        return (
            f"has {num_images} images, and the model's chat template makes places for "
            f"{size.num_images}: use the template of this package's tokenizer"
        )
    if size.in_table > max_positions:
        return (
            f"takes {size.in_table:,} entries of the position table (an image takes 3), which has "
            f"{max_positions:,} (seq_length): shorten the conversation"
        )
    if pack_to is not None and size.positions > pack_to:
        return (
            f"takes {size.positions:,} positions of a row, with all of its images, and a row has "
            f"{pack_to:,} (pack_to): make rows longer, or shorten the conversation"
        )
    if not size.learned:
        return "nothing of it would be learned: the chat template writes 0 words of the assistant"
    return None
