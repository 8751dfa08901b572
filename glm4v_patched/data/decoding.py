"""Decodes pictures to their end, as training will: what cannot be read is found before it.

Needs no torch. ``python -m glm4v_patched.data.decoding`` reads paths from its standard input, a
string of JSON a line, answers each with its :class:`Facts`, and ends with its input: however the
process that started it ends, it ends too.
"""

import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

# Modes of 8 bits a channel or fewer; what else there is, nobody could say what is white in.
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
READY = "ready"
PATHS_AT_ONCE = 4096


class Facts(NamedTuple):
    """A picture's file, and why it cannot be learned from, if so."""

    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str
    fault: str | None


def look_at(path: str) -> Facts:
    """Read a picture and decode all of it."""
    facts = Facts(-1, -1, -1, "", None)
    try:
        # Before it is opened: a pipe would be waited for.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return facts._replace(fault="is not a file")
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read()
    except FileNotFoundError:
        return facts._replace(fault="does not exist")
    except (OSError, ValueError, MemoryError) as error:
        return facts._replace(fault=f"cannot be read: {error}")
    digest = hashlib.sha256(content).hexdigest()
    return Facts(len(content), found.st_mtime_ns, found.st_ctime_ns, digest, find_fault(content))


def find_fault(content: bytes) -> str | None:
    """Why a picture of these bytes cannot be learned from; None if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content)) as image:
                if image.format == "EPS":
                    return "is PostScript (EPS), which a program would have to run: save it as PNG"
                if image.mode not in MODES:
                    return (
                        f"has the mode {image.mode}, in which it is not told what is black and "
                        "what is white; expected 8 bits a channel: convert it to RGB"
                    )
                # Checksums of parts, which loading does not look at. Leaves the image unusable.
                image.verify()
            with Image.open(io.BytesIO(content)) as image:
                image.load()
                ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        return "cannot be decoded: it is no picture of a kind that Pillow knows"
    except Exception as error:  # Pillow raises whatever a broken file makes its readers raise
        return f"cannot be decoded: {error or type(error).__name__}"
    return None


def look_at_all(paths: Iterable[str], processes: int) -> Iterator[Facts]:
    """:func:`look_at` for each path, in order.

    Args:
        processes: How many to start; with 0, this one decodes.
    """
    if not processes:
        yield from map(look_at, paths)
        return
    decoders = [_Decoder() for _ in range(processes)]
    free: SimpleQueue[_Decoder] = SimpleQueue()
    pool = ThreadPoolExecutor(processes)

    def ask(path: str) -> Facts:
        decoder = free.get()
        try:
            return decoder.look_at(path)
        finally:
            free.put(decoder)

    try:
        for decoder in decoders:
            decoder.start()
            free.put(decoder)
        paths = iter(paths)
        while some := list(islice(paths, PATHS_AT_ONCE)):
            yield from pool.map(ask, some)
    finally:
        for decoder in decoders:
            decoder.end()
        pool.shutdown(cancel_futures=True)


class _Decoder:
    """A process that decodes, and is replaced if a picture ends it.

    Not one of ``multiprocessing``: those import the caller's script again, and outlive a caller
    that is killed.
    """

    command = (sys.executable, "-m", __name__)

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.is_ready = False
        self.has_ended = False

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is ours to answer
        )
        self.is_ready = False

    def look_at(self, path: str) -> Facts:
        if not self.is_ready:
            self._wait_until_ready()
        answer = ""
        with suppress(OSError):  # it has ended
            print(json.dumps(path), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        if answer:
            return Facts(*json.loads(answer))
        status = self.process.wait()
        if not self.has_ended:
            self._close()
            self.start()
        fault = f"ended the process that decoded it, with exit status {status}"
        return Facts(-1, -1, -1, "", fault)

    def _wait_until_ready(self) -> None:
        # Else one that cannot even start would be blamed on pictures.
        if self.process.stdout.readline().strip() != READY:
            raise RuntimeError(
                f"a process that decodes pictures ended as it started, with exit status "
                f"{self.process.wait()}; the error above says why"
            )
        self.is_ready = True

    def end(self) -> None:
        self.has_ended = True
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._close()

    def _close(self) -> None:
        self.process.stdout.close()
        with suppress(OSError):  # what was not written yet has nobody to read it
            self.process.stdin.close()


def _answer_until_input_ends() -> None:
    print(READY, flush=True)
    for line in sys.stdin:
        print(json.dumps(look_at(json.loads(line))), flush=True)


if __name__ == "__main__":
    _answer_until_input_ends()
