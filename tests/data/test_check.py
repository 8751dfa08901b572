"""The check before training: what it counts, what it refuses, what it remembers."""

import base64
import io
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path

import psutil
import pytest
from PIL import Image

from glm4v_patched.data import check, decoding
from glm4v_patched.data.check import check_file
from glm4v_patched.data.check_cache import Memory, default_path
from glm4v_patched.data.checked_data import CheckedData, Counts
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.decoding import find_fault, read_facts, read_facts_of_all
from glm4v_patched.data.source import Source
from glm4v_patched.demo.tiny_model import build_processor, tiny_config
from glm4v_patched.finetune import launch as launching
from glm4v_patched.finetune.plan import CHECKED_DATA, Plan, check_data
from glm4v_patched.finetune.worker import train
from glm4v_patched.models.placement import Placement
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.recipes import drawn_recipe, planned

HOUR = 3600


@pytest.fixture(scope="module")
def processor():
    return build_processor(["Which colour is it?", "a red circle", "a green square", "red"])


def turns(picture: str | None = None, answer: str = "red", rounds: int = 1) -> list[dict]:
    asked = {"role": "user", "content": "Which colour is it?"}
    first = asked | {"image": picture} if picture else asked
    answered = {"role": "assistant", "content": answer}
    return [first, answered, *[asked, answered] * (rounds - 1)]


def write(folder: Path, *conversations: list[dict]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in conversations))
    return path


def draw(path: Path, colour="red", **options) -> Path:
    Image.new("RGB", (40, 30), colour).save(path, **options)
    return path


def make_old(*paths: Path) -> None:
    """Changed long ago, as far as a file says; when its entry changed cannot be set."""
    for path in paths:
        os.utime(path, (time.time() - HOUR,) * 2)


@pytest.fixture
def run(tmp_path, processor):
    """The check, with a memory of this test alone."""

    def check_it(path: Path, max_positions: int = 1024, **options) -> CheckedData:
        return check_file(
            path, processor, max_positions, memory=tmp_path / "memory" / "m.sqlite", **options
        )

    return check_it


# What is counted


def test_sizes_are_those_of_the_batches(tmp_path, processor, run):
    draw(tmp_path / "a.png")
    conversations = [turns("a.png"), turns(), turns("a.png", "a red circle", rounds=3)]
    checked = run(write(tmp_path, *conversations))
    read = checked.conversations()
    for conversation, size in zip(read, checked.row_sizes, strict=True):
        batch = ConversationCollator(processor)([conversation])
        assert size.positions == batch["input_ids"].shape[1]
        assert size.learned == (batch["labels"] != -100).sum()
        assert size.images == len(batch.get("pixel_values", ()))
    assert checked.counts == Counts(
        rows=3,
        pictures=2,
        positions=sum(size.positions for size in checked.row_sizes),
        learned=sum(size.learned for size in checked.row_sizes),
    )
    assert checked.row_lines == (1, 2, 3) and checked.skipped == 0
    assert [picture.path for picture in checked.pictures] == [str(tmp_path / "a.png")]


@pytest.mark.parametrize("picture", [None, "a.png"])
def test_a_row_may_be_as_long_as_the_position_table_and_no_longer(
    tmp_path, processor, run, picture
):
    draw(tmp_path / "a.png")
    path = write(tmp_path, turns(), turns(picture, rounds=4))
    checked = run(path)
    needed = checked.row_sizes[1].in_table
    assert run(path, max_positions=needed) == checked
    message = rf"data\.jsonl:2: takes {needed} entries .*which has {needed - 1} \(seq_length\)"
    with pytest.raises(ValueError, match=message):
        run(path, max_positions=needed - 1)
    # The model itself says the same.
    config = tiny_config(processor.tokenizer)
    batch = ConversationCollator(processor)([checked.conversations()[1]])
    for entries in (needed, needed - 1):
        config.seq_length = entries
        model = GLM4VForCausalLM(config).eval()
        if entries == needed:
            model(**batch)
        else:
            with pytest.raises(ValueError, match="the position table ends"):
                model(**batch)


def test_a_row_may_fill_a_packed_row_and_no_more(tmp_path, run):
    draw(tmp_path / "a.png")
    path = write(tmp_path, turns(), turns("a.png"))
    needed = run(path).row_sizes[1].positions
    assert run(path, pack_to=needed).pack_to == needed
    message = rf":2: takes {needed} positions .* a row has {needed - 1} \(pack_to\)"
    with pytest.raises(ValueError, match=message):
        run(path, pack_to=needed - 1)


def test_a_template_that_drops_pictures_or_words_is_noticed(tmp_path, processor, run):
    path = write(tmp_path, turns(str(draw(tmp_path / "a.png"))))
    template = processor.chat_template
    try:
        processor.chat_template = template.replace("* images", "* 0")
        with pytest.raises(ValueError, match=":1: has 1 pictures, and .* makes places for 0"):
            run(path)
        processor.chat_template = (
            "{{ '<|user|>' }}{% for m in messages %}{{ m.content }}{% endfor %}"
        )
        with pytest.raises(ValueError, match=":1: .*makes places for 0"):
            run(path)
        with pytest.raises(ValueError, match=":1: nothing of it would be learned"):
            run(write(tmp_path, turns()))
        processor.chat_template = "{% for m in messages %}{{ m.content + 1 }}{% endfor %}"
        with pytest.raises(ValueError, match=":1: cannot be rendered by the model's chat template"):
            run(path)
    finally:
        processor.chat_template = template


# Pictures


def cut(content: bytes) -> bytes:
    return content[: len(content) * 3 // 4]


def encoded(kind: str, mode: str = "RGB", **options) -> bytes:
    image = Image.effect_noise((64, 48), 80).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def flipped(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 255]) + content[half + 1 :]


def of_16_bits(kind: str) -> bytes:
    """A picture of 2 x 2 pixels, whose numbers are 256, in three channels; Pillow writes none."""
    numbers = (256).to_bytes(2, "big") * 12
    if kind == "TIFF":
        entries = [(256, 3, 1, 2), (257, 3, 1, 2), (258, 3, 3, 122), (259, 3, 1, 1), (262, 3, 1, 2),
                   (273, 4, 1, 128), (277, 3, 1, 3), (278, 3, 1, 2), (279, 4, 1, 24)]  # fmt: skip
        content = struct.pack("<2sHIH", b"II", 42, 8, len(entries))
        content += b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
        content += struct.pack("<3H", 16, 16, 16).rjust(128 - len(content), b"\0")
        return content + numbers
    if kind == "SGI":
        return struct.pack(">HBBHHHH", 474, 0, 2, 3, 2, 2, 3).ljust(512, b"\0") + numbers
    color = {"PNG RGB": 2, "PNG LA": 4, "PNG RGBA": 6}[kind]
    width = 2 * {2: 3, 4: 2, 6: 4}[color]
    lines = (b"\0" + (256).to_bytes(2, "big") * width) * 2
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, color, 0, 0, 0)),
              (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


BAD_PICTURES = {
    **{f"16 bits, {kind}": (of_16_bits(kind), "has the mode .*;16[BL], .*expected 8 bits a channel")
       for kind in ("PNG RGB", "PNG LA", "PNG RGBA", "TIFF", "SGI")},
    **{f"{kind} cut": (cut(encoded(kind)), "cannot be decoded") for kind in
       ("JPEG", "BMP", "GIF", "PNG", "TIFF", "WEBP", "PPM")},
    "PNG with a flipped byte": (flipped(encoded("PNG")), "cannot be decoded"),
    "empty": (b"", "is empty: it has 0 bytes"),
    "words": (b"hello", "cannot be decoded: it is no picture of a kind"),
    "EPS": (encoded("EPS"), "is PostScript"),
    "16 bits": (encoded("PNG", "I;16"), "has the mode I;16, .*expected 8 bits a channel"),
    "float": (encoded("TIFF", "F"), "has the mode F, .*expected 8 bits a channel"),
    "int32": (encoded("TIFF", "I"), "has the mode I, .*expected 8 bits a channel"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_a_picture_that_cannot_be_used_is_refused_with_file_and_line(tmp_path, run, name):
    content, message = BAD_PICTURES[name]
    draw(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(content)
    path = write(tmp_path, turns("a.png"), turns("b.png"))
    with pytest.raises(
        ValueError, match=rf"1 of 2 .*\n.*data\.jsonl:2: the image .*b\.png {message}"
    ):
        run(path)


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_the_image_processor_refuses_what_the_check_refuses(tmp_path, processor, name):
    content = BAD_PICTURES[name][0]
    (tmp_path / "b.png").write_bytes(content)
    for picture in (str(tmp_path / "b.png"), content, base64.b64encode(content).decode()):
        with pytest.raises(ValueError):
            processor.image_processor(picture)
    if name.startswith("16 bits,"):
        for file in (tmp_path / "b.png", io.BytesIO(content)):
            image = Image.open(file)
            for _ in range(2):
                with pytest.raises(ValueError, match=";16[BL]', of more than 8 bits.*scale it"):
                    processor.image_processor(image)


def test_16_bits_a_pixel_are_taken(tmp_path, processor):
    header = struct.pack("<2sIHHI", b"BM", 70, 0, 0, 54)
    header += struct.pack("<IiiHHIIiiII", 40, 2, 2, 1, 16, 0, 8, 0, 0, 0, 0)
    content = header + bytes(16)
    assert find_fault(content) is None
    processor.image_processor(content)


def test_pictures_of_every_kind_are_taken(tmp_path, processor, run):
    kinds = ["JPEG", "BMP", "GIF", "PNG", "TIFF", "WEBP", "PPM"]
    modes = {"PNG": ["1", "L", "LA", "P", "RGB", "RGBA"], "JPEG": ["L", "RGB", "CMYK"]}
    names = []
    for kind in kinds:
        for mode in modes.get(kind, ["RGB"]):
            names.append(f"{kind}-{mode}")
            (tmp_path / names[-1]).write_bytes(encoded(kind, mode))
    assert run(write(tmp_path, *map(turns, names))).counts.pictures == len(names)
    processor.image_processor([str(tmp_path / name) for name in names])


def test_a_picture_too_large_to_decode_is_refused(tmp_path, run, monkeypatch):
    path = write(tmp_path, turns(str(draw(tmp_path / "a.png"))))
    limit = r"expected 120,000,000 pixels at most: make it smaller \(the model sees 1120 x 1120"
    with monkeypatch.context() as patched:
        patched.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 // 2 - 1)
        with pytest.raises(ValueError, match=rf":1: .*a\.png is too large \(.*1200.*\); {limit}"):
            run(path)
    monkeypatch.setattr(decoding, "MOST_BYTES", 10)
    with pytest.raises(
        ValueError, match=r":1: .*a\.png has \d+ bytes; expected 10 at most: make it"
    ):
        run(path)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "TIFF", "WEBP", "JPEG", "ICO"])
def test_a_picture_of_169_megapixels_is_told_by_its_header(tmp_path, kind):
    """It took 2 GB of memory, and 10 seconds."""
    (tmp_path / "a").write_bytes(with_sides_of_13_000(kind))
    fault, megabytes = looked_at(tmp_path / "a")
    assert fault.startswith("is too large (13,000 x 13,000 pixels); expected 120,000,000 pixels")
    assert megabytes < 300


def looked_at(path: Path) -> tuple[str, float]:
    """What a process finds of a picture, and what it takes in memory."""
    script = "import re, sys; from glm4v_patched.data.decoding import read_facts; "
    script += (
        "most = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]); "
    )
    script += (
        "before = most(); print(read_facts(sys.argv[1]).fault, (most() - before) / 1024, sep='\\n')"
    )
    command = [sys.executable, "-c", script, str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fault, megabytes = told.splitlines()
    return fault, float(megabytes)


def with_sides_of_13_000(kind: str) -> bytes:
    side = 13_000
    if kind in ("PNG", "ICO"):
        chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))]
        chunks += [(b"IDAT", zlib.compress(bytes(side * (side // 8 + 1)))), (b"IEND", b"")]
        content = b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in chunks
        )
        directory = struct.pack("<HHHBBBBHHII", 0, 1, 1, 64, 64, 0, 0, 1, 32, len(content), 22)
        return directory + content if kind == "ICO" else content
    options = {"compression": "group4"} if kind == "TIFF" else {}
    buffer = io.BytesIO()
    if kind == "WEBP":  # its header alone: to write one takes a minute
        Image.new("RGB", (64, 48)).save(buffer, kind, lossless=True)
        content = bytearray(buffer.getvalue())
        content[21:25] = struct.pack("<I", (side - 1) | (side - 1) << 14)
        return bytes(content)
    Image.new("1" if kind == "TIFF" else "L", (side, side)).save(buffer, kind, **options)
    return buffer.getvalue()


def test_a_picture_of_108_megapixels_is_taken_and_is_in_memory_once(tmp_path):
    Image.new("L", (12_000, 9_000)).convert("RGB").save(tmp_path / "a.jpg")
    fault, megabytes = looked_at(tmp_path / "a.jpg")
    assert fault == "None" and megabytes < 700


def test_a_name_as_long_as_a_file_is_told_in_short(tmp_path, run):
    with pytest.raises(ValueError, match="cannot be read: File name too long") as refused:
        run(write(tmp_path, turns("x" * 10**6)))
    assert len(str(refused.value)) < 1000


def test_a_row_with_words_for_a_minute_of_rendering_is_not_rendered(tmp_path, run):
    path = write(tmp_path, turns(answer="red " * 2**22), turns())
    with pytest.raises(
        ValueError, match=r"1 of 2 .*\n.*:1: has 16,777,\d+ characters; expected 1,04"
    ):
        run(path)
    assert run(path, on_bad="skip").row_lines == (2,)


def test_a_picture_that_is_not_there_is_refused(tmp_path, run):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    path = write(tmp_path, turns("no.png"), turns("pipe.png"), turns("folder.png"), turns())
    with pytest.raises(ValueError) as refused:
        run(path)
    assert [line.split(".png ")[1] for line in str(refused.value).splitlines()[1:4]] == [
        "does not exist",
        "is not a file",
        "is not a file",
    ]


def test_processes_find_what_one_finds_in_the_same_order(tmp_path):
    contents = [content for content, _ in BAD_PICTURES.values()] + [encoded("PNG")] * 3
    paths = [str(tmp_path / f"{n}.png") for n in range(len(contents))] + ["no.png", "a\nb.png"]
    for path, content in zip(paths, contents, strict=False):
        Path(path).write_bytes(content)
    alone = list(read_facts_of_all(paths, 0))
    assert list(read_facts_of_all(paths, 2)) == alone == [read_facts(path) for path in paths]
    assert alone[-3].fault is None and alone[-2].fault == "does not exist"


def test_few_pictures_start_no_process_and_many_at_most_one_a_core():
    assert check._processes(64, 2**20) == 0
    assert check._processes(65, 2**20) == 1
    assert check._processes(10**6, 10**12) == os.cpu_count()


def test_a_picture_that_ends_its_process_is_named_and_the_others_are_decoded(tmp_path, monkeypatch):
    script = "import os; from glm4v_patched.data import decoding as d; look = d.read_facts; "
    script += "d.read_facts = lambda path: os._exit(7) if 'fatal' in path else look(path); "
    script += "d.answer_until_input_ends(d.read_facts)"
    monkeypatch.setattr(decoding, "python_module", lambda _: [sys.executable, "-c", script])
    good = str(draw(tmp_path / "a.png"))
    facts = list(read_facts_of_all([good, "fatal", good, "fatal", good], 2))
    assert [fact.fault is None for fact in facts] == [True, False, True, False, True]
    assert facts[1].fault == "ended the process that decoded it, with exit status 7"


def test_processes_that_cannot_start_are_not_blamed_on_pictures(monkeypatch):
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(decoding, "python_module", lambda _: command)
    with pytest.raises(RuntimeError, match="ended as it started, with exit status 3"):
        list(read_facts_of_all(["a.png"], 1))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_the_one_that_started_them(tmp_path, number):
    script = """
import itertools, signal, sys
from glm4v_patched.data.decoding import read_facts_of_all
signal.signal(signal.SIGINT, signal.default_int_handler)
for count, _ in enumerate(read_facts_of_all(itertools.repeat(sys.argv[1]), 2)):
    if not count:
        print("decoding", flush=True)
"""
    picture = str(draw(tmp_path / "a.png"))
    command = [sys.executable, "-c", script, picture]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        parent.stdout.readline()
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 2
        parent.send_signal(number)
        parent.wait(20)
    assert psutil.wait_procs(children, timeout=20)[1] == []


@pytest.mark.parametrize("asked", [1, 50])
def test_processes_end_with_their_questions_or_when_no_more_answers_are_wanted(tmp_path, asked):
    before = psutil.Process().children()
    answers = read_facts_of_all([str(draw(tmp_path / "a.png"))] * 50, 2)
    for _ in range(asked):
        next(answers)
    children = [child for child in psutil.Process().children() if child not in before]
    assert len(children) == 2
    if asked == 50:
        assert next(answers, None) is None
    else:
        answers.close()
    assert not any(child.is_running() for child in children)


def test_reading_rows_and_decoding_pictures_needs_no_torch():
    script = "import sys; from glm4v_patched.data import decoding, formats, check_cache, rows; "
    script += "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_pillows_warnings_are_not_shown_and_all_others_still_are(monkeypatch):
    """Also while threads look at pictures, where ``catch_warnings`` puts back another's filters."""
    content = encoded("PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 48 - 1)  # then Pillow warns
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with monkeypatch.context() as none:
            none.setattr(warnings, "catch_warnings", None)
            assert find_fault(content) is None
        assert shown == []
        warnings.warn("of others", stacklevel=1)
    assert [str(each.message) for each in shown] == ["of others"]


# Faults


def test_rows_are_skipped_if_asked_for_and_counted(tmp_path, run, capsys):
    (tmp_path / "bad.png").write_bytes(b"")
    draw(tmp_path / "a.png")
    long = turns(rounds=30)
    path = write(tmp_path, turns(answer=""), turns("a.png"), turns("bad.png"), long, turns())
    options = {"max_positions": 200}
    with pytest.raises(ValueError, match=r"(?s)3 of 5 rows.*:1:.*:3:.*:4:.*\ncorrect .*skip\)$"):
        run(path, **options)
    checked = run(path, on_bad="skip", **options)
    assert checked.row_lines == (2, 5) and checked.skipped == 3
    assert checked.counts.rows == len(checked.row_digests) == len(checked.row_sizes) == 2
    assert checked.conversations()[1] == turns()
    printed = capsys.readouterr().out
    assert "3 of 5 rows cannot be used" in printed and "they are left out" in printed
    # The picture of a row that is left out may change.
    (tmp_path / "bad.png").unlink()
    checked.conversations()


def test_rows_of_which_none_can_be_used_are_not_skipped(tmp_path, run):
    path = write(tmp_path, turns(answer=""))
    with pytest.raises(ValueError, match="1 of 1 rows cannot be used(.|\n)*correct them$"):
        run(path, on_bad="skip")


# What is remembered


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Paths of the pictures that are decoded."""
    paths = []
    look = decoding.read_facts_of_all

    def noted(new, processes):
        paths.extend(new)
        return look(new, processes)

    monkeypatch.setattr(check, "read_facts_of_all", noted)
    return paths


@pytest.fixture
def any_age(monkeypatch):
    """Pictures of this test are young, and remembered even so."""
    monkeypatch.setattr(check, "NANOSECONDS_UNTIL_SURE", -HOUR * 10**9)


def test_a_second_check_decodes_only_new_pictures_and_reads_no_rows_that_it_knows(
    tmp_path, run, decoded, any_age, monkeypatch
):
    measured = []
    measure = ConversationCollator.measure

    def noted(collator, rows):
        measured.extend(rows)
        return measure(collator, rows)

    monkeypatch.setattr(ConversationCollator, "measure", noted)
    a, b = draw(tmp_path / "a.png"), draw(tmp_path / "b.png")
    first = run(write(tmp_path, turns("a.png"), turns("b.png"), turns("a.png", "a red circle")))
    assert decoded == [str(a), str(b)] and len(measured) == 3
    assert run(Path(first.path)) == first
    assert len(decoded) == 2 and len(measured) == 3

    mended = run(write(tmp_path, turns("a.png"), turns("b.png", "green"), turns("a.png", "red")))
    assert len(decoded) == 2 and len(measured) == 6
    assert [old == new for old, new in zip(first.row_digests, mended.row_digests, strict=True)] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("change", ["template", "field of the set", "rows cut", "row not usable"])
def test_rows_are_read_again_where_something_changed_on_which_they_depend(
    tmp_path, processor, run, monkeypatch, change
):
    path = write(tmp_path, turns(), turns(rounds=2))
    first = run(path)
    stored = Path(first.rows.cache_files[0]["filename"])
    if change == "rows cut":
        stored.write_bytes(stored.read_bytes()[:-8])
        assert run(path) == first
    elif change == "template":
        template = processor.chat_template + "{{ 'x' }}"
        monkeypatch.setattr(processor, "chat_template", template)
        assert [size.positions for size in run(path).row_sizes] == [
            size.positions + 1 for size in first.row_sizes
        ]
    elif change == "field of the set":
        with pytest.raises(ValueError, match="2 of 2 rows cannot be used"):
            run(Source(str(path), format="alpaca"))
    else:
        picture = tmp_path / "later.png"
        path = write(tmp_path, turns("later.png"))
        for _ in range(2):
            with pytest.raises(ValueError, match="does not exist"):
                run(path)
        draw(picture)
        assert run(path).counts.pictures == 1


@pytest.mark.parametrize("change", ["bytes", "time", "renamed"])
def test_a_picture_that_changed_is_decoded_again(tmp_path, run, decoded, any_age, change):
    picture = draw(tmp_path / "a.bmp")
    path = write(tmp_path, turns("a.bmp"))
    first = run(path)
    assert len(decoded) == 1
    before = picture.stat()
    time.sleep(0.02)  # a tick of the file system's clock
    if change == "bytes":
        draw(picture, "blue")
    elif change == "renamed":  # with size and time of the one before
        draw(tmp_path / "b.bmp", "blue")
        os.utime(tmp_path / "b.bmp", ns=(before.st_atime_ns, before.st_mtime_ns))
        (tmp_path / "b.bmp").rename(picture)
        assert picture.stat().st_mtime_ns == before.st_mtime_ns
    else:
        picture.touch()
    assert picture.stat().st_size == before.st_size
    assert (run(path).row_digests == first.row_digests) == (change == "time")
    assert len(decoded) == 2


def test_a_picture_that_may_change_within_a_tick_is_not_remembered(tmp_path, run, decoded):
    draw(tmp_path / "a.png")
    path = write(tmp_path, turns("a.png"))
    for _ in range(2):
        run(path)
    assert len(decoded) == 2


def test_the_age_of_a_picture_is_that_before_it_is_read(tmp_path, run, decoded, monkeypatch):
    monkeypatch.setattr(check, "NANOSECONDS_UNTIL_SURE", 0)
    look = check.read_facts_of_all
    picture = draw(tmp_path / "a.png")

    def changed_at_last(*of):
        if not decoded:
            draw(picture)
        yield from look(*of)
        time.sleep(0.3)

    monkeypatch.setattr(check, "read_facts_of_all", changed_at_last)
    path = write(tmp_path, turns("a.png"))
    for _ in range(3):
        run(path)
    assert len(decoded) == 2


def test_what_was_decoded_before_a_check_was_stopped_is_remembered(
    tmp_path, run, decoded, any_age, monkeypatch
):
    monkeypatch.setattr(check, "KEPT_AT_ONCE", 2)
    look = check.read_facts_of_all

    def stopped(paths, processes):
        for number, facts in enumerate(look(paths, processes)):
            if number == 3:
                raise KeyboardInterrupt
            yield facts

    names = [draw(tmp_path / f"{n}.png").name for n in range(5)]
    path = write(tmp_path, *map(turns, names))
    monkeypatch.setattr(check, "read_facts_of_all", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(path)
    monkeypatch.setattr(check, "read_facts_of_all", look)
    decoded.clear()
    assert run(path).counts.pictures == 5
    assert [Path(name).name for name in decoded] == names[2:]


def test_a_bad_picture_is_not_remembered_as_good(tmp_path, run, any_age):
    (tmp_path / "a.png").write_bytes(b"hello")
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be decoded"):
            run(write(tmp_path, turns("a.png")))


@pytest.mark.parametrize("damage", ["words", "half", "middle", "empty", "value"])
def test_a_damaged_memory_is_begun_anew(tmp_path, run, decoded, any_age, damage, caplog):
    draw(tmp_path / "a.png")
    path = write(tmp_path, turns("a.png"))
    first = run(path)
    memory = tmp_path / "memory" / "m.sqlite"
    content = memory.read_bytes()
    if damage == "value":
        # The letters of a picture's digest: its size and times still fit.
        with sqlite3.connect(memory) as connection:
            connection.execute(
                "UPDATE entries SET value = replace(replace(value, 'a', 'b'), 'c', 'd')"
            )
        connection.close()
    else:
        half = len(content) // 2
        memory.write_bytes(
            {
                "words": b"hello" * 100,
                "half": content[:half],
                "middle": content[:4096] + b"x" * (len(content) - 4096),
                "empty": b"",
            }[damage]
        )
    assert run(path) == first
    assert len(decoded) == 2
    assert ("is damaged and begun anew" in caplog.text) == (damage in ("words", "half", "middle"))
    assert run(path) == first
    assert len(decoded) == 2


def test_where_no_memory_can_be_kept_all_is_checked(tmp_path, processor, caplog):
    path = write(tmp_path, turns())
    for memory in (tmp_path, path / "below.sqlite"):
        assert check_file(path, processor, 1024, memory=memory).counts.rows == 1
        assert f"{memory} is not used" in caplog.text


def test_several_may_remember_at_once(tmp_path):
    def remember(number: int) -> None:
        memory = Memory(tmp_path / "m.sqlite")
        for at in range(20):
            memory.put({f"{number} {at}": [number, at], "shared": number})
        memory.close()

    threads = [threading.Thread(target=remember, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = Memory(tmp_path / "m.sqlite").get([f"{n} {at}" for n in range(4) for at in range(20)])
    assert len(found) == 80 and found["3 7"] == [3, 7]


def test_the_memory_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path().parent == tmp_path / "glm4v-patched"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for other in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert default_path().parent == tmp_path / "home" / ".cache" / "glm4v-patched"

    def nobody(*of):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert default_path() is None
    memory = Memory(None)
    memory.put({"a": 1})
    assert memory.get(["a"]) == {}


# What training processes read


def test_what_was_checked_is_read_back(tmp_path, run):
    draw(tmp_path / "a.png")
    checked = run(write(tmp_path, turns("a.png"), turns()))
    checked.write(tmp_path / "data.json")
    read = CheckedData.read(tmp_path / "data.json")
    assert read == checked and read.counts == checked.counts
    assert read.conversations() == [turns(str(tmp_path / "a.png")), turns()]


def test_rows_and_pictures_that_changed_since_the_check_are_refused(tmp_path, run):
    picture = draw(tmp_path / "a.png")
    path = write(tmp_path, turns("a.png"))
    checked = run(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"red", b"led"))
    with pytest.raises(ValueError, match=r"data\.jsonl has changed since it was checked: start"):
        checked.conversations()
    path.write_bytes(content)  # another time and the same rows
    assert checked.conversations()
    make_old(picture)  # touched, and the same
    assert checked.conversations()
    times = picture.stat().st_atime_ns, picture.stat().st_mtime_ns
    picture.write_bytes(picture.read_bytes()[::-1])
    os.utime(picture, ns=times)  # as large and as old as before
    with pytest.raises(ValueError, match=r"a\.png has changed since it was checked"):
        checked.conversations()
    picture.unlink()
    with pytest.raises(ValueError, match=r"a\.png has changed since it was checked"):
        checked.conversations()
    path.unlink()
    with pytest.raises(ValueError, match=r"data\.jsonl cannot be read: No such file"):
        checked.conversations()


@pytest.mark.parametrize(
    "content", [None, "", "5", "{}", '{"rules": 0}', '{"rules": 1, "path": "x"}', "\ud800"]
)
def test_a_record_of_the_check_that_is_none_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "data.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=r"data\.json does not say which rows were checked"):
        CheckedData.read(tmp_path / "data.json")


def test_digests_are_of_words_and_pixels_and_not_of_places(tmp_path, run):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    draw(tmp_path / "one" / "a.png")
    draw(tmp_path / "two" / "b.png")
    one = run(write(tmp_path / "one", turns("a.png"), turns()))
    two = run(write(tmp_path / "two", turns("b.png"), turns()))
    assert one.row_digests == two.row_digests and len(set(one.row_digests)) == 2
    draw(tmp_path / "two" / "b.png", "blue")
    changed = run(Path(two.path))
    assert changed.row_digests[0] != one.row_digests[0]
    assert changed.row_digests[1] == one.row_digests[1]


def test_rows_whose_tools_differ_in_the_order_of_keys_are_two(tmp_path, processor, run):
    """The template writes tools as they stand."""
    tool = {"name": "look", "description": "x" * 9, "parameters": {"type": "object", "a": 1}}
    other = dict(reversed(tool.items()))

    def row(tool: dict) -> list[dict]:
        system = {
            "role": "system",
            "content": "",
            "tools": [{"type": "function", "function": tool}],
        }
        return [system, *turns()]

    rendered = [processor.apply_chat_template(row(t), tokenize=False) for t in (tool, other)]
    assert rendered[0] != rendered[1]
    checked = run(write(tmp_path, row(tool), row(other)))
    assert len({*checked.row_digests}) == 2
    # The order of a message's own keys is nobody's matter.
    turned = [dict(reversed(message.items())) for message in row(tool)]
    assert run(write(tmp_path, turned)).row_digests == checked.row_digests[:1]


# The recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return drawn_recipe(tmp_path_factory.mktemp("recipe"), {"engine.zero_stage": 0})


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Launch a recipe whose processes do nothing; their commands."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    commands = []
    monkeypatch.setattr(launching, "_run", lambda command, _: commands.append(command) or "")
    return commands


def test_the_launcher_checks_the_data_before_any_process_starts(recipe, tmp_path, launched, capsys):
    lines = Path(recipe.data.train).read_text().splitlines()
    broken = Path(recipe.data.train).with_name("broken.jsonl")
    broken.write_text("\n".join([*lines[:3], '{"messages": []}', *lines[3:]]))
    mine = recipe.override({"data.train": str(broken), "out": str(tmp_path / "out")})
    place = Placement(processes=1, on_cpu=True)
    with pytest.raises(
        ValueError, match=r"1 of 21 rows .*\n.*broken\.jsonl:4: messages is an empt"
    ):
        launching.launch(mine, place)
    assert not launched and not (tmp_path / "out" / CHECKED_DATA).exists()

    skipping = mine.override({"data.on_bad": "skip"})
    launching.launch(skipping, place)
    assert len(launched) == 1
    assert capsys.readouterr().out.endswith("1 of 21 rows were left out\n")
    assert CheckedData.read(tmp_path / "out" / CHECKED_DATA) == check_data(skipping)


def test_training_takes_only_rows_that_were_checked_for_it(recipe, tmp_path, launched):
    mine = recipe.override({"out": str(tmp_path / "out")})
    plan = Plan.read(planned(mine))
    checked = tmp_path / "out" / CHECKED_DATA
    check_data(mine.override({"data.pack_to": 99})).write(checked)
    with pytest.raises(ValueError, match=r"data\.json has rows with digest .* planned with"):
        train(plan)
    checked.unlink()
    with pytest.raises(ValueError, match=r"data\.json does not say which rows .*No such file"):
        train(plan)
