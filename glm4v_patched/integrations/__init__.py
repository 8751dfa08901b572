"""Plug-ins that register glm-4v with training frameworks, each by that framework's own mechanism.

Each module registers glm-4v only when its ``register`` is called, not when it is imported.
"""
