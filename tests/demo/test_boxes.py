"""The demo's task with boxes: a tiny model learns to point."""

import json

import pytest
from PIL import Image

from glm4v_patched.cli import main
from glm4v_patched.data.boxes import find_boxes
from glm4v_patched.data.rows import DataSource, read_conversations, write_conversations
from glm4v_patched.demo.images import draw_data_set
from tests.helpers.pages import ROOT, commands
from tests.helpers.processes import on_the_cpu


def test_a_box_is_that_of_the_drawn_shape(tmp_path):
    """All shapes reach the four edges of their box, but for a pixel of rounding."""
    conversations = draw_data_set(tmp_path / "drawn", 40, seed=0, side=56, task="boxes")
    write_conversations(tmp_path / "rows.jsonl", conversations)
    rows = read_conversations(DataSource(str(tmp_path / "rows.jsonl"), boxes="pixels_xyxy"))
    for question, answer in rows:
        (box,) = find_boxes(answer["content"])
        image = Image.open(question["image"]).convert("L")
        shape_edges = image.point(lambda value: 255 * (value > 45)).getbbox()
        assert [edge * 1000 / 56 for edge in shape_edges] == pytest.approx([*box], abs=1500 / 56)


@pytest.mark.slow
def test_a_model_learns_to_point(tmp_path):
    page = ROOT / "docs" / "grounding.md"
    (command,) = (text for text in commands(page) if text.startswith("glm4v-patched demo"))
    words = command.replace("demo_boxes", str(tmp_path / "out")).split()
    with on_the_cpu(900):
        assert main(words[1:]) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["iou_before"] <= 0.1
    assert metrics["iou_after"] >= 0.7
    assert metrics["iou_swapped"] <= 0.4
