"""glm-4v's forward pass, for tests: one sequence at a time, sharing no code with the model.

Written from ARCHITECTURE.md alone. Takes unexpanded prompts without padding.
"""

import math

import torch
import torch.nn.functional as F


def forward_row(weights: dict, config: dict, ids: list[int], images: list) -> torch.Tensor:
    """Return logits ``(length, vocabulary)``; ``images`` are ``(3, S, S)``, in order."""
    vectors, positions, images, features = [], [], iter(images), []
    for position, token in enumerate(ids):  # an image takes three position ids
        begins, inside, ends = (
            position >= offset and ids[position - offset] == config["boi_token_id"]
            for offset in range(3)
        )
        if begins:
            features = encode_image(weights, config["vision_config"], next(images))
        text = [weights["transformer.embedding.word_embeddings.weight"][token]]
        image = features[:1] if begins else features[-1:] if ends else features[1:-1]
        new = image if begins or inside or ends else text
        vectors.extend(new)
        positions += [position] * len(new)
    x = torch.stack(vectors)
    for i in range(config["num_layers"]):
        x = decoder_layer(weights, f"transformer.encoder.layers.{i}.", config, x, positions)
    eps = config["layernorm_epsilon"]
    x = rms_norm(x, weights["transformer.encoder.final_layernorm.weight"], eps)
    return x @ weights["transformer.output_layer.weight"].T


def decoder_layer(weights, prefix, config, x, positions) -> torch.Tensor:
    heads, groups = config["num_attention_heads"], config["multi_query_group_num"]
    eps, base = config["layernorm_epsilon"], 10000.0 * config["rope_ratio"]
    rotation = positions, base, config["original_rope"]

    def weight(name):
        return weights[prefix + name]

    normed = rms_norm(x, weight("input_layernorm.weight"), eps)
    fused = normed @ weight("self_attention.query_key_value.weight").T
    fused = fused + weight("self_attention.query_key_value.bias")
    of_heads = fused.split(config["kv_channels"], dim=1)  # queries, then keys, then values
    outputs = []
    for h in range(heads):
        group = h // (heads // groups)
        query, key = (rotate(of_heads[i], *rotation) for i in (h, heads + group))
        outputs.append(attention(query, key, of_heads[heads + groups + group], causal=True))
    x = x + torch.cat(outputs, dim=1) @ weight("self_attention.dense.weight").T
    normed = rms_norm(x, weight("post_attention_layernorm.weight"), eps)
    gate, up = (normed @ weight("mlp.dense_h_to_4h.weight").T).chunk(2, dim=1)
    return x + (F.silu(gate) * up) @ weight("mlp.dense_4h_to_h.weight").T


def rotate(x, positions, base, neighbors) -> torch.Tensor:
    """Rotate pairs of channels in the first half of ``(length, channels)``: neighbors, or one of
    the first quarter with one of the second (GPT-NeoX)."""
    rotated, columns = x.shape[1] // 2, list(x.unbind(dim=1))
    for i in range(rotated // 2):
        angles = [position * base ** (-2 * i / rotated) for position in positions]
        cos, sin = (x.new_tensor([f(angle) for angle in angles]) for f in (math.cos, math.sin))
        first, second = (2 * i, 2 * i + 1) if neighbors else (i, i + rotated // 2)
        a, b = columns[first], columns[second]
        columns[first], columns[second] = a * cos - b * sin, b * cos + a * sin
    return torch.stack(columns, dim=1)


def attention(query, key, value, causal) -> torch.Tensor:
    scores = query @ key.T / math.sqrt(query.shape[1])
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(dim=1) @ value


def rms_norm(x, weight, eps) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(dim=1, keepdim=True) + eps) * weight


def encode_image(weights, vision, image) -> torch.Tensor:
    """Return ``(tokens + 2, hidden size)``, with the learned begin and end vectors."""
    weights = {k.removeprefix("transformer.vision."): v for k, v in weights.items()}
    width, heads, eps = vision["hidden_size"], vision["num_heads"], vision["layer_norm_eps"]

    def of(name):
        return weights[f"{name}.weight"], weights.get(f"{name}.bias")

    def linear(name, x):
        return F.linear(x, *of(name))

    def layer_norm(name, x, eps):
        return F.layer_norm(x, x.shape[-1:], *of(name), eps)

    grid = F.conv2d(image, *of("patch_embedding.proj"), stride=vision["patch_size"])
    tokens = [weights["patch_embedding.cls_embedding"], grid.flatten(1).T]
    x = torch.cat(tokens) + weights["patch_embedding.position_embedding.weight"]
    for i in range(vision["num_hidden_layers"]):
        layer = f"transformer.layers.{i}."
        fused = linear(layer + "attention.query_key_value", x).split(width, dim=1)
        of_heads = zip(*(part.chunk(heads, dim=1) for part in fused), strict=True)
        attended = torch.cat([attention(*qkv, causal=False) for qkv in of_heads], dim=1)
        attended = linear(layer + "attention.dense", attended)
        x = x + layer_norm(layer + "input_layernorm", attended, eps)
        hidden = linear(layer + "mlp.fc2", F.gelu(linear(layer + "mlp.fc1", x)))
        x = x + layer_norm(layer + "post_attention_layernorm", hidden, eps)
    patches = x[1:].T.reshape(width, *grid.shape[1:])
    x = linear("linear_proj.linear_proj", F.conv2d(patches, *of("conv"), stride=2).flatten(1).T)
    x = F.gelu(layer_norm("linear_proj.norm1", x, 1e-5))
    gate = F.silu(linear("linear_proj.gate_proj", x))
    image = linear("linear_proj.dense_4h_to_h", gate * linear("linear_proj.dense_h_to_4h", x))
    return torch.cat((weights["boi"][0], image, weights["eoi"][0])) / vision["scaling_factor"]
