"""Compare vLLM's answers with our model's: prompt ids, position ids, logits, greedy tokens.

``python docs/benchmarks/compare_with_vllm.py`` builds a small model with random weights (100 image
tokens per image), loads it in vLLM in this process, and asks vLLM and our model about text, an
image, two images in one question, and three in three turns. The plug-in is active as in ``vllm
serve``; ``VLLM_PLUGINS=`` before the command disables it. A line is printed for each conversation;
``--out`` writes everything as JSON. ``--halves`` builds a model that rotates by halves, as
cogagent-9b does.

``--model FOLDER`` selects another model, ``--dtype bfloat16`` another precision, ``--engine JSON``
further arguments of ``vllm.LLM``. ``--adapters`` also compares LoRA adapters of the language model,
and tries to load some of the vision tower.
"""

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

# vLLM's model runs in this process, because a hook reads its position ids.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from PIL import Image
from torch import Tensor, nn

from glm4v_patched.demo.images import draw_data_set
from glm4v_patched.demo.tiny_model import PATCH_SIDE, build_processor, tiny_config
from glm4v_patched.inference.vllm_plugin import never_generated_ids
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.image_layout import InputBatch, expand_image_placeholders
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor

SIDE = 20 * PATCH_SIDE
NEW_TOKENS = 24
# vLLM 0.26 tokenizes a chat with a second [gMASK]<sop> otherwise.
CHAT = {"use_tqdm": False, "tokenization_kwargs": {"add_special_tokens": False}}
QUESTION = {"type": "text", "text": "Which color is it?"}


def make_conversations(images: list[Image.Image], kind: str) -> dict[str, list[dict]]:
    """Return conversations by name; their images are message parts of this ``kind``."""
    parts = [{"type": kind, kind: image} for image in images]

    def turns(*contents) -> list[dict]:
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]

    return {
        "text": turns("Hello"),
        "one image": turns([parts[0], QUESTION]),
        "one image, two turns": turns([parts[0], QUESTION], "red", "And which shape?"),
        "two images": turns([parts[0], parts[1], QUESTION]),
        "three images, three turns": turns(
            [parts[0], QUESTION], "red", [parts[1], QUESTION], "blue", [parts[2], QUESTION]
        ),
    }


def build(folder: Path, original_rope: bool) -> None:
    """Save a model in fp32 whose answers depend on its images, and its processor."""
    texts = [QUESTION["text"], "And which shape?", "Hello", "red", "blue"]
    processor = build_processor(texts, image_side=SIDE)
    config = tiny_config(processor.tokenizer)
    vision = config.vision_config | {
        "image_size": SIDE,
        "num_positions": (SIDE // PATCH_SIDE) ** 2 + 1,
    }
    torch.manual_seed(0)
    changes = {"vision_config": vision, "original_rope": original_rope}
    model = GLM4VForCausalLM(ChatGLMConfig(**(config.to_dict() | changes)))
    # With the tiny model's own initialization, it would repeat one token forever.
    for name, weight in model.named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def build_adapters(folder: Path, model: Path, targets: str) -> None:
    """Save LoRA adapters that change the model's answers."""
    from peft import LoraConfig, get_peft_model

    base = GLM4VForCausalLM.from_pretrained(model, dtype="auto")
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    torch.manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(folder)


def load_vllm(model: Path, dtype: str, num_images: int, **options):
    from vllm import LLM

    # With so few tokens per step, the prefill of an image takes several steps.
    return LLM(
        str(model),
        **{
            "trust_remote_code": True,
            "dtype": dtype,
            "limit_mm_per_prompt": {"image": num_images},
            "max_num_batched_tokens": 128,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 64,
            "enforce_eager": True,
            "logprobs_mode": "raw_logits",
            "max_logprobs": -1,
            "distributed_executor_backend": "uni",
            **options,
        },
    )


def hook(positions: list[Tensor], model: nn.Module) -> None:
    """Collect the position ids that the layers of vLLM's model receive."""
    model.transformer.encoder.register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(kwargs["position_ids"].clone()),
        with_kwargs=True,
    )


def vllm_answers(llm, conversations: dict[str, list[dict]], adapters: Path | None = None) -> dict:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=-1)
    lora = LoRARequest("adapters", 1, str(adapters)) if adapters else None
    outputs = llm.chat(list(conversations.values()), greedy, lora_request=lora, **CHAT)
    return dict(zip(conversations, outputs, strict=True))


def vllm_positions(llm, conversation: list[dict]) -> list[int] | None:
    """Return the position ids of a prompt; fails if vLLM has compiled the model."""
    from vllm import SamplingParams

    positions: list[Tensor] = []
    llm.reset_prefix_cache()
    llm.apply_model(partial(hook, positions))
    llm.chat(conversation, SamplingParams(temperature=0, max_tokens=1), **CHAT)
    return torch.cat(positions).tolist()


@torch.no_grad()
def our_answer(model: nn.Module, processor: ChatGLMProcessor, conversation: list[dict]) -> dict:
    inputs = processor.apply_chat_template(
        [conversation],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    ).to(model.device)
    answer = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,  # as ignore_eos: end tokens may be generated, and end nothing
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = inputs["input_ids"][0]
    prompt_format = model.transformer.prompt_format
    num_images = len(inputs.get("pixel_values", ()))
    rows = expand_image_placeholders(InputBatch(ids[None]), prompt_format, num_images)
    return {
        "ids": ids.tolist(),
        "positions": rows.position_ids[0].tolist(),
        "tokens": answer.sequences[0, len(ids) :].tolist(),
        "logits": torch.cat(answer.logits).float().cpu(),
    }


def compare_answers(
    name: str, ours: dict, theirs, fill_id: int, image_id: int, never: list[int]
) -> dict:
    """Compare both answers; logits are compared up to the first token that differs.

    Args:
        never: Tokens that are never generated. Their logits are left out, as vLLM without the
            plug-in generates them.
    """
    ids = [image_id if token == fill_id else token for token in ours["ids"]]
    output = theirs.outputs[0]
    tokens = list(output.token_ids)
    same = next((i for i in range(NEW_TOKENS) if tokens[i] != ours["tokens"][i]), NEW_TOKENS)
    vocab_size = ours["logits"].shape[1]
    logits = torch.tensor(
        [[step[i].logprob for i in range(vocab_size)] for step in output.logprobs]
    )
    after_equal_ids = min(same + 1, NEW_TOKENS)
    can_be_generated = torch.ones(vocab_size, dtype=torch.bool)
    can_be_generated[never] = False
    both = (logits - ours["logits"])[:after_equal_ids, can_be_generated]
    difference = both.abs().max().item()
    return {
        "conversation": name,
        "ids": len(ids),
        "ids_equal": ids == list(theirs.prompt_token_ids),
        "same_tokens": same,
        "largest_logit": ours["logits"].abs().max().item(),
        "logit_difference": difference,
        "not_drawn": logits.isneginf().all(0).nonzero().flatten().tolist() == sorted(never),
    }


def describe(row: dict) -> str:
    text = (
        f"{row['conversation']}: {row['ids']} ids {'equal' if row['ids_equal'] else 'DIFFER'}, "
        f"{row['same_tokens']} of {NEW_TOKENS} tokens equal, logits (up to "
        f"{row['largest_logit']:.0f}) differ by {row['logit_difference']:.2g}"
    )
    if "position_difference" in row:
        text += f", last position by {row['position_difference']}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", type=json.loads, default={})
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--halves", action="store_true", help="rotate by halves, as cogagent-9b")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = run(Path(name), arguments)
    print(*map(describe, rows["rows"]), sep="\n")
    if arguments.adapters:
        print(f"adapters of the tower: {rows['tower_adapters']}")
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))
    return 0


def run(folder: Path, arguments: argparse.Namespace) -> dict:
    model_folder = arguments.model or folder / "model"
    if arguments.model is None:
        build(model_folder, original_rope=not arguments.halves)
    draw_data_set(folder / "images", 3, seed=0, side=SIDE)
    files = sorted((folder / "images").glob("*.png"))
    images = [Image.open(file).convert("RGB") for file in files]
    is_plugged_in = os.environ.get("VLLM_PLUGINS") != ""

    num_images = 3 if is_plugged_in else 1
    options = dict(arguments.engine)
    if arguments.adapters:
        options |= {"enable_lora": True, "max_lora_rank": 8}
    llm = load_vllm(model_folder, arguments.dtype, num_images, **options)
    ours = GLM4VForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, arguments.dtype))
    ours = ours.to(arguments.device).eval()
    processor = ChatGLMProcessor.from_pretrained(model_folder)
    image_id = ours.config.pad_token_id
    as_ours = make_conversations(images, "image")
    as_theirs = make_conversations(images, "image_pil")
    if not is_plugged_in:
        as_theirs = {name: as_theirs[name] for name in list(as_theirs)[:3]}

    report: dict = {"plugin": is_plugged_in, "rows": []}

    def compare(title: str, model: nn.Module, adapters: Path | None = None) -> None:
        for name, answer in vllm_answers(llm, as_theirs, adapters).items():
            expected = our_answer(model, processor, as_ours[name])
            ids = processor.image_token_id, image_id
            row = compare_answers(
                title + name, expected, answer, *ids, never_generated_ids(ours.config)
            )
            if adapters is None and options.get("enforce_eager", True):
                positions = vllm_positions(llm, as_theirs[name])
                row["positions_equal"] = positions == expected["positions"]
                row["position_difference"] = positions[-1] - expected["positions"][-1]
            report["rows"].append(row)

    compare("", ours)
    if arguments.adapters:
        from peft import PeftModel
        from vllm.lora.request import LoRARequest

        tower = folder / "tower_adapters"
        build_adapters(tower, model_folder, r".*query_key_value")
        try:
            llm.llm_engine.add_lora(LoRARequest("tower", 2, str(tower)))
            report["tower_adapters"] = "loaded"
        except ValueError as error:
            report["tower_adapters"] = str(error)
        language = folder / "adapters"
        build_adapters(language, model_folder, r".*encoder\..*(query_key_value|dense_4h_to_h)")
        compare("adapters: ", PeftModel.from_pretrained(ours, language).eval(), language)
    return report


if __name__ == "__main__":
    sys.exit(main())
