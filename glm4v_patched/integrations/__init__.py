"""What frameworks need to know of glm-4v, told to each by its own mechanism.

Importing a module of this package changes nothing; its ``register`` does.
"""
