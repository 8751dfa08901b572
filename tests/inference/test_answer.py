"""``glm4v-patched answer``: one line per row, continued where it stopped, never overwritten."""

import json
import os
import shutil
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import GenerationConfig

from glm4v_patched.cli import main
from glm4v_patched.data.rows import DataSource
from glm4v_patched.inference import answer as module
from glm4v_patched.inference import questions
from glm4v_patched.inference.answer import answer_file
from glm4v_patched.inference.answer_worker import Answer, Answerer, require_context_length
from glm4v_patched.inference.decoding import static_cache
from glm4v_patched.inference.questions import AnswerOptions, Generation, Question, read_questions
from glm4v_patched.models.base import ModelSource
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load_with_processor
from glm4v_patched.terminal_text import show_progress
from tests.helpers.tiny import update_json

NEW = 6
SETTINGS = "answers.jsonl.settings.json"


def request(files, **changes) -> AnswerOptions:
    values = {"model": str(files.model), "data": files.data, "device": "cpu", "batch_size": 3}
    values |= {"generation": Generation(max_new_tokens=NEW)} | changes
    return AnswerOptions(**values | {"data": DataSource(str(values["data"]))})


@pytest.fixture(scope="module")
def answered(files, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("answered") / "answers.jsonl"
    answer_file(request(files), out)
    return out


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "answers.jsonl"


@pytest.fixture
def begun(answered, out) -> list[str]:
    """A file of answers with its settings; returns its lines."""
    for path in answered.parent.iterdir():
        shutil.copy(path, out.parent)
    return out.read_text().splitlines(keepends=True)


@pytest.fixture
def answers_at_once(monkeypatch) -> None:
    known = [Answer("a", "stop")] * 6
    monkeypatch.setattr(module, "generate_answers", lambda *a: zip(a[-1], known, strict=True))


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_row_has_a_line_and_what_it_ends_with_is_its_reference(files, answered, never_loads):
    lines = rows_of(answered)
    assert [line["row"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line, row in zip(lines, rows_of(files.data), strict=True):
        last = row["messages"][-1]
        assert line.get("reference") == (last["content"] if last["role"] == "assistant" else None)
    assert read_questions(files.data)[0].prompt[-1]["role"] == "user"
    called = {"role": "assistant", "metadata": "search", "content": "shapes"}
    question_message = {"role": "user", "content": "a"}
    assert questions.make_question(1, [question_message, called]).reference == "search\nshapes"
    # A finished file is left as it is.
    before = answered.read_bytes(), answered.stat().st_mtime_ns
    assert len(answer_file(request(files), answered)) == 6
    assert (answered.read_bytes(), answered.stat().st_mtime_ns) == before


def test_batches_and_a_static_cache_answer_as_single_rows_do(files, tmp_path, monkeypatch):
    """The cache is reused for the next batch of the same size; the last batch is smaller."""
    used_caches, make_empty_cache = [], static_cache.StaticCaches.make_empty_cache

    def record_cache(self, rows, positions):
        used_caches.append((rows, make_empty_cache(self, rows, positions)))
        return used_caches[-1][1]

    monkeypatch.setattr(static_cache.StaticCaches, "make_empty_cache", record_cache)
    model = str(files.adapters)
    ways = [(1, "dynamic"), (3, "dynamic"), (4, "static"), (2, "static")]
    for rows, cache in ways:
        answer_file(request(files, model=model, batch_size=rows, cache=cache), tmp_path / str(rows))
    single, *others = [rows_of(tmp_path / str(rows)) for rows, _ in ways]
    assert others == [single] * 3 and len({line["answer"] for line in single}) > 2
    assert [rows for rows, _ in used_caches] == [4, 2, 2, 2, 2]
    assert len({id(cache) for _, cache in used_caches[2:]}) == 1


def test_which_cache_is_taken(files, tmp_path):
    base = ModelSource(str(files.model))
    for cache, device, weights, expected in (
        ("auto", "cuda", None, "static"),
        ("auto", "cpu", None, "dynamic"),
        ("static", "cpu", None, "static"),
        ("auto", "cuda", "4bit", "dynamic"),  # is not recorded
    ):
        assert static_cache.choose_cache(cache, device, base, weights) == expected
    shutil.copytree(files.model, tmp_path / "exported")
    config = tmp_path / "exported" / "config.json"
    update_json(config, quantization_config={"quant_method": "compressed-tensors"})
    assert static_cache.choose_cache("auto", "cuda", ModelSource(str(config.parent))) == "dynamic"


def test_each_batch_and_each_seed_samples_its_own_tokens(files):
    def drawn(**generation) -> list[str]:
        sampled = Generation(top_k=50, max_new_tokens=NEW, **generation)
        rows = [Question(row, [{"role": "user", "content": "Which?"}]) for row in (1, 2)]
        options = request(files, generation=sampled, batch_size=1)
        replies = module.generate_answers(options, ModelSource(options.model), rows)
        return [answer.text for _, answer in replies]

    [first, second] = drawn()
    assert [first, second] == drawn() and len({first, second, *drawn(seed=1)}) == 4
    assert len({first, second, *drawn(seed=-1), *drawn(seed=2**63 + 7)}) == 6


def test_the_next_batch_is_copied_while_one_is_answered(files, monkeypatch):
    placed, numbers = [threading.Event() for _ in range(3)], iter(range(3))
    place, answer = Answerer.to_device, Answerer.generate

    def tell(self, batch):
        number = next(numbers)
        on_device = place(self, batch)
        placed[number].set()
        return on_device

    def wait(self, *arguments, **options):
        assert placed[min(arguments[2] + 1, 2)].wait(timeout=60)
        return answer(self, *arguments, **options)

    monkeypatch.setattr(Answerer, "to_device", tell)
    monkeypatch.setattr(Answerer, "generate", wait)
    rows = [Question(row, [{"role": "user", "content": "Which?"}]) for row in range(3)]
    options = request(files, batch_size=1)
    assert len([*module.generate_answers(options, ModelSource(options.model), rows)]) == 3


@pytest.mark.parametrize("has_image", [False, True])
def test_images_are_copied_to_the_gpu_in_the_models_dtype(answerer, monkeypatch, has_image):
    copied = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    copies = SimpleNamespace(synchronize=lambda: copied.append(True))
    monkeypatch.setattr(answerer, "copy_stream", copies)
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float16)
    monkeypatch.setattr(answerer, "model", model)
    message = {"role": "user", "content": "Which?", "image": Image.new("RGB", (30, 30))}
    batch = answerer.encode([[message]] if has_image else ["Once"])
    assert copied and batch["input_ids"].dtype == torch.int64
    assert not has_image or batch["pixel_values"].dtype == torch.float16


def test_end_ids_are_the_generation_configs_or_else_the_configs(answerer, monkeypatch):
    loaded = model, _ = answerer.model, answerer.processor
    assert Answerer(loaded, Generation(num_beams=2), "static").caches is None
    own = model.config.eos_token_id
    for eos, ends in ((None, own), (0, [0]), ([7, 8], [7, 8]), (7, [7])):
        monkeypatch.setattr(model, "generation_config", GenerationConfig(eos_token_id=eos))
        ending = Answerer(loaded, Generation())
        assert ending.eos_token_ids == ends

    def generate(**batch):
        return torch.cat([batch["input_ids"], torch.tensor([[5, 7, 7], [5, 6, 8]])], 1)

    monkeypatch.setattr(model, "generate", generate)
    answers = ending.answer([[{"role": "user", "content": "Which shapes?"}]] * 2)
    assert model.generation_config.eos_token_id == [7]
    assert [answer.finish_reason for answer in answers] == ["stop", "length"]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_image_that_has_gone_since_ends_with_its_row_after_the_answers_before(
    files, tmp_path, monkeypatch, processes
):
    shutil.copytree(files.data.parent, tmp_path / "files")
    data = tmp_path / "files" / files.data.name
    answer_options = request(files, data=data, processes=processes, batch_size=1)
    rows = read_questions(DataSource(str(data)))
    Path(rows[3].prompt[0]["image"]).unlink()
    groups = []

    class Started(subprocess.Popen):
        def __init__(self, *answers, **options):
            super().__init__(*answers, **options)
            groups.append((os.getsid(self.pid), self.pid))

    monkeypatch.setattr(module, "Popen", Started)
    answers = module.generate_answers(answer_options, find_source(answer_options.model), rows)
    assert [next(answers)[0].row for _ in range(3)] == [1, 2, 3]
    assert len(groups) == {1: 0, 2: 2}[processes]
    assert all(group == number for group, number in groups)  # Ctrl-C is this process's to answer
    with pytest.raises(RuntimeError, match=r"rows \[4\]: "):
        next(answers)


def test_each_process_sees_one_gpu(monkeypatch):
    for visible, seen in (("3,5", ["3", "5"]), (None, ["0", "1"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        environments = module.worker_environments(2, on_cpu=False)
        assert [variables["CUDA_VISIBLE_DEVICES"] for variables in environments] == seen


def test_code_in_the_folder_is_not_run(files, tmp_path):
    shutil.copytree(files.model, tmp_path / "model")
    for path in (tmp_path / "model").glob("*.py"):
        path.write_text("raise SystemExit('the code of the folder was run')\n")
    model, _ = load_with_processor(find_source(str(tmp_path / "model")), "cpu")
    assert type(model).__module__ == "glm4v_patched.remote.modeling_chatglm"


def test_adapters_come_from_the_hub_at_their_revision(hub, files):
    names = ("adapter_config.json", "adapter_model.safetensors")
    contents = {name: (files.adapters / name).read_bytes() for name in names}
    stored = contents | {"modeling_chatglm.py": b"code"}
    repository = hub.add_repository("our-org/adapters", stored)
    repository.refs["v1"] = first = repository.head
    moved = contents["adapter_config.json"].replace(str(files.model).encode(), b"/was/there")
    repository.add_commit({"adapter_config.json": moved})
    base = find_source("our-org/adapters", "v1")
    assert (base.model, base.revision) == (str(files.model), None)
    assert base.adapters is not None and base.adapters.name == first
    # What is a program there is not even fetched.
    assert {path.name for path in base.adapters.iterdir()} == {*names}
    moved = "our-org/adapters contains .* /was/there: .*in a copy"
    with pytest.raises(ValueError, match=moved):
        find_source("our-org/adapters")


def test_it_is_continued_where_it_was_stopped_and_so_is_its_progress(
    files, out, capsys, words, monkeypatch
):
    generation = Generation(max_new_tokens=NEW, temperature=1.5, seed=3)
    options = request(files, generation=generation)
    answer_file(options, out)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:3]) + lines[3][:10])
    capsys.readouterr()
    begun: list[dict] = []

    def recorded(*arguments, **options):
        begun.append(options)
        return show_progress(*arguments, **options)

    monkeypatch.setattr(module, "show_progress", recorded)
    answer_file(options, out)
    assert out.read_text() == "".join(lines) and begun == [{"total": 6, "done": 3}]
    words("\n".join(capsys.readouterr().out.splitlines()[:2]))


def test_answers_of_something_else_are_not_continued(files, referenced, begun, out, never_loads):
    before = out.read_bytes()
    for changes, named in (
        ({"generation": Generation(max_new_tokens=6, seed=1)}, "options.seed: 0 before, 1 now"),
        ({"model": str(files.adapters)}, "model.adapters: adapter_config.json: nothing before, "),
        ({"data": referenced}, "data: "),
    ):
        message = f"(?s)of another model, other data or options.*{named}"
        with pytest.raises(ValueError, match=message):
            answer_file(request(files, **changes), out)
    recorded = json.loads(out.with_name(SETTINGS).read_text())
    recorded["options"]["of_old"] = 1
    out.with_name(SETTINGS).write_text(json.dumps(recorded))
    with pytest.raises(ValueError, match="options.of_old: 1 before, nothing now"):
        answer_file(request(files), out)
    assert out.read_bytes() == before


def test_each_part_of_a_question_is_in_the_digest_of_the_data():
    question = Question(1, [{"role": "user", "content": "a"}], "b")
    changes = [{"row": 2}, {"prompt": []}, {"swapped": True}]
    changes += [{"reference": reference} for reference in ("c", "", None)]
    every = [question, *(question._replace(**change) for change in changes)]
    assert len({questions.digest_questions([one], {}) for one in every}) == len(every)


def test_images_count_by_what_is_in_them(tmp_path, words):
    def digest(name: str, color: str = "blue") -> str:
        Image.new("RGB", (8, 8), color).save(tmp_path / name)
        message = {"role": "user", "image": str(tmp_path / name), "content": "a"}
        rows = [Question(1, [message], "b")]
        return questions.digest_questions(rows, questions.digest_image_files(rows))

    # By content: neither by path nor by size, which is equal for these bitmaps.
    assert digest("a.bmp", "red") != digest("a.bmp") == digest("b.bmp")
    question = Question(2, [{"role": "user", "image": "/", "content": "a"}])
    with words.refused(ValueError, "row 2"):
        questions.digest_image_files([question])


def test_damaged_answers_are_not_continued(files, begun, out, never_loads):
    for changed, named in (
        (["no JSON\n", *begun], ":1 is not an answer"),
        ([begun[0].replace('"row": 1', '"row": 9')], ":1 is not an answer"),
        ([*begun, begun[0]], ":7 is not an answer to a row of the data, or a second answer"),
    ):
        out.write_text("".join(changed))
        with pytest.raises(ValueError, match=named):
            answer_file(request(files), out)


@pytest.mark.usefixtures("answers_at_once")
def test_other_files_are_replaced_only_when_told_so(files, out, words):
    out.write_text("mine")
    with words.refused(ValueError, str(out)):
        answer_file(request(files), out)
    assert out.read_text() == "mine"
    answer_file(request(files), out, overwrite=True)
    assert [row["answer"] for row in rows_of(out)] == ["a"] * 6
    with words.refused(ValueError, "is a folder"):
        answer_file(request(files), out.parent)


def test_the_data_and_its_images_are_not_replaced_however_their_path_is_spelled(files, words):
    data = files.data
    for path in (data, Path(read_questions(data)[0].prompt[0]["image"])):
        before = path.read_bytes()
        with words.refused(ValueError, "is part of the data", files=files.model.parent):
            answer_file(request(files), path, overwrite=True)
        assert path.read_bytes() == before
    for spelled in (os.path.relpath(data), f"{data.parent}/../{data.parent.name}/{data.name}"):
        with pytest.raises(ValueError, match="is part of the data"):
            answer_file(request(files), Path(spelled), overwrite=True)


def test_what_is_to_be_replaced_stays_until_there_is_an_answer(
    files, begun, out, monkeypatch, words
):
    before = {path.name: path.read_bytes() for path in out.parent.iterdir()}

    def stopped(*_):
        yield from ()
        raise KeyboardInterrupt

    with words.refused(ValueError, "1,010", "1,024 positions"):
        answer_file(request(files, generation=Generation(max_new_tokens=1010)), out, True)
    monkeypatch.setattr(module, "generate_answers", stopped)
    with pytest.raises(KeyboardInterrupt):
        answer_file(request(files), out, overwrite=True)
    assert len(before) == 2
    assert {path.name: path.read_bytes() for path in out.parent.iterdir()} == before


def test_answers_lie_in_no_folder_that_is_read(files, referenced, tmp_path, never_loads, capsys):
    rows = tmp_path / "rows"
    (rows / "inner").mkdir(parents=True)
    shutil.copy(referenced, rows / "inner" / "a.jsonl")
    (tmp_path / "link").symlink_to("rows")
    model = Path(shutil.copytree(files.model, tmp_path / "model"))
    shutil.copytree(referenced.parent / "images", tmp_path / "images")
    arguments = [model, "--device", "cpu", "--data", rows, "--image-folder", tmp_path / "images"]

    def refused(command: str, out: Path, message: str) -> None:
        assert main([command, *map(str, arguments), "--out", str(out)]) == 1
        assert message in capsys.readouterr().err

    for inside in ("link/inner", "model", "rows/../images"):  # tests/test_paths.py has more
        place = tmp_path / inside / "new.jsonl"
        refused("answer", place, f"--out, {place}, lies in ")
        assert not place.exists()
    refused("evaluate", rows / "new", f"--out, {rows / 'new'}, lies in ")
    refused("evaluate", rows, f"--out is a folder of --data, {rows}")
    refused("evaluate", tmp_path, f"contains the model's folder, {model}")


@pytest.mark.usefixtures("answers_at_once")
def test_a_file_of_settings_that_is_not_of_answers_is_not_replaced(files, answered, out, words):
    settings, ours = out.with_name(SETTINGS), answered.with_name(SETTINGS).read_text()
    settings.symlink_to("elsewhere.json")
    with pytest.raises(ValueError, match="settings.json is a link to elsewhere.json"):
        answer_file(request(files), out)
    assert settings.is_symlink()
    settings.unlink()
    settings.write_text('{"mine": 1}')
    with words.refused(ValueError, str(settings)):
        answer_file(request(files), out)
    assert settings.read_text() == '{"mine": 1}' and not out.exists()
    # Ours, of other options, that a killed process has left, is.
    settings.write_text(json.dumps(json.loads(ours) | {"options": {}}))
    answer_file(request(files), out)
    assert settings.read_text() == ours


def test_two_processes_do_not_write_to_one_file(files, out, monkeypatch, words):
    def answers(*_):
        with words.refused(ValueError, str(out)):
            answer_file(request(files), out)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "generate_answers", answers)
    with pytest.raises(KeyboardInterrupt):
        answer_file(request(files), out)
    assert out.read_bytes() == b"" and list(out.parent.iterdir()) == [out]


def test_a_run_that_stops_says_how_to_go_on(files, answered, out, monkeypatch, capsys):
    def one_batch(*arguments):
        yield from list(generate_answers(*arguments))[:3]
        raise KeyboardInterrupt

    generate_answers = module.generate_answers
    options = [str(files.model), "--device", "cpu", "--max-new-tokens", "6"]
    answering = ["answer", *options, "--data", str(files.data), "--out", str(out)]
    monkeypatch.setattr(module, "generate_answers", one_batch)
    assert main(answering) == 130
    assert f"3 of 6 answers are in {out}; the same command" in capsys.readouterr().err
    monkeypatch.setattr(module, "generate_answers", generate_answers)
    assert main(answering) == 0 and out.read_text() == answered.read_text()


@pytest.mark.parametrize(
    "arguments",
    ["--weights 4bit", "--top-p 2.0", "--revision main", "--format llama", "--image-folder none"],
)
def test_a_mistake_is_told_and_nothing_is_written(files, out, refused, monkeypatch, arguments):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ["answer", files.model, "--data", files.data, "--device", "cpu", "--out", out]
    named = "has no revisions" if "revision" in arguments else arguments.replace(" 2.0", " is 2.0")
    refused([*command, *arguments.split()], named)
    assert not out.exists()


@pytest.mark.parametrize(
    ("key", "named"), [("image", "rows.jsonl:1: the image "), ("img", 'the key "img"')]
)
def test_a_row_that_cannot_be_asked_is_named(files, out, capsys, key, named):
    data, image = out.with_name("rows.jsonl"), out.with_name("broken.png")
    image.write_bytes(b"\x89PNG")
    message = {"role": "user", "content": "a", key: str(image)}
    data.write_text(json.dumps({"messages": [message], "source": "here"}) + "\n")
    command = ["answer", str(files.model), "--data", str(data), "--ignore", "source"]
    assert main([*command, "--device", "cpu", "--out", str(out)]) == 1
    assert named in capsys.readouterr().err
    assert not out.exists()


def test_a_row_that_leaves_no_room_is_named(files, answerer, words):
    """The longest row and its answer just fit; with one more token they do not."""
    [question] = read_questions(files.data)[2:3]
    length = answerer.encode([question.prompt])["input_ids"].shape[1]
    base = ModelSource(str(files.model))
    require_context_length(base, [question], max_new_tokens=1024 - length)
    with words.refused(ValueError, "line 3"):
        require_context_length(base, [question], max_new_tokens=1025 - length)
