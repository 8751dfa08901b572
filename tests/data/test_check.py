"""The check before training: what it counts, what it refuses, what it remembers."""

import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from PIL import Image

from glm4v_patched.data import check_cache, decoding
from glm4v_patched.data.check import check_sources
from glm4v_patched.data.check_cache import ImageCheckCache, default_cache_path
from glm4v_patched.data.checked_data import CHECK_VERSION, CheckedData, EpochCounts
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.source import DataSource
from glm4v_patched.finetune import launch as launching
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.plan import CHECKED_DATA, Plan, check_data
from glm4v_patched.finetune.worker import train
from glm4v_patched.models.placement import Placement
from tests.data.samples import contents_of, png, said, turns, write_rows
from tests.helpers.recipes import drawn_recipe

HOUR = 3600


def colors(image: str | None = None, answer: str = "red", rounds: int = 1) -> list[dict]:
    user, assistant = said("user", "Which color is it?"), said("assistant", answer)
    first = user | {"image": image} if image else user
    return [first, assistant, *[user, assistant] * (rounds - 1)]


@pytest.fixture
def write(tmp_path):
    return lambda *rows: write_rows(tmp_path / "data.jsonl", *rows)


@pytest.fixture
def draw(tmp_path):
    def draw_it(name: str, color="red") -> Path:
        Image.new("RGB", (8, 8), color).save(tmp_path / name)
        return tmp_path / name

    draw_it("a.png")
    return draw_it


def test_sizes_are_those_of_the_batches(tmp_path, processor, check, write, draw):
    checked = check(write(colors("a.png"), colors(), colors("a.png", "a red circle", rounds=3)))
    batches = [ConversationCollator(processor)([row]) for row in checked.conversations()]
    tokens = [batch["input_ids"].shape[1] for batch in batches]
    supervised = [int((batch["labels"] != -100).sum()) for batch in batches]
    columns = {
        name: checked.column(name).tolist() for name in ("tokens", "supervised", "num_images")
    }
    assert columns == {"tokens": tokens, "supervised": supervised, "num_images": [1, 0, 1]}
    assert checked.counts == EpochCounts(3, 2, sum(tokens), sum(supervised))
    assert checked.sample_labels == (1, 2, 3) and checked.skipped == 0
    assert [image.path for image in checked.images] == [str(tmp_path / "a.png")]


def test_a_row_may_be_as_long_as_the_position_table_or_a_packed_row_and_no_longer(
    check, write, draw
):
    path = write(colors(), colors("a.png", rounds=4))
    checked = check(path)
    needed = checked.column("position_ids")[1]
    assert contents_of(check(path, max_positions=needed)) == contents_of(checked)
    with pytest.raises(ValueError, match=rf"data\.jsonl:2: takes {needed} .* has {needed - 1} "):
        check(path, max_positions=needed - 1)
    packed = checked.column("tokens")[1]
    assert check(path, pack_to=packed).pack_to == packed
    with pytest.raises(ValueError, match=rf":2: takes {packed} .* has {packed - 1} \(pack_to\)"):
        check(path, pack_to=packed - 1)


def test_a_template_that_drops_images_or_words_is_noticed(
    processor, check, write, draw, monkeypatch, words
):
    for template in (
        processor.chat_template.replace("* images", "* 0"),
        "{{ '<|user|>' }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content + 1 }}{% endfor %}",
    ):
        monkeypatch.setattr(processor, "chat_template", template)
        with words.refused(ValueError, "data.jsonl:1: "):
            check(write(colors("a.png" if "* 0" in template else None)))


def test_a_row_with_words_for_a_minute_of_rendering_is_not_rendered(check, write, words):
    with words.refused(ValueError, "1 of 2", ":1: ", "1,048,576"):
        check(write(colors(answer="red " * 2**22), colors()))


def test_rows_are_skipped_if_asked_for_and_counted_and_not_kept(
    tmp_path, check, write, draw, words, capsys
):
    (tmp_path / "bad.png").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.png")
    images = ("bad.png", "pipe.png", "none.png", "x" * 300)
    long = colors(rounds=30)
    path = write(colors(answer=""), colors("a.png"), *map(colors, images), long, colors())
    options = {"max_positions": 200}
    with words.refused(ValueError, "6 of 8 rows", "data.jsonl:7: takes"):
        check(path, **options)
    checked = check(path, on_bad="skip", **options)
    assert checked.sample_labels == (2, 8) and checked.skipped == 6
    assert checked.counts.samples == len(checked.sample_digests) == 2
    assert checked.conversations()[1] == colors()
    words(capsys.readouterr().out)
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["m.sqlite"]
    (tmp_path / "bad.png").unlink()  # the image of a row that is left out may change
    checked.conversations()
    with words.refused(ValueError, "1 of 1 rows"):
        check(write(colors(answer="")), on_bad="skip")


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Names of the images that are decoded."""
    names, look = [], decoding.check_image_files

    def noted(new):
        names.extend(Path(path).name for path in new)
        return look(new)

    monkeypatch.setattr("glm4v_patched.data.check.check_image_files", noted)
    return names


@pytest.fixture
def any_age(monkeypatch):
    """Images of this test are young, and remembered even so."""
    monkeypatch.setattr("glm4v_patched.data.check.CLOCK_TICK_NS", -HOUR * 10**9)


def test_a_second_check_decodes_only_new_images(check, write, draw, decoded, any_age, monkeypatch):
    monkeypatch.setattr("glm4v_patched.data.check.CACHE_WRITE_INTERVAL", 1)
    draw("b.png")
    first = check(write(colors("a.png"), colors("b.png"), colors("a.png", "a red circle")))
    assert decoded == ["a.png", "b.png"]
    assert contents_of(check(Path(first.path))) == contents_of(first)
    mended = check(write(colors("a.png"), colors("b.png", "green"), colors("a.png", "red")))
    assert len(decoded) == 2
    same = [
        old == new for old, new in zip(first.sample_digests, mended.sample_digests, strict=True)
    ]
    assert same == [True, False, False]


def test_an_image_that_changed_is_decoded_once_more(check, write, draw, decoded, any_age):
    image = draw("a.bmp")
    path = write(colors("a.bmp"))
    first, before = check(path).sample_digests, image.stat()
    for change in ("time", "bytes", "renamed"):
        time.sleep(0.02)  # a tick of the file system's clock
        if change == "time":
            image.touch()
        elif change == "bytes":
            draw("a.bmp", "blue")
        else:  # with size and time of the one before
            other = draw("b.bmp", "green")
            os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
            other.rename(image)
        assert image.stat().st_size == before.st_size
        for _ in range(2):
            assert (check(path).sample_digests == first) == (change == "time")
    assert len(decoded) == 4


def test_an_image_that_may_change_within_a_tick_is_not_remembered(check, write, draw, decoded):
    image, path = draw("a.png"), write(colors("a.png"))
    check(path)
    os.utime(image, (time.time() - HOUR,) * 2)  # when its entry changed cannot be set
    for _ in range(2):
        check(path)
    assert len(decoded) == 3


def test_of_a_damaged_memory_what_is_whole_is_used(
    tmp_path, check, write, draw, decoded, any_age, monkeypatch
):
    path = write(colors("a.png"))
    first = contents_of(check(path))
    memory = tmp_path / "memory" / "m.sqlite"
    content = memory.read_bytes()
    # The digest of an image is another one in the first: its size and times still fit.
    changed = content[:-40] + content[-40:].translate(bytes.maketrans(b"0123456789", b"1234567890"))
    damaged = [changed, content[:-9], b"\xff\n[]\n", b""]
    for often, damaged_content in enumerate(damaged, start=1):
        memory.write_bytes(damaged_content)
        for _ in range(2):
            assert contents_of(check(path)) == first and len(decoded) == often + 1
    monkeypatch.setattr(check_cache, "MAX_CACHE_BYTES", memory.stat().st_size - 1)
    check(path)
    assert len(decoded) == 6


def test_where_no_memory_can_be_kept_all_is_checked(tmp_path, processor, write, caplog):
    path = write(colors())
    link = tmp_path / "link"
    link.symlink_to("other")
    for memory in (tmp_path, path / "below", link):
        assert (
            check_sources(
                [DataSource(str(path))], processor, 1024, image_cache=memory
            ).counts.samples
            == 1
        )
        assert f"{memory} is not used" in caplog.text


def test_a_memory_has_all_that_was_put_there(tmp_path):
    values = {f"key {number}": [number] for number in range(1200)}
    for memory in (ImageCheckCache(tmp_path / "m.sqlite"), ImageCheckCache(tmp_path / "m.sqlite")):
        memory.put(values)
        assert memory.get([*values, "another"]) == values
        memory.close()


def test_a_cache_folder_is_ignored_unless_its_path_is_whole(monkeypatch, tmp_path):
    for value, root in ((tmp_path, tmp_path), ("cache", Path.home() / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(value))
        assert default_cache_path().parent == root / "glm4v-patched"


def test_what_was_checked_is_read_back_and_nothing_else(tmp_path, check, write, draw):
    checked = check(write(colors("a.png"), colors(), {"messages": []}), on_bad="skip")
    checked.write(tmp_path / "data.json")
    read = CheckedData.read(tmp_path / "data.json")
    assert contents_of(read) == contents_of(checked) and (read.counts, read.skipped) == (
        checked.counts,
        1,
    )
    for content in ("", '{"version": 0}', f'{{"version": {CHECK_VERSION}, "path": "x"}}'):
        (tmp_path / "data.json").write_text(content)
        with pytest.raises(ValueError, match=r"data\.json does not contain the result of a check"):
            CheckedData.read(tmp_path / "data.json")


def test_rows_and_images_that_changed_since_the_check_are_refused(check, write, draw, words):
    image, path = draw("a.png"), write(colors("a.png"))
    checked = check(path)
    content, before = path.read_bytes(), path.stat()
    path.write_bytes(content.replace(b"red", b"led"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as large and as old
    with words.refused(ValueError, "data.jsonl"):
        checked.conversations()
    path.write_bytes(content)  # another time and the same rows
    os.utime(image, (time.time() - HOUR,) * 2)  # touched, and the same
    assert checked.conversations()
    times = image.stat().st_atime_ns, image.stat().st_mtime_ns
    image.write_bytes(image.read_bytes()[::-1])
    os.utime(image, ns=times)  # as large and as old as before
    for gone in (image, path):
        with words.refused(ValueError, "a.png"):
            checked.conversations()
        gone.unlink()
    with words.refused(ValueError, "data.jsonl"):
        checked.conversations()


def test_digests_are_of_words_and_pixels_in_their_order_and_not_of_places(tmp_path, check):
    def digests(folder: str, first: str, second: str) -> tuple[str, ...]:
        (tmp_path / folder).mkdir()
        for name, color in (("a.png", first), ("b.png", second)):
            (tmp_path / folder / name).write_bytes(png(color))
        parts = [{"type": "image", "image": name} for name in ("a.png", "b.png")]
        row = [said("user", [*parts, {"type": "text", "text": "red"}]), said("assistant", "red")]
        return check(write_rows(tmp_path / folder / "data.jsonl", row, colors())).sample_digests

    one, same = digests("one", "red", "blue"), digests("two", "red", "blue")
    assert one == same and len({*one}) == 2
    for other in (digests("three", "red", "green"), digests("four", "blue", "red")):
        assert other[0] != one[0] and other[1] == one[1]


def test_the_launcher_checks_the_data_and_training_takes_only_what_was_checked_for_it(
    tmp_path, monkeypatch
):
    run = Mock(return_value="")
    monkeypatch.setattr(launching, "_run_processes", run)
    recipe = drawn_recipe(tmp_path, {"engine.zero_stage": 0})
    rows, checked = Path(recipe.data.train), Path(recipe.out, CHECKED_DATA)
    rows.write_text('{"messages": []}\n' + rows.read_text())
    place = Placement(processes=1, on_cpu=True)
    with pytest.raises(ValueError, match=r"1 of 21 rows .*\n.*train\.jsonl:1: messages is an"):
        launching.launch(resolve_recipe(recipe), place)
    assert not run.called and not checked.exists()
    skipping = recipe.override({"data.on_bad": "skip"})
    launching.launch(resolve_recipe(skipping), place)
    assert run.called and contents_of(CheckedData.read(checked)) == contents_of(
        check_data(resolve_recipe(skipping))
    )
    plan = Plan.read(Path(recipe.out, "plan.json"))
    check_data(resolve_recipe(skipping.override({"data.pack_to": 99}))).write(checked)
    with pytest.raises(ValueError, match=r"data\.json has rows with digest .* planned with"):
        train(plan)
    checked.unlink()
    with pytest.raises(ValueError, match=r"data\.json does not contain the result .*No such file"):
        train(plan)


def test_samples_that_lost_their_images_or_have_words_for_them_are_doubtful(tmp_path, check, words):
    (tmp_path / "a.png").write_bytes(png())
    with_image, plain = turns(image="a.png"), turns()
    doubts = []
    for name, *rows in (
        ("mixed", with_image, plain, with_image, plain),
        ("shown", with_image, with_image),
        ("plain", plain, plain),
        (
            "empty",
            with_image,
            {"messages": plain, "images": []},
            {"messages": plain, "image": None},
        ),
        ("word", turns("How do I use <video> here?", image="a.png"), with_image),
    ):
        rows = [row if isinstance(row, dict) else {"messages": row} for row in rows]
        path = write_rows(tmp_path / name, *rows)
        doubts += check(path).find_warnings()
        if name == "plain":  # without the image beside it
            (tmp_path / "other").mkdir()
            other = write_rows(tmp_path / "other" / "plain", *rows)
            assert not [*check(other).find_warnings()]
    ignored = write_rows(tmp_path / "ignored", {"messages": plain, "img": "a.png"})
    doubts += check(DataSource(str(ignored), ignore=("img",))).find_warnings()
    words("\n".join(doubts))
    # Of a set for evaluation, and of the first rows of a stream.
    mixed, fine = tmp_path / "mixed", tmp_path / "shown"
    assert [*check(fine, evaluate=[DataSource(str(mixed))]).find_warnings()] == doubts[:1]
    assert not [*check(fine).find_warnings()] and not [
        *check(mixed, num_precheck=1).find_warnings()
    ]
    assert "1 of 3 samples" in next(check(mixed, num_precheck=3).find_warnings())
