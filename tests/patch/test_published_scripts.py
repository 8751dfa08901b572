"""People's scripts for the published repository run unchanged: see published_calls.py.

Once, in a process that calls ``apply()``, on the stand-in for that repository.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import glm4v_patched
from tests.helpers.fresh_process import run_without_package
from tests.helpers.legacy_repository import NUM_RANKS, remote_code_under, write_legacy_repository
from tests.helpers.tiny import BOI, DATA, EOI, PAD, golden_case

CALLS = (Path(__file__).parent / "published_calls.py").read_text()
ROOT = Path(glm4v_patched.__file__).parents[1]
WITH_APPLY = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + (
    "import glm4v_patched; glm4v_patched.apply()\n"
)
QUESTION = "What is in this picture?"
# Before and after the published preprocessing.
PICTURE = load_file(DATA / "image_preprocess.safetensors")
RECORDED = "generate_image_single.fp32"


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """The stand-in, with more ids that end an answer: the tiny model's others are long."""
    folder = tmp_path_factory.mktemp("scripts") / "glm-4v-9b"
    write_legacy_repository(folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] += range(0, NUM_RANKS, 8)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def run(published) -> tuple[dict, dict]:
    """What the scripts got, and their pictures."""
    out = published.parent
    given = out / "given.safetensors"
    save_file(golden_case(RECORDED)[0] | {"picture": PICTURE["in.image_uint8_hwc"]}, given)
    run_without_package(WITH_APPLY + CALLS, out, str(published), str(out), str(given))
    return json.loads((out / "results.json").read_text()), load_file(out / "pixels.safetensors")


@pytest.fixture(scope="module")
def legacy_tokenizer(published, tmp_path_factory):
    with remote_code_under(tmp_path_factory.mktemp("modules")):
        yield AutoTokenizer.from_pretrained(published, trust_remote_code=True)


def legacy_ids(tokenizer, messages: list[dict]) -> list[int]:
    """The published tokenizer's, whose padding no transformers of today can call."""
    pieces = [tokenizer._encode_message(message) for message in messages]
    return tokenizer.get_prefix_tokens() + [token for piece in pieces for token in piece]


def user(content: str, **rest) -> dict:
    return {"role": "user", "content": content, **rest}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


def test_the_code_is_ours_and_pictures_and_answers_are_the_published_ones(run):
    results, pixels = run
    assert all(name.startswith("glm4v_patched.remote.") for name in results["classes"])
    for name in pixels:
        assert torch.equal(pixels[name][0], PICTURE["out.image_size_56"]), name
    assert pixels["finetune_vision"].shape == (2, 3, 56, 56)
    card = results["model_card"]
    assert card["inputs"]["input_ids"][0][4:7] == [BOI, PAD, EOI]
    assert 1 < len(card["new"][0]) < 50  # it ended
    assert card["new"] == results["vlm_eval_kit"]["new"]
    assert results["recorded"] == golden_case(RECORDED)[1]["sequences"].tolist()


CHATS = {
    **dict.fromkeys(("model_card", "command_line"), [user(QUESTION, image=1)]),
    "later": [user(QUESTION), assistant("A cat."), user("Which shape is it?")],
    "server": [user("Hello."), assistant("Hello, how are you?"), user(QUESTION, image=1)],
}


def test_chats_of_demos_have_the_published_ids_and_an_answer(run, legacy_tokenizer):
    speaks = legacy_tokenizer.convert_tokens_to_ids("<|assistant|>")
    for name, messages in CHATS.items():
        ids = [*legacy_ids(legacy_tokenizer, messages), speaks]
        inputs = {"attention_mask": [[1] * len(ids)], "position_ids": [[*range(len(ids))]]}
        assert run[0][name]["inputs"] == {"input_ids": [ids], **inputs}, name
        assert run[0][name]["answer"].strip(), name


def test_the_vision_finetuning_script(run, legacy_tokenizer):
    script = run[0]["finetune_vision"]
    ends = legacy_tokenizer.convert_tokens_to_ids("<|user|>")
    answers = ["A red circle.", "Nothing, and a longer answer."]
    wanted = [
        [*legacy_ids(legacy_tokenizer, [user(QUESTION, image=1), assistant(answer)]), ends]
        for answer in answers
    ]
    assert script["rows"] == wanted
    length = max(map(len, wanted))
    for row, mask, positions in zip(wanted, script["mask"], script["positions"], strict=True):
        fill = [0] * (length - len(row))
        assert mask == fill + [1] * len(row)
        assert positions == fill + [*range(len(row))]
    assert math.isfinite(script["loss"]) and script["loss"] > 0
    assert script["moved"] == [True, True], "the tower and the language model learned"
