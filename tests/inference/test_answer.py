"""``glm4v-patched answer``: a line a row, continued where it was stopped, never replaced."""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from glm4v_patched.cli import main
from glm4v_patched.data.rows import Source
from glm4v_patched.inference import answer as module
from glm4v_patched.inference import answer_worker, answers_file
from glm4v_patched.inference.answer import Request, answer_file, answers
from glm4v_patched.inference.answer_worker import Answer, Answerer, Words
from glm4v_patched.inference.decoding import static_cache
from glm4v_patched.inference.merge import merge
from glm4v_patched.inference.questions import (
    Generation,
    Question,
    digest_pictures,
    digest_questions,
    read_questions,
)
from glm4v_patched.models.base import Base, identify
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load
from tests.helpers.local_hub import LocalHub

NEW = 6


def request(files, **changes) -> Request:
    given = {"model": str(files.model), "data": files.data, "device": "cpu", "batch_size": 3}
    given["generation"] = Generation(max_new_tokens=NEW)
    given |= changes
    return Request(**given | {"data": Source(str(given["data"]))})


@pytest.fixture
def never_loads(monkeypatch):
    from glm4v_patched.models import loading

    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("the model was loaded"))


@pytest.fixture(scope="module")
def answered(files, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("answered") / "answers.jsonl"
    answer_file(request(files), out)
    return out


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("source", ["model", "adapters"])
def test_a_static_cache_gives_the_same_answers(files, source, tmp_path, monkeypatch):
    """It is kept for the next batch of as many rows; the last batch has fewer. Nothing waits
    between its steps."""
    made, taken, drawn = [], static_cache.StaticCaches.of, []
    draw_ahead = static_cache.draw_ahead
    monkeypatch.setattr(
        static_cache, "draw_ahead", lambda *a, **k: drawn.append(1) or draw_ahead(*a, **k)
    )
    monkeypatch.setattr(
        static_cache.StaticCaches,
        "of",
        lambda self, *sizes: made.append((sizes[0], cache := taken(self, *sizes))) or cache,
    )
    files_of = {}
    for cache in ("static", "dynamic"):
        asked = request(files, model=str(getattr(files, source)), batch_size=2, cache=cache)
        if cache == "static":
            asked = request(files, model=str(getattr(files, source)), batch_size=4, cache=cache)
        answer_file(asked, tmp_path / cache)
        files_of[cache] = (tmp_path / cache).read_text()
    assert files_of["static"] == files_of["dynamic"]
    assert [rows for rows, _ in made] == [4]
    answer_file(replace(asked, cache="static"), tmp_path / "again")
    assert (tmp_path / "again").read_text() == files_of["dynamic"]
    caches = [cache for rows, cache in made if rows == 2]
    assert len(caches) == 3 and len({*map(id, caches)}) == 1
    assert len(drawn) == len(made)


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_words_come_as_they_are_answered(files, cache):
    loaded = load(find_source(str(files.model)), "cpu")
    answerer = Answerer(loaded, Generation(max_new_tokens=NEW), cache)
    said: list[str] = []
    asked = [{"role": "user", "content": "Which shapes?"}]
    words = Words(loaded.processor.tokenizer, said.append)
    [answer] = answerer.answer([asked], streamer=words)
    assert "".join(said).strip() == answer.text and len(said) > 1


def test_auto_is_static_where_a_gpu_has_enough_to_do():
    assert static_cache.chosen("auto", "cuda", 8000) == "static"
    assert static_cache.chosen("auto", "cuda", 500) == "dynamic"
    assert static_cache.chosen("auto", "cpu", 8000) == "dynamic"
    assert static_cache.chosen("static", "cpu", 1) == "static"
    assert static_cache.chosen("auto", "cuda", 8000, "int8") == "static"
    assert static_cache.chosen("auto", "cuda", 8000, "4bit") == "dynamic"  # is not compiled


def test_each_row_has_a_line_and_what_it_ends_with_is_its_reference(files, answered):
    lines = rows_of(answered)
    assert [line["row"] for line in lines] == [1, 2, 3, 4, 5, 6]
    given = [json.loads(text)["messages"] for text in files.data.read_text().splitlines()]
    for line, messages in zip(lines, given, strict=True):
        last = messages[-1]
        assert line.get("reference") == (last["content"] if last["role"] == "assistant" else None)
    questions = read_questions(files.data)
    assert questions[0].prompt[-1]["role"] == "user" and questions[4].reference is None


@pytest.mark.parametrize("adapters", [False, True])
def test_answers_in_batches_are_those_of_single_rows(files, adapters):
    base = find_source(str(files.adapters if adapters else files.model))
    answerer = Answerer(load(base, "cpu"), Generation(max_new_tokens=NEW))
    prompts = [question.prompt for question in read_questions(files.data)]
    together = answerer.answer(prompts)
    assert together == [answerer.answer([prompt])[0] for prompt in prompts]
    # Else the test would say nothing.
    assert len({answer.text for answer in together}) > 2
    lengths = answerer.encode(prompts)["attention_mask"].sum(-1)
    assert lengths.min() < lengths.max()


def test_adapters_are_loaded_on_the_model_that_they_name(files):
    [prompt] = [q.prompt for q in read_questions(files.data)][:1]
    loaded = load(find_source(str(files.adapters)), "cpu")
    model, processor = loaded
    batch = Answerer(loaded, Generation()).encode([prompt])
    with torch.no_grad():
        adapted = model(**batch).logits
        with model.disable_adapter():
            without = model(**batch).logits
        plain = load(find_source(str(files.model)), "cpu").model(**batch).logits
    torch.testing.assert_close(without, plain)
    assert (adapted - plain).abs().max() > 0.1
    assert model.dtype == torch.float32 and not model.training


def test_code_in_the_folder_is_not_run(files, tmp_path):
    shutil.copytree(files.model, tmp_path / "model")
    for path in (tmp_path / "model").glob("*.py"):
        path.write_text("raise SystemExit('the code of the folder was run')\n")
    model, _ = load(find_source(str(tmp_path / "model")), "cpu")
    assert type(model).__module__ == "glm4v_patched.remote.modeling_chatglm"


def test_it_is_continued_where_it_was_stopped(files, answered, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    text = answered.read_text()
    lines = text.splitlines(keepends=True)
    for name in ("answers.jsonl.settings.json",):
        shutil.copy(answered.with_name(name), tmp_path / name)
    out.write_text("".join(lines[:3]) + lines[3][:10])
    answer_file(request(files, batch_size=2), out)
    assert out.read_text() == text
    told = capsys.readouterr().out
    assert "line 4 of" in told and "cut off" in told and "3 of 6 answers are there" in told


def test_a_finished_file_is_left_as_it_is(files, answered, never_loads):
    before = answered.read_bytes(), answered.stat().st_mtime_ns
    assert len(answer_file(request(files), answered)) == 6
    assert (answered.read_bytes(), answered.stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation": Generation(max_new_tokens=7)}, "options.max_new_tokens: 6 there, 7 now"),
        ({"generation": Generation(max_new_tokens=6, seed=1)}, "options.seed: 0 there, 1 now"),
        ({"model": "adapters"}, "model.adapters: adapter_config.json: nothing there, "),
        ({"data": "shorter"}, "data: .* there, .* now"),
    ],
)
def test_answers_of_something_else_are_not_continued(
    files, answered, never_loads, changes, message
):
    if "model" in changes:
        changes = {"model": str(files.adapters)}
    if "data" in changes:
        shorter = files.data.with_name("shorter.jsonl")
        shorter.write_text("".join(files.data.read_text().splitlines(keepends=True)[:5]))
        changes = {"data": shorter}
    before = answered.read_bytes()
    with pytest.raises(ValueError, match=rf"(?s)belong to something else.*{message}"):
        answer_file(request(files, **changes), answered)
    assert answered.read_bytes() == before


def test_pictures_count_by_what_is_in_them(tmp_path):
    """Not by their paths; in bitmaps of one side, not by their sizes."""

    def digest(name: str, colour: str) -> str:
        path = tmp_path / name
        Image.new("RGB", (8, 8), colour).save(path)
        rows = [Question(1, [{"role": "user", "image": str(path), "content": "a"}], "b")]
        return digest_questions(rows, digest_pictures(rows))

    red, blue = digest("a.bmp", "red"), digest("a.bmp", "blue")
    assert red != blue == digest("b.bmp", "blue")
    with pytest.raises(ValueError, match="row 2: the image .* cannot be read: Is a directory"):
        digest_pictures([Question(2, [{"role": "user", "image": "/", "content": "a"}])])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: ["no JSON\n", *lines], ":1 is no answer to a row"),
        (lambda lines: [*lines, lines[0]], ":7 answers row 1 a second time"),
        (lambda lines: [lines[0].replace("yellow", "red")], ":1 has another reference than row 1"),
        (lambda lines: [lines[0].replace('"row": 1', '"row": 9')], ":1 is no answer to a row"),
    ],
)
def test_damaged_answers_are_not_continued(files, answered, tmp_path, never_loads, change, message):
    out = tmp_path / "answers.jsonl"
    shutil.copy(answered.with_name("answers.jsonl.settings.json"), tmp_path)
    out.write_text("".join(change(answered.read_text().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=message):
        answer_file(request(files), out)


def test_other_files_are_not_replaced_unless_told_so(files, tmp_path, never_loads):
    out = tmp_path / "notes.txt"
    out.write_text("mine")
    with pytest.raises(ValueError, match="does not say what its answers belong to"):
        answer_file(request(files), out)
    assert out.read_text() == "mine"
    for path in (files.data, Path(read_questions(files.data)[0].prompt[0]["image"])):
        before = path.read_bytes()
        with pytest.raises(ValueError, match="is what is read"):
            answer_file(request(files), path, overwrite=True)
        assert path.read_bytes() == before
    with pytest.raises(ValueError, match="is a folder"):
        answer_file(request(files), tmp_path)


def test_overwrite_replaces(files, answered, tmp_path):
    out = tmp_path / "answers.jsonl"
    out.write_text("mine")
    answer_file(request(files), out, overwrite=True)
    assert out.read_text() == answered.read_text()


@pytest.mark.parametrize("reason", ["no room", "stopped"])
def test_what_is_to_be_replaced_stays_until_there_is_an_answer(
    files, answered, tmp_path, monkeypatch, reason
):
    out = tmp_path / "answers.jsonl"
    for path in answered.parent.iterdir():
        shutil.copy(path, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def stopped(*_):
        yield from ()
        raise KeyboardInterrupt

    if reason == "no room":
        with pytest.raises(ValueError, match="leave too little room"):
            answer_file(request(files, generation=Generation(max_new_tokens=1010)), out, True)
    else:
        monkeypatch.setattr(module, "answers", stopped)
        with pytest.raises(KeyboardInterrupt, match=f"nothing was answered, and {out} is as it"):
            answer_file(request(files), out, overwrite=True)
    assert len(before) == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_of_settings_that_is_not_of_answers_is_not_replaced(
    files, answered, tmp_path, monkeypatch
):
    out, settings = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.settings.json"
    settings.write_text('{"mine": 1}')
    with pytest.raises(ValueError, match=f"{settings} is there, without answers beside it"):
        answer_file(request(files), out)
    assert settings.read_text() == '{"mine": 1}' and not out.exists()
    # Ours, of other options, that a killed process has left, is.
    left = json.loads((answered.parent / settings.name).read_text()) | {"options": {}}
    settings.write_text(json.dumps(left))
    known = [Answer("a", "stop")] * 6
    monkeypatch.setattr(module, "answers", lambda *a: zip(a[-1], known, strict=True))
    answer_file(request(files), out)
    assert settings.read_text() == (answered.parent / settings.name).read_text()


def test_a_file_that_another_process_has_just_removed_is_made_anew(files, tmp_path, monkeypatch):
    """That process had no answer, and ended after this one opened the file."""
    out = tmp_path / "answers.jsonl"
    lock = answers_file.fcntl.flock

    def removed(file, how):
        monkeypatch.setattr(answers_file.fcntl, "flock", lock)
        out.unlink()
        lock(file, how)

    monkeypatch.setattr(answers_file.fcntl, "flock", removed)
    known = [Answer("a", "stop")] * 6
    monkeypatch.setattr(module, "answers", lambda *a: zip(a[-1], known, strict=True))
    answer_file(request(files), out)
    assert len(rows_of(out)) == 6


def test_two_processes_do_not_write_to_one_file(files, tmp_path, monkeypatch):
    out = tmp_path / "answers.jsonl"

    def answers(*_):
        with pytest.raises(ValueError, match="another process writes to"):
            answer_file(request(files), out)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "answers", answers)
    with pytest.raises(KeyboardInterrupt):
        answer_file(request(files), out)
    # Nothing was answered, and nothing is left that would say so.
    assert list(tmp_path.iterdir()) == []


def test_what_is_drawn_depends_on_the_seed_and_not_on_where_it_was_stopped(files, tmp_path):
    drawn = Generation(max_new_tokens=NEW, temperature=1.5, seed=3)
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    answer_file(request(files, generation=drawn), one)
    shutil.copy(one, other)
    shutil.copy(f"{one}.settings.json", f"{other}.settings.json")
    other.write_text("".join(one.read_text().splitlines(keepends=True)[:3]))
    answer_file(request(files, generation=drawn), other)
    assert one.read_text() == other.read_text()
    third = tmp_path / "third.jsonl"
    answer_file(request(files, generation=Generation(max_new_tokens=NEW, temperature=1.5)), third)
    assert third.read_text() != one.read_text()


def test_an_answer_that_ends_is_told_from_one_that_was_cut(files, monkeypatch):
    answerer = Answerer(load(find_source(str(files.model)), "cpu"), Generation(max_new_tokens=3))
    end = answerer.end_ids[0]
    prompt = read_questions(files.data)[2].prompt

    def generate(**batch):
        new = torch.tensor([[5, end, end], [5, 6, 7]])
        return torch.cat([batch["input_ids"], new], 1)

    monkeypatch.setattr(answerer.model, "generate", generate)
    reasons = [answer.finish_reason for answer in answerer.answer([prompt, prompt])]
    assert reasons == ["stop", "length"]


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [(KeyboardInterrupt(), 130, "stopped"), (RuntimeError("OOM"), 1, "OOM")],
)
def test_a_run_that_stops_says_how_to_go_on(
    files, answered, tmp_path, monkeypatch, capsys, error, status, told
):
    def two_batches(*arguments):
        yield from list(given(*arguments))[:3]
        raise error

    given = module.answers
    out = tmp_path / "answers.jsonl"
    options = ["--data", str(files.data), "--device", "cpu", "--max-new-tokens", str(NEW)]
    options += ["--batch-size", "3"]
    monkeypatch.setattr(module, "answers", two_batches)
    assert main(["answer", str(files.model), *options, "--out", str(out)]) == status
    assert f"{told}\n3 of 6 answers are in {out}, and the same command" in capsys.readouterr().err
    assert (
        main(["evaluate", str(files.model), *options, "--data", str(with_reference(files))])
        == status
    )
    assert f"{told}\nno answer is kept, as there is no --out" in capsys.readouterr().err
    monkeypatch.setattr(module, "answers", given)
    assert main(["answer", str(files.model), *options, "--out", str(out)]) == 0
    assert out.read_text() == answered.read_text()


def with_reference(files) -> Path:
    lines = files.data.read_text().splitlines(keepends=True)
    path = files.data.with_name("some.jsonl")
    path.write_text("".join(lines[at] for at in (0, 1, 3, 5)))
    return path


def parts_of(files, size: int = 1) -> list[answer_worker.Part]:
    questions = read_questions(files.data)
    some = answer_worker.batches(questions, size)
    return [answer_worker.Part([q.row for q in part], [q.prompt for q in part]) for part in some]


def test_pictures_of_the_next_rows_are_read_while_these_are_answered(files, monkeypatch):
    parts, encode = parts_of(files), answer_worker.encode
    begun = {json.dumps(part.prompts): threading.Event() for part in parts}
    later = [*begun.values()][1:]

    def noted(processor, prompts):
        begun[json.dumps(prompts)].set()
        return encode(processor, prompts)

    def answer(self, batch, number):
        assert not later or later.pop(0).wait(60), "the next rows are not read meanwhile"
        return [Answer(str(number), "stop")]

    monkeypatch.setattr(answer_worker, "encode", noted)
    monkeypatch.setattr(Answerer, "answer_encoded", answer)
    job = answer_worker.Job(find_source(str(files.model)), "cpu", None, Generation())
    told = [answers[0].text for answers in answer_worker.answer_parts(job, parts)]
    assert told == [str(part.rows[0]) for part in parts]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_picture_that_has_gone_since_ends_with_its_row_after_the_answers_before(
    files, tmp_path, processes
):
    shutil.copytree(files.data.parent, tmp_path / "files")
    data = tmp_path / "files" / files.data.name
    asked = request(files, data=data, processes=processes, batch_size=1)
    questions = read_questions(Source(str(data)))
    Path(questions[3].prompt[0]["image"]).unlink()
    given = answers(asked, asked.place(), find_source(asked.model), questions)
    assert [next(given)[0].row for _ in range(3)] == [1, 2, 3]
    with pytest.raises(RuntimeError, match=r"rows \[4\]: "):
        next(given)


@pytest.mark.slow
def test_several_processes_give_the_same_answers_in_order(files, answered, tmp_path):
    out = tmp_path / "answers.jsonl"
    answer_file(request(files, processes=2, batch_size=1), out)
    assert out.read_text() == answered.read_text()


def test_each_process_sees_one_gpu_of_those_that_there_are(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    seen = [each["CUDA_VISIBLE_DEVICES"] for each in module.environments(2, on_cpu=False)]
    assert seen == ["3", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    seen = [each["CUDA_VISIBLE_DEVICES"] for each in module.environments(2, on_cpu=False)]
    assert seen == ["0", "1"]


def test_adapters_of_a_model_that_has_changed_since_are_refused(files, tmp_path):
    shutil.copytree(files.adapters, tmp_path / "adapters")
    recorded = identify(Base(str(files.model)))
    report = tmp_path / "adapters" / "training.json"
    report.write_text(json.dumps({"base": recorded}))
    assert find_source(str(tmp_path / "adapters")).model == str(files.model)
    changed = recorded | {"model.safetensors": "0" * 64}
    report.write_text(json.dumps({"base": changed}))
    told = r"(?s)were trained on another model than .*model.safetensors: 0{64} there"
    with pytest.raises(ValueError, match=told):
        find_source(str(tmp_path / "adapters"))


def test_adapters_come_from_the_hub_at_their_revision(files, tmp_path, monkeypatch):
    kept = {"adapter_config.json", "adapter_model.safetensors", "modeling_chatglm.py"}
    held = {p.name: p.read_bytes() for p in files.adapters.iterdir() if p.name in kept}
    kept.add("tokenizer.model")  # of adapters that were trained on the published code
    held["tokenizer.model"] = b"IQ== 0"
    with LocalHub() as hub:
        hub.redirect_client(monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        repository = hub.add_repository("our-org/adapters", held)
        repository.refs["v1"] = first = repository.head
        moved = json.loads(held["adapter_config.json"]) | {"base_model_name_or_path": "/was/there"}
        changes = {"adapter_config.json": json.dumps(moved).encode()}
        repository.add_commit(changes)
        base = find_source("our-org/adapters", "v1")
        assert (base.model, base.revision) == (str(files.model), None)
        assert base.adapters is not None and base.adapters.name == first
        # What is a program there is not even fetched.
        assert {path.name for path in base.adapters.iterdir()} == kept - {"modeling_chatglm.py"}
        difference = merge("our-org/adapters", tmp_path / "merged", "v1", check=False)
        assert difference is None and (tmp_path / "merged" / "model.safetensors").is_file()
        with pytest.raises(ValueError, match="our-org/adapters holds .* /was/there: .*in a copy"):
            find_source("our-org/adapters")
        with pytest.raises(ValueError, match="our-org/none is no folder here, and cannot be had"):
            find_source("our-org/none")
    same = load(base, "cpu").model.state_dict()
    wanted = load(find_source(str(files.adapters)), "cpu").model.state_dict()
    assert all(torch.equal(same[name], weight) for name, weight in wanted.items())


MISTAKES = {
    "there is no such folder": ["no such/model/at/all"],
    "holds adapters of the model": ["adapters"],
    "adapter_model.safetensors is missing": ["without_weights"],
    "a folder without config.json": ["empty"],
    "message 2 of 2: the key": ["model", "--data", "faulty.jsonl"],
    "does not exist": ["model", "--data", "lost.jsonl"],
    "is of assistant, at the beginning": ["model", "--data", "answer.jsonl"],
    "there is no GPU": ["model", "--device", "cuda"],
    "--load-in-4bit needs a GPU": ["model", "--load-in-4bit"],
    "expected at least 1": ["model", "--max-new-tokens", "0"],
    "--top-p 2.0: expected": ["model", "--top-p", "2"],
    "none.jsonl: there is no such file": ["model", "--data", "none.jsonl"],
    "--format llama: expected one of auto": ["model", "--format", "llama"],
    "--image-folder none: there is no": ["model", "--image-folder", "none"],
    "has no revisions": ["model", "--revision", "main"],
}


@pytest.fixture(scope="module")
def mistaken(files, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistaken")
    (folder / "model").symlink_to(files.model)
    for name in ("adapters", "without_weights"):
        shutil.copytree(files.adapters, folder / name)
    (folder / "without_weights" / "adapter_model.safetensors").unlink()
    config = folder / "adapters" / "adapter_config.json"
    moved = json.loads(config.read_text()) | {"base_model_name_or_path": "/was/there/once"}
    config.write_text(json.dumps(moved))
    (folder / "empty").mkdir()
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = {
        "rows": [user, assistant],
        "faulty": [user, assistant | {"img": "a"}],
        "lost": [user | {"image": "a.png"}],
        "answer": [assistant],
    }
    for name, messages in rows.items():
        (folder / f"{name}.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    return folder


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_told_before_torch_is_loaded(mistaken, monkeypatch, capsys, message):
    monkeypatch.chdir(mistaken)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = MISTAKES[message]
    arguments += [] if "--data" in arguments else ["--data", "rows.jsonl"]
    arguments += [] if "--device" in arguments else ["--device", "cpu"]
    assert main(["answer", *arguments, "--out", "out.jsonl"]) == 1
    assert message in capsys.readouterr().err
    assert not (mistaken / "out.jsonl").exists()


def test_a_row_that_leaves_no_room_is_named_before_the_model_is_loaded(
    files, tmp_path, never_loads
):
    long = Generation(max_new_tokens=1010)
    with pytest.raises(ValueError, match="leave too little room .*1,024 positions; lower"):
        answer_file(request(files, generation=long), tmp_path / "out.jsonl")


def test_rows_of_other_trainers_are_answered_with_their_pictures_elsewhere(
    files, answered, tmp_path
):
    """LLaVA's form, a row with a key that means nothing here."""
    first = json.loads(files.data.read_text().splitlines()[0])["messages"]
    turns = [{"from": "human", "value": f"<image>\n{first[0]['content']}"}]
    turns.append({"from": "gpt", "value": first[1]["content"]})
    row = {"id": 7, "image": first[0]["image"], "conversations": turns}
    (tmp_path / "llava.json").write_text(json.dumps([row]))
    out = tmp_path / "out.jsonl"
    options = ["--data", str(tmp_path / "llava.json"), "--out", str(out), "--device", "cpu"]
    options += ["--image-folder", str(files.data.parent), "--ignore", "id"]
    assert main(["answer", str(files.model), *options, "--max-new-tokens", str(NEW)]) == 0
    assert rows_of(out) == rows_of(answered)[:1]


def test_a_picture_that_cannot_be_decoded_is_named_before_the_model_is_loaded(
    tmp_path, files, never_loads
):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    row = {"messages": [{"role": "user", "image": "broken.png", "content": "a"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .*broken.png cannot be decoded"):
        answer_file(request(files, data=tmp_path / "rows.jsonl"), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
