"""Put this package's code beside existing weights, for ``adopt`` and for ``hub_upload``.

Nothing in the original folder is changed. Its code is never run, and settings that could make
transformers run other code are not copied.
"""

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from PIL import Image

from .. import __version__
from ..atomic import (
    create_folder_atomically,
    explain_failed_writes,
    require_copyable,
    require_free_disk,
    require_new_folder,
)
from ..engine.options import QUANTIZER_PACKAGES
from ..patch.config_json import (
    parse_json_object,
    read_bytes_within_limit,
    read_json_object,
    why_not_glm4v,
)
from ..paths import refuse_overlap
from ..remote import tokenization_chatglm
from ..remote.configuration_chatglm import (
    FULL_AUTO_MAP,
    SAVED_CONFIG_FIELDS,
    ChatGLMConfig,
    EVA2CLIPVisionConfig,
    keep_known_settings,
    refuse_nonfinite_generation,
    warn_unsaved,
)
from ..remote.tokenization_chatglm import CHAT_TEMPLATE
from ..terminal_text import (
    format_bytes,
    listed,
    own_command,
    pip_install,
    pluralize,
    printable,
    show_progress,
)
from .base import ADAPTER_CONFIG, ModelSource
from .check_weights import NO_WEIGHTS_PROBLEM, require_complete_weights, require_loadable_settings
from .find import print_cogagent_assumptions, require_known_quantizer
from .limits import BPE_RANKS_FILE, PROCESSOR_JSON_FILES
from .loading import load_processor
from .weight_files import (
    SINGLE_FILE,
    WEIGHTS_INDEX,
    TensorInfo,
    keep_known_index_entries,
    read_header,
    require_matching_index,
    shards_of,
)

REMOTE_FOLDER = Path(__file__).parents[1] / "remote"
ARCHITECTURE = "GLM4VForCausalLM"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER_CONFIG, IMAGE_CONFIG = "tokenizer_config.json", "preprocessor_config.json"
TEMPLATE = "chat_template.jinja"
LICENSES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "MODEL_LICENSE")
# The files of the original folder that are read; none of them contains code.
READ_FILES = (
    CONFIG,
    GENERATION_CONFIG,
    WEIGHTS_INDEX,
    BPE_RANKS_FILE,
    TEMPLATE,
    *PROCESSOR_JSON_FILES,
)
# The Auto classes in the auto_map of each file; config.json has all of them.
AUTO_CLASSES = {
    CONFIG: [*FULL_AUTO_MAP],
    TOKENIZER_CONFIG: ["AutoProcessor", "AutoTokenizer"],
    IMAGE_CONFIG: ["AutoImageProcessor", "AutoProcessor"],
    "processor_config.json": ["AutoProcessor"],
}
# Options of generation that are copied; none of them makes transformers run other code.
GENERATION_KEYS = {
    *str.split(
        "_from_model_config transformers_version bos_token_id eos_token_id pad_token_id "
        "decoder_start_token_id forced_bos_token_id forced_eos_token_id do_sample temperature "
        "top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty "
        "encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
        "exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length "
        "min_new_tokens max_time stop_strings early_stopping num_beams num_beam_groups "
        "num_return_sequences diversity_penalty bad_words_ids suppress_tokens "
        "begin_suppress_tokens sequence_bias guidance_scale renormalize_logits "
        "remove_invalid_values use_cache output_attentions output_hidden_states output_logits "
        "output_scores return_dict_in_generate"
    )
}
TOKENIZER_KEYS = tokenization_chatglm.SAVED_TOKENIZER_FIELDS - {"backend", "chat_template"} | {
    *(f"{name}_token" for name in ("bos", "cls", "eos", "mask", "pad", "sep", "unk"))
}
VISION_KEYS = {field.name for field in fields(EVA2CLIPVisionConfig)}
# Keys of config.json, and the token whose id each must be.
SPECIAL_IDS = {"boi_token_id": "<|begin_of_image|>", "eoi_token_id": "<|end_of_image|>"}
SPECIAL_IDS |= {"pad_token_id": "<|endoftext|>"}
DISK_CURE = ", or give a folder elsewhere as --out"
IMAGE_MARK = "<|begin_of_image|>"
PROCESSOR_CURE = (
    "expected the tokenizer and processor files that were saved with the weights, or in their "
    "place tokenizer_config.json and tokenizer.model of zai-org/glm-4v-9b"
)
# A Python program that converts pickled weights to safetensors. With weights_only, torch.load
# refuses everything else in a pickle.
PICKLE_CONVERSION = (
    "import glob, torch, safetensors.torch as s; "
    "[s.save_file({k: v.clone() for k, v in torch.load(p, 'cpu', weights_only=True).items()}, "
    "p[:-3] + 'safetensors', {'format': 'pt'}) for p in glob.glob('*model*.bin')]"
)


def to_json_bytes(values: dict[str, Any]) -> bytes:
    """Return indented JSON with a final newline."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def read_our_code() -> dict[str, bytes]:
    """Return the code files that go beside weights, by name."""
    files = {path.name: path.read_bytes() for path in sorted(REMOTE_FOLDER.glob("*.py"))}
    del files["__init__.py"]
    return files


def require_glm4v_config(name: str, source_files: Mapping[str, bytes]) -> None:
    """Raise ``ValueError`` unless config.json belongs to a glm-4v or a cogagent-9b."""
    if reason := why_not_glm4v(_read_json(name, source_files, CONFIG)):
        raise ValueError(f"{name}: {CONFIG} does not belong to a glm-4v: {reason}")


def make_model_files(name: str, source_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files that go beside a model's weights: code, settings, vocabulary and index.

    The result depends only on the arguments and on this package's version: it is the same with
    every supported transformers. A warning lists the settings that are left out.

    Args:
        name: The model's folder or id, for messages.
        source_files: The content of the model's files, by name (:data:`READ_FILES`).

    Returns:
        The content of the files, by name.

    Raises:
        ValueError: The config belongs to another model, a file is invalid, or two files disagree.
    """
    require_glm4v_config(name, source_files)
    files = _processor_files(name, source_files)
    config = _make_config(name, source_files, files)
    files |= read_our_code() | {CONFIG: to_json_bytes(config)}
    files[GENERATION_CONFIG] = _generation_config(name, source_files, config)
    if WEIGHTS_INDEX in source_files:
        index = _read_json(name, source_files, WEIGHTS_INDEX)
        known = keep_known_index_entries(index)
        is_unchanged = known == index
        files[WEIGHTS_INDEX] = source_files[WEIGHTS_INDEX] if is_unchanged else to_json_bytes(known)
    return files


def _read_json(name: str, source_files: Mapping[str, bytes], file: str) -> dict[str, Any]:
    if file not in source_files:
        raise ValueError(f"{name} has no {file}")
    return parse_json_object(source_files[file], f"{name}: {file}")


def _auto_map(file: str) -> dict[str, Any]:
    return {auto_class: FULL_AUTO_MAP[auto_class] for auto_class in AUTO_CLASSES[file]}


def _generation_config(
    name: str, source_files: Mapping[str, bytes], config: dict[str, Any]
) -> bytes:
    """Return the content of generation_config.json: only options in :data:`GENERATION_KEYS`."""
    values = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    file = f"{name}: {GENERATION_CONFIG}"
    if GENERATION_CONFIG in source_files:
        values = _read_json(name, source_files, GENERATION_CONFIG)
    known = keep_known_settings(values, GENERATION_KEYS, file)
    refuse_nonfinite_generation(known, file)
    _check_eos_ids(known, config["padded_vocab_size"], file)
    is_unchanged = known == values and GENERATION_CONFIG in source_files
    return source_files[GENERATION_CONFIG] if is_unchanged else to_json_bytes(known)


def _check_eos_ids(values: dict[str, Any], vocab_size: int, file: str) -> None:
    eos = values.get("eos_token_id")
    for token_id in eos if isinstance(eos, list) else [eos]:
        if not (isinstance(token_id, int) and 0 <= token_id < vocab_size):
            raise ValueError(
                f"{file}: eos_token_id has {token_id}, which is not one of the {vocab_size} token "
                "ids"
            )


def _make_config(
    name: str, source_files: Mapping[str, bytes], processor_files: Mapping[str, bytes]
) -> dict[str, Any]:
    """Return the content of config.json; add our classes, and token ids that are missing."""
    file = f"{name}: {CONFIG}"
    values = _read_json(name, source_files, CONFIG)
    vision = keep_known_settings(values["vision_config"], VISION_KEYS, f"{file}: vision_config")
    aliases = ChatGLMConfig.attribute_map
    values.pop("_name_or_path", None)
    config = keep_known_settings(values, SAVED_CONFIG_FIELDS | aliases.keys(), file)
    tokens = json.loads(processor_files["tokenizer.json"])["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    for key, token in SPECIAL_IDS.items():
        if config.get(key) is None:
            config[key] = ids.get(token)
        if config[key] is None or config[key] != ids.get(token):
            raise ValueError(
                f"{file}: {key} is {config[key]}, but the tokenizer has {ids.get(token)} for "
                f"{token}"
            )
    try:  # with a copy, because transformers removes keys from its argument
        checked = ChatGLMConfig.from_dict(deepcopy(config | {"vision_config": vision}))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    config.setdefault("eos_token_id", checked.eos_token_id)
    # transformers may have saved a setting under an alias. Store it only under ChatGLM's own name,
    # which older versions of the code know.
    config |= {key: getattr(checked, key) for alias, key in aliases.items() if alias in config}
    config = {key: value for key, value in config.items() if key not in aliases}
    _check_eos_ids(config, checked.padded_vocab_size, file)
    vision.setdefault("image_size", checked.vision.image_size)
    size = json.loads(processor_files[IMAGE_CONFIG])["size"]["height"]
    if vision["image_size"] != size:
        raise ValueError(
            f"{file}: vision_config has image_size {vision['image_size']}, but {IMAGE_CONFIG} has "
            f"{size}: the files belong to different models"
        )
    if config.pop("quantization_config", None):
        config["quantization_config"] = checked.to_diff_dict()["quantization_config"]
    config |= {"vision_config": vision, "padded_vocab_size": checked.padded_vocab_size}
    return config | {"architectures": [ARCHITECTURE], "auto_map": _auto_map(CONFIG)}


def _processor_files(name: str, source_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of tokenizer and processor; they do not depend on transformers' version.

    All versions of transformers save the same tokenizer.json, chat template and settings of the
    image processor. The other two config files differ between versions, so they are made here:
    tokenizer_config.json gets the fields of the source's file, and processor_config.json only
    processor_class and auto_map. The image processor gets its own file, because transformers 4
    reads its settings from no other file. transformers 5 reads that file, too.
    """
    tokenizer = _read_json(name, source_files, TOKENIZER_CONFIG)
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as saved:
        for file in source_files.keys() & {*READ_FILES}:
            Path(source, file).write_bytes(source_files[file])
        try:
            processor = load_processor(ModelSource(source))
            if IMAGE_MARK not in (processor.chat_template or ""):
                warn_unsaved(["chat_template, which has no images"], name)
                processor.chat_template = processor.tokenizer.chat_template = CHAT_TEMPLATE
            chat = [{"role": "user", "image": Image.new("RGB", (32, 32)), "content": "?"}]
            processor.apply_chat_template(chat, tokenize=True, return_dict=True)
        except (ValueError, TemplateError) as error:
            raise ValueError(f"{str(error).replace(source, name)}; {PROCESSOR_CURE}") from None
        processor.save_pretrained(saved)
        files = {
            file: Path(saved, file).read_bytes()
            for file in ("tokenizer.json", TEMPLATE, IMAGE_CONFIG)
        }
    # transformers also saves options of from_pretrained. These are left out without a warning.
    left_out = tokenization_chatglm.LOADING_KWARGS | {"backend", "chat_template"}
    tokenizer = {key: value for key, value in tokenizer.items() if key not in left_out}
    tokenizer = keep_known_settings(tokenizer, TOKENIZER_KEYS, f"{name}: {TOKENIZER_CONFIG}")
    tokenizer["tokenizer_class"] = type(processor.tokenizer).__name__
    tokenizer.setdefault("image_size", processor.tokenizer.image_size)
    configs = {"processor_config.json": {}, TOKENIZER_CONFIG: tokenizer}
    configs[IMAGE_CONFIG] = json.loads(files[IMAGE_CONFIG])
    for file, values in configs.items():
        values |= {"processor_class": "ChatGLMProcessor", "auto_map": _auto_map(file)}
        files[file] = to_json_bytes(dict(sorted(values.items())))
    return files


class WeightFiles(NamedTuple):
    """The files of a model's weights and their tensors.

    Attributes:
        paths: The path of each file, by the file's name in the new folder.
        tensors: All tensors, by name.
        file_index: The index of these files; None for a single file.
    """

    paths: dict[str, Path]
    tensors: dict[str, TensorInfo]
    file_index: dict[str, Any] | None


def find_weight_files(folder: Path) -> WeightFiles:
    """Return a folder's safetensors files, including names that transformers does not look for.

    Raises:
        ValueError: There are none, or they contradict each other or their index.
    """
    names = shards_of(folder)
    has_standard_names = bool(names)  # those that transformers looks for
    names = names or sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        if not any(folder.glob("*model*.bin")):
            raise ValueError(NO_WEIGHTS_PROBLEM)
        command = (
            f"cd {shlex.quote(str(folder))} && {shlex.join(['python', '-c', PICKLE_CONVERSION])}"
        )
        raise ValueError(
            "its weights are pickles (*.bin), which are not read, because a pickle may run code; "
            f"this command converts them to safetensors without running that code: {command}"
        )
    headers = {name: read_header(folder / name) for name in names}
    weight_map = {tensor: name for name, header in headers.items() for tensor in header}
    tensors = {tensor: info for header in headers.values() for tensor, info in header.items()}
    if names == [SINGLE_FILE] or (len(names) == 1 and not has_standard_names):
        return WeightFiles({SINGLE_FILE: folder / names[0]}, tensors, None)
    index: dict[str, Any] = {"metadata": {}, "weight_map": weight_map}
    if has_standard_names:
        index = read_json_object(folder / WEIGHTS_INDEX)
    require_matching_index(index["weight_map"], headers)
    return WeightFiles({name: folder / name for name in names}, tensors, index)


def read_source_files(folder: Path) -> dict[str, bytes]:
    """Return the content of a model's files of settings, vocabulary and license, by name.

    Raises:
        ValueError: A file is too large, or is a link to a file outside of the folder.
    """
    source_files = {}
    for path in sorted(folder.iterdir()):
        if path.name in (*READ_FILES, *LICENSES):
            require_copyable(path, folder)
            source_files[path.name] = read_bytes_within_limit(path)
    return source_files


def link_or_copy(files: Mapping[str, Path], into: Path) -> list[str]:
    """Hard-link files into a folder, and copy those that cannot be linked.

    Args:
        files: The path of each file, by its name in the folder. Symbolic links are followed.

    Returns:
        The names of the copies.

    Raises:
        ValueError: There is not enough free disk space for the copies.
    """
    originals = {name: Path(os.path.realpath(path)) for name, path in files.items()}
    copies = []
    for name, path in originals.items():
        try:
            os.link(path, into / name)
        except OSError:  # another file system, one without hard links, or another user's file
            copies.append(name)
    sizes = {name: originals[name].stat().st_size for name in copies}
    require_free_disk(sum(sizes.values()), into.parent)
    activity = f"copying {format_bytes(sum(sizes.values()))} of weights"
    with show_progress(activity, total=len(copies), unit="file") as progress:
        for name in copies:
            shutil.copyfile(originals[name], into / name)
            progress.update()
    return copies


class CheckedModel(NamedTuple):
    """A model whose weights match its config, and the files of the folder to write.

    Attributes:
        contents: The content of the files beside the weights, by name.
        left_out: Names of files of the original folder that are not copied.
    """

    config: ChatGLMConfig
    contents: dict[str, bytes]
    weights: WeightFiles
    left_out: list[str]


def adopt(folder: Path, out: Path | None = None) -> str:
    """Write a new folder with a model's weights and this package's code, and return a report.

    Nothing in ``folder`` is changed. Weights become hard links, which take no space, or copies if
    the file system does not allow links. If there is an error, ``out`` is not created.

    Args:
        folder: Folder of a published, merged, quantized or trained model, with any code.
        out: The new folder; by default ``folder`` with ``-adopted`` appended.

    Raises:
        ValueError: The folder does not contain a complete glm-4v or cogagent-9b, or ``out``
            exists and is not an empty folder.
        RuntimeError: ``out`` cannot be written.
    """
    folder, is_default = Path(os.path.abspath(folder)), out is None
    if is_default and folder.parent.name == "snapshots":
        raise ValueError(f"{folder} is in the Hub's cache; give a folder outside of it as --out")
    out = out or folder.with_name(f"{folder.name}-adopted")
    refuse_overlap(out, [("the folder itself", folder)], "--out")
    with show_progress(f"checking {printable(str(folder))}"):
        model = _check_model(folder)
    if not model.config.original_rope:  # a cogagent-9b
        print_cogagent_assumptions(str(folder))
    if is_default and all(
        (folder / name).is_file() and (folder / name).read_bytes() == content
        for name, content in model.contents.items()
    ):
        return f"{folder} has the code of version {__version__} already; nothing was written"
    require_new_folder(out)
    with explain_failed_writes(out, DISK_CURE), create_folder_atomically(out) as partial:
        for name, content in model.contents.items():
            (partial / name).write_bytes(content)
        try:
            require_loadable_settings(str(partial))
        except ValueError as error:
            raise ValueError(str(error).replace(str(partial), str(folder))) from None
        copies = link_or_copy(model.weights.paths, partial)
    return _make_report(folder, out, model, copies)


def _check_model(folder: Path) -> CheckedModel:
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; expected a model's folder (from the Hub: hf download "
            "ORG/NAME --local-dir FOLDER)"
        )
    if (folder / ADAPTER_CONFIG).exists():
        command = own_command("merge", str(folder), "--out", "OUT")
        raise ValueError(
            f"{folder} has adapters ({ADAPTER_CONFIG}), and adopt takes only complete models. "
            f"Merge the adapters into their base model: {command}. If they are already merged into "
            "weights in this folder, move the adapters' files away"
        )
    try:
        source_files = read_source_files(folder)
        require_glm4v_config(str(folder), source_files)
        weights = find_weight_files(folder)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(folder)) else f"{folder}: {text}") from None
    if weights.file_index is None:
        source_files.pop(WEIGHTS_INDEX, None)  # transformers does not read it beside a single file
    else:
        source_files.setdefault(WEIGHTS_INDEX, to_json_bytes(weights.file_index))
    contents = make_model_files(str(folder), source_files)
    contents |= {name: content for name, content in source_files.items() if name not in READ_FILES}
    values = json.loads(contents[CONFIG])
    if quantization := values.get("quantization_config"):
        method = quantization.get("quant_method")
        require_known_quantizer(str(folder), method)
        modules = sorted(n.removesuffix(".qweight") for n in weights.tensors if ".qweight" in n)
        if method == "gptq" and modules and not quantization.get("block_name_to_quantize"):
            # optimum guesses the quantized layers by names that this model does not have.
            quantization["block_name_to_quantize"] = "transformer"
            quantization["modules_in_block_to_quantize"] = [modules]
            contents[CONFIG] = to_json_bytes(values)
    config = ChatGLMConfig.from_dict(values)
    require_complete_weights(str(folder), config, weights.tensors)
    used_names = {*READ_FILES, *contents, *(path.name for path in weights.paths.values())}
    names = sorted(path.name for path in folder.iterdir())
    left_out = [name for name in names if name not in used_names or name.endswith(".py")]
    return CheckedModel(config, contents, weights, left_out)


def _make_report(folder: Path, out: Path, model: CheckedModel, copies: list[str]) -> str:
    """Return the lines that the command prints."""
    config, weights = model.config, model.weights
    model_kind = "glm-4v" if config.original_rope else "cogagent-9b (original_rope is false)"
    size = sum(path.stat().st_size for path in weights.paths.values())
    num_linked = len(weights.paths) - len(copies)
    kinds = [f"{num_linked} hard links, which take no space"] * bool(num_linked)
    kinds += [f"{len(copies)} copies, because they cannot be linked"] * bool(copies)
    files = pluralize(len(weights.paths), "file")
    lines = [
        f"{out}: a {model_kind} with the code of version {__version__}",
        f"{files} of weights ({format_bytes(size)}): {', '.join(kinds)}",
    ]
    if model.left_out:
        lines.append(f"left out of {folder}: {printable(listed(model.left_out, 8))}")
    if quantization := getattr(config, "quantization_config", None):
        method = quantization["quant_method"]
        packages = pip_install(*QUANTIZER_PACKAGES[method])
        lines.append(f"saved quantized by {method}: loading needs {packages}")
    return "\n".join(lines)
