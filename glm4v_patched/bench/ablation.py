"""What each measure brings: measured one after the other, each on top of those before."""

from dataclasses import replace
from typing import Any

from .settings import Settings

# Of each measure: its settings, as they are in plain training. There layers run as torch runs
# them, and are gathered linear by linear and recomputed.
MEASURES: dict[str, dict[str, Any]] = {
    "fused attention": {"attn_implementation": "eager"},
    "logits only where a token is learned, in chunks": {"all_logits": True},
    "RMSNorm and SwiGLU of Liger-Kernel": {"liger": False},
    "layers compiled and, under ZeRO-3, gathered whole": {"compile": False, "layers_ahead": 0},
    "weights gathered without copies": {"gather_in_place": False},
    "activations kept": {"tower": "full", "language": "full"},
    "weights kept gathered": {"stage3_max_live_parameters": 1e9},
    "the optimizer's moments in 8 bits": {"optimizer": "adamw"},
    "samples packed into one row": {"packed": False},
    "features of the frozen tower reused": {"reuse_features": False},
}
OF_ZERO_3 = {"stage3_max_live_parameters", "gather_in_place", "layers_ahead"}


def ablation(asked: Settings) -> dict[str, Settings]:
    """From plain training to what was asked for, by the name of what was added.

    Measures that were not asked for, or have no part in it, are left out.
    """
    idle = set() if asked.zero_stage == 3 else OF_ZERO_3
    if not asked.compile:  # nothing is gathered whole, or with some policies only
        idle = idle | {"gather_in_place"}
    plain = {name: value for of in MEASURES.values() for name, value in of.items()}
    current = replace(asked, **{name: plain[name] for name in plain.keys() - idle})
    steps = {"(nothing)": current}
    for added, names in MEASURES.items():
        following = replace(current, **{name: getattr(asked, name) for name in names})
        if following != current:
            steps[added] = current = following
    return steps
