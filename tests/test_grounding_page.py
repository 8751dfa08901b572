"""What docs/grounding.md shows can be read, trained on and scored as it says."""

import json
from functools import partial

import pytest
import yaml
from PIL import Image

from glm4v_patched.data.boxes import BOX_FORMATS, ORDERS, UNITS
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.rows import DataSource, read_conversations
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.inference.grounding import BOX_METRICS, OPERATION_METRICS, find_operation
from tests.data.samples import turns, write_rows
from tests.helpers.pages import ROOT, blocks
from tests.helpers.recipes import LEAST

PAGE = ROOT / "docs" / "grounding.md"
THREE_FORMS, COGAGENT = blocks(PAGE, "json")
COCO, PROMPT = blocks(PAGE, "python")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (640, 200)).save("cat.png")
    Image.new("RGB", (64, 36)).save("screen.png")
    return tmp_path


def first_column(head: str) -> str:
    return PAGE.read_text().partition(f"\n| {head} |")[2].partition("\n\n")[0]


def test_the_tables_have_all_formats_and_scores():
    formats, scores = first_column("part of the value"), first_column("score")
    assert all(f"`{name}`" in formats for name in (*UNITS, *ORDERS))
    assert all(f"| `{name}` |" in scores for name in BOX_METRICS | OPERATION_METRICS)


def test_the_recipe_can_be_and_reaches_the_rows():
    (text,) = blocks(PAGE, "yaml")
    data = Recipe.from_values(LEAST | yaml.safe_load(text)).data
    assert [source.boxes for source in data.sources()] == ["pixels_xyxy"]
    for name in BOX_FORMATS:
        assert Recipe.from_values(LEAST | {"data": {"train": "a.jsonl", "boxes": name}})


@pytest.mark.parametrize("number", range(3))
def test_the_three_rows_are_the_same_sample(folder, number):
    row = THREE_FORMS.splitlines()[number]
    columns = {"question": "question", "answer": "bbox", "image": "file"} if number == 2 else None
    if number == 2:
        assert "{question: question, answer: bbox, image: file}" in PAGE.read_text()
    path = write_rows(folder / "rows.jsonl", row)
    expected = turns("Where is the cat?", "[[100,250,500,750]]", image=str(folder / "cat.png"))
    source = DataSource(str(path), boxes="pixels_xyxy", columns=columns)
    assert read_conversations(source) == [expected]


def test_coco_becomes_a_question_for_each_image_and_category(folder):
    item = {"image_id": 7, "category_id": 3}
    coco = {
        "images": [{"id": 7, "file_name": "cat.png", "width": 640, "height": 200}],
        "categories": [{"id": 3, "name": "cat"}, {"id": 4, "name": "dog"}],
        "annotations": [
            item | {"bbox": [64, 50, 256, 100]},
            item | {"category_id": 4, "bbox": [0, 0, 64.0, 20.0]},
            item | {"bbox": [320, 100, 320, 100]},
        ],
    }
    (folder / "instances_train2017.json").write_text(json.dumps(coco))
    exec(compile(COCO, PAGE.name, "exec"), {})
    cats, dogs = read_conversations(DataSource("rows.jsonl", boxes="pixels_xywh"))
    image = str(folder / "cat.png")
    answer = "[[100,250,500,750], [500,500,999,999]]"
    assert cats == turns("Where is each cat?", answer, image=image)
    assert dogs == turns("Where is each dog?", "[[000,000,100,100]]", image=image)


def test_the_prompt_is_the_one_of_the_row_and_the_end_of_its_answer_is_supervised(
    folder, processor
):
    names: dict = {}
    exec(compile(PROMPT, PAGE.name, "exec"), names)
    (messages,) = read_conversations(write_rows(folder / "rows.jsonl", COGAGENT.strip()))
    prompt, answer = messages[0]["content"], messages[1]["content"]
    assert prompt == names["make_prompt"]("Send the form", "WIN")
    steps = [("CLICK(box=[[1,2,3,4]])", "Click."), ("END()", "Done.")]
    later = names["make_prompt"]("Send the form", "WIN", steps)
    assert "steps: \n0. CLICK(box=[[1,2,3,4]])\tClick.\n1. END()\tDone.\n(Platform: WIN)" in later

    collator = ConversationCollator(processor)
    batch = collator([messages])
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    decode = partial(processor.tokenizer.decode, spaces_between_special_tokens=False)
    assert decode(labels[labels != -100]).strip() == f"{answer}<|endoftext|>"
    assert f"{prompt}<|assistant|>" in decode(ids) and labels[-1] == collator.end_id

    operation = find_operation(answer)
    assert operation.name == "CLICK" and len(operation.boxes) == 1
    assert operation.arguments == {"element_type": "Button", "element_info": "Send"}
