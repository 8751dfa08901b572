"""Decodes pictures completely, as training will, to find those that cannot be read before it.

Needs no torch. ``python -m glm4v_patched.data.decoding`` reads paths, a line of JSON each, and
writes what it found. ``multiprocessing`` is not used: its processes import the caller's script
again, and outlive a caller that is killed.
"""

import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Generator, Sequence
from tempfile import TemporaryFile
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from ..engine.environment import python_module

MOST_PIXELS = 120 * 10**6
"""More than the 108 megapixels of a telephone; half a gigabyte where it is decoded."""
MOST_BYTES = 2**29
SMALLER = "make it smaller (the model sees 1120 x 1120 pixels)"
NAME = "glm4v_patched.data.decoding"
STARTED = "started\n"


class Facts(NamedTuple):
    """A picture's file, and why it cannot be learned from, if so."""

    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str
    fault: str | None


NOT_READ = Facts(-1, -1, -1, "", None)


def read_facts(path: str) -> Facts:
    """Read a picture and decode all of it."""
    try:
        # Before it is opened: a pipe would be waited for.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return NOT_READ._replace(fault="is not a file")
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size > MOST_BYTES:
                told = f"has {found.st_size:,} bytes; expected {MOST_BYTES:,} at most"
                return NOT_READ._replace(fault=f"{told}: {SMALLER}")
            content = file.read()
    except FileNotFoundError:
        return NOT_READ._replace(fault="does not exist")
    except (OSError, ValueError, MemoryError) as error:
        # Without the name, which may be as long as the row.
        reason = getattr(error, "strerror", None) or error
        return NOT_READ._replace(fault=f"cannot be read: {reason}")
    digest = hashlib.sha256(content).hexdigest()
    return Facts(len(content), found.st_mtime_ns, found.st_ctime_ns, digest, find_fault(content))


def may_be_decoded(path: str) -> bool:
    """Whether a picture's header, which is all that is read, says that it is one, and not larger
    than :func:`read_facts` takes."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > MOST_BYTES:
            return False
        with warnings.catch_warnings(action="ignore"), Image.open(path) as image:
            return image.width * image.height <= MOST_PIXELS
    except Exception:  # Pillow raises whatever its readers raise
        return False


def find_fault(content: bytes) -> str | None:
    """Why a picture of these bytes cannot be learned from; None if it can.

    What is found here is what the image processor, which needs torch, would refuse later.
    """
    if not content:
        return "is empty: it has 0 bytes; copy it again"
    # For ever: threads must not change filters for a while.
    warnings.filterwarnings("ignore", module=r"PIL\b")
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.format == "EPS":
                return "is PostScript (EPS), which a program would have to run: save it as PNG"
            if image.width * image.height > MOST_PIXELS:
                raise Image.DecompressionBombError(f"{image.width:,} x {image.height:,} pixels")
            deep = _file_of_16_bits(image)
            image.load()
            if deep or image.mode.startswith("I") or image.mode == "F":
                return (
                    f"has the mode {deep or image.mode}, which does not say what number is "
                    "white; expected 8 bits a channel: scale it to them"
                )
            # Where nothing changes they would copy it: a large one is as many gigabytes.
            ImageOps.exif_transpose(image, in_place=True)
            if image.mode != "RGB":
                image.convert("RGB")
    except Image.DecompressionBombError as error:  # Pillow raises it for still larger ones
        told = str(error).partition(" exceeds")[0]
        return f"is too large ({told}); expected {MOST_PIXELS:,} pixels at most: {SMALLER}"
    except UnidentifiedImageError:
        return "cannot be decoded: it is no picture of a kind that Pillow knows"
    except Exception as error:  # Pillow raises whatever a broken file makes its readers raise
        return f"cannot be decoded: {error or type(error).__name__}"
    return None


def _file_of_16_bits(image: Image.Image) -> str | None:
    # Of 16 bits in each of several channels Pillow keeps the upper 8, and does not say so later.
    if image.mode.startswith("I"):
        return None
    for codec, _, _, arguments in getattr(image, "tile", ()):
        mode = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
        if codec == "SGI16":
            return f"{mode};16B"
        # In "BGR;16" 16 bits are a pixel's.
        if isinstance(mode, str) and mode.endswith((";16B", ";16L", ";16N")):
            return mode
    return None


def read_facts_of_all(paths: Sequence[str], processes: int) -> Generator[Facts, None, None]:
    """:func:`read_facts` for each path, in order.

    Args:
        processes: How many to start, which take turns; with 0, this one decodes.

    Raises:
        RuntimeError: a process ends as it starts. If it ends later, its picture is at fault.
    """
    if not processes:
        yield from map(read_facts, paths)
        return
    running = [_start(paths[turn::processes]) for turn in range(min(processes, len(paths)))]
    try:
        for process in running:
            _require_started(process)
        for number in range(len(paths)):
            turn = number % processes
            assert (answers := running[turn].stdout) is not None  # a pipe
            if answer := answers.readline():
                yield Facts(*json.loads(answer))
                continue
            with running[turn] as ended:
                status = ended.wait()
            yield NOT_READ._replace(fault=f"ended the process that decoded it, {_how(status)}")
            running[turn] = _start(paths[number + processes :: processes])
            _require_started(running[turn])
    finally:
        for process in running:
            with process:
                process.kill()


def _start(paths: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process that decodes these. It ends when nobody reads its answers."""
    with TemporaryFile("w+", encoding="utf-8") as questions:
        questions.writelines(f"{json.dumps(path)}\n" for path in paths)
        questions.seek(0)
        return subprocess.Popen(
            python_module(NAME),
            stdin=questions,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # as many processes as cores
            start_new_session=True,  # Ctrl-C is ours to answer
        )


def _require_started(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None  # a pipe
    if process.stdout.readline() != STARTED:
        raise RuntimeError(
            f"a process that decodes pictures ended as it started, {_how(process.wait())}; an "
            "error above says why, or nothing if the system killed it, as for want of memory"
        )


def _how(status: int) -> str:
    return f"by signal {-status}" if status < 0 else f"with exit status {status}"


def main() -> None:
    print(STARTED, end="", flush=True)
    for line in sys.stdin:
        print(json.dumps(read_facts(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
