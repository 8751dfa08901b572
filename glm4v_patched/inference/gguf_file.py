"""Write a model as two GGUF files for llama.cpp: the language model, and the vision tower (mmproj).

llama.cpp has no architecture for glm-4v, but its ``qwen2vl`` computes the same language model. The
rotary embedding of ``qwen2vl`` takes four positions per token. The tokens of an image share the
first position, and the others order them. The tower needs the patch in docs/upstream/llama_cpp.md.

Tensors are read, converted and written one after the other, so that only one is in memory.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..models.weight_files import TensorInfo, shards_of, tensors_of
from ..terminal_text import format_bytes, listed, pip_install, show_progress
from .export import find_exportable
from .merge import (
    GENERATION_CONFIG,
    create_folder_atomically,
    fetch_weights,
    files_to_copy,
    require_free_disk,
    require_new_folder,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..remote.configuration_chatglm import ChatGLMConfig

    # For each tensor of a GGUF file, by name: the name of the model's tensor, and its conversion.
    TensorTable = dict[str, tuple[str, Callable[[Tensor], Tensor]]]

GGUF_TYPES = ("f32", "bf16", "f16", "q8_0")
TOWER = "transformer.vision."
UNUSED_TENSORS = {"transformer.rotary_pos_emb.inv_freq"}  # llama.cpp computes it
METADATA_BYTES = 50_000_000  # more than the vocabulary and the merges of glm-4v-9b take
# The keys tokenizer.ggml.{name}_token_id hold the ids that end a text, a turn and a message. Here,
# they hold the model's end-of-sequence ids, in order.
END_KEYS = ("eos", "eot", "eom")
IMAGE_POSITIONS = (
    "The embeddings of an image, with those of begin and end, follow a text of p tokens. The "
    "positions of embedding i are (t, i, i, 0), where t is p for begin, p + 1 for every inner "
    "embedding and p + 2 for end. The text after them begins at position p + 3."
)


def export_gguf(model: str, out: Path, type_name: str, revision: str | None = None) -> str:
    """Write a model as GGUF files to a new folder, and return a line about each file.

    If an error is raised, ``out`` does not exist.

    Args:
        model: Folder of a model, or an id on the Hub.
        type_name: One of :data:`GGUF_TYPES`, the type of the language model's matrices. With f32,
            the tower is stored as f32, too; otherwise as f16. With q8_0, matrices whose row length
            is not a multiple of 32 are stored as f16.

    Raises:
        ValueError: The model, its tokenizer or ``out`` cannot be used, or the disk is too small.
        RuntimeError: The package gguf is missing.
    """
    require_new_folder(out)
    try:
        import gguf
    except ModuleNotFoundError:
        command = pip_install("glm4v-patched[gguf]")
        raise RuntimeError(f"--format gguf needs gguf, which is not installed: {command}") from None
    base = find_exportable(model, out, revision)
    if base.adapters is not None:
        raise ValueError(
            f"{model} holds adapters; merge them into their model first, and export that: "
            f"glm4v-patched merge {model} --out merged"
        )
    from ..models.loading import load_model_config, load_processor

    config, processor = load_model_config(base), load_processor(base)
    require_expressible(config)
    folder = fetch_weights(base)
    tensor_infos = tensors_of(folder)
    language_table, tower_table = language_tensors(config), tower_tensors(config)
    used = {source for source, _ in (language_table | tower_table).values()}
    if unused := sorted(tensor_infos.keys() - used - UNUSED_TENSORS):
        raise ValueError(
            f"{model} has {len(unused)} tensors that a GGUF file cannot express: {listed(unused)}; "
            "expected only those of a glm-4v that generates text"
        )
    tower_type = "f32" if type_name == "f32" else "f16"
    language_writer = gguf.GGUFWriter(None, "qwen2vl")
    tower_writer = gguf.GGUFWriter(None, "clip")
    files = {
        f"language-{type_name}.gguf": (language_writer, language_table, type_name),
        f"mmproj-{tower_type}.gguf": (tower_writer, tower_table, tower_type),
    }
    _add_language_metadata(language_writer, config)
    _add_tokenizer(language_writer, config, processor.tokenizer)
    _add_tower_metadata(tower_writer, config, processor.image_processor)
    num_bytes = sum(
        _declare_tensors(writer, table, file_type, tensor_infos)
        for writer, table, file_type in files.values()
    )
    require_free_disk(num_bytes + METADATA_BYTES, out)
    with create_folder_atomically(out) as temporary_folder:
        for name, (writer, table, _) in files.items():
            _write(writer, table, folder, temporary_folder / name)
        for path in files_to_copy(folder):
            if path.name != GENERATION_CONFIG:
                shutil.copyfile(path, temporary_folder / path.name)
    return "\n".join(f"{out / name}: {format_bytes((out / name).stat().st_size)}" for name in files)


def require_expressible(config: "ChatGLMConfig") -> None:
    """Raise ``ValueError`` for settings that the graphs of llama.cpp do not compute."""
    num_eos = len(_eos_token_ids(config))
    attention_size = config.num_attention_heads * config.kv_channels
    for name, value, expected in (
        ("add_bias_linear", config.add_bias_linear, False),
        ("num_attention_heads * kv_channels", attention_size, config.hidden_size),
        ("vision_config.hidden_act", config.vision.hidden_act, "gelu"),
        ("vision_config.in_channels", config.vision.in_channels, 3),
        # Bounded, because the file has its square as float32.
        ("rope_ratio", config.rope_ratio, min(max(config.rope_ratio, 1e-15), 1e15)),
        ("the number of eos_token_id", num_eos, min(max(num_eos, 1), len(END_KEYS))),
    ):
        if value != expected:
            raise ValueError(
                f"config.json: {name} is {value!r}, which a GGUF file cannot express; expected "
                f"{expected!r}"
            )


def _eos_token_ids(config: "ChatGLMConfig") -> list[int]:
    """Return ``eos_token_id`` of the config as a list."""
    ids = config.eos_token_id
    if ids is None:
        return []
    return [*ids] if isinstance(ids, list) else [ids]


def channel_order(config: "ChatGLMConfig") -> "Tensor":
    """Return the order in which a GGUF file stores the channels of a query or key head.

    llama.cpp pairs channels that are half a head apart, and rotates the first half of the pairs by
    the first position. The pairs that our model rotates are therefore stored as the first half of
    the pairs. The channels that it does not rotate are stored as the second half.
    """
    import torch

    channels = torch.arange(config.kv_channels)
    rotated, others = channels.chunk(2)
    pairs = rotated.unflatten(0, (-1, 2, config.rotary_distance)).transpose(0, 1)
    return torch.cat((pairs.flatten(1), others.unflatten(0, (2, -1))), dim=1).flatten()


def language_tensors(config: "ChatGLMConfig") -> "TensorTable":
    """Return the tensors of the language model, by their names in llama.cpp's qwen2vl."""
    order = channel_order(config)

    def rows(start: int, end: int | None) -> Callable[["Tensor"], "Tensor"]:
        return lambda fused: fused[start:end]

    def reordered_rows(start: int, end: int) -> Callable[["Tensor"], "Tensor"]:
        return lambda fused: fused[start:end].unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)

    table: TensorTable = {
        "token_embd.weight": ("transformer.embedding.word_embeddings.weight", _identity),
        "output.weight": ("transformer.output_layer.weight", _identity),
        "output_norm.weight": ("transformer.encoder.final_layernorm.weight", _identity),
    }
    # First rows of the keys and of the values in the fused query_key_value.
    key_start = config.num_attention_heads * config.kv_channels
    value_start = key_start + config.multi_query_group_num * config.kv_channels
    ffn_size = config.ffn_hidden_size
    suffixes = ["weight", "bias"] if config.add_qkv_bias else ["weight"]
    for layer in range(config.num_layers):
        block, source = f"blk.{layer}", f"transformer.encoder.layers.{layer}"
        table |= {
            f"{block}.attn_norm.weight": (f"{source}.input_layernorm.weight", _identity),
            f"{block}.attn_output.weight": (f"{source}.self_attention.dense.weight", _identity),
            f"{block}.ffn_norm.weight": (f"{source}.post_attention_layernorm.weight", _identity),
            f"{block}.ffn_down.weight": (f"{source}.mlp.dense_4h_to_h.weight", _identity),
        }
        for suffix in suffixes:
            fused = f"{source}.self_attention.query_key_value.{suffix}"
            table |= {
                f"{block}.attn_q.{suffix}": (fused, reordered_rows(0, key_start)),
                f"{block}.attn_k.{suffix}": (fused, reordered_rows(key_start, value_start)),
                f"{block}.attn_v.{suffix}": (fused, rows(value_start, None)),
            }
        gate_up = f"{source}.mlp.dense_h_to_4h.weight"
        table[f"{block}.ffn_gate.weight"] = gate_up, rows(0, ffn_size)
        table[f"{block}.ffn_up.weight"] = gate_up, rows(ffn_size, None)
    return table


def tower_tensors(config: "ChatGLMConfig") -> "TensorTable":
    """Return the tensors of the tower and the projector, by their names in llama.cpp's CogVLM.

    llama.cpp's CogVLM has the class token last, so its position embedding is stored last. The
    projector's last matrix and the embeddings at an image's begin and end (boi and eoi) are stored
    divided by ``scaling_factor``.
    """

    def scale(tensor: "Tensor") -> "Tensor":
        return tensor.float() / config.vision.scaling_factor

    def flatten(tensor: "Tensor") -> "Tensor":
        return tensor.flatten()

    table: TensorTable = {
        "v.class_embd": ("patch_embedding.cls_embedding", flatten),
        "v.position_embd.weight": (
            "patch_embedding.position_embedding.weight",
            lambda positions: positions.roll(-1, 0),
        ),
        "mm.model.fc.weight": ("linear_proj.linear_proj.weight", _identity),
        "mm.up.weight": ("linear_proj.dense_h_to_4h.weight", _identity),
        "mm.gate.weight": ("linear_proj.gate_proj.weight", _identity),
        "mm.down.weight": ("linear_proj.dense_4h_to_h.weight", scale),
        "v.boi": ("boi", lambda boi: scale(flatten(boi))),
        "v.eoi": ("eoi", lambda eoi: scale(flatten(eoi))),
    }
    modules = {
        "v.patch_embd": "patch_embedding.proj",
        "mm.patch_merger": "conv",
        "mm.post_fc_norm": "linear_proj.norm1",
    }
    for layer in range(config.vision.num_hidden_layers):
        block, source = f"v.blk.{layer}", f"transformer.layers.{layer}"
        modules |= {
            f"{block}.attn_qkv": f"{source}.attention.query_key_value",
            f"{block}.attn_out": f"{source}.attention.dense",
            f"{block}.ln1": f"{source}.input_layernorm",
            f"{block}.ffn_up": f"{source}.mlp.fc1",
            f"{block}.ffn_down": f"{source}.mlp.fc2",
            f"{block}.ln2": f"{source}.post_attention_layernorm",
        }
    for name, source in modules.items():
        for suffix in ("weight", "bias"):
            table[f"{name}.{suffix}"] = f"{source}.{suffix}", _identity
    return {name: (TOWER + source, convert) for name, (source, convert) in table.items()}


def _identity(tensor: "Tensor") -> "Tensor":
    return tensor


def _add_language_metadata(writer: Any, config: "ChatGLMConfig") -> None:
    writer.add_name("glm-4v")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.seq_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn_hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.multi_query_group_num)
    writer.add_layer_norm_rms_eps(config.layernorm_epsilon)
    # llama.cpp divides the exponents of the frequencies by the number of channels of a head. Our
    # model divides them by the number of rotated channels, half of it, so the base is squared here.
    writer.add_rope_freq_base((10000.0 * config.rope_ratio) ** 2)
    num_pairs = config.kv_channels // 4
    writer.add_rope_dimension_sections([num_pairs, 0, 0, num_pairs])
    writer.add_string("glm4v_patched.image_positions", IMAGE_POSITIONS)
    writer.add_uint32("glm4v_patched.image_embeddings", config.vision.num_image_tokens + 2)


def _add_tokenizer(writer: Any, config: "ChatGLMConfig", tokenizer: Any) -> None:
    """Add vocabulary, merges, special tokens and chat template.

    Raises:
        ValueError: The tokenizer splits text in another way than glm-4v's, or has too many tokens.
    """
    from gguf import TokenType

    from ..remote.tokenization_chatglm import SPLIT_PATTERN

    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added_tokens = settings["model"], settings["added_tokens"]
    steps = (settings["pre_tokenizer"] or {}).get("pretokenizers", [])
    has_our_types = [step["type"] for step in steps] == ["Split", "ByteLevel"]
    has_our_steps = has_our_types and steps[0]["pattern"].get("Regex") == SPLIT_PATTERN
    stripping_tokens = [t["content"] for t in added_tokens if t["lstrip"] or t["rstrip"]]
    if not has_our_steps or settings["normalizer"] or stripping_tokens:
        raise ValueError(
            f"tokenizer.json: normalizer {settings['normalizer']!r:.60}, pre_tokenizer "
            f"{steps!r:.200}, tokens that strip spaces {stripping_tokens!r:.60}; a GGUF file can "
            f"only express byte-level BPE with glm-4v's pattern {SPLIT_PATTERN}"
        )
    texts = {token_id: (text, TokenType.NORMAL) for text, token_id in model["vocab"].items()}
    for token in added_tokens:
        kind = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        texts[token["id"]] = token["content"], kind
    size = config.padded_vocab_size
    special_ids = {"padding": config.pad_token_id} if config.pad_token_id is not None else {}
    special_ids |= dict(zip(END_KEYS, _eos_token_ids(config), strict=False))
    if wrong_ids := sorted({i for i in (*texts, *special_ids.values()) if not 0 <= i < size}):
        raise ValueError(
            f"tokenizer.json or config.json has the ids {listed(wrong_ids)}; expected ids of 0 or "
            f"more and below padded_vocab_size, {size:,}"
        )
    tokens = [texts.get(i, (f"[PAD{i}]", TokenType.UNUSED)) for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    # Both names stand for glm-4v's pattern. "glm4" also sets ignore_merges: a piece of text that is
    # in the vocabulary becomes one token, whatever the merges are.
    writer.add_tokenizer_pre("glm4" if model["ignore_merges"] else "chatglm-bpe")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    # Depending on the version of tokenizers, a merge is a pair or a text.
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)  # the chat template begins with [gMASK]<sop> already
    for key, token_id in special_ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token_id)
    writer.add_chat_template(tokenizer.get_chat_template())


def _add_tower_metadata(writer: Any, config: "ChatGLMConfig", image_processor: Any) -> None:
    vision = config.vision
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("glm4v_9b")
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_size(vision.image_size)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_heads)
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    writer.add_vision_projection_dim(config.hidden_size)
    writer.add_vision_image_mean(image_processor.image_mean)
    writer.add_vision_image_std(image_processor.image_std)


def _declare_tensors(
    writer: Any, table: "TensorTable", type_name: str, tensor_infos: Mapping[str, TensorInfo]
) -> int:
    """Declare shapes and types of a file's tensors, and return their size in bytes."""
    import gguf
    import numpy as np
    import torch

    kinds = gguf.GGMLQuantizationType
    share = "ALL" if type_name == "f32" else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{share}_{type_name}".upper()])
    total_bytes = 0
    for name, (source, convert) in table.items():
        shape = convert(torch.empty(tensor_infos[source].shape, device="meta")).shape
        is_matrix = len(shape) > 1 and "position" not in name  # position embeddings stay f32
        kind = kinds[type_name.upper()] if is_matrix else kinds.F32
        if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = kinds.F16
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = shape.numel() // block_size * block_bytes
        writer.add_tensor_info(name, [*shape], np.dtype(np.float32), num_bytes, raw_dtype=kind)
        total_bytes += num_bytes
    return total_bytes


def _write(writer: Any, table: "TensorTable", folder: Path, path: Path) -> None:
    """Write a file, tensor by tensor.

    Raises:
        ValueError: A tensor has a value that is NaN, infinite or too large for its type.
    """
    import gguf
    import torch
    from safetensors import safe_open

    kinds = {name: info.dtype for name, info in writer.tensors[0].items()}
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with ExitStack() as stack:
        progress = stack.enter_context(
            show_progress(f"writing {path.name}", total=len(table), unit="tensor")
        )
        shards = [
            stack.enter_context(safe_open(folder / shard, framework="pt"))
            for shard in shards_of(folder)
        ]
        shard_of = {key: shard for shard in shards for key in shard.keys()}  # noqa: SIM118
        for name, (source, convert) in table.items():
            tensor = convert(shard_of[source].get_tensor(source)).float()
            largest = torch.stack(tensor.aminmax()).abs().max().item()
            kind = kinds[name]
            limit = torch.finfo(torch.float16 if kind.name == "F16" else torch.float32).max
            if not largest <= limit:
                raise ValueError(
                    f"{source} has values up to {largest:.3g}; to store it as {kind.name}, "
                    f"expected finite numbers of at most {limit:.5g}"
                )
            writer.write_tensor_data(gguf.quants.quantize(tensor.numpy(), kind))
            progress.update()
    writer.close()
