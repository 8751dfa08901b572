"""What each measure brings: measured one after the other, each on top of those before."""

from dataclasses import replace
from typing import Any

from .settings import Settings

# Without any of the measures: layers as torch runs them, gathered linear by linear, recomputed.
PLAIN: dict[str, Any] = {
    "attn_implementation": "eager",
    "optimizer": "adamw",
    "liger": False,
    "all_logits": True,
    "compile": False,
    "tower": "full",
    "language": "full",
    "stage3_max_live_parameters": 1e9,
    "gather_in_place": False,
    "layers_ahead": 0,
    "packed": False,
    "reuse_features": False,
}
OF_ZERO_3 = {"stage3_max_live_parameters", "gather_in_place", "layers_ahead"}
# Each takes these settings over from what was asked for.
MEASURES = {
    "fused attention": ["attn_implementation"],
    "logits only where a token is learned, in chunks": ["all_logits"],
    "RMSNorm and SwiGLU of Liger-Kernel": ["liger"],
    "layers compiled and, under ZeRO-3, gathered whole": ["compile", "layers_ahead"],
    "weights gathered without copies": ["gather_in_place"],
    "activations kept": ["tower", "language"],
    "weights kept gathered": ["stage3_max_live_parameters"],
    "the optimizer's moments in 8 bits": ["optimizer"],
    "samples packed into one row": ["packed"],
    "features of the frozen tower reused": ["reuse_features"],
}


def ablation(settings: Settings) -> dict[str, Settings]:
    """From plain training to ``settings``, by the name of what was added.

    Measures that ``settings`` leave out, or have no part in, are left out.
    """
    idle = set() if settings.zero_stage == 3 else OF_ZERO_3
    if not settings.compile:  # nothing is gathered whole, or with some policies only
        idle = idle | {"gather_in_place"}
    current = replace(settings, **{name: PLAIN[name] for name in PLAIN.keys() - idle})
    steps = {"(nothing)": current}
    for name, fields in MEASURES.items():
        following = replace(current, **{field: getattr(settings, field) for field in fields})
        if following != current:
            steps[name] = current = following
    return steps
