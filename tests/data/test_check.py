"""The check before training: what it counts, what it refuses, what it remembers."""

import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from glm4v_patched.data import check, decoding
from glm4v_patched.data.check import check_file
from glm4v_patched.data.check_cache import Memory, default_path
from glm4v_patched.data.checked_data import RULES, CheckedData, Counts
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.source import Source
from glm4v_patched.demo.tiny_model import tiny_config
from glm4v_patched.finetune import launch as launching
from glm4v_patched.finetune.plan import CHECKED_DATA, Plan, check_data
from glm4v_patched.finetune.worker import train
from glm4v_patched.models.placement import Placement
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.data_forms import found, png, said, write_rows
from tests.helpers.recipes import drawn_recipe, planned

HOUR = 3600


def turns(picture: str | None = None, answer: str = "red", rounds: int = 1) -> list[dict]:
    asked = said("user", "Which colour is it?")
    first = asked | {"image": picture} if picture else asked
    return [first, said("assistant", answer), *[asked, said("assistant", answer)] * (rounds - 1)]


@pytest.fixture
def write(tmp_path):
    return lambda *rows: write_rows(tmp_path / "data.jsonl", *rows)


@pytest.fixture
def draw(tmp_path):
    def draw_it(name: str, colour="red") -> Path:
        Image.new("RGB", (8, 8), colour).save(tmp_path / name)
        return tmp_path / name

    return draw_it


@pytest.fixture
def run(tmp_path, processor):
    """The check, with a memory of this test alone."""

    def check_it(path: Path | Source, max_positions: int = 1024, **options) -> CheckedData:
        memory = tmp_path / "memory" / "m.sqlite"
        return check_file(path, processor, max_positions, memory=memory, **options)

    return check_it


# What is counted


def test_sizes_are_those_of_the_batches(tmp_path, processor, run, write, draw):
    draw("a.png")
    checked = run(write(turns("a.png"), turns(), turns("a.png", "a red circle", rounds=3)))
    batches = [ConversationCollator(processor)([row]) for row in checked.conversations()]
    positions = [batch["input_ids"].shape[1] for batch in batches]
    learned = [int((batch["labels"] != -100).sum()) for batch in batches]
    assert checked.column("positions").tolist() == positions
    assert checked.column("learned").tolist() == learned
    assert checked.column("images").tolist() == [1, 0, 1]
    assert checked.counts == Counts(3, 2, sum(positions), sum(learned))
    assert checked.row_lines == (1, 2, 3) and checked.skipped == 0
    assert [picture.path for picture in checked.pictures] == [str(tmp_path / "a.png")]


@pytest.mark.parametrize("picture", [None, "a.png"])
def test_a_row_may_be_as_long_as_the_position_table_and_no_longer(
    processor, run, write, draw, picture
):
    draw("a.png")
    path = write(turns(), turns(picture, rounds=4))
    checked = run(path)
    needed = checked.column("in_table")[1]
    assert found(run(path, max_positions=needed)) == found(checked)
    with pytest.raises(ValueError, match=rf"data\.jsonl:2: takes {needed} .* has {needed - 1} "):
        run(path, max_positions=needed - 1)
    # The model itself says the same.
    config = tiny_config(processor.tokenizer)
    batch = ConversationCollator(processor)([checked.conversations()[1]])
    config.seq_length = needed
    GLM4VForCausalLM(config).eval()(**batch)
    config.seq_length = needed - 1
    with pytest.raises(ValueError, match="the position table ends"):
        GLM4VForCausalLM(config).eval()(**batch)


def test_a_row_may_fill_a_packed_row_and_no_more(run, write, draw):
    draw("a.png")
    path = write(turns(), turns("a.png"))
    needed = run(path).column("positions")[1]
    assert run(path, pack_to=needed).pack_to == needed
    with pytest.raises(ValueError, match=rf":2: takes {needed} .* has {needed - 1} \(pack_to\)"):
        run(path, pack_to=needed - 1)


@pytest.mark.parametrize(
    ("old", "new", "picture"),
    [
        ("* images", "* 0", "a.png"),
        (None, "{{ '<|user|>' }}{% for m in messages %}{{ m.content }}{% endfor %}", None),
        (None, "{% for m in messages %}{{ m.content + 1 }}{% endfor %}", None),
    ],
    ids=["without pictures", "without answers", "that fails"],
)
def test_a_template_that_drops_pictures_or_words_is_noticed(
    processor, run, write, draw, monkeypatch, words, old, new, picture
):
    draw("a.png")
    template = processor.chat_template
    monkeypatch.setattr(processor, "chat_template", template.replace(old, new) if old else new)
    with words.refused(ValueError, "data.jsonl:1: "):
        run(write(turns(picture)))


# Faults


def test_a_row_with_words_for_a_minute_of_rendering_is_not_rendered(run, write, words):
    path = write(turns(answer="red " * 2**22), turns())
    with words.refused(ValueError, "1 of 2", ":1: ", "1,048,576"):
        run(path)
    assert run(path, on_bad="skip").row_lines == (2,)


def test_rows_are_skipped_if_asked_for_and_counted(tmp_path, run, write, draw, words, capsys):
    (tmp_path / "bad.png").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    draw("a.png")
    pictures = ("bad.png", "folder.png", "pipe.png", "none.png")
    long = turns(rounds=30)
    path = write(turns(answer=""), turns("a.png"), *map(turns, pictures), long, turns())
    options = {"max_positions": 200}
    with words.refused(ValueError, "6 of 8 rows", "data.jsonl:7: takes"):
        run(path, **options)
    checked = run(path, on_bad="skip", **options)
    assert checked.row_lines == (2, 8) and checked.skipped == 6
    assert checked.counts.rows == len(checked.row_digests) == 2
    assert checked.conversations()[1] == turns()
    words(capsys.readouterr().out)
    (tmp_path / "bad.png").unlink()  # the picture of a row that is left out may change
    checked.conversations()
    with words.refused(ValueError, "1 of 1 rows"):
        run(write(turns(answer="")), on_bad="skip")


def test_a_name_as_long_as_a_file_is_told_in_short(run, write):
    with pytest.raises(ValueError, match="cannot be read: File name too long") as refused:
        run(write(turns("x" * 10**6)))
    assert len(str(refused.value)) < 1000


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
    run, write, draw, decoded, any_age, monkeypatch
):
    measured = []
    measure = ConversationCollator.measure

    def noted(collator, rows):
        measured.extend(rows)
        return measure(collator, rows)

    monkeypatch.setattr(ConversationCollator, "measure", noted)
    a, b = draw("a.png"), draw("b.png")
    first = run(write(turns("a.png"), turns("b.png"), turns("a.png", "a red circle")))
    assert decoded == [str(a), str(b)] and len(measured) == 3
    assert found(run(Path(first.path))) == found(first)
    assert len(decoded) == 2 and len(measured) == 3
    mended = run(write(turns("a.png"), turns("b.png", "green"), turns("a.png", "red")))
    assert len(decoded) == 2 and len(measured) == 6
    same = [old == new for old, new in zip(first.row_digests, mended.row_digests, strict=True)]
    assert same == [True, False, False]


def test_rows_are_read_again_where_something_changed_on_which_they_depend(
    tmp_path, processor, run, write, monkeypatch
):
    path = write(turns(), turns(rounds=2))
    first = run(path)
    sizes, kept = first.column("positions"), tmp_path / "memory" / "rows"
    for damage in (
        lambda content: content[:-8],
        lambda content: content.replace(b"Which", b"which"),
    ):
        [stored] = kept.glob("*.arrow")
        stored.write_bytes(damage(stored.read_bytes()))
        assert [*run(path).conversations()] == [turns(), turns(rounds=2)]
    with pytest.raises(ValueError, match="2 of 2 rows cannot be used"):
        run(Source(str(path), format="alpaca"))
    monkeypatch.setattr(processor, "chat_template", processor.chat_template + "{{ 'x' }}")
    assert (run(path).column("positions") == sizes + 1).all()


def test_rows_with_a_fault_are_read_again(run, write, draw, any_age):
    """What could not be fetched or decoded may be there next time."""
    path = write(turns("later.png"), turns())
    for _ in range(2):
        with pytest.raises(ValueError, match="1 of 2 rows(.|\n)*does not exist"):
            run(path)
    Path(path.parent, "later.png").write_bytes(b"hello")
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be decoded"):
            run(path)
    draw("later.png")
    assert run(path).counts.pictures == 1


def test_rows_that_were_left_out_are_not_kept(run, write, tmp_path):
    run(write(turns(), {"messages": []}), on_bad="skip")
    assert not [*(tmp_path / "memory" / "rows").glob("*.arrow")]


@pytest.mark.parametrize("change", ["bytes", "time", "renamed"])
def test_a_picture_that_changed_is_decoded_again(
    tmp_path, run, write, draw, decoded, any_age, change
):
    picture = draw("a.bmp")
    path = write(turns("a.bmp"))
    first, before = run(path), picture.stat()
    time.sleep(0.02)  # a tick of the file system's clock
    if change == "bytes":
        draw("a.bmp", "blue")
    elif change == "renamed":  # with size and time of the one before
        other = draw("b.bmp", "blue")
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.rename(picture)
    else:
        picture.touch()
    assert picture.stat().st_size == before.st_size
    assert (run(path).row_digests == first.row_digests) == (change == "time")
    assert len(decoded) == 2


def test_a_picture_that_may_change_within_a_tick_is_not_remembered(run, write, draw, decoded):
    picture, path = draw("a.png"), write(turns("a.png"))
    run(path)
    os.utime(picture, (time.time() - HOUR,) * 2)  # when its entry changed cannot be set
    for _ in range(2):
        run(path)
    assert len(decoded) == 3


def test_the_age_of_a_picture_is_that_before_it_is_read(run, write, draw, decoded, monkeypatch):
    monkeypatch.setattr(check, "NANOSECONDS_UNTIL_SURE", 0)
    look = check.read_facts_of_all
    draw("a.png")

    def changed_at_last(*of):
        if not decoded:
            draw("a.png")
        yield from look(*of)
        time.sleep(0.3)

    monkeypatch.setattr(check, "read_facts_of_all", changed_at_last)
    for _ in range(3):
        run(write(turns("a.png")))
    assert len(decoded) == 2


def test_what_was_decoded_before_a_check_was_stopped_is_remembered(
    run, write, draw, decoded, any_age, monkeypatch
):
    monkeypatch.setattr(check, "KEPT_AT_ONCE", 2)
    look = check.read_facts_of_all

    def stopped(paths, processes):
        for number, facts in enumerate(look(paths, processes)):
            if number == 3:
                raise KeyboardInterrupt
            yield facts

    names = [draw(f"{n}.png").name for n in range(5)]
    path = write(*map(turns, names))
    monkeypatch.setattr(check, "read_facts_of_all", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(path)
    monkeypatch.setattr(check, "read_facts_of_all", look)
    decoded.clear()
    assert run(path).counts.pictures == 5
    assert [Path(name).name for name in decoded] == names[2:]


@pytest.mark.parametrize("damage", ["words", "half", "middle", "empty", "value"])
def test_a_damaged_memory_is_begun_anew(
    tmp_path, run, write, draw, decoded, any_age, damage, caplog
):
    draw("a.png")
    path = write(turns("a.png"))
    first = found(run(path))
    memory = tmp_path / "memory" / "m.sqlite"
    content = memory.read_bytes()
    if damage == "value":  # the letters of a picture's digest: its size and times still fit
        with sqlite3.connect(memory) as file:
            file.execute("UPDATE entries SET value = replace(replace(value, 'a', 'b'), 'c', 'd')")
        file.close()
    else:
        cut = {"words": b"hello" * 100, "half": content[: len(content) // 2], "empty": b""}
        cut["middle"] = content[:4096] + b"x" * (len(content) - 4096)
        memory.write_bytes(cut[damage])
        Path(f"{memory}-journal").write_bytes(content if damage == "words" else b"")
    for _ in range(2):
        assert found(run(path)) == first
        assert len(decoded) == 2
    assert ("is damaged and begun anew" in caplog.text) == (damage in ("words", "half", "middle"))
    assert not Path(f"{memory}-journal").exists()


def test_where_no_memory_can_be_kept_all_is_checked(tmp_path, processor, write, caplog):
    path = write(turns())
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


def test_what_was_checked_is_read_back(tmp_path, run, write, draw):
    draw("a.png")
    checked = run(write(turns("a.png"), turns(), {"messages": []}), on_bad="skip")
    checked.write(tmp_path / "data.json")
    read = CheckedData.read(tmp_path / "data.json")
    assert found(read) == found(checked) and (read.counts, read.skipped) == (checked.counts, 1)
    assert [*read.conversations()] == [turns(str(tmp_path / "a.png")), turns()]


def test_rows_and_pictures_that_changed_since_the_check_are_refused(run, write, draw, words):
    picture, path = draw("a.png"), write(turns("a.png"))
    checked = run(path)
    content, before = path.read_bytes(), path.stat()
    time.sleep(0.02)  # a tick of the file system's clock
    path.write_bytes(content.replace(b"red", b"led"))
    for _ in range(2):
        with words.refused(ValueError, "data.jsonl"):
            checked.conversations()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as large and as old
    path.write_bytes(content)  # another time and the same rows
    os.utime(picture, (time.time() - HOUR,) * 2)  # touched, and the same
    assert checked.conversations()
    times = picture.stat().st_atime_ns, picture.stat().st_mtime_ns
    picture.write_bytes(picture.read_bytes()[::-1])
    os.utime(picture, ns=times)  # as large and as old as before
    for change in (lambda: None, picture.unlink):
        change()
        with words.refused(ValueError, "a.png"):
            checked.conversations()
    draw("a.png")
    path.unlink()
    with words.refused(ValueError, "data.jsonl"):
        checked.conversations()


@pytest.mark.parametrize(
    "content", [None, "", "5", '{"rules": 0}', f'{{"rules": {RULES}, "path": "x"}}']
)
def test_a_record_of_the_check_that_is_none_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "data.json").write_text(content)
    with pytest.raises(ValueError, match=r"data\.json does not say which rows were checked"):
        CheckedData.read(tmp_path / "data.json")


def test_digests_are_of_words_and_pixels_in_their_order_and_not_of_places(tmp_path, run):
    def digests(folder: str, first: str, second: str) -> tuple[str, ...]:
        (tmp_path / folder).mkdir()
        for name, colour in (("a.png", first), ("b.png", second)):
            (tmp_path / folder / name).write_bytes(png(colour))
        shown = [{"type": "image", "image": name} for name in ("a.png", "b.png")]
        row = [said("user", [*shown, {"type": "text", "text": "red"}]), said("assistant", "red")]
        return run(write_rows(tmp_path / folder / "data.jsonl", row, turns())).row_digests

    one, same = digests("one", "red", "blue"), digests("two", "red", "blue")
    assert one == same and len({*one}) == 2
    for other in (digests("three", "red", "green"), digests("four", "blue", "red")):
        assert other[0] != one[0] and other[1] == one[1]


def test_rows_whose_tools_differ_in_the_order_of_keys_are_two(processor, run, write):
    """The template writes tools as they stand."""
    tool = {"name": "look", "description": "x" * 9, "parameters": {"type": "object", "a": 1}}

    def row(tool: dict) -> list[dict]:
        return [said("system", "", tools=[{"type": "function", "function": tool}]), *turns()]

    rows = row(tool), row(dict(reversed(tool.items())))
    assert len({processor.apply_chat_template(each, tokenize=False) for each in rows}) == 2
    checked = run(write(*rows))
    assert len({*checked.row_digests}) == 2
    # The order of a message's own keys is nobody's matter.
    turned = [dict(reversed(message.items())) for message in row(tool)]
    assert run(write(turned)).row_digests == checked.row_digests[:1]


# The recipe


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Launch a recipe whose processes do nothing; their commands."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    commands = []
    monkeypatch.setattr(launching, "_run", lambda command, _: commands.append(command) or "")
    return commands


def test_the_launcher_checks_the_data_before_any_process_starts(tmp_path, launched, capsys):
    recipe = drawn_recipe(tmp_path, {"engine.zero_stage": 0})
    rows = Path(recipe.data.train)
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([*lines[:3], '{"messages": []}', *lines[3:]]))
    place = Placement(processes=1, on_cpu=True)
    with pytest.raises(ValueError, match=r"1 of 21 rows .*\n.*train\.jsonl:4: messages is an"):
        launching.launch(recipe, place)
    assert not launched and not Path(recipe.out, CHECKED_DATA).exists()
    skipping = recipe.override({"data.on_bad": "skip"})
    launching.launch(skipping, place)
    assert len(launched) == 1
    assert capsys.readouterr().out.endswith("1 of 21 rows were left out\n")
    read = CheckedData.read(Path(recipe.out, CHECKED_DATA))
    assert found(read) == found(check_data(skipping))


def test_training_takes_only_rows_that_were_checked_for_it(tmp_path, launched):
    mine = drawn_recipe(tmp_path, {"engine.zero_stage": 0})
    plan, checked = Plan.read(planned(mine)), Path(mine.out, CHECKED_DATA)
    check_data(mine.override({"data.pack_to": 99})).write(checked)
    with pytest.raises(ValueError, match=r"data\.json has rows with digest .* planned with"):
        train(plan)
    checked.unlink()
    with pytest.raises(ValueError, match=r"data\.json does not say which rows .*No such file"):
        train(plan)
