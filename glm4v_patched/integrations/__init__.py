"""Plug-ins that register glm-4v with training frameworks, each by that framework's own mechanism.

Importing a module of this package changes nothing; calling its ``register`` does.
"""
