"""lmms-eval's backend for models of transformers, which it calls ``huggingface``."""

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoProcessor

from tests.frameworks import drawn_task

QUESTIONS = ["What is it?", "Which shape do you see in this image?"]
TOKENS = 6


def test_lmms_eval_gives_the_answers_of_the_model(tmp_path):
    pytest.importorskip("lmms_eval", reason="nox -f tests/noxfile.py -s clients")
    from lmms_eval.api.instance import Instance
    from lmms_eval.models.chat.huggingface import Huggingface

    models = drawn_task.Models(tmp_path)
    folder = models("random")
    images = [Image.open(question["image"]) for question, _ in models.conversations[:2]]
    on_cpu = {"device": "cpu", "device_map": "cpu"}
    backend = Huggingface(str(folder), batch_size=2, trust_remote_code=True, **on_cpu)
    backend.task_dict = {"task": {"test": [*zip(QUESTIONS, images, strict=True)]}}

    def messages_of(row) -> list[dict]:
        parts = [{"type": "image", "url": row[1]}, {"type": "text", "text": row[0]}]
        return [{"role": "user", "content": parts}]

    options = {"max_new_tokens": TOKENS, "temperature": 0}
    requests = [
        Instance(
            *("generate_until", ("", messages_of, options, number, "task", "test"), 0),
            metadata={"task": "task", "doc_id": number, "repeats": 1},
        )
        for number in range(2)
    ]
    answers = [reply.text for reply in backend.generate_until(requests)]

    load = {"trust_remote_code": True}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **load).eval()
    processor = AutoProcessor.from_pretrained(folder, **load)
    chats = [
        [{"role": "user", "image": i, "content": q}] for q, i in zip(QUESTIONS, images, strict=True)
    ]
    inputs = processor.apply_chat_template(
        chats,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        padding=True,
        return_tensors="pt",
    )
    ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    new = ids[:, inputs["input_ids"].shape[1] :]
    expected = processor.batch_decode(
        new, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert answers == expected and answers[0] != answers[1]
