"""What the shared suites read off transformers' own tables of names."""

from transformers.models.auto import modeling_auto


def know_by_name(model_type: str, **names: str) -> None:
    """Enter classes into modeling_auto's tables, as those of a model in transformers are.

    By them the suites decide what inputs a class takes and whether it has a loss. Nothing is
    loaded by them here.
    """
    for table, name in names.items():
        getattr(modeling_auto, table)[model_type] = name
