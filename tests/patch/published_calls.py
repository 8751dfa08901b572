"""Calls that people's scripts make of the published repository, in the order in which they do.

Run in a process of its own with a folder to load and one to write to. Which scripts: the model
card's, the official command-line demo, ``glm4v_server.py``, ``finetune_vision.py`` and the model of
VLMEvalKit. What each gets goes to ``results.json`` and ``pixels.safetensors``.
"""

import json
import sys
from threading import Thread

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
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

folder, out, given = sys.argv[1:]
torch.set_num_threads(1)
QUESTION = "What is in this picture?"
images = load_file(given)
PICTURE = Image.fromarray(images.pop("picture").numpy())
results, pixels = {}, {}


def user(content: str, **rest) -> dict:
    return {"role": "user", "content": content, **rest}


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


def stopping_criteria(model) -> dict:
    criteria = StoppingCriteriaList([StopAtAny(model)])
    return {"stopping_criteria": criteria, "eos_token_id": model.config.eos_token_id}


CAT = {"role": "assistant", "content": "A cat."}
HELLO = {"role": "assistant", "content": "Hello, how are you?"}
ASKED = [user(QUESTION, image=PICTURE)]
# The picture is in the first question only, and gone in the second round.
LATER = [user(QUESTION), CAT, user("Which shape is it?")]
ON_CPU = (AutoModelForCausalLM, {"low_cpu_mem_usage": True})
SPREAD = (AutoModel, {"device_map": "auto"})
SPECIAL = {"encode_special_tokens": True}
TOP_1 = {"max_length": 2500, "do_sample": True, "top_k": 1}
DEMO = {"max_new_tokens": 8, "do_sample": True, "top_p": 0.8, "temperature": 0.6}
DEMO |= {"repetition_penalty": 1.2}
SERVER = {"repetition_penalty": 1.0, "max_new_tokens": 8, "do_sample": False, "top_p": 0}
TURNS = [user("Hello."), HELLO, user(QUESTION, image=PICTURE)]
# Of each: what the tokenizer and the model are loaded with, the chat, what is passed to generate,
# and whether the answer is streamed.
CHATS = {
    "model_card": ({}, ON_CPU, ASKED, TOP_1, False),
    "command_line": (SPECIAL, SPREAD, ASKED, DEMO, True),
    "later": (SPECIAL | {"use_fast": False}, SPREAD, LATER, DEMO, True),
    "vlm_eval_kit": ({}, ON_CPU, ASKED, {"max_length": 2048, "do_sample": False}, False),
    "server": (SPECIAL, SPREAD, TURNS, SERVER, True),
}


def chats() -> None:
    for name, (of_tokenizer, (auto, of_model), messages, options, streamed) in CHATS.items():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, **of_tokenizer)
        model = auto.from_pretrained(
            folder, torch_dtype=torch.bfloat16, trust_remote_code=True, **of_model
        )
        model = model.to("cpu").eval()
        inputs = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_tensors="pt",
            return_dict=True,
        )
        inputs = inputs.to(next(model.parameters()).device)
        torch.manual_seed(0)
        options = {**inputs, **options}
        if options.get("repetition_penalty") == 1.2:
            options |= stopping_criteria(model)
        if streamed:
            told = {"answer": stream(tokenizer, model, options)}
        else:
            with torch.no_grad():
                new = model.generate(**options)[:, inputs["input_ids"].shape[1] :]
            told = {"new": new.tolist(), "answer": tokenizer.decode(new[0])}
        if "images" in inputs:
            pixels[name] = inputs.pop("images")
        assert {value.dtype for value in inputs.values()} == {torch.int64}
        results[name] = {"inputs": {n: value.tolist() for n, value in inputs.items()}, **told}


def recorded() -> None:
    """What the published code was recorded to generate."""
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, torch_dtype=torch.float32)
    inputs = {name: images[name] for name in ("input_ids", "attention_mask", "images")}
    options = {"max_length": inputs["input_ids"].shape[1] + 8, "do_sample": True, "top_k": 1}
    results["recorded"] = model.eval().generate(**inputs, **options).tolist()


def rows_to_train(tokenizer, conversations) -> list[dict]:
    """Message by message, each as a chat of its own without its first two ids."""
    prefix = tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    rows = []
    for conversation in conversations:
        ids, mask, labels, found = list(prefix), [1, 1], [-100, -100], []
        for message in conversation:
            encoded = tokenizer.apply_chat_template(
                [message], tokenize=True, return_dict=True, padding=True
            )
            new = encoded["input_ids"][0][2:]
            ids += new
            mask += encoded["attention_mask"][0][2:]
            labels += new if message["role"] == "assistant" else [-100] * len(new)
            if message.get("image"):
                found.append(encoded["images"])
        rows.append(
            {
                "input_ids": [*ids, end],
                "attention_mask": [*mask, 1],
                "position_ids": [*range(len(ids) + 1)],
                "labels": [*labels, -100],
                "images": found[0][0].tolist(),  # as a table of `datasets` gives it back
            }
        )
    return rows


def finetune_vision() -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=True)
    # Earlier versions of the script also pass ``empty_init=False``.
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        trust_remote_code=True,
        empty_init=False,
        use_cache=False,
        torch_dtype=torch.bfloat16,
    )
    lora = {"r": 8, "lora_alpha": 32, "lora_dropout": 0.1, "target_modules": ["query_key_value"]}
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    # Rows of text get a black picture; tables have None where a row lacks a key.
    first, second = "A red circle.", "Nothing, and a longer answer."
    black = Image.new("L", (224, 224), 0).convert("RGB")
    conversations = [
        [
            {"role": "user", "content": QUESTION, "image": picture},
            {"role": "assistant", "content": answer, "image": None},
        ]
        for picture, answer in [(PICTURE, first), (black, second)]
    ]
    rows = rows_to_train(tokenizer, conversations)
    results["finetune_vision"] = {"rows": [row["input_ids"] for row in rows]}
    pixels["finetune_vision"] = torch.tensor([row["images"] for row in rows])

    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    options = Seq2SeqTrainingArguments(
        output_dir=f"{out}/finetune_vision",
        max_steps=2,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    collator = DataCollatorForSeq2Seq(tokenizer=tokenizer, padding="longest", return_tensors="pt")
    batch = collator([dict(row) for row in rows])
    results["finetune_vision"]["positions"] = batch["position_ids"].tolist()
    results["finetune_vision"]["mask"] = batch["attention_mask"].tolist()
    trainer = Seq2SeqTrainer(
        model=model,
        args=options,
        data_collator=collator,
        train_dataset=Dataset.from_list(rows),
    )
    loss = trainer.train().training_loss
    moved = {name for name, value in model.named_parameters() if "lora_B" in name and value.any()}
    results["finetune_vision"] |= {
        "loss": loss,
        "moved": [any(f".{side}." in name for name in moved) for side in ("vision", "encoder")],
    }


def classes() -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    made = AutoModelForCausalLM.from_config(model.config, trust_remote_code=True, empty_init=False)
    results["classes"] = [type(x).__module__ for x in (model, tokenizer, made)]


for script in (chats, recorded, finetune_vision, classes):
    torch.manual_seed(0)  # for adapters' first weights, dropout and what is sampled
    script()
with open(f"{out}/results.json", "w") as file:
    json.dump(results, file)
save_file({name: value.contiguous() for name, value in pixels.items()}, f"{out}/pixels.safetensors")
