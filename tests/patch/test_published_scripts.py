"""Calls of scripts for the published repository, which run unchanged under ``apply()``.

The scripts are the model card, the official command-line demo, ``glm4v_server.py``,
``finetune_vision.py`` and the model of VLMEvalKit. They run on the stand-in for that repository.
"""

import json
import math
from pathlib import Path
from threading import Thread

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import glm4v_patched
from tests.helpers.legacy_repository import (
    LEGACY_SPECIAL_TOKENS,
    NUM_RANKS,
    write_legacy_repository,
)
from tests.helpers.tiny import BOI, DATA, EOI, PAD

QUESTION = "What is in this image?"
# Before and after the published preprocessing.
PIXELS = load_file(DATA / "image_preprocess.safetensors")
IMAGE = Image.fromarray(PIXELS["in.image_uint8_hwc"].numpy())


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """The stand-in, with more end tokens, because the tiny model's answers would be long."""
    folder = tmp_path_factory.mktemp("scripts") / "glm-4v-9b"
    write_legacy_repository(folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] += range(0, NUM_RANKS, 8)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def applied():
    torch.manual_seed(0)  # for initial adapter weights, dropout and sampling
    with glm4v_patched.applied():
        yield


def published_ids(tokenizer, messages: list[dict]) -> list[int]:
    """Return the ids of a chat as the published tokenizer arranges them."""

    def special(*tokens: str) -> list[int]:
        return [NUM_RANKS + LEGACY_SPECIAL_TOKENS.index(token) for token in tokens]

    def plain(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = special("[gMASK]", "<sop>")
    for message in messages:
        ids += special(f"<|{message['role']}|>") + plain("\n")
        if message.get("image") is not None:
            ids += special("<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>")
        ids += plain(message["content"])
    return ids


def user(content: str, **rest) -> dict:
    return {"role": "user", "content": content, **rest}


def assistant(content: str, **rest) -> dict:
    return {"role": "assistant", "content": content, **rest}


class StopAtAny(StoppingCriteria):
    def __init__(self, model):
        self.stops = model.config.eos_token_id

    def __call__(self, input_ids, scores, **kwargs) -> bool:
        return any(input_ids[0][-1] == stop for stop in self.stops)


def stream(tokenizer, model, options: dict) -> str:
    streamer = TextIteratorStreamer(
        tokenizer=tokenizer, timeout=60, skip_prompt=True, skip_special_tokens=True
    )
    thread = Thread(target=model.generate, kwargs=options | {"streamer": streamer})
    thread.start()
    answer = "".join(streamer)
    thread.join()
    return answer


ASKED = [user(QUESTION, image=IMAGE)]
# The image is in the first question only, and gone in the second round.
LATER = [user(QUESTION), assistant("A cat."), user("Which shape is it?")]
TURNS = [user("Hello."), assistant("Hello, how are you?"), *ASKED]
ON_CPU = (AutoModelForCausalLM, {"low_cpu_mem_usage": True})
SPREAD = (AutoModel, {"device_map": "auto"})
SPECIAL = {"encode_special_tokens": True}
TOP_1 = {"max_length": 2500, "do_sample": True, "top_k": 1}
DEMO = {"max_new_tokens": 8, "do_sample": True, "top_p": 0.8, "temperature": 0.6}
DEMO |= {"repetition_penalty": 1.2}
SERVER = {"repetition_penalty": 1.0, "max_new_tokens": 8, "do_sample": False, "top_p": 0}
# For each script: options of the tokenizer, Auto class and options of the model, the chat, options
# of generate, and whether the answer is streamed.
CHATS = {
    "model card": ({}, ON_CPU, ASKED, TOP_1, False),
    "command line": (SPECIAL, SPREAD, ASKED, DEMO, True),
    "later": (SPECIAL | {"use_fast": False}, SPREAD, LATER, DEMO, True),
    "VLMEvalKit": ({}, ON_CPU, ASKED, {"max_length": 2048, "do_sample": False}, False),
    "server": (SPECIAL, SPREAD, TURNS, SERVER, True),
}


def test_chats_have_the_published_ids_and_images_and_an_answer(published):
    generated = {}
    for name, (tokenizer_options, loader, messages, options, streamed) in CHATS.items():
        auto, model_options = loader
        tokenizer = AutoTokenizer.from_pretrained(
            published, trust_remote_code=True, **tokenizer_options
        )
        model = auto.from_pretrained(
            published, torch_dtype=torch.bfloat16, trust_remote_code=True, **model_options
        )
        assert all(type(one).__module__.startswith("glm4v_patched.") for one in (tokenizer, model))
        model = model.to("cpu").eval()
        inputs = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_tensors="pt",
            return_dict=True,
        ).to(next(model.parameters()).device)
        options = {**inputs, **options}
        if streamed:
            stops = {"eos_token_id": [tokenizer.eos_token_id, *model.config.eos_token_id]}
            if name != "server":
                stops["stopping_criteria"] = StoppingCriteriaList([StopAtAny(model)])
            answer = stream(tokenizer, model, options | stops)
        else:
            with torch.no_grad():
                generated[name] = model.generate(**options)[:, inputs["input_ids"].shape[1] :]
            answer = tokenizer.decode(generated[name][0])
        assert answer.strip(), name
        if messages is not LATER:
            assert torch.equal(inputs.pop("images")[0], PIXELS["out.image_size_56"]), name
        assistant_id = tokenizer.convert_tokens_to_ids("<|assistant|>")
        ids = [*published_ids(tokenizer, messages), assistant_id]
        expected = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        expected["position_ids"] = [*range(len(ids))]
        assert {value.dtype for value in inputs.values()} == {torch.int64}
        assert {n: value[0].tolist() for n, value in inputs.items()} == expected, name
    assert published_ids(tokenizer, ASKED)[4:7] == [BOI, PAD, EOI]
    assert 1 < generated["model card"].shape[1] < 50  # it ended
    assert torch.equal(generated["model card"], generated["VLMEvalKit"])


def rows_to_train(tokenizer, conversations) -> list[dict]:
    """Encode as the script does: each message as a separate chat, without its first two ids."""
    prefix = tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    rows = []
    for conversation in conversations:
        ids, mask, labels, images = list(prefix), [1, 1], [-100, -100], []
        for message in conversation:
            encoded = tokenizer.apply_chat_template(
                [message], tokenize=True, return_dict=True, padding=True
            )
            new = encoded["input_ids"][0][2:]
            ids += new
            mask += encoded["attention_mask"][0][2:]
            labels += new if message["role"] == "assistant" else [-100] * len(new)
            if message.get("image"):
                images.append(encoded["images"])
        row = {"input_ids": [*ids, end], "attention_mask": [*mask, 1], "labels": [*labels, -100]}
        row["position_ids"] = [*range(len(ids) + 1)]
        rows.append(row | {"images": images[0][0].tolist()})  # as in a table of `datasets`
    return rows


def test_the_vision_finetuning_script(published, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(
        published, padding_side="left", trust_remote_code=True
    )
    # Earlier versions of the script also pass ``empty_init=False``.
    options = {"trust_remote_code": True, "empty_init": False, "use_cache": False}
    model = AutoModelForCausalLM.from_pretrained(published, torch_dtype=torch.bfloat16, **options)
    lora = {"r": 8, "lora_alpha": 32, "lora_dropout": 0.1, "target_modules": ["query_key_value"]}
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    # Text samples get a black image; tables have None where a row has no such key.
    black = Image.new("L", (224, 224), 0).convert("RGB")
    answers = {"A red circle.": IMAGE, "Nothing, and a longer answer.": black}
    conversations = [
        [user(QUESTION, image=image), assistant(answer, image=None)]
        for answer, image in answers.items()
    ]
    rows = rows_to_train(tokenizer, conversations)
    assert torch.equal(torch.tensor(rows[0]["images"]), PIXELS["out.image_size_56"])
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    expected = [[*published_ids(tokenizer, messages), end] for messages in conversations]
    assert [row["input_ids"] for row in rows] == expected

    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    collator = DataCollatorForSeq2Seq(tokenizer=tokenizer, padding="longest", return_tensors="pt")
    batch = collator([dict(row) for row in rows])
    length = max(map(len, expected))
    for row, mask, positions in zip(
        expected, batch["attention_mask"].tolist(), batch["position_ids"].tolist(), strict=True
    ):
        padding = [0] * (length - len(row))
        assert mask == padding + [1] * len(row)
        assert positions == padding + [*range(len(row))]
    options = {"max_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 2}
    options |= {"remove_unused_columns": False, "report_to": [], "save_strategy": "no"}
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options),
        data_collator=collator,
        train_dataset=Dataset.from_list(rows),
    )
    loss = trainer.train().training_loss
    assert math.isfinite(loss) and loss > 0
    moved = {name for name, value in model.named_parameters() if "lora_B" in name and value.any()}
    for tower in ("vision", "encoder"):
        assert any(f".{tower}." in name for name in moved), tower
