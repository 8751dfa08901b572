"""People's scripts for the published repository run unchanged: see published_calls.py.

Once in a process that calls ``apply()``, on the stand-in for that repository, and once in a process
without this package, on the folder to which the first one saved model and tokenizer alone.
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
WITHOUT_PACKAGE = "import sys; sys.modules['glm4v_patched'] = None\n"
QUESTION = "What is in this picture?"
END = "<|endoftext|>"
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
def picture() -> dict[str, torch.Tensor]:
    """A picture before and after the published preprocessing."""
    return load_file(DATA / "image_preprocess.safetensors")


@pytest.fixture(scope="module")
def runs(published, picture) -> dict[str, tuple[dict, dict]]:
    """What the scripts got, and their pictures, either way."""
    given = published.parent / "given.safetensors"
    save_file(golden_case(RECORDED)[0] | {"picture": picture["in.image_uint8_hwc"]}, given)
    found = {}
    for way, head, folder in [
        ("applied", WITH_APPLY, published),
        ("saved", WITHOUT_PACKAGE, published.parent / "applied" / "saved"),
    ]:
        out = published.parent / way
        out.mkdir()
        run_without_package(head + CALLS, out, str(folder), str(out), str(given))
        results = json.loads((out / "results.json").read_text())
        found[way] = results, load_file(out / "pixels.safetensors")
    return found


@pytest.fixture(params=["applied", "saved"])
def run(request, runs) -> tuple[dict, dict]:
    return runs[request.param]


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


def check_inputs(inputs: dict, ids: list[int]) -> None:
    assert inputs == {
        "input_ids": [ids],
        "attention_mask": [[1] * len(ids)],
        "position_ids": [[*range(len(ids))]],
    }


def test_the_code_is_ours(runs):
    modules = runs["applied"][0]["classes"]
    assert all(name.startswith("glm4v_patched.remote.") for name in modules), modules
    modules = runs["saved"][0]["classes"]
    assert all(name.startswith("transformers_modules.") for name in modules), modules


def test_pictures_are_those_of_the_published_code(run, picture):
    _, pixels = run
    wanted = picture["out.image_size_56"][None]
    for name in pixels.keys() - {"finetune_vision"}:
        assert torch.equal(pixels[name], wanted), name
    assert torch.equal(pixels["finetune_vision"][:1], wanted)
    assert pixels["finetune_vision"].shape == (2, 3, 56, 56)


CHATS = {
    **dict.fromkeys(("model_card", "command_line", "inference"), [user(QUESTION, image=1)]),
    "later": [user(QUESTION), assistant("A cat."), user("Which shape is it?")],
    "web": [assistant(QUESTION), user("", image=1)],
    "server": [user("Hello."), assistant("Hello, how are you?"), user(QUESTION, image=1)],
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_of_demos_have_the_published_ids_and_an_answer(name, run, legacy_tokenizer):
    told = run[0][name]
    speaks = legacy_tokenizer.convert_tokens_to_ids("<|assistant|>")
    check_inputs(told["inputs"], [*legacy_ids(legacy_tokenizer, CHATS[name]), speaks])
    assert told["answer"].strip()


def test_answers_are_the_same_whichever_way_they_are_asked_for(run, runs):
    results, _ = run
    card = results["model_card"]
    assert card["inputs"]["input_ids"][0][4:7] == [BOI, PAD, EOI]
    # An answer that ended, the same as through the processor.
    assert 1 < len(card["new"][0]) < 50
    assert card["new"] == runs["applied"][0]["processor"]["new"] == results["vlm_eval_kit"]["new"]
    assert results["server"]["answer"] == results["server_sampled"]["answer"], "top_k is 1"
    assert results["recorded"] == golden_case(RECORDED)[1]["sequences"].tolist()


@pytest.mark.parametrize("name", ["mmtrust", "mmtrust_text"])
def test_mmtrust_strips_no_letters_off_an_answer(name, run):
    """It strips those of the last special token; what is left depends on the space before that."""
    whole = run[0][name]["answer"]
    text, end, nothing = whole.rpartition(" <|endoftext|>")
    assert end and not nothing and text.strip() == whole.rstrip(END).strip()


def test_nodes_of_comfyui(run):
    for whole, answer in run[0]["comfyui"]:
        assert f"Answer briefly. {QUESTION}" in whole and answer
        assert QUESTION not in answer


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


def test_self_llms_scripts(run, legacy_tokenizer):
    script = run[0]["self_llm"]
    speaks = legacy_tokenizer.convert_tokens_to_ids("<|assistant|>")
    messages = [{"role": "system", "content": "Answer."}, user(QUESTION)]
    check_inputs(script["inputs"], [*legacy_ids(legacy_tokenizer, messages), speaks])
    assert script["text"] == f"[gMASK]<sop><|system|>\nAnswer.<|user|>\n{QUESTION}<|assistant|>"
    for row in script["rows"]:
        assert row[:2] == legacy_tokenizer.get_prefix_tokens() and row.count(speaks) == 1
    assert math.isfinite(script["loss"]) and script["loss"] > 0


def test_both_ways_agree(runs):
    """Losses and sampled answers too: one seed, the same numbers."""
    (applied, pictures), (saved, same_pictures) = runs["applied"], runs["saved"]
    alone = {"classes", "processor"}  # not ours everywhere; not in a folder with a tokenizer alone
    assert applied.keys() - alone == saved.keys() - alone
    assert {"vlabench", "self_llm", "finetune_vision", "server"} <= saved.keys()
    for name in applied.keys() - alone:
        assert applied[name] == saved[name], name
    assert all(torch.equal(value, pictures[name]) for name, value in same_pictures.items())
