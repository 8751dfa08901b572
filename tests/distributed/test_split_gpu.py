"""One process trains and answers with a model that ``device_map`` splits: both towers, any layer.

The tests on two GPUs (``pytest -m two_gpu``) compare with one GPU.
"""

import pytest
import torch
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
from torch import nn

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM, GLMBlock
from glm4v_patched.remote.visual import TransformerLayer
from tests.helpers.tiny import padded, pictures, text, three_id_image, tiny_config

NUM_LAYERS = 4
MODES = {"plain": None, "reentrant": True, "non-reentrant": False}
# fp32. Relative to the largest gradient: two GPUs of one kind run the same kernels in the same
# order, up to atomic additions. A row, an image or a layer that is left out differs by more than 1.
RTOL = 1e-5


def deep_config():
    vision = tiny_config().vision_config | {"num_hidden_layers": NUM_LAYERS}
    return tiny_config(num_layers=NUM_LAYERS, vision_config=vision, initializer_range=0.1)


def deep_model() -> GLM4VForCausalLM:
    torch.manual_seed(0)
    return GLM4VForCausalLM._from_config(deep_config(), attn_implementation="sdpa").eval()


def empty_model() -> GLM4VForCausalLM:
    with init_empty_weights(include_buffers=True):
        return GLM4VForCausalLM(deep_config())


def size_of(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def spare_room(model: nn.Module, whole: list[str]) -> int:
    """What accelerate keeps free on the first device, to load the largest part into."""
    return max(size_of(part) for part in model.modules() if type(part).__name__ in whole)


def halved(model: nn.Module, name: str, devices: tuple) -> dict:
    """``infer_auto_device_map`` of one tower with room for half its layers on the first device."""
    tower, whole = model.get_submodule(name), model._no_split_modules
    weights = list(tower.state_dict().items())
    middle = next(i for i, (key, _) in enumerate(weights) if f"layers.{NUM_LAYERS // 2}." in key)
    room = {
        0: spare_room(tower, whole) + sum(tensor.nbytes for _, tensor in weights[:middle]),
        1: 2 * size_of(tower),
    }
    inferred = infer_auto_device_map(tower, room, no_split_module_classes=whole)
    return {f"{name}.{part}": devices[place] for part, place in inferred.items()}


def both_towers_halved(model: nn.Module, first, second, crossed: bool = False) -> dict:
    """A device map in which both towers lie on both devices; ``crossed``: in opposite order."""
    vision_devices = (second, first) if crossed else (first, second)
    return {
        "transformer.embedding": first,
        "transformer.rotary_pos_emb": first,
        "transformer.output_layer": second,
        **halved(model, "transformer.encoder", (first, second)),
        **halved(model, "transformer.vision", vision_devices),
    }


def places(device_map: dict, model: nn.Module, kind) -> list:
    """Where each layer of a kind lies; fails if one is cut."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, kind):
            assert not [part for part in device_map if part.startswith(f"{name}.")], name
            found.append(
                next(v for k, v in device_map.items() if k == "" or f"{name}.".startswith(f"{k}."))
            )
    return found


def batch(device: str = "cpu", labels_device: str | None = None) -> dict[str, torch.Tensor]:
    """Two images, one image and none, padded on the left."""
    image = three_id_image()
    rows = [[*image, *text(4, 1), *image, *text(5, 2)], [7, *image, *text(6, 3)], text(9, 4)]
    inputs = padded(rows, "left") | {"pixel_values": pictures(3)}
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] >= 500, -100)
    moved = {name: value.to(device) for name, value in inputs.items()}
    return moved | {"labels": labels.to(labels_device or device)}


def answer(model: nn.Module, device: str = "cpu"):
    inputs = {name: value for name, value in batch(device).items() if name != "labels"}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 500}
    return model.generate(**inputs, **options, return_dict_in_generate=True)


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["query_key_value"], init_lora_weights=False)
    return get_peft_model(model, config)


def gradients(model: nn.Module, inputs: dict, mode: str = "plain") -> dict[str, torch.Tensor]:
    if MODES[mode] is not None:
        model.gradient_checkpointing_enable({"use_reentrant": MODES[mode]})
    loss = model.train()(**inputs).loss
    loss.backward()
    got = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    return got | {"loss": loss.detach().cpu()}


def largest_difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest of all differences, relative to the largest gradient."""
    assert got.keys() == want.keys()
    largest = max(tensor.abs().max().item() for name, tensor in want.items() if name != "loss")
    return max((got[name] - want[name]).abs().max().item() for name in want) / largest


def test_both_towers_split_at_layer_boundaries_only():
    model = empty_model()
    device_map = both_towers_halved(model, 0, 1, crossed=True)
    assert places(device_map, model, GLMBlock) == [0, 0, 1, 1]
    assert places(device_map, model, TransformerLayer) == [1, 1, 0, 0]


@pytest.mark.parametrize("share", [0.2, 0.35, 0.5, 0.65, 0.8])
def test_wherever_an_automatic_split_falls_it_cuts_no_layer(share):
    model = empty_model()
    total = size_of(model)
    room = {0: int(share * total) + spare_room(model, model._no_split_modules), 1: 2 * total}
    device_map = infer_auto_device_map(model, room, no_split_module_classes=model._no_split_modules)
    assert set(device_map.values()) == {0, 1}
    layers = places(device_map, model, (GLMBlock, TransformerLayer))
    assert len(layers) == 2 * NUM_LAYERS


@pytest.mark.parametrize("mode", MODES)
def test_training_passes_through_the_hooks_of_a_split(mode):
    """With hooks on every part as a split has them, but one device: all that shows on a CPU."""
    want = gradients(deep_model(), batch())
    model = deep_model()
    device_map = both_towers_halved(model, "cpu", "cpu")
    model = dispatch_model(model, device_map, force_hooks=True)
    assert largest_difference(gradients(model, batch(), mode), want) == 0


def test_generation_with_half_of_both_towers_on_disk(tmp_path):
    """No module reads the weights of another: each is loaded for its own forward only."""
    model = deep_model()
    device_map = both_towers_halved(model, "cpu", "disk")
    model = dispatch_model(model, device_map, offload_dir=tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(answer(model).sequences, answer(deep_model()).sequences)


@pytest.fixture(params=["halved", "crossed", "auto"])
def split(request, tmp_path) -> GLM4VForCausalLM:
    """The deep model on two GPUs; ``auto``: wherever transformers puts its parts."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs on one machine, found {torch.cuda.device_count()}")
    model = deep_model()
    if request.param == "auto":
        model.save_pretrained(tmp_path)
        # Room for the decoder's larger half and no more: transformers has to use both GPUs.
        room = {0: int(0.6 * size_of(model)), 1: 2 * size_of(model)}
        model = GLM4VForCausalLM.from_pretrained(
            tmp_path, device_map="auto", max_memory=room, attn_implementation="sdpa"
        )
    else:
        crossed = request.param == "crossed"
        model = dispatch_model(model, both_towers_halved(model, 0, 1, crossed=crossed))
    model.name = request.param
    return model


@pytest.mark.two_gpu
def test_layers_lie_on_both_gpus(split):
    together = [(GLMBlock, TransformerLayer)]
    for kind in together if split.name == "auto" else together[0]:
        layers = [module for module in split.modules() if isinstance(module, kind)]
        devices = [{p.device.index for p in layer.parameters()} for layer in layers]
        assert all(len(device) == 1 for device in devices)
        assert set.union(*devices) == {0, 1}


@pytest.mark.two_gpu
@pytest.mark.parametrize("weights", ["all", "adapters"])
@pytest.mark.parametrize("skip_logits", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_split_gradients_equal_those_of_one_gpu(mode, skip_logits, weights, split):
    one, two = deep_model().to("cuda:0"), split
    if weights == "adapters":
        one, two = with_adapters(one), with_adapters(two)
    inputs = batch("cuda:0") | {"skip_logits": skip_logits}
    assert largest_difference(gradients(two, inputs, mode), gradients(one, inputs)) <= RTOL


@pytest.mark.two_gpu
@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:1"])
def test_labels_may_lie_anywhere(device, split):
    want = gradients(deep_model().to("cuda:0"), batch("cuda:0"))
    assert largest_difference(gradients(split, batch("cuda:0", device)), want) <= RTOL


@pytest.mark.two_gpu
def test_split_generation_equals_that_of_one_gpu(split):
    want = answer(deep_model().to("cuda:0"), "cuda:0")
    got = answer(split.eval(), "cuda:0")
    assert torch.equal(got.sequences.cpu(), want.sequences.cpu())
    layers = split.transformer.encoder.layers
    for layer, cached in zip(layers, got.past_key_values.layers, strict=True):
        assert cached.keys.device == layer.mlp.dense_4h_to_h.weight.device
