"""Fine-tuning glm-4v-9b. Importing this package changes nothing."""

__version__ = "0.1.0"
