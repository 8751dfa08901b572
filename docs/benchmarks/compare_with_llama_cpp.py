"""Compare llama.cpp's answers with our model's: token ids, logits, greedy tokens, right answers.

``python docs/benchmarks/compare_with_llama_cpp.py`` builds a small model with random weights (100
inner embeddings per image), exports it in each type of ``export --format gguf``, and asks llama.cpp
(llama-cpp-py-sync) and our model about no, one and two images. With ``--demo demo_output`` it also
asks the demo's model about the demo's 96 held-out images, and each question about another image.

Images are encoded by our tower. If LLAMA_CPP_LIB and LLAMA_CPP_MTMD_LIB name the libraries of a
llama.cpp with our patch (docs/upstream/build_llama_cpp.py), they are also encoded by llama.cpp.
"""

import argparse
import json
import os
import sys
import tempfile
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import torch
from llama_cpp_py_sync import Llama
from llama_cpp_py_sync import _cffi_bindings as bindings
from torch import Tensor, nn

from glm4v_patched.data.messages import images_of
from glm4v_patched.data.rows import read_conversations
from glm4v_patched.demo.images import draw_data_set
from glm4v_patched.demo.tiny_model import PATCH_SIDE, build_processor, save, tiny_config
from glm4v_patched.inference.gguf_file import GGUF_TYPES, export_gguf
from glm4v_patched.inference.questions import digest_image_files, make_question
from glm4v_patched.inference.scoring import exact_match, swap_images
from glm4v_patched.remote.image_layout import InputBatch, expand_image_placeholders
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor

SIDE = 20 * PATCH_SIDE
NEW_TOKENS = 16
BATCH_SIZE = 64  # an image's embeddings take several calls
QUESTION = "Which color is it?"
PLACEHOLDER = "<|begin_of_image|><|endoftext|><|end_of_image|>"
Q4_K_M = 15  # of llama.cpp's enum llama_ftype
IS_PATCHED = "LLAMA_CPP_MTMD_LIB" in os.environ
# The package prefers its own libraries, which need glibc 2.38.
if "LLAMA_CPP_LIB" in os.environ:
    bindings._lib = bindings.ffi.dlopen(os.environ["LLAMA_CPP_LIB"])
if IS_PATCHED:
    bindings._mtmd_lib = bindings.ffi.dlopen(os.environ["LLAMA_CPP_MTMD_LIB"])


class LlamaCpp:
    """A language model in llama.cpp, on one thread, and the projector beside it if that is asked
    for."""

    def __init__(self, language: Path, projector: Path | None = None) -> None:
        self.lib, self.ffi = bindings.get_lib(), bindings.ffi
        # In f16, the cache alone would change logits by 3e-3.
        cache = {"type_k": "f32", "type_v": "f32"}
        self.llm = Llama(str(language), n_ctx=1024, n_batch=BATCH_SIZE, n_threads=1, **cache)
        self.multimodal = None
        if projector is not None:
            from llama_cpp_py_sync.multimodal import MultimodalContext

            self.multimodal = MultimodalContext(self.llm, projector, use_gpu=False, n_threads=1)

    def token_ids(self, text: str) -> list[int]:
        return self.llm.tokenize(text, add_special=True, parse_special=True)

    def clear(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.llm._ctx), True)

    def read(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Append tokens or embeddings to the context, and return their logits ``(L, V)``.

        Args:
            inputs: Token ids ``(L,)``, or embeddings ``(L, D)``.
            positions: ``(L,)`` of ids, ``(4, L)`` of embeddings.
        """
        rows = []
        for start in range(0, len(inputs), BATCH_SIZE):
            part = inputs[start : start + BATCH_SIZE]
            length, width = len(part), part.shape[1] if part.ndim == 2 else 0
            # Four positions of an embedding, where llama_batch_init has room for one.
            batch = self.lib.llama_batch_init(4 * length, width, 1)
            batch.n_tokens = length
            values = part.float() if width else part.int()
            target = batch.embd if width else batch.token
            self.ffi.memmove(target, values.contiguous().numpy(), 4 * values.numel())
            placed = positions[..., start : start + length].contiguous().int()
            self.ffi.memmove(batch.pos, placed.numpy(), 4 * placed.numel())
            for i in range(length):
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
            status = self.lib.llama_decode(self.llm._ctx, batch)
            assert status == 0, f"llama_decode returned {status}"
            rows += [self.logits(i) for i in range(length)]
            self.lib.llama_batch_free(batch)
        return torch.stack(rows)

    def logits(self, index: int) -> Tensor:
        row = self.lib.llama_get_logits_ith(self.llm._ctx, index)
        content = self.ffi.buffer(row, 4 * self.llm.n_vocab)
        return torch.frombuffer(bytearray(content), dtype=torch.float32)

    def prefill(self, batch, features: Tensor | None, is_counted: bool = False) -> Tensor:
        """Read a prompt of our model, and return its logits ``(R, V)``.

        Args:
            batch: The prompt, an ``ExpandedBatch`` of one sequence.
            features: The embeddings of all its images, one after the other.
            is_counted: Whether to give every embedding a position of its own, which is wrong.
        """
        self.clear()
        logits, begin, num_read = [], 0, 0
        for is_image, mask in groupby(batch.image_mask[0].tolist()):
            end = begin + len(list(mask))
            positions = torch.arange(begin, end) if is_counted else batch.position_ids[0, begin:end]
            inputs = batch.input_ids[0, begin:end]
            if is_image:
                inputs = features[num_read : num_read + len(positions)]
                num_read += len(positions)
                # The index orders embeddings of one position; the last section is not rotated.
                index = torch.arange(len(positions))
                positions = torch.stack((positions, index, index, torch.zeros_like(index)))
            logits.append(self.read(inputs, positions))
            begin = end
        return torch.cat(logits)

    def prefill_files(self, prompt: str, images: list[str]) -> tuple[Tensor, int]:
        """Read a prompt and image files as mtmd does; return the last logits and next position."""
        self.clear()
        files = [("image/png", Path(path).read_bytes()) for path in images]
        with self.multimodal.tokenize_prompt(prompt, files) as chunks:
            position = self.multimodal.evaluate_prompt(chunks)
        return self.logits(-1), position

    def generate(self, logits: Tensor, position: int, stop: list[int], limit: int) -> list[int]:
        """Return the greedy tokens after a prompt with these last logits."""
        tokens: list[int] = []
        while len(tokens) < limit:
            tokens.append(int(logits.argmax()))
            if tokens[-1] in stop:
                break
            logits = self.read(torch.tensor(tokens[-1:]), torch.tensor([position]))[-1]
            position += 1
        return tokens


def build(folder: Path, original_rope: bool) -> None:
    """Save a model in fp32 whose answers depend on its images, and its processor."""
    processor = build_processor([QUESTION, "And which shape?", "Hello", "red", "blue"], SIDE)
    # Rows of 256, which q4_k_m needs.
    language = {"hidden_size": 256, "num_attention_heads": 8, "original_rope": original_rope}
    config = tiny_config(
        processor.tokenizer, SIDE, language, tower={"scaling_factor": 8, "num_hidden_layers": 3}
    )
    torch.manual_seed(0)
    model = GLM4VForCausalLM(config)
    for name, weight in model.named_parameters():
        # With the tiny model's own initialization, it would repeat one token forever, and features
        # divided by 8 would not matter.
        if "word_embeddings" in name or "output_layer" in name:
            nn.init.normal_(weight, std=0.1)
        if name.endswith(("dense_4h_to_h.weight", "boi", "eoi")) and "vision" in name:
            nn.init.normal_(weight, std=0.5)
        if name.endswith("bias"):
            nn.init.normal_(weight, std=0.2)
    save(model, processor, folder)


@torch.no_grad()
def our_answer(
    model: GLM4VForCausalLM,
    processor: ChatGLMProcessor,
    messages: list[dict],
    min_new_tokens: int = NEW_TOKENS,
) -> dict:
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    inputs = processor.apply_chat_template([messages], return_tensors="pt", **options)
    ids, pixels = inputs["input_ids"], inputs.get("pixel_values")
    num_images = 0 if pixels is None else len(pixels)
    features = None
    if pixels is not None:
        features = model.transformer.vision(pixels.to(model.dtype)).float().flatten(0, 1)
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return {
        "batch": expand_image_placeholders(
            InputBatch(ids), model.transformer.prompt_format, num_images
        ),
        "features": features,
        "logits": model(**inputs).logits[0].float(),
        "tokens": model.generate(
            **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=min_new_tokens
        )[0, ids.shape[1] :].tolist(),
        "text": text,
    }


def compare_random(folder: Path, original_rope: bool) -> list[dict]:
    """Return a row for each type and conversation of a model with random weights."""
    build(folder / "model", original_rope)
    rows = draw_data_set(folder / "images", 2, seed=0, side=SIDE)
    images = [row[0]["image"] for row in rows]
    ask = {"type": "text", "text": QUESTION}
    parts = [{"type": "image", "image": str(folder / "images" / Path(i).name)} for i in images]
    conversations = {
        "no image": [{"role": "user", "content": "Hello"}],
        "one image": [{"role": "user", "content": [parts[0], ask]}],
        "two images": [{"role": "user", "content": [*parts, ask]}],
        "two turns": [
            {"role": "user", "content": [parts[0], ask]},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": [parts[1], ask]},
        ],
    }
    model = GLM4VForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    processor = ChatGLMProcessor.from_pretrained(folder / "model")
    expected = {name: our_answer(model, processor, c) for name, c in conversations.items()}
    report = []
    for kind, language, projector in export_types(folder / "model", folder):
        llama = LlamaCpp(language, projector if IS_PATCHED else None)
        for name, ours in expected.items():
            batch = ours["batch"]
            logits = llama.prefill(batch, ours["features"])
            position = batch.last_position + 1
            tokens = llama.generate(logits[-1], position, [], NEW_TOKENS)
            row = {"weights": "random", "original_rope": original_rope, "type": kind}
            row |= {"conversation": name, "largest_logit": ours["logits"].abs().max().item()}
            row["logit_difference"] = (logits - ours["logits"]).abs().max().item()
            row["same_tokens"] = count_same(tokens, ours["tokens"])
            ids = [i for part in ours["text"].split(PLACEHOLDER) for i in llama.token_ids(part)]
            row["ids_equal"] = ids == batch.input_ids[~batch.image_mask].tolist()
            if ours["features"] is not None:
                counted = llama.prefill(batch, ours["features"], is_counted=True)
                row["counted_logit_difference"] = (counted - ours["logits"]).abs().max().item()
            if llama.multimodal is not None:
                files = images_of(conversations[name])
                prompt = ours["text"].replace(PLACEHOLDER, llama.multimodal.marker)
                last, position = llama.prefill_files(prompt, files)
                tokens = llama.generate(last, position, [], NEW_TOKENS)
                row["mmproj_logit_difference"] = (last - ours["logits"][-1]).abs().max().item()
                row["mmproj_same_tokens"] = count_same(tokens, ours["tokens"])
            report.append(row)
            print(json.dumps(row), flush=True)
    return report


def count_same(tokens: list[int], others: list[int]) -> int:
    pairs = zip(tokens, others, strict=True)
    return next((i for i, (mine, other) in enumerate(pairs) if mine != other), len(tokens))


def export_types(model: Path, folder: Path) -> list[tuple[str, Path, Path]]:
    """Export a model in all types, and in q4_k_m, to which llama.cpp quantizes the first one."""
    files = []
    for kind in GGUF_TYPES:
        out = folder / kind
        export_gguf(str(model), out, kind)
        files.append((kind, out / f"language-{kind}.gguf", next(out.glob("mmproj-*.gguf"))))
    lib, ffi = bindings.get_lib(), bindings.ffi
    if not hasattr(lib, "llama_model_quantize"):  # not in the library of xllamacpp
        return files
    options = ffi.new("llama_model_quantize_params *", lib.llama_model_quantize_default_params())
    options.ftype, options.nthread = Q4_K_M, 1
    _, source, projector = files[0]
    target = folder / "language-q4_k_m.gguf"
    status = lib.llama_model_quantize(str(source).encode(), str(target).encode(), options)
    assert status == 0, f"llama_model_quantize returned {status}"
    return [*files, ("q4_k_m", target, projector)]


def compare_demo(demo: Path, folder: Path) -> list[dict]:
    """Return a row for our model and one for each type, with the share of right answers."""
    model = GLM4VForCausalLM.from_pretrained(demo / "trained", dtype=torch.float32).eval()
    processor = ChatGLMProcessor.from_pretrained(demo / "trained")
    held_out = read_conversations(demo / "data" / "held_out.jsonl")
    questions = [make_question(index, messages) for index, messages in enumerate(held_out)]
    groups = {
        "right": questions,
        "right_swapped": swap_images(questions, digest_image_files(questions)),
    }
    ours = {
        name: [our_answer(model, processor, question.prompt, 0) for question in group]
        for name, group in groups.items()
    }
    stop = model.generation_config.eos_token_id

    def share_right(name: str, answers: list[list[int]]) -> float:
        texts = [processor.decode([i for i in tokens if i not in stop]) for tokens in answers]
        pairs = zip(texts, groups[name], strict=True)
        right = [exact_match(text, question.reference) for text, question in pairs]
        return round(sum(right) / len(right), 4)

    report: list[dict] = [{"weights": "demo", "type": "this package, f32"}]
    for name, answers in ours.items():
        report[0][name] = share_right(name, [answer["tokens"] for answer in answers])
    for kind, language, projector in export_types(demo / "trained", folder):
        llama = LlamaCpp(language, projector if IS_PATCHED else None)
        row: dict = {"weights": "demo", "type": kind}
        for name, answers in ours.items():
            tokens, tokens_of_files, differences = [], [], []
            for question, answer in zip(groups[name], answers, strict=True):
                logits = llama.prefill(answer["batch"], answer["features"])
                differences.append((logits - answer["logits"]).abs().max().item())
                position = answer["batch"].last_position + 1
                tokens.append(llama.generate(logits[-1], position, stop, NEW_TOKENS))
                if llama.multimodal is not None:
                    prompt = answer["text"].replace(PLACEHOLDER, llama.multimodal.marker)
                    last, position = llama.prefill_files(prompt, images_of(question.prompt))
                    tokens_of_files.append(llama.generate(last, position, stop, NEW_TOKENS))
            row[name] = share_right(name, tokens)
            first = zip(tokens, answers, strict=True)
            row[f"{name}_same_first"] = sum(t[0] == answer["tokens"][0] for t, answer in first)
            row[f"{name}_logit_difference"] = max(differences)
            row["largest_logit"] = max(a["logits"].abs().max().item() for a in answers)
            if tokens_of_files:
                row[f"mmproj_{name}"] = share_right(name, tokens_of_files)
        report.append(row)
        print(json.dumps(row), flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", type=Path, help="the folder of a demo")
    parser.add_argument("--build", help="name of this build of llama.cpp, for the rows")
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = []
        for original_rope in (True, False):
            rows += compare_random(Path(name, str(original_rope)), original_rope)
        if arguments.demo:
            rows += compare_demo(arguments.demo, Path(name, "demo"))
    packages = ("torch", "transformers", "gguf", "llama-cpp-py-sync")
    versions = {name: version(name) for name in packages} | {"llama.cpp": arguments.build}
    rows = [row | {"versions": versions} for row in rows]
    if arguments.out:
        lines = ",\n".join(map(json.dumps, rows))
        arguments.out.write_text(f"[\n{lines}\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
