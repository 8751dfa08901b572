"""Calls that people's scripts make of the published repository, in the order in which they do.

Run in a process of its own with a folder to load and one to write to. Which scripts: the model
card's, the official command-line and web demos', ``inference.py``, ``glm4v_server.py`` and
``finetune_vision.py``, Self-LLM's on GLM-4, the models of VLMEvalKit, MMTrustEval and VLABench, and
ComfyUI's nodes. What each gets goes to ``results.json`` and ``pixels.safetensors``.
"""

import json
import sys
from threading import Thread

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    Trainer,
    TrainingArguments,
    set_seed,
)

folder, out, given = sys.argv[1:]
torch.set_num_threads(1)
QUESTION = "What is in this picture?"
images = load_file(given)
PICTURE = Image.fromarray(images.pop("picture").numpy())
results, pixels = {}, {}


def chat_of(tokenizer, messages: list[dict]):
    """Every one of the scripts takes its chats so."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_tensors="pt", return_dict=True
    )


def ids_of(inputs) -> dict:
    """All but the pictures, as lists; notes shapes and dtypes."""
    assert {value.dtype for name, value in inputs.items() if name != "images"} == {torch.int64}
    return {name: value.tolist() for name, value in inputs.items() if name != "images"}


def model_card() -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    inputs = chat_of(tokenizer, [{"role": "user", "image": PICTURE, "content": QUESTION}])
    inputs = inputs.to("cpu")
    model = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.bfloat16, low_cpu_mem_usage=True, trust_remote_code=True
    )
    model = model.to("cpu").eval()
    with torch.no_grad():
        outputs = model.generate(**inputs, max_length=2500, do_sample=True, top_k=1)
        outputs = outputs[:, inputs["input_ids"].shape[1] :]
        answer = tokenizer.decode(outputs[0])
    pixels["model_card"] = inputs["images"]
    results["model_card"] = {"inputs": ids_of(inputs), "new": outputs.tolist(), "answer": answer}

    # The documented way, for comparison. A folder without a processor gives its tokenizer.
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    if type(processor) is type(tokenizer):
        return
    grown = chat_of(processor, [{"role": "user", "image": PICTURE, "content": QUESTION}])
    assert set(grown) == {"input_ids", "attention_mask", "pixel_values"}
    new = model.generate(**grown, max_new_tokens=outputs.shape[1], do_sample=False)
    results["processor"] = {"new": new[:, grown["input_ids"].shape[1] :].tolist()}
    pixels["processor"] = grown["pixel_values"]


def recorded() -> None:
    """What the published code was recorded to generate."""
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, torch_dtype=torch.float32)
    inputs = {name: images[name] for name in ("input_ids", "attention_mask", "images")}
    options = {"max_length": inputs["input_ids"].shape[1] + 8, "do_sample": True, "top_k": 1}
    results["recorded"] = model.eval().generate(**inputs, **options).tolist()


class StopAtAny(StoppingCriteria):
    def __init__(self, model):
        self.stops = model.config.eos_token_id

    def __call__(self, input_ids, scores, **kwargs) -> bool:
        return any(input_ids[0][-1] == stop for stop in self.stops)


def load_for_demos():
    tokenizer = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=True, encode_special_tokens=True
    )
    model = AutoModel.from_pretrained(
        folder, trust_remote_code=True, device_map="auto", torch_dtype=torch.bfloat16
    )
    return tokenizer, model.eval()


def stream(tokenizer, model, messages) -> tuple[dict, str]:
    inputs = chat_of(tokenizer, messages).to(next(model.parameters()).device)
    streamer = TextIteratorStreamer(
        tokenizer=tokenizer, timeout=60, skip_prompt=True, skip_special_tokens=True
    )
    torch.manual_seed(0)
    options = {
        **inputs,
        "streamer": streamer,
        "max_new_tokens": 8,
        "do_sample": True,
        "top_p": 0.8,
        "temperature": 0.6,
        "stopping_criteria": StoppingCriteriaList([StopAtAny(model)]),
        "repetition_penalty": 1.2,
        "eos_token_id": model.config.eos_token_id,
    }
    thread = Thread(target=model.generate, kwargs=options)
    thread.start()
    answer = "".join(streamer)
    thread.join()
    return inputs, answer.strip()


def command_line_demo() -> None:
    tokenizer, model = load_for_demos()
    first = {"role": "user", "content": QUESTION, "image": PICTURE}
    inputs, answer = stream(tokenizer, model, [first])
    pixels["command_line"] = inputs["images"]
    # The picture is in the first question only, and gone in the second round.
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Which shape is it?"},
    ]
    later, _ = stream(tokenizer, model, turns)
    assert "images" not in later
    results["command_line"] = {
        "inputs": ids_of(inputs),
        "answer": answer,
        "later": later["input_ids"].tolist(),
    }


def web_demo() -> None:
    tokenizer, model = load_for_demos()
    messages = [
        {"role": "assistant", "content": QUESTION},
        {"role": "user", "content": "", "image": PICTURE},
    ]
    inputs, answer = stream(tokenizer, model, messages)
    pixels["web"] = inputs["images"]
    results["web"] = {"inputs": ids_of(inputs), "answer": answer}


def inference() -> None:
    tokenizer = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=True, encode_special_tokens=True, use_fast=False
    )
    model = AutoModel.from_pretrained(
        folder, trust_remote_code=True, device_map="auto", torch_dtype=torch.bfloat16
    )
    inputs = chat_of(tokenizer, [{"role": "user", "content": QUESTION, "image": PICTURE}]).to(
        model.device
    )
    outputs = model.generate(
        **inputs,
        max_new_tokens=8,
        do_sample=True,
        top_p=0.8,
        temperature=0.8,
        repetition_penalty=1.2,
        eos_token_id=model.config.eos_token_id,
    )
    start = len(inputs["input_ids"][0])
    results["inference"] = {
        "inputs": ids_of(inputs),
        "answer": tokenizer.decode(outputs[0][start:], skip_special_tokens=True).strip(),
    }


def evaluators() -> None:
    """VLMEvalKit's, MMTrustEval's and VLABench's models of one question and one picture."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    options = {"torch_dtype": torch.bfloat16, "trust_remote_code": True}
    model = AutoModelForCausalLM.from_pretrained(folder, low_cpu_mem_usage=True, **options)
    model = model.to("cpu").eval()

    def answer(picture, question, model=model, **options) -> str:
        inputs = chat_of(tokenizer, [{"role": "user", "image": picture, "content": question}])
        with torch.no_grad():
            drawn = model.generate(**inputs.to("cpu"), **options)
        return tokenizer.decode(drawn[:, inputs["input_ids"].shape[1] :][0])

    end = "<|endoftext|>"
    vlm_eval_kit = answer(PICTURE, QUESTION, max_length=2048, do_sample=False).split(end)[0]

    # MMTrustEval strips the letters of the last special token off the answer's end; what is left
    # depends on the space that decoding puts before it. Questions of text, too.
    ends = {"eos_token_id": tokenizer.eos_token_id, "forced_eos_token_id": tokenizer.eos_token_id}
    limits = {"max_new_tokens": 6, "do_sample": False, **ends}
    whole = answer(PICTURE, QUESTION, **limits)
    asked = chat_of(tokenizer, [{"role": "user", "content": QUESTION}]).to(model.device)
    of_text = tokenizer.decode(
        model.generate(**asked, **limits)[:, asked["input_ids"].shape[1] :][0]
    )

    # VLABench puts its pictures side by side, and its question in several lines.
    wide = Image.new("RGB", (2 * PICTURE.width, PICTURE.height))
    for i in range(2):
        wide.paste(PICTURE, (i * PICTURE.width, 0))
    spread = AutoModelForCausalLM.from_pretrained(
        folder, low_cpu_mem_usage=True, device_map="auto", **options
    ).eval()
    drawing = {"max_length": 2500, "do_sample": True, "top_k": 1}
    results["evaluators"] = {
        "vlm_eval_kit": vlm_eval_kit,
        "mmtrust": [whole, whole.rstrip(end).strip(), of_text, of_text.rstrip(end).strip()],
        "vlabench": answer(wide, f"{QUESTION}\nWhich shape is it?\n", spread, **drawing),
    }


def comfyui() -> None:
    """The nodes hand over plain tensors, decode whole rows, and take the question out of them."""
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        device_map="auto",
        low_cpu_mem_usage=True,
        trust_remote_code=True,
        torch_dtype=torch.bfloat16,
    )
    model = model.to("cpu").eval()
    answers = []
    for rest in ({"image": PICTURE}, {}):
        message = {"role": "user", "content": f"Answer briefly. {QUESTION}", **rest}
        inputs = {k: v.to(model.device) for k, v in chat_of(tokenizer, [message]).items()}
        drawn = {"temperature": 0.1, "top_k": 40, "top_p": 0.7, "repetition_penalty": 1.1}
        with torch.no_grad():
            outputs = model.generate(**inputs, max_new_tokens=8, **drawn)
        text = tokenizer.decode(outputs[0], skip_special_tokens=True)
        answers.append([text, text.replace(message["content"], "").strip()])
    results["comfyui"] = answers


def server() -> None:
    """``glm4v_server.py`` between the request and the response: greedy and sampled, streamed."""
    tokenizer, model = load_for_demos()
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello, how are you?"},
        {"role": "user", "content": QUESTION, "image": PICTURE},
    ]
    inputs = chat_of(tokenizer, messages).to(next(model.parameters()).device)
    pixels["server"] = inputs["images"]
    texts = []
    for temperature in (0.0, 0.8):
        streamer = TextIteratorStreamer(
            tokenizer=tokenizer, timeout=60.0, skip_prompt=True, skip_special_tokens=True
        )
        options = {
            "repetition_penalty": 1.0,
            "max_new_tokens": 8,
            "do_sample": temperature > 1e-5,
            "top_p": 0.8 if temperature > 1e-5 else 0,
            "top_k": 1,
            "streamer": streamer,
            "eos_token_id": [tokenizer.eos_token_id, *model.config.eos_token_id],
        }
        if temperature > 1e-5:
            options["temperature"] = temperature
        thread = Thread(target=model.generate, kwargs={**inputs, **options})
        thread.start()
        texts.append("".join(streamer))
        thread.join()
        assert isinstance(tokenizer.encode(texts[-1]), list)
    results["server"] = {"inputs": ids_of(inputs), "texts": texts}


class PadsOutputs(DataCollatorForSeq2Seq):
    """The script's collator pads one more column by hand, and leaves the rest to its base."""

    def __call__(self, features, return_tensors=None):
        if "output_ids" in features[0]:
            length = max(len(feature["output_ids"]) for feature in features)
            for feature in features:
                missing = length - len(feature["output_ids"])
                feature["output_ids"] = (
                    feature["output_ids"] + [self.tokenizer.pad_token_id] * missing
                )
        return super().__call__(features, return_tensors)


class Generates(Seq2SeqTrainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **options):
        with torch.no_grad():
            wanted = inputs.pop("output_ids", None)
            del inputs["labels"]  # which the base's collator makes None
            loss, drawn, _ = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys, **options
            )
            return loss, drawn[:, inputs["input_ids"].shape[1] :], wanted


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


def rows_to_evaluate(tokenizer, conversations) -> list[dict]:
    speaks = tokenizer.convert_tokens_to_ids("<|assistant|>")
    rows = []
    for conversation in conversations:
        encoded = tokenizer.apply_chat_template(
            conversation, tokenize=True, return_dict=True, padding=True
        )
        ids, mask = encoded["input_ids"][0], encoded["attention_mask"][0]
        assert encoded["position_ids"][0] == [*range(len(ids))]
        cut = ids.index(speaks) + 1
        rows.append(
            {
                "input_ids": ids[:cut],
                "attention_mask": mask[:cut],
                "position_ids": [*range(cut)],
                "output_ids": ids[cut:],
                "images": encoded["images"][0].tolist(),
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
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=32,
        lora_dropout=0.1,
        target_modules=["query_key_value"],
    )
    model = get_peft_model(model, lora)
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
    held_out = rows_to_evaluate(tokenizer, conversations)
    results["finetune_vision"] = {"rows": [row["input_ids"] for row in rows]}
    pixels["finetune_vision"] = torch.tensor([row["images"] for row in rows])

    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    options = Seq2SeqTrainingArguments(
        output_dir=f"{out}/finetune_vision",
        max_steps=2,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        remove_unused_columns=False,
        predict_with_generate=True,
        generation_config=GenerationConfig(
            max_new_tokens=4,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=model.config.eos_token_id,
        ),
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    decoded = []

    def metrics(predictions):
        drawn, wanted = predictions
        for row in (*drawn, *wanted):
            row[row == -100] = tokenizer.pad_token_id
            decoded.append(tokenizer.decode(row).strip())
        return {"rows": len(drawn)}

    collator = PadsOutputs(tokenizer=tokenizer, padding="longest", return_tensors="pt")
    batch = collator([dict(row) for row in rows])
    results["finetune_vision"]["positions"] = batch["position_ids"].tolist()
    results["finetune_vision"]["mask"] = batch["attention_mask"].tolist()
    trainer = Generates(
        model=model,
        args=options,
        data_collator=collator,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(held_out),
        compute_metrics=metrics,
    )
    loss = trainer.train().training_loss
    assert trainer.evaluate()["eval_rows"] == len(decoded) / 2 == 2
    assert trainer.predict(trainer.eval_dataset).metrics["test_rows"] == 2
    moved = {name for name, value in model.named_parameters() if "lora_B" in name and value.any()}
    results["finetune_vision"] |= {
        "loss": loss,
        "evaluated": decoded,
        "moved": [any(f".{side}." in name for name in moved) for side in ("vision", "encoder")],
    }


def self_llm() -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=False, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", torch_dtype=torch.bfloat16, trust_remote_code=True
    )
    prompt = tokenizer(
        f"[gMASK]<sop><|system|>\nAnswer briefly.<|user|>\n{QUESTION}<|assistant|>\n",
        add_special_tokens=False,
    )
    rows = []
    for text in ("A cat.", "Two green triangles, please."):
        answer = tokenizer(text, add_special_tokens=False)
        end = [tokenizer.pad_token_id]
        rows.append(
            {
                "input_ids": prompt["input_ids"] + answer["input_ids"] + end,
                "attention_mask": prompt["attention_mask"] + answer["attention_mask"] + [1],
                "labels": [-100] * len(prompt["input_ids"]) + answer["input_ids"] + end,
            }
        )
    model.enable_input_require_grads()
    names = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=names,
        inference_mode=False,
        r=8,
        lora_alpha=32,
        lora_dropout=0.1,
    )
    trainer = Trainer(
        model=get_peft_model(model, lora),
        args=TrainingArguments(
            output_dir=f"{out}/self_llm",
            max_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            gradient_checkpointing=True,
            save_on_each_node=True,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer, padding=True),
    )
    loss = trainer.train().training_loss
    trainer.model.save_pretrained(f"{out}/lora")
    tokenizer.save_pretrained(f"{out}/lora")

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", torch_dtype=torch.bfloat16, trust_remote_code=True
    ).eval()
    model = PeftModel.from_pretrained(model, model_id=f"{out}/lora")
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": QUESTION}]
    inputs = chat_of(tokenizer, messages).to("cpu")
    with torch.no_grad():
        outputs = model.generate(**inputs, max_length=2500, do_sample=True, top_k=1)
        outputs = outputs[:, inputs["input_ids"].shape[1] :]
        answer = tokenizer.decode(outputs[0], skip_special_tokens=True)

    # Its page for the browser writes the chat as text first.
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    written = tokenizer([text], return_tensors="pt").to("cpu")
    drawn = model.generate(written.input_ids, max_new_tokens=4)
    cut = [row[len(ids) :] for ids, row in zip(written.input_ids, drawn, strict=True)]
    results["self_llm"] = {
        "loss": loss,
        "answers": [answer, *tokenizer.batch_decode(cut, skip_special_tokens=True)],
        "rows": [row["input_ids"] for row in rows],
        "inputs": ids_of(inputs),
        "text": text,
    }


def save_as_scripts_do() -> None:
    """Model and tokenizer, no processor."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.save_pretrained(f"{out}/saved")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    tokenizer.save_pretrained(f"{out}/saved")
    config = AutoModelForCausalLM.from_config(
        model.config, trust_remote_code=True, empty_init=False
    )
    results["classes"] = [f"{type(x).__module__}" for x in (model, tokenizer, config)]


for script in (
    model_card,
    recorded,
    command_line_demo,
    web_demo,
    inference,
    evaluators,
    comfyui,
    server,
    finetune_vision,
    self_llm,
    save_as_scripts_do,
):
    torch.manual_seed(0)  # for adapters' first weights, dropout and what is sampled
    script()
with open(f"{out}/results.json", "w") as file:
    json.dump(results, file)
save_file({name: value.contiguous() for name, value in pixels.items()}, f"{out}/pixels.safetensors")
