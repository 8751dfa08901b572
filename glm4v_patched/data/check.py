"""Check data sources before training: read every row, apply the chat template, count the tokens,
and decode every image.

The check stores the rows in a file (:mod:`stored_rows`), and returns a description of them
(:class:`checked_data.CheckedData`). It caches which images were decoded without a problem
(:mod:`check_cache`). Such an image is decoded again only after its file has changed.

Memory contains only one batch of rows at a time, and the paths of all images.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import PIL

from ..terminal_text import shorten, show_progress
from .check_cache import ImageCheckCache, default_cache_path
from .checked_data import CHECK_VERSION, CheckedData, row_digests
from .collate import ConversationCollator, SampleSize
from .decoding import ImageCheck, check_image_files
from .forked import run_forked
from .image_files import FileStamp, file_times
from .messages import images_of, replace_images
from .rows import ROWS_CURE, ConversationRow, RowProblem, describe_problems, iter_rows
from .source import COMPRESSED_SUFFIXES, DataSource
from .stored_rows import (
    ROWS_PER_BATCH,
    StoredRows,
    column_values,
    interleave_rows,
    iter_values,
    store_rows,
    writable_folder,
    write_rows,
)
from .text_rows import LINE_KINDS, count_lines, file_kind
from .workers import count_cores

# The cache is written after this many images, so that a stopped check loses little work.
CACHE_WRITE_INTERVAL = 1000
# Limit of a row's JSON: to tokenize this many characters takes a second. The model's context length
# does not limit the characters of a row, because one token may stand for 100 blanks.
MAX_JSON_CHARACTERS = 2**20
# A file that changes twice within one tick of its file system's clock has the same time after both
# changes. Therefore no result is cached for a file that has changed within this time.
CLOCK_TICK_NS = 2 * 10**9

# Reading this many bytes takes a second, and starting a process only a tenth of a second.
BYTES_PER_PROCESS = 2**21
MAX_PROCESSES = 16  # more would not help, because each process reads every line

DataSources = Sequence[DataSource]
# Shared, because constructing an encoder takes longer than encoding a row.
ROW_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class _SourceRows(NamedTuple):
    """The rows of some sources, and which of them are usable.

    Attributes:
        files: Stamps of the sources that are files.
        rows: All rows, in the order of the sources.
        problems: The problems of each source's rows.
        usable: Indices of the usable rows.
    """

    sources: DataSources
    files: list[FileStamp]
    rows: StoredRows
    problems: list[list[RowProblem]]
    usable: list[int]


def check_sources(
    sources: DataSources,
    processor,
    max_positions: int,
    *,
    evaluate: float | DataSources | None = None,
    pack_to: int | None = None,
    on_bad: Literal["fail", "skip"] = "fail",
    image_cache: Path | None = None,
    num_precheck: int | None = None,
) -> CheckedData:
    """Check every row of some sources.

    Each row is read, and its tokens in the chat template are counted. Each image is decoded once.
    Rows that are skipped are printed, up to 20 per source.

    Args:
        processor: A ``ChatGLMProcessor``.
        max_positions: Number of position ids that the model supports.
        evaluate: Sources to evaluate on, or the share of rows to hold out. Rows are held out by
            their digests. So the order of rows does not matter, and of equal rows, either all or
            none are held out.
        pack_to: Length of a packed sequence, which no conversation may exceed.
        on_bad: What to do about rows that cannot be used: raise ("fail") or skip them ("skip").
        image_cache: File that caches the results of image checks; by default
            :func:`check_cache.default_cache_path`.
        num_precheck: Check only this many rows of each training source. The others are checked
            while training (:mod:`stream`).

    Raises:
        ValueError: A source cannot be read, or has rows that cannot be used (the message lists up
            to 20); or no row remains for training or for evaluation.
    """
    eval_share = evaluate if isinstance(evaluate, float) else None
    eval_sources = () if evaluate is None or isinstance(evaluate, float) else evaluate
    collator = ConversationCollator(processor)
    image_cache = image_cache or default_cache_path()
    if num_precheck is not None:  # weights of a stream are probabilities, and repeat no row
        sources = [replace(source, weight=1.0) for source in sources]
    rows_folder = image_cache and image_cache.parent
    splits = [_read_sources(sources, collator, rows_folder, num_precheck)]
    if eval_sources:
        splits.append(_read_sources(eval_sources, collator, rows_folder))
    _require_sufficient_weights(sources, splits[0].rows)  # before images are decoded
    paths = [path for split in splits for path in _image_paths(split.rows)]
    checks = _check_images(paths, image_cache)
    splits = [_find_problems(split, checks, max_positions, pack_to) for split in splits]
    _report_problems(splits, on_bad)
    # The second item, if any, is for evaluation: the rows held out, or those of eval_sources.
    checked, *evaluation = [
        data for split in splits for data in _separate_held_out(split, checks, pack_to, eval_share)
    ]
    _require_sufficient_weights(sources, checked.rows)
    if not evaluation:
        return checked
    unweighted = tuple(replace(source, weight=1.0) for source in evaluation[0].sources)
    evaluated = replace(evaluation[0], sources=unweighted)
    _require_train_and_eval(checked, evaluated, eval_share)
    # The value of data.eval. Resuming is an error if it has changed.
    eval_option = [source.path for source in eval_sources] if eval_share is None else eval_share
    return replace(checked, eval=evaluated, eval_option=eval_option)


def require_images(path: str | Path | DataSource, image_cache: Path | None = None) -> None:
    """Decode every image of a file whose rows are questions to answer.

    Raises:
        ValueError: Some images cannot be used; the message lists up to 20 rows.
    """
    rows = [row for row in iter_rows(path, for_training=False) if isinstance(row, ConversationRow)]
    paths = [path for row in rows for path in row.images]
    checks = _check_images(paths, image_cache or default_cache_path())
    texts = [(row.line, _find_images_problem(row.images, checks)) for row in rows]
    if problems := [RowProblem(line, text) for line, text in texts if text is not None]:
        text = describe_problems(path, problems, len(rows))
        raise ValueError(f"{text}\n{ROWS_CURE}")


def _read_sources(
    sources: DataSources,
    collator: ConversationCollator,
    folder: Path | None,
    num_precheck: int | None = None,
) -> _SourceRows:
    """Read and measure the rows of sources, at most ``num_precheck`` of each, and store them in
    ``folder``. :func:`_find_problems` finds their problems later."""
    is_streamed = num_precheck is not None
    paths = [] if is_streamed else [path for source in sources for path in source.files]
    files = [*map(FileStamp.of, paths)]
    processes = 1 if is_streamed else num_reading_processes(sources)
    if processes == 1:
        rows = store_rows(_all_measured_batches(sources, collator, num_precheck), folder)
    else:
        rows = _store_in_processes(sources, collator, processes, folder)
    if changed := next((stamp for stamp in files if stamp.has_changed()), None):
        raise ValueError(f"{changed.path} changed while it was read: start again")
    return _SourceRows(sources, files, rows, problems=[], usable=[])


def _all_measured_batches(
    sources: DataSources, collator: ConversationCollator, num_precheck: int | None
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of all sources in batches, in the form in which they are stored."""
    for source_index, source in enumerate(sources):
        if num_precheck is not None:
            limit = min(num_precheck, source.max_samples or num_precheck)
            source = replace(source, max_samples=limit)
        batches = _measured_batches(iter_rows(source), source_index, collator)
        with show_progress("reading rows", total=_max_rows(source)) as progress:
            yield from _report_progress(batches, progress.update)


def _measured_batches(
    rows: Iterator[ConversationRow | RowProblem], source_index: int, collator: ConversationCollator
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a source in batches, in the form in which they are stored."""
    while batch := [*islice(rows, ROWS_PER_BATCH)]:
        stored = [_stored_row(row, source_index) for row in batch]
        usable = [index for index, row in enumerate(stored) if row["problem"] is None]
        conversations = [batch[index].messages for index in usable]  # type: ignore[union-attr]
        sizes = measure_conversations(conversations, collator)
        for index, size in zip(usable, sizes, strict=True):
            stored[index] |= size._asdict() if isinstance(size, SampleSize) else {"problem": size}
        yield stored


def num_reading_processes(sources: DataSources) -> int:
    """Return how many processes read the sources: up to one per core, or one if not all sources are
    local files with a row per line.

    A file that is one JSON document would be in the memory of each process. An image with a URL
    might be downloaded by each process.
    """
    if any(source.allow_urls or not _has_lines(source) for source in sources):
        return 1
    useful_processes = sum(os.path.getsize(source.path) // BYTES_PER_PROCESS for source in sources)
    return max(1, min(count_cores(), MAX_PROCESSES, useful_processes))


def _has_lines(source: DataSource) -> bool:
    """Return whether a source is a file with a row per line."""
    return bool(source.is_local and source.files) and file_kind(Path(source.path)) in LINE_KINDS


def _max_rows(source: DataSource) -> int | None:
    """Return an upper bound of the number of rows of a source; None if no bound is known.

    A bound is known if the source has ``max_samples``, or is an uncompressed file with a row per
    line.
    """
    if not _has_lines(source) or source.path.lower().endswith(COMPRESSED_SUFFIXES):
        return source.max_samples
    num_lines = count_lines(Path(source.path))
    return min(num_lines, source.max_samples or num_lines)


def _store_in_processes(
    sources: DataSources, collator: ConversationCollator, processes: int, folder: Path | None
) -> StoredRows:
    """Store the rows of sources. Each of n processes reads and measures every n-th row."""
    limits = [*map(_max_rows, sources)]
    total = None if None in limits else sum(filter(None, limits))
    with TemporaryDirectory(dir=writable_folder(folder), prefix=".rows.") as shard_folder:

        def shard_path(source_index: int, process: int) -> Path:
            return Path(shard_folder, f"{source_index}.{process}")

        def store_shard(process: int, report: Callable[[int], None]) -> None:
            for source_index, source in enumerate(sources):
                rows = iter_rows(source, shard=(process, processes))
                with shard_path(source_index, process).open("wb") as file:
                    batches = _measured_batches(rows, source_index, collator)
                    write_rows(_report_progress(batches, report), file)

        with show_progress("reading rows", total=total) as progress:
            run_forked(store_shard, processes, progress.update)
        shards = (
            [shard_path(source_index, process) for process in range(processes)]
            for source_index in range(len(sources))
        )
        return interleave_rows(shards, folder)


def _report_progress(
    batches: Iterator[list[dict[str, Any]]], report: Callable[[int], None]
) -> Iterator[list[dict[str, Any]]]:
    for batch in batches:
        yield batch
        report(len(batch))


def _stored_row(row: ConversationRow | RowProblem, source_index: int) -> dict[str, Any]:
    """Return a row in the form in which it is stored, with a :class:`SampleSize` of zeros."""
    messages = [] if isinstance(row, RowProblem) else row.messages
    # The digest must not depend on the order of a message's keys. The keys in "tools" keep their
    # order, because the template writes them in this order.
    messages = [dict(sorted(message.items())) for message in messages]
    text = text_without_images = ROW_ENCODER.encode(messages)
    if images := images_of(messages):
        text_without_images = ROW_ENCODER.encode(replace_images(messages, lambda path: ""))
    problem = row.text if isinstance(row, RowProblem) else find_length_problem(text)
    if problem is not None:  # it may quote half of a surrogate pair, which Arrow refuses
        text, problem = "", problem.encode("utf-8", "backslashreplace").decode()
    return {
        "messages": text,
        "images": images,
        "source": source_index,
        "line": row.line,
        "text_digest": hashlib.sha256(text_without_images.encode()).digest(),
        "problem": problem,
        **dict.fromkeys(SampleSize._fields, 0),
    }


def find_length_problem(text: str) -> str | None:
    """Return what is wrong with the length of a row's JSON, or None."""
    if len(text) <= MAX_JSON_CHARACTERS:
        return None
    size = f"{len(text):,} characters; expected at most {MAX_JSON_CHARACTERS:,}"
    return f"has {size}: shorten the conversation"


def measure_conversations(
    conversations: list[list[dict]], collator: ConversationCollator
) -> list[SampleSize | str]:
    """Return the size of each conversation, or why the chat template cannot render it."""
    if not conversations:
        return []
    try:
        return [*collator.measure(conversations)]
    except Exception as error:  # chat templates may raise any kind
        if len(conversations) == 1:
            return [f"cannot be rendered by the model's chat template: {error}"]
        return [
            measure_conversations([conversation], collator)[0] for conversation in conversations
        ]


def _image_paths(rows: StoredRows) -> Iterator[str]:
    return (path for (images,) in iter_values(rows, "images") for path in images)


def _rows_per_source(sources: DataSources, rows: StoredRows) -> list[int]:
    """Return how many rows each source has."""
    return np.bincount(column_values(rows, "source"), minlength=len(sources)).tolist()


def _require_sufficient_weights(sources: DataSources, rows: StoredRows) -> None:
    """Raise ``ValueError`` if a source has rows but a weight so small that none would be used."""
    for source, count in zip(sources, _rows_per_source(sources, rows), strict=True):
        if count and not round(source.weight * count):
            raise ValueError(
                f"{source.path}: weight {source.weight:g} of {count:,} rows is less than one row; "
                f"expected a weight of at least {math.ceil(1e4 / count) / 1e4:g}, or remove the "
                "data set"
            )


def _find_problems(
    split: _SourceRows, checks: dict[str, ImageCheck], max_positions: int, pack_to: int | None
) -> _SourceRows:
    """Return the rows with their problems, and with the indices of the usable rows."""
    problems: list[list[RowProblem]] = [[] for _ in split.sources]
    usable = []
    columns = ("source", "line", "problem", "images", *SampleSize._fields)
    values = iter_values(split.rows, *columns)
    for index, (source, line, problem, paths, *size) in enumerate(values):
        problem = problem or _find_images_problem(paths, checks)
        problem = problem or find_size_problem(
            len(paths), SampleSize(*size), max_positions, pack_to
        )
        if problem is None:
            usable.append(index)
        else:
            problems[source].append(RowProblem(line, problem))
    return split._replace(problems=problems, usable=usable)


def _report_problems(splits: list[_SourceRows], on_bad: Literal["fail", "skip"]) -> None:
    """Print problems of rows if these rows are skipped, else raise them as ``ValueError``."""
    reports = []
    for split in splits:
        num_rows = _rows_per_source(split.sources, split.rows)
        for source, problems, count in zip(split.sources, split.problems, num_rows, strict=True):
            if problems:
                reports.append(describe_problems(source, problems, count))
    if not reports:
        return
    text = "\n".join(reports)
    if not all(split.usable for split in splits):
        raise ValueError(f"{text}\n{ROWS_CURE}")
    if on_bad == "fail":
        raise ValueError(f"{text}\n{ROWS_CURE}. To skip these rows, set data.on_bad: skip")
    print(f"{text}\nthese rows are skipped", flush=True)


def _separate_held_out(
    split: _SourceRows,
    checks: dict[str, ImageCheck],
    pack_to: int | None,
    eval_share: float | None,
) -> Iterator[CheckedData]:
    """Yield the usable rows. With ``eval_share``, yield first the rows to train on, and then those
    that are held out."""
    rows = split.rows.select(split.usable)
    held_out = np.zeros(len(rows), bool)
    if eval_share is not None:
        held_out[:] = [_is_held_out(digest, eval_share) for digest in row_digests(rows, checks)]
    skipped = sum(map(len, split.problems))
    for is_eval in (False,) if eval_share is None else (False, True):
        selected = rows.select(np.flatnonzero(held_out == is_eval))
        paths = dict.fromkeys(_image_paths(selected))
        yield CheckedData(
            sources=tuple(split.sources),
            files=tuple(split.files),
            pack_to=pack_to,
            rows=selected,
            images=tuple(FileStamp(path, *checks[path][:-1]) for path in paths),  # without problem
            skipped=0 if is_eval else skipped,
        )


def _is_held_out(digest: str, share: float) -> bool:
    return int(digest[:16], 16) < share * 2**64


def _require_train_and_eval(
    checked: CheckedData, evaluated: CheckedData, eval_share: float | None
) -> None:
    """Raise ``ValueError`` if ``eval_share`` leaves no row for training or none for evaluation. If
    there are sources to evaluate on, print how many of their rows are also trained on."""
    num_train, num_eval = len(checked.rows), len(evaluated.rows)
    if eval_share is None:
        trained_on = {*checked.sample_digests}
        num_shared = sum(digest in trained_on for digest in evaluated.sample_digests)
        if num_shared:
            print(
                f"{num_shared:,} of the {num_eval:,} rows of data.eval are also in data.train",
                flush=True,
            )
    elif not (num_train and num_eval):
        raise ValueError(
            f"data.eval is {eval_share:g}: of {num_train + num_eval:,} rows, {num_eval:,} are held "
            f"out for evaluation and {num_train:,} remain for training; expected at least 1 of "
            "each: set another share, or a file"
        )


def _check_images(paths: Iterable[str], image_cache: Path | None) -> dict[str, ImageCheck]:
    """Return the check of each image by its path, from the cache where possible."""
    keys = {path: _image_key(path) for path in dict.fromkeys(paths)}
    checks: dict[str, ImageCheck] = {}
    unsaved: dict[str, Any] = {}
    cacheable_before = time.time_ns() - CLOCK_TICK_NS
    with closing(ImageCheckCache(image_cache)) as cache:
        cached = cache.get([*keys.values()])
        for path, key in keys.items():
            times = file_times(path)
            if times is not None and key in cached:
                *cached_times, sha256 = cached[key]
                if times == tuple(cached_times):
                    checks[path] = ImageCheck(*times, sha256, None)
        uncached = [path for path in keys if path not in checks]
        new_checks = check_image_files(uncached)
        progress_bar = show_progress("decoding images", total=len(uncached), unit="image")
        # The generator is closed explicitly, because its threads live as long as it does.
        with closing(new_checks), progress_bar as progress:
            for path, check in zip(uncached, new_checks, strict=True):
                progress.update()
                checks[path] = check
                if check.problem is None and max(check.mtime_ns, check.ctime_ns) < cacheable_before:
                    unsaved[keys[path]] = check[:-1]  # without problem
                if len(unsaved) == CACHE_WRITE_INTERVAL:
                    cache.put(unsaved)
                    unsaved = {}
        cache.put(unsaved)
    return checks


def _image_key(path: str) -> str:
    """Return the cache key of an image's check, with the versions of the check and of Pillow."""
    path_digest = hashlib.sha256(os.fsencode(path)).hexdigest()
    return f"image {CHECK_VERSION} {PIL.__version__} {path_digest}"


def _find_images_problem(paths: list[str], checks: dict[str, ImageCheck]) -> str | None:
    problems = (describe_image_problem(path, checks[path]) for path in paths)
    return next(filter(None, problems), None)


def describe_image_problem(path: str, check: ImageCheck) -> str | None:
    return None if check.problem is None else f"the image {shorten(path)} {check.problem}"


def find_size_problem(
    num_images: int, size: SampleSize, max_positions: int, pack_to: int | None
) -> str | None:
    """Return why a conversation of this size, with ``num_images`` images, is refused, or None."""
    if size.num_images != num_images:
        return (
            f"has {num_images} images, but the model's chat template writes {size.num_images} "
            "image placeholders: use the template of this package's tokenizer"
        )
    if size.position_ids > max_positions:
        return (
            f"takes {size.position_ids:,} position ids (an image takes 3), but the model has "
            f"{max_positions:,} (seq_length): shorten the conversation"
        )
    if pack_to is not None and size.tokens > pack_to:
        return (
            f"takes {size.tokens:,} tokens with its images expanded, but a packed sequence has "
            f"{pack_to:,} (pack_to): raise pack_to, or shorten the conversation"
        )
    if not size.supervised:
        return (
            "has 0 supervised tokens: the chat template writes no text of the assistant; use the "
            "template of this package's tokenizer"
        )
    return None
